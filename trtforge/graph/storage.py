"""Stored tensors: check one against its own declaration, then give its values without a needless copy.

A tensor declares an element type and dims. Its bytes are in `raw_data`, in a typed field, or in a file beside the
model (external data: location, offset, length). Rules, with n = product(dims) and b = bits per element:
  inline    len(raw_data) == ceil(n * b / 8), or the typed field holds n elements (packed types: ceil(n * b / 8) bytes)
  external  location is a relative path to a regular file inside the model's folder, symbolic links followed;
            offset >= 0, length == ceil(n * b / 8), offset + length <= size of the file
External files are mapped, not read, so a model costs memory only for the pages that are used.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from trtforge.errors import InputError
from trtforge.limits import Limits

PACKED_BITS: dict[int, int] = {
    TensorProto.INT4: 4,
    TensorProto.UINT4: 4,
    TensorProto.FLOAT4E2M1: 4,
    TensorProto.INT2: 2,
    TensorProto.UINT2: 2,
}
"""Bits per element of the types that share a byte (ONNX IR: packed along the last axis, low bits first)."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExternalRange:
    """Where the bytes of an external tensor are.

    Attributes:
        file: absolute path, symbolic links resolved.
        offset: first byte.
        num_bytes: how many.
    """

    file: Path
    offset: int
    num_bytes: int


def numpy_dtype(data_type: int) -> np.dtype[Any] | None:
    """The numpy (ml_dtypes where numpy has none) type of an ONNX element type, or None for an unknown one."""
    try:
        return np.dtype(helper.tensor_dtype_to_np_dtype(data_type))
    except (KeyError, ValueError, TypeError):
        return None


