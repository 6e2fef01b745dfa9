"""Prove a packaged repository with the real server.

Triton is started on loopback with the models that are checked. Each model answers a request of min, opt and max of
every profile, which is compared with ONNX Runtime's answer for the same graph, and refuses what lies just outside. Then
many requests come at once: every one has to be answered right, and where Triton batches, its own statistics have to
show batches larger than 1.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from trtforge.errors import InputError, TrtForgeError, UnavailableError
from trtforge.gpu import find_gpus
from trtforge.progress import Event, Reporter, ignore
from trtforge.serving.check.results import CheckResult, ModelCheck
from trtforge.serving.check.tensors import check_tensors
from trtforge.serving.check.texts import check_texts
from trtforge.serving.repository import PackagedModel, RepositoryManifest, damaged_models, load_repository
from trtforge.serving.text.text_file import TEXT_FILE_NAME, load_text_file
from trtforge.serving.triton.client import TritonClient
from trtforge.serving.triton.environment import TritonInstall
from trtforge.serving.triton.server import TritonServer

# Requests that are sent at once to each model; as many as the server's statistics need to show what it does.
NUM_REQUESTS = 64
# Seconds for the models to load.
_START_TIMEOUT_S = 600.0


def check_repository(
    repository: Path,
    install: TritonInstall,
    models: Sequence[str] | None = None,
    report: Reporter = ignore,
    *,
    artifacts: Mapping[str, Path] | None = None,
    num_requests: int = NUM_REQUESTS,
) -> CheckResult:
    """Start the server, check models, and stop it.

    Args:
        repository: written by `trtforge package`.
        install: the server.
        models: names of those to check; None means all.
        report: takes progress.
        artifacts: folder of the artifact by name of the model, for the graph that answers are compared with; a model
            that runs on ONNX Runtime brings its own.
        num_requests: sent at once to each model.

    Raises:
        InputError: no such model, or files that are not those that were written.
        UnavailableError: a model needs a GPU and there is none, or the server cannot be started.
    """
    manifest = load_repository(repository)
    chosen = _choose(repository, manifest, models)
    with tempfile.TemporaryDirectory(prefix="trtforge-check-") as scratch:
        log = Path(scratch) / "triton.log"
        # Others of the repository may be for other GPUs.
        arguments = ["--model-control-mode=explicit", *(f"--load-model={entry.name}" for entry in chosen)]
        report(Event("start Triton"))
        with TritonServer(install, repository, log=log, arguments=arguments) as server:
            try:
                server.wait_ready(_START_TIMEOUT_S)
            except UnavailableError as err:
                return CheckResult(install.version, _failed_to_load(chosen, err, server.failed_models()))
            with TritonClient(server.grpc, "grpc") as client:
                version = str(client.server()["version"])
                checks: list[ModelCheck] = []
                for done, entry in enumerate(chosen):
                    report(Event("check", entry.name, done=done, total=len(chosen)))
                    check = _check_model(client, repository, manifest, entry, artifacts or {}, num_requests)
                    checks.append(check if server.is_alive() else _died(check, server))
    return CheckResult(version, tuple(checks))


def require_gpu(what: str) -> None:
    """Refuse to check what needs a GPU where there is none.

    Args:
        what: models or artifacts, as the message names them.

    Raises:
        UnavailableError: there is no GPU.
    """
    try:
        find_gpus()
    except UnavailableError as err:
        fix = "check on the machine that serves it, or package with --cpu, which runs the same graph here"
        raise UnavailableError(f"{what} cannot be checked here: {err.what}", err.why, fix) from err


def _check_model(
    client: TritonClient,
    repository: Path,
    manifest: RepositoryManifest,
    entry: PackagedModel,
    artifacts: Mapping[str, Path],
    num_requests: int,
) -> ModelCheck:
    if entry.kind == "text":
        return check_texts(client, repository, manifest, entry, artifacts, num_requests)
    return check_tensors(client, repository, entry, artifacts.get(entry.name), num_requests)


def _died(check: ModelCheck, server: TritonServer) -> ModelCheck:
    """The check of a model that ended the server, or came after that."""
    why = server.failure() or server.ending()
    return dataclasses.replace(check, failure=f"the server died: {why}")


def _choose(repository: Path, manifest: RepositoryManifest, names: Sequence[str] | None) -> list[PackagedModel]:
    """The models to check, those first that a text front asks."""
    known = {entry.name: entry for entry in manifest.models}
    for name in names or ():
        if name not in known:
            raise InputError(f"{repository} has no model {name!r}", f"it has {', '.join(known)}", "give one of these")
    wanted = set(known if names is None else names)
    for name in sorted(wanted):
        if known[name].kind == "text":
            facts = load_text_file(repository / name / str(known[name].version) / TEXT_FILE_NAME)
            wanted |= {bucket.model for bucket in facts.buckets}
    chosen = [entry for entry in manifest.models if entry.name in wanted]
    damaged = damaged_models(repository, manifest.model_copy(update={"models": tuple(chosen)}))
    if damaged:
        raise InputError(
            f"{', '.join(damaged)} in {repository} is not what was packaged",
            "files were changed, or are missing",
            "package it again with --force",
        )
    needs_gpu = [entry.name for entry in chosen if entry.needs_gpu]
    if needs_gpu:
        require_gpu(", ".join(needs_gpu))
    return sorted(chosen, key=lambda entry: entry.kind == "text")


def _failed_to_load(
    chosen: Sequence[PackagedModel], error: TrtForgeError, reasons: Mapping[str, str]
) -> tuple[ModelCheck, ...]:
    """What the server's refusal to start says of each model."""
    others = f"not checked: the server did not start, because {error.why}"
    return tuple(
        ModelCheck(
            entry.name,
            entry.kind,
            failure=f"it did not load: {reasons[entry.name]}" if entry.name in reasons else others,
        )
        for entry in chosen
    )
