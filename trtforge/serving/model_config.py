"""A model's `config.pbtxt`, which is the text form of Triton's protobuf message ModelConfig.

Dims leave out the batch axis where `max_batch_size` is above 0. Triton knows neither dims of size 0 nor inputs and
outputs without an axis: the former are written as -1, the latter as one element, and the model's own code takes the
axis off again. Where Triton batches, a tensor of one value per sample has dims [1] for the client and none for the
model, which `reshape` says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Literal

# Triton's names of element types, by numpy's.
TRITON_TYPES = MappingProxyType(
    {
        "bool": "TYPE_BOOL",
        "uint8": "TYPE_UINT8",
        "uint16": "TYPE_UINT16",
        "uint32": "TYPE_UINT32",
        "uint64": "TYPE_UINT64",
        "int8": "TYPE_INT8",
        "int16": "TYPE_INT16",
        "int32": "TYPE_INT32",
        "int64": "TYPE_INT64",
        "float16": "TYPE_FP16",
        "bfloat16": "TYPE_BF16",
        "float32": "TYPE_FP32",
        "float64": "TYPE_FP64",
        "string": "TYPE_STRING",
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class TensorConfig:
    """An input or output as clients see it.

    Attributes:
        dtype: numpy's name, "bfloat16", or "string".
        dims: without the batch axis; -1 where dynamic.
        reshape: the dims that the model gets instead; None means the same.
        is_shape_tensor: its values become shapes; for the TensorRT backend only, no other accepts the mark.
        is_optional: a request may leave the input out.
    """

    name: str
    dtype: str
    dims: tuple[int, ...]
    reshape: tuple[int, ...] | None = None
    is_shape_tensor: bool = False
    is_optional: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class InstanceGroup:
    """Copies of a model that run at once.

    Attributes:
        count: copies, on each of the GPUs.
        gpus: their numbers; empty means every GPU of the machine.
        profiles: indices of optimisation profiles, for the TensorRT backend. Each copy holds all of them and takes the
            nearest for a request: the server does not look at shapes when it chooses a copy.
    """

    kind: Literal["KIND_GPU", "KIND_CPU"]
    count: int = 1
    gpus: tuple[int, ...] = ()
    profiles: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class QueuePolicy:
    """What becomes of requests that wait.

    Attributes:
        timeout_us: a request that waited so long is refused; 0 means never.
        max_size: a request that finds so many waiting is refused; 0 means never.
    """

    timeout_us: int = 0
    max_size: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class DynamicBatching:
    """How the server joins requests.

    Attributes:
        preferred_sizes: sizes that are sent at once.
        queue_delay_us: how long a request may wait for others.
        priority_levels: 0 means that all requests are alike; else 1 is served first.
        default_priority: of a request that states none.
        queue: limits of the queue; None means none.
    """

    preferred_sizes: tuple[int, ...] = ()
    queue_delay_us: int = 0
    priority_levels: int = 0
    default_priority: int = 0
    queue: QueuePolicy | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class WarmupInput:
    """One input of a warm-up request.

    Attributes:
        dims: as in the model's configuration, every size known.
        file: in the model's folder `warmup`, values of one sample; None means zeros.
    """

    name: str
    dtype: str
    dims: tuple[int, ...]
    file: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class WarmupRequest:
    """A request that the server sends to itself before it calls the model ready.

    Attributes:
        batch_size: samples, all of the same values; 1 where Triton does not batch. The server skips a request that
            states none.
    """

    name: str
    batch_size: int
    inputs: tuple[WarmupInput, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
    """The content of a `config.pbtxt`.

    Attributes:
        backend: Triton's name of it.
        file: of the model in the folder of a version; None means the backend's own default.
        num_versions: the newest versions that are served.
        response_cache: equal requests are answered from the server's cache, where it was started with one.
        decoupled: a request may have any number of answers.
        parameters: free text for the backend.
    """

    name: str
    backend: str
    max_batch_size: int
    inputs: tuple[TensorConfig, ...]
    outputs: tuple[TensorConfig, ...]
    instances: tuple[InstanceGroup, ...] = ()
    dynamic_batching: DynamicBatching | None = None
    warmup: tuple[WarmupRequest, ...] = ()
    file: str | None = None
    num_versions: int = 1
    response_cache: bool = False
    decoupled: bool = False
    parameters: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def to_text(self) -> str:
        """The text of the file."""
        return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"name: {quote(self.name)}"
        yield f"backend: {quote(self.backend)}"
        yield f"max_batch_size: {self.max_batch_size}"
        if self.file is not None:
            yield f"default_model_filename: {quote(self.file)}"
        for port in self.inputs:
            yield from _block("input", _tensor_lines(port))
        for port in self.outputs:
            yield from _block("output", _tensor_lines(port))
        for group in self.instances:
            yield from _block("instance_group", _instance_lines(group))
        if self.dynamic_batching is not None:
            yield from _block("dynamic_batching", _batching_lines(self.dynamic_batching))
        yield f"version_policy {{ latest {{ num_versions: {self.num_versions} }} }}"
        if self.response_cache:
            yield "response_cache { enable: true }"
        if self.decoupled:
            yield "model_transaction_policy { decoupled: true }"
        for key, value in self.parameters.items():
            yield f"parameters {{ key: {quote(key)} value {{ string_value: {quote(value)} }} }}"
        for request in self.warmup:
            yield from _block("model_warmup", _warmup_lines(request))


def quote(text: str) -> str:
    """A string in protobuf's text form: printable ASCII as it is, every other byte of its UTF-8 as an octal escape."""
    kept = {ord('"'): '\\"', ord("\\"): "\\\\"}
    inner = "".join(kept.get(byte, chr(byte) if 32 <= byte < 127 else f"\\{byte:03o}") for byte in text.encode())
    return f'"{inner}"'


