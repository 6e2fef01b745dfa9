"""The bytes that trtforge's processes exchange: messages of JSON and arrays, never pickle.

A frame is an 8-byte little-endian length, that many bytes of JSON `{"kind", "meta", "arrays": [[name, dtype, shape]]}`,
then each array's raw bytes in that order. Whoever reads trusts nothing: element types come from a fixed list, and sizes
are bounded before memory is taken. Arrays are written from their own memory and read straight into new ones.
"""

from __future__ import annotations

import json
import math
import select
import time
from collections.abc import Mapping
from io import FileIO
from typing import Any

import numpy as np
import numpy.typing as npt

Meta = dict[str, Any]
Arrays = dict[str, npt.NDArray[Any]]

# Bytes of JSON in one frame; the largest are plans of 200,000 nodes.
MAX_HEADER_BYTES = 128 * 2**20
# numpy's own limit.
_MAX_RANK = 64
# fmt: off
_NUMPY_DTYPES = frozenset([
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
])
_ML_DTYPES = frozenset([
    "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
    "float4_e2m1fn", "int4", "uint4",
])
# fmt: on


class BadFrameError(Exception):
    """What arrived is no frame of ours."""


class GoneError(Exception):
    """The process at the other end has closed its pipe."""


class LateError(Exception):
    """The deadline passed."""


def _dtype_from_name(name: object) -> np.dtype[Any]:
    if isinstance(name, str) and name in _NUMPY_DTYPES:
        return np.dtype(name)
    if isinstance(name, str) and name in _ML_DTYPES:
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return dtype
    raise BadFrameError(f"element type {name!r}")


def pack_frame(kind: str, meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> list[memoryview]:
    """The buffers of one frame, the arrays' own memory where they are contiguous.

    Raises:
        TypeError: an array of objects, strings or times.
    """
    described, buffers = [], []
    for name, array in arrays.items():
        if array.dtype.name not in _NUMPY_DTYPES | _ML_DTYPES:
            raise TypeError(f"array {name!r} of {array.dtype} cannot cross to another process")
        described.append([name, array.dtype.name, list(array.shape)])
        native = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
        buffers.append(native.reshape(-1).view(np.uint8).data)
    header = json.dumps({"kind": kind, "meta": meta, "arrays": described}).encode()
    return [memoryview(len(header).to_bytes(8, "little")), memoryview(header), *buffers]


def write_buffers(pipe: FileIO, buffers: list[memoryview]) -> None:
    """Write a frame's buffers, however many pieces the pipe takes them in.

    Raises:
        GoneError: the reader is gone.
    """
    for buffer in buffers:
        done = 0
        while done < len(buffer):
            try:
                done += pipe.write(buffer[done:]) or 0
            except BrokenPipeError as err:
                raise GoneError from err


def _read_into(pipe: FileIO, buffer: memoryview, deadline: float | None) -> None:
    done = 0
    while done < len(buffer):
        if deadline is not None:
            poll = select.poll()
            poll.register(pipe, select.POLLIN)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise LateError
        count = pipe.readinto(buffer[done:])
        if not count:
            raise GoneError
        done += count


def read_frame(pipe: FileIO, max_array_bytes: int, deadline: float | None = None) -> tuple[str, Meta, Arrays]:
    """The next frame of a pipe, whose writer is not trusted.

    Args:
        pipe: the end to read.
        max_array_bytes: what all arrays of the frame may have together.
        deadline: seconds of time.monotonic().

    Returns:
        kind, meta and arrays, as given to `pack_frame`.

    Raises:
        BadFrameError: not a frame, or larger than allowed.
        GoneError: the writer is gone.
        LateError: the deadline passed.
    """
    prefix = bytearray(8)
    _read_into(pipe, memoryview(prefix), deadline)
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise BadFrameError(f"a header of {length} bytes; the limit is {MAX_HEADER_BYTES}")
    header = bytearray(length)
    _read_into(pipe, memoryview(header), deadline)
    try:
        frame = json.loads(header)
        kind, meta, described = frame["kind"], frame["meta"], frame["arrays"]
        shapes = [(name, _dtype_from_name(dtype), tuple(shape)) for name, dtype, shape in described]
    except (ValueError, TypeError, KeyError, RecursionError) as err:
        raise BadFrameError("a header that is not ours") from err
    if not isinstance(kind, str) or not isinstance(meta, dict):
        raise BadFrameError("a header that is not ours")
    arrays: Arrays = {}
    left = max_array_bytes
    for name, dtype, shape in shapes:
        sizes_are_valid = len(shape) <= _MAX_RANK and all(type(dim) is int and 0 <= dim < 2**62 for dim in shape)
        if not isinstance(name, str) or not sizes_are_valid:
            raise BadFrameError(f"an array of shape {str(shape)[:200]}")
        left -= math.prod(shape) * dtype.itemsize
        if left < 0 or math.prod(dim or 1 for dim in shape) >= 2**62:
            raise BadFrameError(f"arrays of more than {max_array_bytes} bytes")
        arrays[name] = np.empty(shape, dtype)
        _read_into(pipe, arrays[name].reshape(-1).view(np.uint8).data, deadline)
    return kind, meta, arrays