def count_bytes(data_type: int, num_elements: int) -> int:
    """Bytes that a number of elements takes in ONNX's raw layout."""
    dtype = numpy_dtype(data_type)
    bits = PACKED_BITS.get(data_type) or 8 * (dtype.itemsize if dtype is not None else 1)
    return -(-num_elements * bits // 8)


def check_tensor(tensor: TensorProto, place: str, limits: Limits, num_cut_bytes: int | None = None) -> None:
    """Check type, dims and inline size of a stored tensor (external ones: type and dims only).

    Args:
        tensor: as stored.
        place: how an error names it.
        limits: bounds on rank and size.
        num_cut_bytes: size of the raw data, for a tensor whose data was cut out (wire.py).

    Raises:
        InputError: unknown type, absurd dims, or data that contradicts them; names the place.
    """
    if numpy_dtype(tensor.data_type) is None:
        raise InputError(
            f"{place} has the unknown element type {tensor.data_type}",
            "the file is damaged, or newer than the installed onnx package",
            "export the model again, or update onnx",
        )
    if tensor.HasField("segment"):
        raise InputError(
            f"{place} is one segment of a larger tensor",
            f"it has elements {tensor.segment.begin} to {tensor.segment.end}; nothing says where the others are",
            "save the model with whole tensors",
        )
    if len(tensor.dims) > limits.tensor_dims:
        raise InputError(
            f"{place} has {len(tensor.dims)} dims",
            f"the limit is {limits.tensor_dims}",
            f"check the file, or raise it with --limit tensor_dims={len(tensor.dims)}",
        )
    if any(dim < 0 for dim in tensor.dims):
        raise InputError(
            f"{place} has the shape {list(tensor.dims)}",
            "a stored tensor cannot have a negative size",
            "export the model again",
        )
    num_elements = math.prod(tensor.dims)
    needed = count_bytes(tensor.data_type, num_elements)
    if needed > limits.model_bytes:
        raise InputError(
            f"{place} declares {needed} bytes",
            f"its shape is {list(tensor.dims)}; the limit for a model is {limits.model_bytes}",
            f"check the file, or raise it with --limit model_bytes={needed}",
        )
    if tensor.data_location != TensorProto.EXTERNAL:
        _check_inline(tensor, place, num_elements, needed, num_cut_bytes)


def _check_inline(tensor: TensorProto, place: str, num_elements: int, needed: int, num_cut_bytes: int | None) -> None:
    if num_cut_bytes is not None and tensor.data_type != TensorProto.STRING:
        found, expected, unit = num_cut_bytes, needed, "bytes"
    elif tensor.HasField("raw_data") and tensor.data_type != TensorProto.STRING:
        found, expected, unit = len(tensor.raw_data), needed, "bytes"
    else:
        field = helper.tensor_dtype_to_field(tensor.data_type)
        complex_parts = 2 if tensor.data_type in (TensorProto.COMPLEX64, TensorProto.COMPLEX128) else 1
        expected = needed if tensor.data_type in PACKED_BITS else num_elements * complex_parts
        found, unit = len(getattr(tensor, field)), "values"
    if found != expected:
        raise InputError(
            f"{place} holds {found} {unit} where its shape needs {expected}",
            f"shape {list(tensor.dims)}, element type {TensorProto.DataType.Name(tensor.data_type)}",
            "the file is damaged or truncated: export or download it again",
        )


def external_range(tensor: TensorProto, place: str, folder: Path) -> ExternalRange:
    """Where an external tensor's bytes are, after every check of the module's rules.

    Args:
        tensor: one that `check_tensor` has passed.
        place: how an error names it.
        folder: the folder of the ONNX file.

    Raises:
        InputError: missing file, a path that leads out of the folder, or a range that contradicts shape or file.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    file = _external_file(location, place, folder)
    try:
        offset = int(entries.get("offset") or 0)
        length = int(entries["length"]) if entries.get("length") else None
    except ValueError as err:
        raise InputError(
            f"external data of {place} has no valid range",
            f"offset {entries.get('offset')!r}, length {entries.get('length')!r}; both are whole numbers of bytes",
            "export the model again",
        ) from err
    needed = count_bytes(tensor.data_type, math.prod(tensor.dims))
    if offset < 0 or (length is not None and length != needed):
        raise InputError(
            f"external data of {place} has an impossible range",
            f"offset {offset}, length {length}; shape {list(tensor.dims)} needs offset >= 0 and length {needed}",
            "export the model again",
        )
    size = file.stat().st_size
    if offset + needed > size:
        raise InputError(
            f"external data file {location!r} is shorter than {place} declares",
            f"it has {size} bytes; the tensor ends at byte {offset + needed}",
            "the file is damaged or half copied: export or download it again",
        )
    return ExternalRange(file, offset, needed)


def _external_file(location: str, place: str, folder: Path) -> Path:
    relative = Path(location)
    if not location or "\0" in location:
        raise InputError(
            f"external data of {place} names no file",
            f"its location is {location!r}",
            "export the model again",
        )
    root = folder.resolve()
    try:
        file = (root / relative).resolve()
    except (OSError, RuntimeError) as err:
        raise InputError(
            f"external data file {location!r} of {place} cannot be opened",
            str(err),
            "check its name and the links that it goes through",
        ) from err
    if relative.is_absolute() or ".." in relative.parts or not file.is_relative_to(root):
        raise InputError(
            f"external data of {place} is outside the model's folder: {location!r}",
            f"only files inside {folder} are read (symbolic links are followed), because a model is untrusted input",
            "copy the data file beside the model (cp --dereference) and keep its name",
        )
    if not file.is_file():
        raise InputError(
            f"external data file {location!r} of {place} is missing",
            f"it is not in {folder}" if not file.exists() else "it is not a regular file",
            "copy it beside the ONNX file: a model with external data is two or more files",
        )
    return file


def array_from_tensor(tensor: TensorProto, external: ExternalRange | None) -> np.ndarray[Any, Any]:
    """The values of a checked tensor, read-only; external ones are mapped from their file.

    Args:
        tensor: one that `check_tensor` has passed.
        external: its range, for an external tensor.
    """
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
    shape = tuple(tensor.dims)
    is_packed = tensor.data_type in PACKED_BITS
    if external is not None and is_packed:
        inline = TensorProto(data_type=tensor.data_type, dims=tensor.dims)
        with external.file.open("rb") as file:
            file.seek(external.offset)
            inline.raw_data = file.read(external.num_bytes)
        return numpy_helper.to_array(inline)
    if external is not None:
        if external.num_bytes == 0:
            return np.empty(shape, dtype)
        return np.asarray(np.memmap(external.file, dtype, "r", external.offset, shape))
    if tensor.HasField("raw_data") and not is_packed and dtype != np.dtype(object):
        return np.frombuffer(tensor.raw_data, dtype).reshape(shape)
    return numpy_helper.to_array(tensor)


def release_pages(array: np.ndarray[Any, Any]) -> None:
    """Give back the memory of a mapped array's pages, which a pass over its values has just read.

    They come from the file again when they are next used, so the values stay. Any other array is left alone.
    """
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap):
        base.madvise(mmap.MADV_DONTNEED)


def array_from_bytes(tensor: TensorProto, raw: memoryview) -> np.ndarray[Any, Any]:
    """The values of a checked tensor whose raw data was cut out (wire.py); not copied, unless they are packed.

    Args:
        tensor: type and dims; one that `check_tensor` has passed.
        raw: its data.
    """
    if tensor.data_type in PACKED_BITS:
        return numpy_helper.to_array(TensorProto(data_type=tensor.data_type, dims=tensor.dims, raw_data=bytes(raw)))
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
    return np.frombuffer(raw, dtype).reshape(tuple(tensor.dims))


def tensor_from_array(name: str, array: np.ndarray[Any, Any] | np.generic, with_data: bool = True) -> TensorProto:
    """A TensorProto of an array in raw layout, 4-bit types packed; without data it only declares type and shape."""
    values = np.asarray(array)
    data_type = onnx.helper.np_dtype_to_tensor_dtype(values.dtype)
    if with_data and (data_type in PACKED_BITS or values.dtype == object):
        return numpy_helper.from_array(values, name)
    tensor = TensorProto(name=name, data_type=data_type, dims=values.shape)
    if with_data:
        tensor.raw_data = np.ascontiguousarray(values).tobytes()
    return tensor
