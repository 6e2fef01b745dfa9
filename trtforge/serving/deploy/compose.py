"""A compose file for one machine: the server, and Prometheus with Grafana behind the profile `monitoring`.

The same limits hold as in a cluster, and every port is published on the loopback address alone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from trtforge.serving.deploy.dashboard import DASHBOARD_NAME
from trtforge.serving.deploy.image import needs_build
from trtforge.serving.deploy.names import bytes_of_quantity
from trtforge.serving.deploy.server import (
    ENVIRONMENT,
    EXIT_TIMEOUT_S,
    MODELS_PATH,
    READY_PATH,
    UNLOAD_S,
    USER_ID,
    restriction_options,
    server_options,
)
from trtforge.serving.deploy.spec import DeploymentSpec

_LOOPBACK = "127.0.0.1"
# Exact releases, so that the same repository makes the same deployment; Prometheus' is one with long support.
_PROMETHEUS_IMAGE = "prom/prometheus:v3.5.0"
_GRAFANA_IMAGE = "grafana/grafana:12.0.2"
_GRAFANA_PORT = 3000
PROMETHEUS_NAME = "prometheus.yaml"
DATASOURCE_NAME = "grafana-datasource.yaml"
PROVIDER_NAME = "grafana-provider.yaml"
_LOCKED = {
    "read_only": True,
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges:true"],
    "restart": "unless-stopped",
}


def compose(spec: DeploymentSpec, repository: Path, folder: Path) -> dict[str, Any]:
    """The compose file.

    Args:
        spec: the deployment.
        repository: whose folders are mounted.
        folder: where the file will be; paths in it are relative to that.
    """
    return {
        "name": spec.name,
        "services": {
            # Compose puts variables in the place of names after a single "$".
            "triton": _triton(spec, os.path.relpath(repository.absolute(), folder.absolute()).replace("$", "$$")),
            "prometheus": _prometheus(),
            "grafana": _grafana(),
        },
        "volumes": {"prometheus": {}, "grafana": {}},
    }


def _triton(spec: DeploymentSpec, repository: str) -> dict[str, Any]:
    build: dict[str, Any] = {}
    if needs_build(spec):
        contexts = {"additional_contexts": {"models": repository}} if spec.models_in_image else {}
        build = {"build": {"context": ".", **contexts}}
    mounts = [
        {
            "type": "bind",
            "source": f"{repository}/{model.name}",
            "target": f"{MODELS_PATH}/{model.name}",
            "read_only": True,
            # A folder that is missing is an error, not an empty one.
            "bind": {"create_host_path": False},
        }
        for model in spec.models
    ]
    ports = (spec.ports.http, spec.ports.grpc, spec.ports.metrics)
    # The key is a number that nobody knows: on one machine, nobody needs the restricted interfaces.
    key = '"$$(cat /proc/sys/kernel/random/uuid)"'
    return {
        **build,
        "image": spec.image,
        "command": [
            "sh",
            "-c",
            f'key={key}; exec tritonserver "$$@" {" ".join(restriction_options("$$key"))}',
            "tritonserver",
            *server_options(spec),
        ],
        "user": f"{USER_ID}:{USER_ID}",
        **_LOCKED,
        "environment": dict(ENVIRONMENT),
        "tmpfs": ["/tmp"],
        "shm_size": bytes_of_quantity(spec.resources.shared_memory),
        "mem_limit": bytes_of_quantity(spec.resources.memory),
        **({} if spec.models_in_image else {"volumes": mounts}),
        "ports": [_port(port) for port in ports],
        "healthcheck": {
            "test": ["CMD", "python3", "-c", _request(f"http://127.0.0.1:{spec.ports.http}{READY_PATH}")],
            "interval": "10s",
            "timeout": "5s",
            "retries": 3,
            "start_period": "10m",
        },
        "stop_grace_period": f"{EXIT_TIMEOUT_S + UNLOAD_S}s",
        **_gpus(spec),
    }


def _request(url: str) -> str:
    """Python that fails unless the URL answers with success."""
    return f"import urllib.request; urllib.request.urlopen('{url}', timeout=4)"


def _gpus(spec: DeploymentSpec) -> dict[str, Any]:
    if not spec.needs_gpu:
        return {}
    device = {"driver": "nvidia", "count": spec.resources.gpus, "capabilities": ["gpu"]}
    return {"deploy": {"resources": {"reservations": {"devices": [device]}}}}


def _port(port: int) -> dict[str, Any]:
    return {"target": port, "published": str(port), "host_ip": _LOOPBACK, "protocol": "tcp"}


def _file(name: str, target: str) -> dict[str, Any]:
    return {"type": "bind", "source": f"./{name}", "target": target, "read_only": True}


def _prometheus() -> dict[str, Any]:
    return {
        "image": _PROMETHEUS_IMAGE,
        "profiles": ["monitoring"],
        **_LOCKED,
        "volumes": [
            _file(PROMETHEUS_NAME, "/etc/prometheus/prometheus.yml"),
            {"type": "volume", "source": "prometheus", "target": "/prometheus"},
        ],
    }


def _grafana() -> dict[str, Any]:
    return {
        "image": _GRAFANA_IMAGE,
        "profiles": ["monitoring"],
        **_LOCKED,
        # Whoever reaches the loopback address may look, and nobody may change anything.
        "environment": {
            "GF_AUTH_ANONYMOUS_ENABLED": "true",
            "GF_AUTH_ANONYMOUS_ORG_ROLE": "Viewer",
            "GF_AUTH_DISABLE_LOGIN_FORM": "true",
            "GF_AUTH_BASIC_ENABLED": "false",
            "GF_ANALYTICS_REPORTING_ENABLED": "false",
            "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
        },
        "tmpfs": ["/tmp"],
        "volumes": [
            _file(DATASOURCE_NAME, "/etc/grafana/provisioning/datasources/prometheus.yaml"),
            _file(PROVIDER_NAME, "/etc/grafana/provisioning/dashboards/triton.yaml"),
            _file(DASHBOARD_NAME, "/etc/grafana/dashboards/triton.json"),
            {"type": "volume", "source": "grafana", "target": "/var/lib/grafana"},
        ],
        "ports": [_port(_GRAFANA_PORT)],
    }


def prometheus_config(spec: DeploymentSpec) -> dict[str, Any]:
    """What Prometheus scrapes."""
    target = {"targets": [f"triton:{spec.ports.metrics}"]}
    return {
        "global": {"scrape_interval": "15s"},
        "scrape_configs": [{"job_name": "triton", "static_configs": [target]}],
    }


def grafana_datasource() -> dict[str, Any]:
    """Where Grafana finds Prometheus."""
    source = {"name": "Prometheus", "type": "prometheus", "url": "http://prometheus:9090", "isDefault": True}
    return {"apiVersion": 1, "datasources": [source]}


def grafana_provider() -> dict[str, Any]:
    """Where Grafana finds the dashboard."""
    provider = {"name": "triton", "type": "file", "options": {"path": "/etc/grafana/dashboards"}}
    return {"apiVersion": 1, "providers": [provider]}
