"""Repositories to deploy, and what is asked of the files that deploy them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from trtforge.serving.deploy import DeploymentOptions, Form, plan_deployment, write_deployment
from trtforge.serving.repository import PackagedModel, RepositoryManifest

CPU = {"digits": {"kind": "onnxruntime"}}
ENGINE = {
    "digits": {"kind": "tensorrt-rtx", "targets": ("sm_86", "sm_120"), "backend_version": "1.7.1.116", "gpus": (0, 1)}
}
TEXT = {
    "MiniLM": {"kind": "text"},
    "MiniLM_b32": {"kind": "onnxruntime", "bucket": 32},
    "MiniLM_b128": {"kind": "onnxruntime", "bucket": 128},
}
PER_GPU = {
    "digits_sm86": {"kind": "tensorrt", "targets": ("sm_86",), "triton": "24.12"},
    "digits_sm89": {"kind": "tensorrt", "targets": ("sm_89",), "triton": "24.12"},
}
CONFIG = "config.pbtxt"


def make_repository(
    folder: Path, models: dict[str, dict[str, Any]], files: dict[str, dict[str, str]] | None = None
) -> Path:
    """Write a repository as `trtforge package` leaves it.

    Args:
        folder: of the repository.
        models: what trtforge.json says of each, by name.
        files: content of each model's files by path; None gives two that no server loads.
    """
    entries = []
    for name, facts in models.items():
        texts = (files or {}).get(name, {CONFIG: f'name: "{name}"\n', "1/model file.bin": name * 100})
        for path, text in texts.items():
            (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / name / path).write_text(text)
        entries.append(
            PackagedModel(
                **{"name": name, "model": "digits.onnx", "model_sha256": "1" * 64, "artifact_sha256": "2" * 64}
                | {"precision": "fp16", "targets": (), "max_batch_size": 8}
                | {"files": {path: hashlib.sha256(text.encode()).hexdigest() for path, text in texts.items()}}
                | facts
            )
        )
    manifest = RepositoryManifest(trtforge_version="0", models=tuple(entries))
    (folder / "trtforge.json").write_text(manifest.to_json())
    return folder


def deploy(tmp_path: Path, models: dict[str, dict[str, Any]], form: Form = "kubernetes", **options: Any) -> Path:
    """The folder of a deployment."""
    repository = make_repository(tmp_path / "repository", models)
    spec = plan_deployment(repository, DeploymentOptions(**options))
    return write_deployment(spec, repository, tmp_path / form, form).folder


def load(folder: Path, name: str) -> dict[str, Any]:
    """A YAML file of the deployment."""
    value = yaml.safe_load((folder / name).read_text())
    assert isinstance(value, dict)
    return value


def container_problems(container: dict[str, Any]) -> Iterable[str]:
    """What keeps a container from Kubernetes' restricted standard with a read-only root."""
    security = container["securityContext"]
    if security.get("allowPrivilegeEscalation") is not False:
        yield "it may gain privileges"
    if security.get("privileged"):
        yield "it is privileged"
    if security.get("readOnlyRootFilesystem") is not True:
        yield "its root can be written"
    if security.get("capabilities") != {"drop": ["ALL"]}:
        yield "it has capabilities"
    if "memory" not in container["resources"]["limits"]:
        yield "its memory has no limit"


def pod_problems(pod: dict[str, Any]) -> list[str]:
    """What keeps a pod from the same, and from having no token."""
    security = pod["securityContext"]
    problems = [
        problem
        for key in ("initContainers", "containers")
        for c in pod.get(key, [])
        for problem in container_problems(c)
    ]
    if security.get("runAsNonRoot") is not True or not security.get("runAsUser"):
        problems.append("it may run as root")
    if security.get("seccompProfile") != {"type": "RuntimeDefault"}:
        problems.append("it has no seccomp profile")
    if pod.get("automountServiceAccountToken") is not False:
        problems.append("it has a token")
    if {"hostNetwork", "hostPID", "hostIPC"} & set(pod):
        problems.append("it shares the node's namespaces")
    return problems
