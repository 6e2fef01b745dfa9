"""The image that runs the models: NVIDIA's Triton with the packages of the Python backend, at exact versions.

The stub of the Python backend starts its interpreter isolated: it sees neither PYTHONPATH nor a user's site-packages.
So the packages go into the system's own, as root, and the image runs as another user.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable

from trtforge.errors import InputError
from trtforge.serving.deploy.names import check_backend_version
from trtforge.serving.deploy.server import MODELS_PATH, USER_ID
from trtforge.serving.deploy.spec import DeploymentSpec
from trtforge.serving.repository import PackagedModel

# Newest release whose notes were read: https://docs.nvidia.com/deeplearning/triton-inference-server/release-notes/
DEFAULT_RELEASE = "26.10"
_REGISTRY = "nvcr.io/nvidia/tritonserver"
# These work with the image's numpy, of version 1 or 2; later ones ask for numpy 2.
_CUPY = "cupy-cuda13x==13.6.0"
_ML_DTYPES = "ml_dtypes==0.5.4"
_TOKENIZERS = "tokenizers==0.23.3"
REQUIREMENTS_NAME = "requirements.txt"


def base_image(models: Iterable[PackagedModel]) -> str:
    """NVIDIA's image of the release that the engines need, or of a recent one.

    Raises:
        InputError: two engines need different releases.
    """
    releases = {model.triton: model.name for model in models if model.triton is not None}
    if len(releases) > 1:
        each = "; ".join(f"{name} needs {release}" for release, name in sorted(releases.items()))
        raise InputError("no Triton release runs every engine", each, "build the artifacts with one TensorRT version")
    return f"{_REGISTRY}:{next(iter(releases), DEFAULT_RELEASE)}-py3"


def requirements(models: Iterable[PackagedModel]) -> tuple[str, ...]:
    """What pip installs for the Python backend; nothing for TensorRT's own backend."""
    found: set[str] = set()
    for model in models:
        if model.kind == "tensorrt-rtx":
            check_backend_version(model.backend_version, model.name)
            found |= {f"tensorrt-rtx-cu13=={model.backend_version}", _CUPY, _ML_DTYPES}
        if model.kind == "onnxruntime":
            # The release that the answers were compared with.
            found |= {f"onnxruntime=={importlib.metadata.version('onnxruntime')}", _ML_DTYPES}
        if model.kind == "text":
            found.add(_TOKENIZERS)
    versions = sorted(line for line in found if line.startswith("tensorrt-rtx"))
    if len(versions) > 1:
        raise InputError(
            "no image runs every engine", f"they need {' and '.join(versions)}", "build the artifacts with one version"
        )
    return tuple(sorted(found))


def needs_build(spec: DeploymentSpec) -> bool:
    """Whether something is added to NVIDIA's image; an image with a digest was built already."""
    return (bool(spec.requirements) or spec.models_in_image) and "@" not in spec.image


def dockerfile(spec: DeploymentSpec) -> str:
    """The text of the Dockerfile."""
    lines = [f"# docker build {_contexts(spec)}--tag {spec.image} ."]
    if any(line.startswith("tensorrt-rtx") for line in spec.requirements):
        lines.append("# Its packages for CUDA 13 need NVIDIA's driver 580 or later.")
    lines += [f"FROM {spec.base_image}", ""]
    if spec.requirements:
        path = f"/opt/trtforge/{REQUIREMENTS_NAME}"
        lines += [
            "USER root",
            f"COPY {REQUIREMENTS_NAME} {path}",
            "# Ubuntu marks its Python as managed by apt; this Python is the Python backend's.",
            f"RUN PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir --requirement {path}",
            "",
        ]
    if spec.models_in_image:
        lines += [f"COPY --from=models {model.name} {MODELS_PATH}/{model.name}" for model in spec.models]
        lines.append("")
    lines += [f"USER {USER_ID}:{USER_ID}", ""]
    return "\n".join(lines)


def _contexts(spec: DeploymentSpec) -> str:
    """The option of `docker build` that names the repository."""
    return "--build-context models=REPO " if spec.models_in_image else ""
