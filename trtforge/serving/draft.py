"""From an artifact to a model's folder before it is written: what a run shows, the batch sizes, and all files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from trtforge.errors import InputError
from trtforge.manifest import ENGINE_NAME, MODEL_NAME
from trtforge.serving.artifact import Artifact
from trtforge.serving.batching import (
    FLOAT32_TOLERANCE,
    LOW_TOLERANCE,
    Batching,
    Observation,
    find_obstacle,
    observe_model,
    plan_batching,
)
from trtforge.serving.model_file import Kind, ModelFile
from trtforge.serving.model_folder import ServingOptions, make_config, make_folder, make_model_file, model_contents
from trtforge.serving.repository import ModelFolder, PackagedModel
from trtforge.serving.triton_releases import release_for_engine
from trtforge.serving.versions import add_earlier_versions
from trtforge.target import BackendName


@dataclasses.dataclass(frozen=True, slots=True)
class DraftOptions:
    """What an artifact is made into.

    Attributes:
        repository: where it goes.
        cpu: serve the built graph with ONNX Runtime.
        from_onnx: build a TensorRT-RTX engine on the serving machine.
        max_batch: samples that the server may join at most; None takes what the profiles allow.
        triton_version: release of the server, for TensorRT engines; see `release_for_engine`.
        serving: how the server runs it.
    """

    repository: Path
    cpu: bool
    from_onnx: bool
    max_batch: int | None
    triton_version: str | None
    serving: ServingOptions

    @property
    def warms_graph(self) -> bool:
        """Whether the server will run the graph itself at every point of the profiles."""
        return self.cpu and self.serving.warmup

    def kind(self, artifact: Artifact) -> Kind:
        """What will run an artifact.

        Raises:
            InputError: it cannot be served in this form.
        """
        manifest = artifact.manifest
        is_rtx = manifest.backend.name == BackendName.TENSORRT_RTX
        if self.from_onnx and not is_rtx:
            raise InputError(
                f"--from-onnx cannot be used with {artifact.path}",
                f"it was built with {manifest.backend.name}; the option is for tensorrt-rtx",
                "leave it out, or build the artifact with --backend tensorrt-rtx",
            )
        if self.cpu:
            return "onnxruntime"
        if manifest.engine.strip_weights:
            raise InputError(
                f"{artifact.path} holds an engine without weights, which cannot be served",
                "it was built with --strip-weights and has to be refitted before it runs",
                "build it without --strip-weights",
            )
        return "tensorrt-rtx" if is_rtx else "tensorrt"


@dataclasses.dataclass(frozen=True, slots=True)
class Draft:
    """A model before it is written.

    Attributes:
        artifact: that it is made from.
        model: what its `model.json` says; of a text front, that of its first bucket.
        folder: its files.
        reason: why `max_batch_size` is what it is.
    """

    artifact: Artifact
    model: ModelFile
    folder: ModelFolder
    reason: str


def observe(artifact: Artifact, *, every_point: bool = False) -> Observation:
    """What a run of the built graph shows of its outputs, and of batches where names and ranges allow them.

    Args:
        artifact: the artifact.
        every_point: run it at min, opt and max of every profile too, as its warm-up will.
    """
    manifest = artifact.manifest
    # The run needs the inputs only, in the graph's own types.
    known = Observation({port.name: len(port.shape or ()) for port in manifest.io})
    model = make_model_file(artifact, "onnxruntime", Batching(0, ""), known)
    is_exact = manifest.precision.requested == "fp32" and not model.as_written
    tolerance = FLOAT32_TOLERANCE if is_exact else LOW_TOLERANCE
    is_batched = not find_obstacle(manifest)
    return observe_model(artifact.path / MODEL_NAME, model, is_batched, tolerance, every_point=every_point)


def draft_model(
    artifact: Artifact,
    name: str,
    seen: Observation,
    options: DraftOptions,
    warn: Callable[[str], None],
    *,
    bucket: int | None = None,
    engine_profiles: Sequence[int] = (),
) -> Draft:
    """The model of an artifact.

    Args:
        artifact: the artifact.
        name: the model's.
        seen: what a run showed.
        options: what it is made into.
        warn: takes what the user has to know.
        bucket: length that texts are padded to, of a model behind a text front.
        engine_profiles: numbers of the profiles that the model takes, where the engine has others too.

    Raises:
        InputError: the artifact cannot be served so.
    """
    manifest, serving, kind = artifact.manifest, options.serving, options.kind(artifact)
    if kind == "onnxruntime" and not seen.is_loaded:
        raise InputError(
            f"{artifact.path} cannot be served with --cpu: ONNX Runtime does not take its graph",
            seen.failure,
            "build it in a precision that ONNX Runtime has on the CPU (--fp32, --fp16 or --int8), or package the "
            "engine without --cpu",
        )
    obstacle = seen.failure or seen.refusal
    if obstacle and serving.warmup:
        # A sample that fails keeps the model from loading, and can end the server.
        warn(f"{name} gets no warm-up: it did not run on made-up values ({obstacle})")
        serving = dataclasses.replace(serving, warmup=False)
    batching = plan_batching(manifest, seen, options.max_batch)
    _check_preferred(serving, batching)
    model = make_model_file(artifact, kind, batching, seen, any_version=options.from_onnx)
    entry = PackagedModel(
        name=name,
        kind=kind,
        model=manifest.model.name,
        model_sha256=manifest.model.sha256,
        artifact_sha256=manifest.inputs_sha256,
        precision=manifest.precision.requested,
        targets=manifest.targets,
        backend_version="" if kind == "onnxruntime" else manifest.backend.version,
        triton=_release(artifact, options) if kind == "tensorrt" else None,
        version=serving.version,
        gpus=serving.gpus,
        bucket=bucket,
        max_batch_size=batching.max_batch_size,
        local_files=(f"{serving.version}/{ENGINE_NAME}",) if options.from_onnx else (),
    )
    config = make_config(name, model, batching, serving, engine_profiles)
    contents = model_contents(artifact, kind, from_onnx=options.from_onnx)
    folder = make_folder(entry, model, config, contents, serving)
    return Draft(artifact, model, add_earlier_versions(folder, model, options.repository), batching.reason)


def _release(artifact: Artifact, options: DraftOptions) -> str:
    manifest = artifact.manifest
    is_compatible = manifest.engine.version_compatible
    return release_for_engine(manifest.backend.version, options.triton_version, is_version_compatible=is_compatible)


def _check_preferred(serving: ServingOptions, batching: Batching) -> None:
    sizes = serving.preferred_sizes or ()
    if sizes and not batching.max_batch_size:
        raise InputError(
            "preferred batch sizes cannot be used: the model has no batch dim", batching.reason, "leave them out"
        )
    wrong = [size for size in sizes if not 1 <= size <= batching.max_batch_size]
    if wrong:
        raise InputError(
            f"a preferred batch size of {wrong[0]} cannot be had",
            f"the model takes a batch of 1 to {batching.max_batch_size} ({batching.reason})",
            "give sizes in that range",
        )
