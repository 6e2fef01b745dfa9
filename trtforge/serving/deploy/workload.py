"""The Kubernetes objects that run the server: Deployment, Service, ServiceAccount and what limits them."""

from __future__ import annotations

from typing import Any

from trtforge.serving.deploy.models import CHECKSUMS_NAME, CHECKSUMS_PATH, model_mounts, model_volumes
from trtforge.serving.deploy.names import CHECKSUMS_SUFFIX
from trtforge.serving.deploy.server import (
    CONTAINER_SECURITY,
    DRAIN_S,
    ENVIRONMENT,
    EXIT_TIMEOUT_S,
    LIVE_PATH,
    MODELS_PATH,
    POD_SECURITY,
    READY_PATH,
    UNLOAD_S,
    labels,
    metadata,
    restriction_options,
    server_options,
)
from trtforge.serving.deploy.spec import DeploymentSpec

# A server is given 10 minutes to load and warm its models.
_STARTUP_PERIOD_S = 5
_STARTUP_TRIES = 120
# Before that, the node may have to pull an image of 20 GB.
_PROGRESS_S = 1800
DIGEST_ANNOTATION = "trtforge/models-sha256"


def deployment(spec: DeploymentSpec) -> dict[str, Any]:
    """The Deployment; the autoscaler owns the number of replicas, so it names none."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(spec),
        "spec": {
            "selector": {"matchLabels": labels(spec)},
            "progressDeadlineSeconds": _PROGRESS_S,
            # A server is stopped only once its successor is ready.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": {
                # Other models make other pods, although the volume keeps its name.
                "metadata": {"labels": labels(spec), "annotations": {DIGEST_ANNOTATION: spec.digest}},
                "spec": _pod(spec),
            },
        },
    }


def _pod(spec: DeploymentSpec) -> dict[str, Any]:
    pod: dict[str, Any] = {
        "serviceAccountName": spec.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": DRAIN_S + EXIT_TIMEOUT_S + UNLOAD_S,
        "securityContext": POD_SECURITY,
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": labels(spec)},
            }
        ],
    }
    if spec.needs_gpu:
        pod["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    if spec.targets:
        pod["affinity"] = {"nodeAffinity": _gpu_affinity(spec.targets)}
    return {
        **pod,
        "initContainers": [_check_container(spec)],
        "containers": [_server_container(spec)],
        "volumes": [
            *model_volumes(spec),
            {"name": "checksums", "configMap": {"name": spec.name + CHECKSUMS_SUFFIX}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": spec.resources.shared_memory}},
        ],
    }


def _gpu_affinity(targets: tuple[str, ...]) -> dict[str, Any]:
    """Nodes whose GPU has one of the compute capabilities, by the labels of NVIDIA's GPU feature discovery."""
    terms = []
    for target in targets:
        number = target.removeprefix("sm_")
        terms.append(
            {
                "matchExpressions": [
                    {"key": "nvidia.com/gpu.compute.major", "operator": "In", "values": [number[:-1]]},
                    {"key": "nvidia.com/gpu.compute.minor", "operator": "In", "values": [number[-1]]},
                ]
            }
        )
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}


def _check_container(spec: DeploymentSpec) -> dict[str, Any]:
    """Refuses to start on models that are missing or not those that were packaged: an empty Triton is ready."""
    return {
        "name": "check-models",
        "image": spec.image,
        "command": ["sha256sum", "--check", "--quiet", "--strict", f"{CHECKSUMS_PATH}/{CHECKSUMS_NAME}"],
        "workingDir": MODELS_PATH,
        "securityContext": CONTAINER_SECURITY,
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "256Mi"}},
        "volumeMounts": [
            *model_mounts(spec),
            {"name": "checksums", "mountPath": CHECKSUMS_PATH, "readOnly": True},
        ],
    }


def _server_container(spec: DeploymentSpec) -> dict[str, Any]:
    gpus = {"nvidia.com/gpu": str(spec.resources.gpus)} if spec.needs_gpu else {}
    return {
        "name": "triton",
        "image": spec.image,
        "args": ["tritonserver", *server_options(spec), *restriction_options("$(POD_UID)")],
        "env": [
            # Who may read the pod may use the restricted interfaces; there is no secret to keep.
            {"name": "POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
            *({"name": name, "value": value} for name, value in ENVIRONMENT.items()),
        ],
        "ports": [
            {"name": "http", "containerPort": spec.ports.http},
            {"name": "grpc", "containerPort": spec.ports.grpc},
            {"name": "metrics", "containerPort": spec.ports.metrics},
        ],
        "resources": {
            "requests": {"cpu": spec.resources.cpu, "memory": spec.resources.memory, **gpus},
            "limits": {"memory": spec.resources.memory, **gpus},
        },
        "securityContext": CONTAINER_SECURITY,
        "startupProbe": _probe(READY_PATH, period_s=_STARTUP_PERIOD_S, tries=_STARTUP_TRIES),
        "readinessProbe": _probe(READY_PATH, period_s=5, tries=3),
        "livenessProbe": _probe(LIVE_PATH, period_s=10, tries=6),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(DRAIN_S)]}}},
        "volumeMounts": [
            *model_mounts(spec),
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def _probe(path: str, period_s: int, tries: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period_s,
        "timeoutSeconds": 3,
        "failureThreshold": tries,
    }


def service_account(spec: DeploymentSpec) -> dict[str, Any]:
    """An account with no rights and no token."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(spec),
        "automountServiceAccountToken": False,
    }


def service(spec: DeploymentSpec) -> dict[str, Any]:
    """What clients call; the metrics are not behind it."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(spec),
        "spec": {
            "type": "ClusterIP",
            "selector": labels(spec),
            "ports": [
                {"name": "http", "port": spec.ports.http, "targetPort": "http", "appProtocol": "http"},
                {"name": "grpc", "port": spec.ports.grpc, "targetPort": "grpc", "appProtocol": "grpc"},
            ],
        },
    }


def disruption_budget(spec: DeploymentSpec) -> dict[str, Any]:
    """At most one server is taken away at a time when nodes are drained."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(spec),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels(spec)}},
    }


def network_policy(spec: DeploymentSpec) -> dict[str, Any]:
    """Requests from the own namespace, metrics for Prometheus' alone, and no way out.

    A Redis cache is known by its host's name, which a policy cannot name: its port is open to any host, and so is DNS.
    """
    egress: list[dict[str, Any]] = []
    if spec.cache.host:
        egress = [
            {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]},
            {"ports": [{"protocol": "TCP", "port": spec.cache.port}]},
        ]
    prometheus = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": spec.monitoring_namespace}}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(spec),
        "spec": {
            "podSelector": {"matchLabels": labels(spec)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [
                {
                    "from": [{"podSelector": {}}],
                    "ports": [{"protocol": "TCP", "port": "http"}, {"protocol": "TCP", "port": "grpc"}],
                },
                {"from": [prometheus], "ports": [{"protocol": "TCP", "port": "metrics"}]},
            ],
            "egress": egress,
        },
    }
