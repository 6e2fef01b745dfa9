"""An artifact as a model of a Triton repository, in the form of the backend that runs it.

    tensorrt        Triton's TensorRT backend and the engine, `model.plan`
    tensorrt-rtx    Triton's Python backend: code that runs the engine with the TensorRT-RTX release that built it
    onnxruntime     Triton's Python backend: code that runs the built graph with ONNX Runtime on the CPU

Names, order and types of inputs and outputs are the source's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from importlib import resources

from trtforge.errors import InputError
from trtforge.manifest import ENGINE_NAME, MODEL_NAME, IoInfo, Manifest
from trtforge.serving.artifact import Artifact
from trtforge.serving.batching import Batching, Observation
from trtforge.serving.model_config import (
    TRITON_TYPES,
    DynamicBatching,
    InstanceGroup,
    ModelConfig,
    QueuePolicy,
    TensorConfig,
)
from trtforge.serving.model_file import MODEL_FILE_NAME, Kind, ModelFile, Port
from trtforge.serving.repository import FileSource, ModelFolder, PackagedModel
from trtforge.serving.warmup import FOLDER, make_warmup

# Types that the engines of both builders have at their borders.
_ENGINE_TYPES = frozenset(["bool", "uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32"])
_ONNX_TYPES = frozenset(TRITON_TYPES) - {"string"}
PLAN_NAME = "model.plan"
BUILD_SCRIPT = "build_engine.py"
_SHARED = ("answering.py", "bfloat16.py")


@dataclasses.dataclass(frozen=True, slots=True)
class ServingOptions:
    """How the server runs a model.

    Attributes:
        instances: copies that run at once, on each GPU.
        gpus: numbers of the GPUs; empty means all.
        queue_delay_us: how long a request may wait for others to be batched with.
        preferred_sizes: batch sizes that are sent at once; None takes those of the profiles' opt.
        priority_levels: 0 for one level.
        queue_timeout_us: waiting requests are refused after it; 0 means never.
        queue_size: requests that may wait; 0 means any number.
        version: number of the folder that holds the model.
        num_versions: the newest versions that are served.
        response_cache: equal requests are answered from the server's cache.
        warmup: the server sends itself requests before it calls the model ready.
        threads: of one instance of ONNX Runtime; None takes every core that the server may run on.
    """

    instances: int = 1
    gpus: tuple[int, ...] = ()
    queue_delay_us: int = 100
    preferred_sizes: tuple[int, ...] | None = None
    priority_levels: int = 0
    queue_timeout_us: int = 0
    queue_size: int = 0
    version: int = 1
    num_versions: int = 1
    response_cache: bool = False
    warmup: bool = True
    threads: int | None = None


def make_model_file(
    artifact: Artifact, kind: Kind, batching: Batching, seen: Observation, *, any_version: bool = False
) -> ModelFile:
    """What `model.json` says of an artifact.

    Args:
        artifact: the artifact.
        kind: what runs it.
        batching: the batch sizes.
        seen: what a run showed.
        any_version: the engine is built where it is served, by whatever release is there.

    Raises:
        InputError: a type or a number of axes that the backend does not take.
    """
    manifest = artifact.manifest
    ports = {
        mode: tuple(_port(port, manifest, kind, seen) for port in manifest.io if port.mode == mode)
        for mode in ("input", "output")
    }
    return ModelFile(
        kind=kind,
        version="" if kind == "onnxruntime" or any_version else manifest.backend.version,
        file={"tensorrt": PLAN_NAME, "tensorrt-rtx": ENGINE_NAME, "onnxruntime": MODEL_NAME}[kind],
        max_batch_size=batching.max_batch_size,
        as_written=artifact.facts.has_qdq,
        tf32=bool(manifest.environment.get("tf32", True)),
        inputs=ports["input"],
        outputs=ports["output"],
        profiles=manifest.profiles,
        integer_limits=dict(artifact.facts.integer_limits),
    )


def make_config(
    name: str, model: ModelFile, batching: Batching, options: ServingOptions, engine_profiles: Sequence[int] = ()
) -> ModelConfig:
    """The configuration of a model, without warm-up.

    Args:
        name: the model's.
        model: its inputs, outputs and profiles.
        batching: the batch sizes.
        options: how the server runs it.
        engine_profiles: numbers of the profiles that the model takes, where the engine has others too; empty means
            that it takes all.

    Raises:
        InputError: a response cache in front of Python.
    """
    is_tensorrt = model.kind == "tensorrt"
    if options.response_cache and not is_tensorrt:
        # Seen in release 24.10, with the local cache, over HTTP and gRPC.
        raise InputError(
            f"--response-cache cannot be used with {name}, which runs in Triton's Python backend",
            "Triton keeps the refusal of a request as well, and gives the next equal one an empty answer, no error",
            "leave it out",
        )
    shape_tensors = {value for profile in model.profiles for value in profile.values} if is_tensorrt else set()
    return ModelConfig(
        name=name,
        backend="tensorrt" if is_tensorrt else "python",
        max_batch_size=model.max_batch_size,
        inputs=tensor_configs(model.inputs, model.max_batch_size, shape_tensors),
        outputs=tensor_configs(model.outputs, model.max_batch_size),
        instances=(_instances(model, options, engine_profiles),),
        dynamic_batching=_dynamic_batching(batching, options),
        num_versions=options.num_versions,
        response_cache=options.response_cache,
        parameters={} if options.threads is None else {"threads": str(options.threads)},
    )


def make_folder(
    entry: PackagedModel,
    model: ModelFile,
    config: ModelConfig,
    contents: Mapping[str, bytes | FileSource],
    options: ServingOptions,
) -> ModelFolder:
    """The model's folder, with its warm-up requests.

    Args:
        entry: for `trtforge.json`.
        model: for `model.json`.
        config: without warm-up.
        contents: files of the version's folder, by path, `model.json` aside.
        options: how the server runs it.
    """
    files: dict[str, bytes | FileSource] = {f"{options.version}/{name}": content for name, content in contents.items()}
    files[f"{options.version}/{MODEL_FILE_NAME}"] = model.to_json().encode()
    if options.warmup:
        requests, values = make_warmup(model, config.inputs)
        config = dataclasses.replace(config, warmup=requests)
        files |= {f"{FOLDER}/{name}": content for name, content in values.items()}
    return ModelFolder(entry, config, files)


def model_contents(artifact: Artifact, kind: Kind, *, from_onnx: bool = False) -> dict[str, bytes | FileSource]:
    """The files that run an artifact, by their path in the version's folder.

    Args:
        artifact: the artifact.
        kind: what runs it.
        from_onnx: of TensorRT-RTX: the graph, and the script that builds the engine, in the place of the engine.
    """
    if kind == "tensorrt":
        return {PLAN_NAME: artifact.source(ENGINE_NAME)}
    if kind == "onnxruntime":
        return {**_python_files("onnxruntime_model.py"), **artifact.graph_sources()}
    files: dict[str, bytes | FileSource] = {
        **_python_files("tensorrt_rtx_model.py"),
        **_runtime_files(),
        "requirements.txt": _requirements(artifact.manifest),
    }
    if from_onnx:
        return files | artifact.graph_sources() | {BUILD_SCRIPT: python_model(BUILD_SCRIPT)}
    return files | {ENGINE_NAME: artifact.source(ENGINE_NAME)}


def _requirements(manifest: Manifest) -> bytes:
    """What the code of a TensorRT-RTX model imports."""
    names = [f"tensorrt-rtx-cu13=={manifest.backend.version}", "cupy-cuda13x", "numpy"]
    names += ["ml_dtypes"] if any(port.dtype == "bfloat16" for port in manifest.io) else []
    return "".join(f"{name}\n" for name in names).encode()


def _python_files(model: str) -> dict[str, bytes]:
    """`model.py`, and what it shares with the other models."""
    return {"model.py": python_model(model), **{name: python_model(name) for name in _SHARED}}


def python_model(name: str) -> bytes:
    """A file of `serving/python_models`, which runs inside the server and knows nothing of trtforge."""
    return resources.files("trtforge.serving").joinpath("python_models", name).read_bytes()


def _runtime_files() -> dict[str, bytes]:
    """`trtforge.runtime`, which needs nothing else of trtforge, as a package beside `model.py`."""
    return {
        f"runtime/{file.name}": file.read_bytes()
        for file in resources.files("trtforge.runtime").iterdir()
        if file.name.endswith(".py")
    }


def _port(port: IoInfo, manifest: Manifest, kind: Kind, seen: Observation) -> Port:
    dtype = (port.source_dtype or port.dtype) if kind == "onnxruntime" else port.dtype
    allowed = _ONNX_TYPES if kind == "onnxruntime" else _ENGINE_TYPES
    if dtype not in allowed:
        raise InputError(
            f"{port.mode} '{port.name}' has type {dtype}, which cannot be served",
            f"{kind} takes {', '.join(sorted(allowed))}",
            "change its type in the model",
        )
    shape = _input_shape(port, manifest) if port.mode == "input" else _output_shape(port, seen)
    if not shape and kind == "tensorrt":
        raise InputError(
            f"{port.mode} '{port.name}' has no axis, which Triton's TensorRT backend does not take",
            "its configuration has no scalars",
            "give it an axis of size 1 in the model, or build with --backend tensorrt-rtx",
        )
    return Port(name=port.name, dtype=dtype, shape=shape)


def _input_shape(port: IoInfo, manifest: Manifest) -> tuple[int, ...]:
    """The shape of an input; a dim that has one size in all profiles has that size."""
    spans = [profile.inputs[port.name] for profile in manifest.profiles]
    sizes = [{size for span in spans for size in (span.min[axis], span.max[axis])} for axis in range(len(spans[0].opt))]
    return tuple(found.pop() if len(found) == 1 else -1 for found in sizes)


def _output_shape(port: IoInfo, seen: Observation) -> tuple[int, ...]:
    if port.shape is not None:
        return tuple(dim if isinstance(dim, int) else -1 for dim in port.shape)
    if port.name not in seen.ranks:
        raise InputError(
            f"the number of axes of output '{port.name}' is not known",
            f"the model does not state it, and a run did not show it: {seen.failure}",
            "state the output's shape in the model",
        )
    return (-1,) * seen.ranks[port.name]


def tensor_configs(
    ports: Sequence[Port], max_batch_size: int, shape_tensors: Set[str] = frozenset()
) -> tuple[TensorConfig, ...]:
    """Inputs or outputs as the configuration has them.

    Args:
        ports: as the model has them.
        max_batch_size: above 0, axis 0 is left out.
        shape_tensors: names of those whose values become shapes.
    """
    configs = []
    for port in ports:
        # Triton has no dims of size 0; any size is what lets one through.
        inner = tuple(-1 if dim == 0 else dim for dim in port.shape[1 if max_batch_size else 0 :])
        reshape = () if max_batch_size and not inner else None
        configs.append(
            TensorConfig(port.name, port.dtype, inner or (1,), reshape, is_shape_tensor=port.name in shape_tensors)
        )
    return tuple(configs)


def _instances(model: ModelFile, options: ServingOptions, engine_profiles: Sequence[int]) -> InstanceGroup:
    if model.kind == "onnxruntime":
        return InstanceGroup("KIND_CPU", options.instances)
    count = len(model.profiles)
    # Without names Triton takes the engine's first profile alone.
    numbers = engine_profiles or (range(count) if count > 1 else ())
    names = tuple(map(str, numbers)) if model.kind == "tensorrt" else ()
    return InstanceGroup("KIND_GPU", options.instances, options.gpus, names)


def _dynamic_batching(batching: Batching, options: ServingOptions) -> DynamicBatching | None:
    """The scheduler; a model without batches needs one only for what becomes of waiting requests."""
    has_queue = options.queue_timeout_us > 0 or options.queue_size > 0
    is_batched = batching.max_batch_size > 1
    if not is_batched and not has_queue and not options.priority_levels:
        return None
    preferred = batching.preferred if options.preferred_sizes is None else options.preferred_sizes
    return DynamicBatching(
        preferred_sizes=preferred if is_batched else (),
        queue_delay_us=options.queue_delay_us if is_batched else 0,
        priority_levels=options.priority_levels,
        default_priority=(options.priority_levels + 1) // 2,
        queue=QueuePolicy(options.queue_timeout_us, options.queue_size) if has_queue else None,
    )
