"""The options of the deployment, and every metric that it reads, on the real server."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from deploy_cases import load, make_repository

from trtforge.serving.deploy import DeploymentOptions, Form, Ports, plan_deployment, write_deployment
from trtforge.serving.triton.client import TritonClient
from trtforge.serving.triton.environment import TritonInstall

# Triton reports them only where it sees a GPU.
GPU_METRICS = {"nv_gpu_utilization", "nv_gpu_memory_used_bytes", "nv_gpu_memory_total_bytes", "nv_gpu_power_usage"}
MODEL = """
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        tensors = [pb.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb.InferenceResponse([pb.Tensor("y", 2 * tensor)]) for tensor in tensors]
"""
CONFIG = """name: "{name}"
backend: "python"
max_batch_size: 4
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ 2 ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ 2 ] }} ]
instance_group [ {{ kind: KIND_CPU }} ]
dynamic_batching {{ }}
{more}
"""
START_TIMEOUT_S = 120.0


class Running(NamedTuple):
    """A server that was started as a deployment starts it."""

    folders: Mapping[str, Path]
    ports: Ports
    url: str


def free_ports() -> Ports:
    probes = [socket.socket() for _ in range(3)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = Ports(*(probe.getsockname()[1] for probe in probes))
    for probe in probes:
        probe.close()
    return ports


def status_of(url: str, headers: dict[str, str] | None = None) -> int:
    """Of a GET; 0 where nothing answers."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers or {}), timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as err:
        return err.code
    except OSError:
        return 0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, triton_install: TritonInstall) -> Iterator[Running]:
    """The compose file's own command, with the folders of this machine in place of the container's."""
    path = tmp_path_factory.mktemp("deployed")
    caching = "response_cache { enable: true }"
    files = {
        name: {"config.pbtxt": CONFIG.format(name=name, more=more), "1/model.py": MODEL}
        for name, more in (("plain", ""), ("cached", caching))
    }
    repository = make_repository(path / "repository", {name: {"kind": "onnxruntime"} for name in files}, files)
    environment = {**os.environ, **triton_install.environment()}
    environment["PATH"] = f"{triton_install.binary.parent}{os.pathsep}{environment['PATH']}"
    # Another program may take a free port before the server does.
    for attempt in ("1", "2", "3"):
        deployed = make_deployment(repository, path / attempt)
        command = local_command(deployed, repository, triton_install)
        with (path / "log").open("wb") as log:
            server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            is_ready = wait_ready(server, f"{deployed.url}/v2/health/ready")
            if is_ready:
                yield deployed
        finally:
            server.terminate()
            server.wait(60)
        if is_ready:
            break
        text = (path / "log").read_text(errors="replace")
        assert "already in use" in text, text[-3000:]
    # It ends by itself, and within its exit timeout: no client is connected any more.
    assert is_ready and server.returncode == 0


def make_deployment(repository: Path, folder: Path) -> Running:
    ports = free_ports()
    spec = plan_deployment(repository, DeploymentOptions(ports=ports))
    # A model asks for the cache, so the server has one.
    assert spec.cache.bytes > 0
    forms: tuple[Form, ...] = ("kubernetes", "compose")
    folders = {form: write_deployment(spec, repository, folder / form, form).folder for form in forms}
    return Running(folders, ports, f"http://127.0.0.1:{ports.http}")


def local_command(deployed: Running, repository: Path, install: TritonInstall) -> list[str]:
    words = load(deployed.folders["compose"], "compose.yaml")["services"]["triton"]["command"]
    return [
        *(word.replace("$$", "$").replace("=/models", f"={repository}") for word in words),
        *(f"--{service}-address=127.0.0.1" for service in ("http", "grpc", "metrics")),
        f"--backend-directory={install.backends}",
        f"--cache-directory={install.caches}",
    ]


def wait_ready(server: subprocess.Popen[bytes], url: str) -> bool:
    """Whether the server becomes ready before it ends."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while server.poll() is None and time.monotonic() < deadline:
        if status_of(url) == 200:
            return True
        time.sleep(0.1)
    return False


def test_cluster_and_machine_start_the_same_server(running: Running) -> None:
    compose = load(running.folders["compose"], "compose.yaml")["services"]["triton"]["command"]
    (container,) = load(running.folders["kubernetes"], "deployment.yaml")["spec"]["template"]["spec"]["containers"]
    restrictions = [word.replace("$$key", "$(POD_UID)") for word in compose[2].split() if "restricted" in word]
    assert len(restrictions) == 2
    assert container["args"] == [*compose[3:], *restrictions]


def test_probes_are_answered(running: Running) -> None:
    (container,) = load(running.folders["kubernetes"], "deployment.yaml")["spec"]["template"]["spec"]["containers"]
    named = {port["name"]: port["containerPort"] for port in container["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        request = container[probe]["httpGet"]
        assert status_of(f"http://127.0.0.1:{named[request['port']]}{request['path']}") == 200, probe
    test = load(running.folders["compose"], "compose.yaml")["services"]["triton"]["healthcheck"]["test"]
    assert test[0] == "CMD" and subprocess.run(test[1:], check=False).returncode == 0


@pytest.mark.parametrize(
    "path", ["v2/logging", "v2/trace/setting", "v2/systemsharedmemory/status", "v2/cudasharedmemory/status"]
)
def test_interfaces_that_reach_into_the_machine_are_closed(running: Running, path: str) -> None:
    assert status_of(f"{running.url}/{path}") == 403
    assert status_of(f"{running.url}/{path}", {"admin-key": "$(POD_UID)"}) == 403


def test_models_cannot_be_unloaded_or_loaded(running: Running) -> None:
    for action in ("unload", "load"):
        request = urllib.request.Request(
            f"{running.url}/v2/repository/models/plain/{action}", method="POST", data=b"{}"
        )
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(request, timeout=10)
    assert status_of(f"{running.url}/v2/models/plain/ready") == 200


def test_metrics_are_on_their_own_port(running: Running) -> None:
    assert status_of(f"{running.url}/metrics") == 404
    # It answers any GET, but takes no request.
    infer = f"http://127.0.0.1:{running.ports.metrics}/v2/models/plain/infer"
    with pytest.raises(urllib.error.HTTPError, match="405"):
        urllib.request.urlopen(urllib.request.Request(infer, data=b"{}"), timeout=10)


def test_every_metric_that_is_read_exists(running: Running) -> None:
    x = np.ones((1, 2), np.float32)
    with TritonClient(f"127.0.0.1:{running.ports.http}") as client:
        for model in ("plain", "cached", "cached"):
            np.testing.assert_array_equal(client.infer(model, {"x": x})["y"], 2 * x)
    with urllib.request.urlopen(f"http://127.0.0.1:{running.ports.metrics}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    reported = {
        (name, label)
        for name, labels in re.findall(r"^(nv_\w+)(?:\{(.*)\})? ", text, re.M)
        for label in (labels or "").split(",")
    }
    names = {name for name, _ in reported}
    read = set()
    for folder in running.folders.values():
        for file in folder.iterdir():
            read |= set(re.findall(r"\bnv_\w+", file.read_text()))
    assert {"nv_inference_queue_duration_us", "nv_cache_num_hits_per_model"} <= read
    assert not read & GPU_METRICS
    assert read <= names
    # What the queries select by.
    assert ("nv_inference_request_success", 'model="plain"') in reported
    assert ("nv_inference_request_failure", 'reason="REJECTED"') in reported
    for quantile in ("0.5", "0.99", "0.999"):
        assert ("nv_inference_request_summary_us", f'quantile="{quantile}"') in reported
