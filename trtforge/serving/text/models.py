"""The models of a text model: one for each length bucket, and the front that chooses among them.

    <name>              text [N, 1] -> the outputs, and attention_mask [N, longest]
    <name>_b<length>    input_ids, attention_mask ... [N, length] -> the outputs

All buckets share one file on disk. The front runs twice: while the models work for one instance, the other tokenizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from trtforge.errors import InputError
from trtforge.manifest import Manifest, ProfileInfo, RangeInfo
from trtforge.serving.artifact import Artifact
from trtforge.serving.model_config import DynamicBatching, InstanceGroup, ModelConfig, QueuePolicy, TensorConfig
from trtforge.serving.model_file import ModelFile, Port
from trtforge.serving.model_folder import ServingOptions, python_model, tensor_configs
from trtforge.serving.repository import (
    REPOSITORY_NAME,
    FileSource,
    ModelFolder,
    PackagedModel,
    load_repository,
)
from trtforge.serving.text.plan import MASK, TextPlan
from trtforge.serving.text.text_file import TEXT_FILE_NAME, BucketInfo, OutputInfo, TextFile
from trtforge.serving.text.tokenizer import TOKENIZER_NAME

TEXT_INPUT = "text"
# Texts of one request to the front, where its models take few.
_MIN_TEXTS = 64
_INSTANCES = 2


@dataclasses.dataclass(frozen=True, slots=True)
class BucketModel:
    """A model that is asked by the front.

    Attributes:
        entry: for `trtforge.json`.
        model: its `model.json`.
    """

    entry: PackagedModel
    model: ModelFile


def bucket_name(name: str, length: int) -> str:
    """The model of a length bucket."""
    return f"{name}_b{length}"


def note_forgotten(repository: Path, name: str, plan: TextPlan) -> tuple[str, ...]:
    """What to do with models of an earlier package that the front no longer asks; nothing where there are none.

    Raises:
        InputError: the repository's manifest cannot be read.
    """
    known = load_repository(repository).models if (repository / REPOSITORY_NAME).exists() else ()
    forgotten = [
        entry.name
        for entry in known
        if entry.bucket is not None
        and entry.bucket not in plan.buckets.lengths
        and entry.name == bucket_name(name, entry.bucket)
        and (repository / entry.name).is_dir()
    ]
    if not forgotten:
        return ()
    return (f"{name} no longer asks {', '.join(forgotten)} of an earlier package: remove these folders",)


def bucket_artifact(artifact: Artifact, plan: TextPlan, length: int) -> Artifact:
    """The artifact as if it had been built for one length: its profiles and shapes say so, its files are the same."""
    manifest = artifact.manifest
    kept = [_at_length(manifest.profiles[number], length) for number in profile_numbers(manifest, length)]
    io = []
    for port in manifest.io:
        inner: tuple[int | None, ...] = (-1,) if port.mode == "input" else plan.shapes[port.name][1:]
        batch = port.shape[0] if port.shape else None
        shape = (batch, *(length if size == -1 else size for size in inner))
        io.append(port.model_copy(update={"shape": shape}))
    changed = manifest.model_copy(update={"profiles": tuple(kept), "io": tuple(io)})
    return dataclasses.replace(artifact, manifest=changed)


def profile_numbers(manifest: Manifest, length: int) -> tuple[int, ...]:
    """The profiles that take a length, by their place in the engine."""
    return tuple(
        number
        for number, profile in enumerate(manifest.profiles)
        if all(span.min[1] <= length <= span.max[1] for span in profile.inputs.values())
    )


def _at_length(profile: ProfileInfo, length: int) -> ProfileInfo:
    inputs = {
        name: RangeInfo(min=(span.min[0], length), opt=(span.opt[0], length), max=(span.max[0], length))
        for name, span in profile.inputs.items()
    }
    return profile.model_copy(update={"inputs": inputs})


def front_folder(name: str, plan: TextPlan, models: Sequence[BucketModel], options: ServingOptions) -> ModelFolder:
    """The front.

    Args:
        name: its name.
        plan: how the model is served.
        models: one for each of the plan's lengths, in their order.
        options: how the server runs the models; the front takes priorities and the limits of the queue.

    Raises:
        InputError: an output of a type that Python has not, or a response cache.
    """
    if options.response_cache:
        # Seen in release 24.10, with the local cache.
        raise InputError(
            "--response-cache cannot be used with --tokenizer",
            "Triton keeps the refusal of a text as well, and gives the next request for it an empty answer, no error",
            "leave it out",
        )
    outputs = [
        port.model_copy(update={"shape": tuple(-1 if size is None else size for size in plan.shapes[port.name])})
        for port in models[0].model.outputs
        if port.name != MASK
    ]
    for port in outputs:
        if port.dtype == "bfloat16":
            raise InputError(
                f"output '{port.name}' has type bfloat16, which a text front cannot hand on",
                "the numpy of the server's Python has no such type",
                "build without --io, so that outputs keep the source's type",
            )
    size = max(_MIN_TEXTS, sum(bucket.model.max_batch_size for bucket in models))
    own = {"name": name, "kind": "text", "bucket": None, "max_batch_size": size}
    # What only an engine has.
    engine = {"gpus": (), "triton": None, "backend_version": "", "local_files": ()}
    files: dict[str, bytes | FileSource] = {
        "model.py": python_model("text_model.py"),
        TEXT_FILE_NAME: _text_file(plan, models, outputs).to_json().encode(),
        TOKENIZER_NAME: plan.tokenizer,
    }
    return ModelFolder(
        models[0].entry.model_copy(update=own | engine),
        _front_config(name, outputs, size, options),
        {f"{options.version}/{path}": content for path, content in files.items()},
    )


def _text_file(plan: TextPlan, models: Sequence[BucketModel], outputs: Sequence[Port]) -> TextFile:
    return TextFile(
        tokenizer=TOKENIZER_NAME,
        pad_id=plan.pad_id,
        truncate=plan.truncate,
        inputs={port.name: port.dtype for port in models[0].model.inputs},
        outputs=tuple(OutputInfo(name=port.name, sequence_axes=plan.sequence_axes(port.name)) for port in outputs),
        buckets=tuple(
            BucketInfo(length=length, model=bucket.entry.name, max_batch_size=bucket.model.max_batch_size)
            for length, bucket in zip(plan.buckets.lengths, models, strict=True)
        ),
    )


def _front_config(name: str, outputs: Sequence[Port], size: int, options: ServingOptions) -> ModelConfig:
    has_queue = options.queue_timeout_us > 0 or options.queue_size > 0
    return ModelConfig(
        name=name,
        backend="python",
        max_batch_size=size,
        inputs=(TensorConfig(TEXT_INPUT, "string", (1,)),),
        outputs=tensor_configs((*outputs, Port(name=MASK, dtype="int64", shape=(-1, -1))), size),
        instances=(InstanceGroup("KIND_CPU", _INSTANCES),),
        dynamic_batching=DynamicBatching(
            priority_levels=options.priority_levels,
            default_priority=(options.priority_levels + 1) // 2,
            queue=QueuePolicy(options.queue_timeout_us, options.queue_size) if has_queue else None,
        ),
        num_versions=options.num_versions,
    )
