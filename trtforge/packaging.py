"""From artifacts to a Triton repository that is proved by the real server, and to the files that deploy it.

spec = PackageSpec(artifacts=(Path("build/model-int8"),), repository=Path("models"), cpu=True)
result = package(spec)
result.models[0].entry.name
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from trtforge.errors import InputError
from trtforge.limits import DEFAULT_LIMITS, Limits
from trtforge.progress import Reporter, Stopwatch, ignore
from trtforge.serving.artifact import Artifact, open_artifact
from trtforge.serving.check import CheckResult, check_repository, require_gpu
from trtforge.serving.deploy import (
    DeploymentOptions,
    Form,
    WrittenDeployment,
    check_folder,
    plan_deployment,
    write_deployment,
)
from trtforge.serving.draft import Draft, DraftOptions, draft_model, observe
from trtforge.serving.model_config import ModelConfig
from trtforge.serving.model_folder import BUILD_SCRIPT, ServingOptions
from trtforge.serving.names import model_names
from trtforge.serving.repository import PackagedModel, write_models
from trtforge.serving.text.plan import TextOptions
from trtforge.serving.text_drafts import draft_text_models
from trtforge.serving.triton.environment import TritonInstall, find_triton

# Triton's configuration has most of its numbers in 32 bits.
_LARGEST_NUMBER = 2**31 - 1


@dataclasses.dataclass(frozen=True, slots=True)
class PackageSpec:
    """What to package.

    Attributes:
        artifacts: folders that `trtforge build` wrote.
        repository: takes the models.
        cpu: serve the built graph with ONNX Runtime.
        from_onnx: build a TensorRT-RTX engine on the serving machine.
        name: of the model; None takes the source's.
        max_batch: samples that the server may join at most; None takes what the profiles allow.
        triton_version: release of the server, for TensorRT engines; see `release_for_engine`.
        options: how the server runs the models.
        text: serve strings, with this tokenizer; None serves tensors.
        check_with: where a Triton server is looked for that proves the models; None proves nothing.
        deployments: form and folder of deployment files to write.
        deployment: what is decided of the deployments.
        force: replace what trtforge wrote before, and package artifacts that miss their accuracy budget.
        limits: bounds on untrusted input.
    """

    artifacts: tuple[Path, ...]
    repository: Path
    cpu: bool = False
    from_onnx: bool = False
    name: str | None = None
    max_batch: int | None = None
    triton_version: str | None = None
    options: ServingOptions = dataclasses.field(default_factory=ServingOptions)
    text: TextOptions | None = None
    check_with: tuple[Path, ...] | None = None
    deployments: tuple[tuple[Form, Path], ...] = ()
    deployment: DeploymentOptions = dataclasses.field(default_factory=DeploymentOptions)
    force: bool = False
    limits: Limits = DEFAULT_LIMITS


@dataclasses.dataclass(frozen=True, slots=True)
class ModelResult:
    """One model of the repository.

    Attributes:
        entry: what `trtforge.json` says of it.
        config: its configuration.
        reason: why `max_batch_size` is what it is.
        is_new: it was written; False where it was there already.
    """

    entry: PackagedModel
    config: ModelConfig
    reason: str
    is_new: bool


@dataclasses.dataclass(frozen=True, slots=True)
class PackageResult:
    """What was packaged.

    Attributes:
        repository: the folder.
        models: in the order of the artifacts.
        notes: what has to be done on the serving machine.
        check: what the real server did; None where it was not asked.
        deployments: what was written to deploy the repository; nothing where the check failed.
    """

    repository: Path
    models: tuple[ModelResult, ...]
    notes: tuple[str, ...]
    check: CheckResult | None = None
    deployments: tuple[WrittenDeployment, ...] = ()

    @property
    def passed(self) -> bool:
        """The server did with every model what it has to."""
        return self.check is None or self.check.passed


def package(spec: PackageSpec, report: Reporter = ignore) -> PackageResult:
    """Write artifacts into a Triton repository, as models that load.

    Raises:
        InputError: an artifact that is damaged or misses its budget, options that do not fit it, a name that is taken.
        UnavailableError: the place cannot be written, or nothing here can prove the models.
    """
    _check_options(spec)
    watch = Stopwatch(report)
    with watch.stage("read") as note:
        artifacts = [
            open_artifact(path, lambda text: note(text, level="warning"), force=spec.force, limits=spec.limits)
            for path in spec.artifacts
        ]
    install = None if spec.check_with is None else _find_prover(spec.check_with, artifacts, spec)
    names = model_names([artifact.manifest for artifact in artifacts], spec.name)
    drafts: list[Draft] = []
    notes: list[str] = []
    with watch.stage("draft") as note:
        for artifact, name in zip(artifacts, names, strict=True):
            found, about = _drafts(artifact, name, spec, lambda text: note(text, level="warning"))
            drafts += found
            notes += about
    with watch.stage("write"):
        written = write_models(spec.repository, [draft.folder for draft in drafts], spec.force)
    models = tuple(_result(draft, draft.folder.entry.name in written) for draft in drafts)
    for draft, model in zip(drafts, models, strict=True):
        notes += _notes(draft.artifact, model, spec)
    result = PackageResult(spec.repository, models, tuple(dict.fromkeys(notes)))
    if install is not None:
        by_name = {draft.folder.entry.name: draft.artifact.path for draft in drafts}
        check = check_repository(spec.repository, install, list(by_name), report, artifacts=by_name)
        result = dataclasses.replace(result, check=check)
    return _deploy(spec, result)


def _deploy(spec: PackageSpec, result: PackageResult) -> PackageResult:
    """The result with its deployments; there are none for models that failed."""
    if not spec.deployments or not result.passed:
        return result
    plan = plan_deployment(spec.repository, spec.deployment)
    written = tuple(
        write_deployment(plan, spec.repository, folder, form, spec.force) for form, folder in spec.deployments
    )
    return dataclasses.replace(result, deployments=written)


def _check_options(spec: PackageSpec) -> None:
    options = spec.options
    if not spec.artifacts:
        raise InputError("no artifact is given", "there is nothing to package", "give a folder of `trtforge build`")
    numbers = {
        "--instances": options.instances,
        "--threads": options.threads or 0,
        "--gpus": max(options.gpus, default=0),
        "--queue-delay": options.queue_delay_us,
        "--priority-levels": options.priority_levels,
        "--queue-timeout": options.queue_timeout_us,
        "--queue-size": options.queue_size,
        "--version-number": options.version,
        "--versions": options.num_versions,
    }
    for name, value in numbers.items():
        if value > _LARGEST_NUMBER:
            raise InputError(f"{name} {value} cannot be used", f"it takes {_LARGEST_NUMBER} at most", "give less")
    if spec.cpu and options.gpus:
        raise InputError("--gpus cannot be used with --cpu", "ONNX Runtime runs on the CPU", "leave one of them out")
    if options.threads is not None and not spec.cpu:
        raise InputError("--threads is for --cpu", "an engine runs on the GPU", "leave it out")
    if spec.cpu and spec.from_onnx:
        why = "ONNX Runtime needs no engine"
        raise InputError("--from-onnx cannot be used with --cpu", why, "leave one of them out")
    if spec.from_onnx and spec.check_with is not None:
        why = "the engine is built on the serving machine first"
        raise InputError("--check cannot be used with --from-onnx", why, "check there, or package with --cpu to check")
    for _, folder in spec.deployments:
        check_folder(folder)


def _find_prover(places: Sequence[Path], artifacts: Sequence[Artifact], spec: PackageSpec) -> TritonInstall:
    """The server that will prove the models.

    Raises:
        UnavailableError: there is none, or no GPU for an engine.
    """
    if not spec.cpu:
        require_gpu(str(artifacts[0].path))
    return find_triton(places)


def _drafts(
    artifact: Artifact, name: str, spec: PackageSpec, warn: Callable[[str], None]
) -> tuple[list[Draft], tuple[str, ...]]:
    """The models of one artifact, and what the user has to know of them."""
    options = DraftOptions(
        repository=spec.repository,
        cpu=spec.cpu,
        from_onnx=spec.from_onnx,
        max_batch=spec.max_batch,
        triton_version=spec.triton_version,
        serving=spec.options,
    )
    if spec.text is not None:
        return draft_text_models(artifact, name, spec.text, options, warn, spec.limits)
    seen = observe(artifact, every_point=options.warms_graph)
    return [draft_model(artifact, name, seen, options, warn)], ()


def _result(draft: Draft, is_new: bool) -> ModelResult:
    return ModelResult(draft.folder.described(), draft.folder.config, draft.reason, is_new)


def _notes(artifact: Artifact, model: ModelResult, spec: PackageSpec) -> list[str]:
    """What has to be done where the model is served."""
    manifest, entry = artifact.manifest, model.entry
    notes = []
    if entry.kind == "tensorrt":
        if manifest.engine.version_compatible:
            notes.append("start the server with --backend-config=tensorrt,version-compatible=true")
        else:
            notes.append(f"{entry.name} loads in Triton {entry.triton} (TensorRT {entry.backend_version}) only")
        if manifest.engine.plugins:
            names = ";".join(manifest.engine.plugins)
            notes.append(
                f"{entry.name} needs the plugin libraries that it was built with: copy them to the server and start "
                f'it with --backend-config=tensorrt,plugins="{names}", each with its path'
            )
    if entry.kind == "tensorrt-rtx":
        folder = spec.repository / entry.name / str(entry.version)
        notes.append(f"the server's Python needs {folder / 'requirements.txt'}: TensorRT-RTX {entry.backend_version}")
        if spec.from_onnx:
            notes.append(f"on the serving machine, once: python3 {folder / BUILD_SCRIPT}")
    if spec.options.response_cache:
        notes.append(
            "start the server with a response cache: --cache-config local,size=104857600, or "
            "--cache-config redis,host=HOST --cache-config redis,port=6379"
        )
    return notes