def _block(name: str, lines: Iterable[str]) -> Iterator[str]:
    yield f"{name} {{"
    yield from (f"  {line}" for line in lines)
    yield "}"


def _list(values: Iterable[int]) -> str:
    return f"[{', '.join(map(str, values))}]"


def _tensor_lines(port: TensorConfig) -> Iterator[str]:
    yield f"name: {quote(port.name)}"
    yield f"data_type: {TRITON_TYPES[port.dtype]}"
    yield f"dims: {_list(port.dims)}"
    if port.reshape is not None:
        yield f"reshape {{ shape: {_list(port.reshape)} }}"
    if port.is_shape_tensor:
        yield "is_shape_tensor: true"
    if port.is_optional:
        yield "optional: true"


def _instance_lines(group: InstanceGroup) -> Iterator[str]:
    yield f"kind: {group.kind}"
    yield f"count: {group.count}"
    if group.gpus:
        yield f"gpus: {_list(group.gpus)}"
    if group.profiles:
        yield f"profile: [{', '.join(map(quote, group.profiles))}]"


def _batching_lines(batching: DynamicBatching) -> Iterator[str]:
    if batching.preferred_sizes:
        yield f"preferred_batch_size: {_list(batching.preferred_sizes)}"
    yield f"max_queue_delay_microseconds: {batching.queue_delay_us}"
    if batching.priority_levels:
        yield f"priority_levels: {batching.priority_levels}"
        yield f"default_priority_level: {batching.default_priority}"
    if batching.queue is not None:
        yield from _block("default_queue_policy", _queue_lines(batching.queue))


def _queue_lines(queue: QueuePolicy) -> Iterator[str]:
    yield "timeout_action: REJECT"
    yield f"default_timeout_microseconds: {queue.timeout_us}"
    yield "allow_timeout_override: true"
    yield f"max_queue_size: {queue.max_size}"


def _warmup_lines(request: WarmupRequest) -> Iterator[str]:
    yield f"name: {quote(request.name)}"
    yield f"batch_size: {request.batch_size}"
    for port in request.inputs:
        values = "zero_data: true" if port.file is None else f"input_data_file: {quote(port.file)}"
        value = f"data_type: {TRITON_TYPES[port.dtype]} dims: {_list(port.dims)} {values}"
        yield f"inputs {{ key: {quote(port.name)} value {{ {value} }} }}"
