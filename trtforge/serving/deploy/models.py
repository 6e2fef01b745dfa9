"""How a pod gets its models: a volume that holds the repository, or the image itself, and checksums of every file.

Only the folders of the models that are served are mounted, so one repository can hold engines for several GPUs.
"""

from __future__ import annotations

from typing import Any

from trtforge.serving.deploy.names import CHECKSUMS_SUFFIX
from trtforge.serving.deploy.server import CONTAINER_SECURITY, MODELS_PATH, POD_SECURITY, metadata
from trtforge.serving.deploy.spec import DeploymentSpec

CHECKSUMS_NAME = "SHA256SUMS"
CHECKSUMS_PATH = "/checksums"
# Room for the repository, and for a second one beside it while models are replaced.
_COPIES = 2
_GIB = 2**30


def model_volumes(spec: DeploymentSpec) -> list[dict[str, Any]]:
    """The pod's volumes that hold models."""
    if spec.models_in_image:
        return []
    return [{"name": "models", "persistentVolumeClaim": {"claimName": spec.claim_name, "readOnly": True}}]


def model_mounts(spec: DeploymentSpec) -> list[dict[str, Any]]:
    """Each model's folder, read-only."""
    if spec.models_in_image:
        return []
    return [
        {"name": "models", "mountPath": f"{MODELS_PATH}/{model.name}", "subPath": model.name, "readOnly": True}
        for model in spec.models
    ]


def checksums(spec: DeploymentSpec) -> dict[str, Any]:
    """A ConfigMap with the list that `sha256sum --check` reads."""
    lines = "".join(f"{digest}  {path}\n" for path, digest in spec.files.items())
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(spec, CHECKSUMS_SUFFIX),
        "data": {CHECKSUMS_NAME: lines},
    }


def volume_claim(spec: DeploymentSpec, size_bytes: int) -> dict[str, Any]:
    """A claim for the repository, which servers on several nodes read.

    Args:
        spec: the deployment.
        size_bytes: of the repository.
    """
    gibibytes = -(-_COPIES * size_bytes // _GIB)
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {**metadata(spec), "name": spec.claim_name},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": f"{max(1, gibibytes)}Gi"}},
        },
    }


def writer_pod(spec: DeploymentSpec) -> dict[str, Any]:
    """A pod that waits while the repository is copied into the volume."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata(spec, "-writer") | {"labels": {"app.kubernetes.io/name": "triton-model-writer"}},
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": 3600,
            "automountServiceAccountToken": False,
            "securityContext": POD_SECURITY,
            "containers": [
                {
                    "name": "writer",
                    "image": spec.image,
                    "command": ["sleep", "3600"],
                    "securityContext": CONTAINER_SECURITY,
                    "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "256Mi"}},
                    "volumeMounts": [{"name": "models", "mountPath": MODELS_PATH}],
                }
            ],
            "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": spec.claim_name}}],
        },
    }
