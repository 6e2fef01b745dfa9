"""Read and write the weights of an ONNX file without a copy of them in protobuf.

A protobuf message is a list of fields, each `key = number << 3 | wire type` and a value; wire type 2 is a length and
that many bytes. The fields on the way to a weight (onnx.proto):

    ModelProto.graph = 7 -> GraphProto.initializer = 5 -> TensorProto.raw_data = 9

Reading cuts every large `raw_data` of the top graph out and remembers where it lies; what is left, the skeleton, is a
valid ModelProto that the protobuf library parses. Writing is the reverse: the skeleton, then the weights' bytes as they
are. Fields may stand in any order, so both are plain ONNX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import IO, Any

import numpy as np
import onnx

# Bytes from which a tensor counts as a weight: smaller ones are shapes, axes and scales.
WEIGHT_BYTES = 1024
_GRAPH = 7
_INITIALIZER = 5
_RAW_DATA = 9
_NAME = 8
# Values in a typed field, beside the file, or elsewhere in a segment: such a tensor stays whole.
_OTHER_DATA = frozenset((3, 4, 5, 6, 7, 10, 11, 13))
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# Wire type of each field of a ModelProto.
_MODEL_FIELDS = {
    **dict.fromkeys((1, 5), _VARINT),
    **dict.fromkeys((2, 3, 4, 6, _GRAPH, 8, 14, 20, 25, 26), _BYTES),
}
# Longest varint of a 64-bit value.
_VARINT_BYTES = 10
# Fields of one message: ten times the nodes that the limits let in by default.
_MAX_FIELDS = 2_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file: the first one, and how many."""

    offset: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class SplitModel:
    """A serialised model, cut into skeleton and weights.

    Attributes:
        skeleton: a serialised ModelProto without the weights' data.
        weights: where the data of each lies, by tensor name.
    """

    skeleton: bytes
    weights: dict[str, Span]


class WireError(ValueError):
    """The bytes are not a protobuf message of the expected form, or end inside a field."""


class CutOffError(WireError):
    """The bytes end inside a field."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    """One field: its number, where it begins, and its content for wire type 2."""

    number: int
    wire_type: int
    start: int
    content: int
    end: int


def split_model(data: bytes | memoryview, min_bytes: int) -> SplitModel:
    """Cut the weights out of a serialised ModelProto.

    Args:
        data: the file's bytes.
        min_bytes: smaller tensors stay in the skeleton.

    Raises:
        WireError: not a ModelProto, cut off, or a weight whose name occurs twice or is missing.
    """
    view = memoryview(data)
    weights: dict[str, Span] = {}
    parts: list[bytes | memoryview] = []
    for field in _fields(view, 0, len(view)):
        if field.number == _GRAPH and field.wire_type == _BYTES:
            graph = _split_graph(view, field, min_bytes, weights)
            parts += [_key(_GRAPH), _varint(len(graph)), graph]
        else:
            parts.append(view[field.start : field.end])
    return SplitModel(b"".join(parts), weights)


def is_cut_off(data: bytes) -> bool:
    """True when the bytes begin with whole fields of a ModelProto and end inside one."""
    num_fields = 0
    try:
        for field in _fields(memoryview(data), 0, len(data)):
            if _MODEL_FIELDS.get(field.number) != field.wire_type:
                return False
            num_fields += 1
    except CutOffError:
        return num_fields > 0
    except WireError:
        return False
    return False


def write_model(model: onnx.ModelProto, weights: Mapping[str, np.ndarray[Any, Any]], file: IO[bytes]) -> None:
    """Write a model whose top graph has initializers without data; its own data are written as they are.

    Args:
        model: the skeleton; its graph is emptied.
        weights: contiguous arrays in ONNX's raw layout, by tensor name.
        file: open for writing bytes.
    """
    graph = onnx.GraphProto()
    graph.CopyFrom(model.graph)
    large = [tensor for tensor in graph.initializer if tensor.name in weights]
    small = [tensor for tensor in graph.initializer if tensor.name not in weights]
    heads = [tensor.SerializeToString(deterministic=True) for tensor in large]
    names = [tensor.name for tensor in large]
    kept = [onnx.TensorProto.FromString(tensor.SerializeToString()) for tensor in small]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    body = graph.SerializeToString(deterministic=True)
    pieces: list[bytes | memoryview] = []
    for head, name in zip(heads, names, strict=True):
        raw = weights[name].reshape(-1).view(np.uint8).data
        lead = head + _key(_RAW_DATA) + _varint(len(raw))
        pieces += [_key(_INITIALIZER) + _varint(len(lead) + len(raw)) + lead, raw]
    model.ClearField("graph")
    file.write(model.SerializeToString(deterministic=True))
    file.write(_key(_GRAPH) + _varint(len(body) + sum(len(piece) for piece in pieces)))
    file.write(body)
    for piece in pieces:
        file.write(piece)


def _split_graph(view: memoryview, graph: _Field, min_bytes: int, weights: dict[str, Span]) -> bytes:
    parts: list[bytes | memoryview] = []
    for field in _fields(view, graph.content, graph.end):
        if field.number != _INITIALIZER or field.wire_type != _BYTES or field.end - field.content < min_bytes:
            parts.append(view[field.start : field.end])
            continue
        inner = list(_fields(view, field.content, field.end))
        raw = [entry for entry in inner if entry.number == _RAW_DATA and entry.wire_type == _BYTES]
        names = [entry for entry in inner if entry.number == _NAME and entry.wire_type == _BYTES]
        has_other_data = any(entry.number in _OTHER_DATA for entry in inner)
        if len(raw) != 1 or raw[0].end - raw[0].content < min_bytes or has_other_data:
            parts.append(view[field.start : field.end])
            continue
        name = bytes(view[names[-1].content : names[-1].end]).decode("utf-8", "strict") if names else ""
        if not name or name in weights:
            raise WireError(f"two initializers are called {name!r}" if name else "an initializer has no name")
        weights[name] = Span(raw[0].content, raw[0].end - raw[0].content)
        tensor = b"".join(view[entry.start : entry.end] for entry in inner if entry is not raw[0])
        parts += [_key(_INITIALIZER), _varint(len(tensor)), tensor]
    return b"".join(parts)


def _fields(view: memoryview, start: int, end: int) -> Iterator[_Field]:
    """The fields of a message that takes the bytes from start to end."""
    position = start
    for _ in range(_MAX_FIELDS):
        if position == end:
            return
        key, content = _read_varint(view, position, end)
        number, wire_type = key >> 3, key & 7
        if wire_type == _VARINT:
            _, stop = _read_varint(view, content, end)
        elif wire_type == _FIXED64:
            stop = content + 8
        elif wire_type == _FIXED32:
            stop = content + 4
        elif wire_type == _BYTES:
            size, content = _read_varint(view, content, end)
            stop = content + size
        else:
            raise WireError(f"wire type {wire_type} at byte {position}")
        if number == 0:
            raise WireError(f"field 0 at byte {position}")
        if stop > end:
            raise CutOffError(f"field {number} at byte {position} ends after its message")
        yield _Field(number, wire_type, position, content, stop)
        position = stop
    raise WireError(f"more than {_MAX_FIELDS} fields in one message")


def _read_varint(view: memoryview, position: int, end: int) -> tuple[int, int]:
    value = 0
    for index in range(_VARINT_BYTES):
        if position + index >= end:
            raise CutOffError(f"the message ends inside a number at byte {position}")
        byte = view[position + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, position + index + 1
    raise WireError(f"a number at byte {position} is too long")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _key(number: int) -> bytes:
    return _varint(number << 3 | _BYTES)
