"""How tritonserver is started in a container: its options, its user, and what it may write.

Rules that every form of deployment shares: user 1000 without capabilities, a read-only root, a `/tmp` of its own, a
`/dev/shm` for the Python backend, models mounted read-only. The model repository cannot be changed through the
server, and the interfaces that reach into its machine (shared memory, trace files, log files) ask for a header.
"""

from __future__ import annotations

from typing import Any

from trtforge.serving.deploy.spec import DeploymentSpec

MODELS_PATH = "/models"
# NVIDIA's image has the user triton-server under this id.
USER_ID = 1000
READY_PATH = "/v2/health/ready"
LIVE_PATH = "/v2/health/live"
METRICS_PATH = "/metrics"
# How long a server that was told to stop waits for requests that it has begun.
EXIT_TIMEOUT_S = 30
# Before that, so that nothing sends it new requests any more: it closes its ports at once.
DRAIN_S = 10
# Unloading engines and ending the Python backend's processes.
UNLOAD_S = 20
ADMIN_HEADER = "admin-key"
_RESTRICTED = "shared-memory,trace,logging"
# Nothing but these is written: caches of compiled kernels, and what Python would put in a home.
ENVIRONMENT = {"HOME": "/tmp", "CUPY_CACHE_DIR": "/tmp/cupy"}

POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": USER_ID,
    "runAsGroup": USER_ID,
    "fsGroup": USER_ID,
    # A volume of large models is walked only where its owner is another.
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "privileged": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def server_options(spec: DeploymentSpec) -> list[str]:
    """Options of tritonserver, apart from those of `restriction_options`."""
    return [
        f"--model-repository={MODELS_PATH}",
        "--model-control-mode=none",
        "--disable-auto-complete-config",
        "--strict-readiness=true",
        "--exit-on-error=true",
        f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
        f"--http-port={spec.ports.http}",
        f"--grpc-port={spec.ports.grpc}",
        f"--metrics-port={spec.ports.metrics}",
        "--metrics-config=summary_latencies=true",
        *spec.cache.option,
    ]


def restriction_options(key: str) -> list[str]:
    """Options that close the interfaces which reach into the server's machine to who does not send the key.

    Args:
        key: the value of the header, e.g. "$(POD_UID)".
    """
    return [
        f"--http-restricted-api={_RESTRICTED}:{ADMIN_HEADER}={key}",
        f"--grpc-restricted-protocol={_RESTRICTED}:{ADMIN_HEADER}={key}",
    ]


def labels(spec: DeploymentSpec) -> dict[str, str]:
    """Labels of every object; the selectors use them too, so they hold nothing that changes."""
    return {"app.kubernetes.io/name": "triton", "app.kubernetes.io/instance": spec.name}


def metadata(spec: DeploymentSpec, suffix: str = "") -> dict[str, Any]:
    """An object's metadata; `suffix` is appended to the deployment's name."""
    place = {} if spec.namespace is None else {"namespace": spec.namespace}
    return {"name": spec.name + suffix, **place, "labels": labels(spec)}
