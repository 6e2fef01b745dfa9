"""bfloat16 tensors of Triton's Python backend, which passes them through DLPack only, as arrays of `ml_dtypes`.

The structures are those of DLPack's `dlpack.h`, version 0.8.
"""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import triton_python_backend_utils as pb_utils

_CPU = 1
_BFLOAT = 4


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _ManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
# What the server still reads, by the address of its structure.
_lent: dict[int, Any] = {}


def _forget(address: int) -> None:
    _lent.pop(address, None)


_release = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_forget)


def array_from_tensor(tensor: Any) -> np.ndarray:
    """A copy of a request's tensor."""
    capsule = tensor.to_dlpack()
    lent = _ManagedTensor.from_address(_get_pointer(capsule, b"dltensor")).tensor
    shape = [lent.shape[axis] for axis in range(lent.ndim)]
    size = int(np.prod(shape, dtype=np.int64)) * ml_dtypes.bfloat16(0).itemsize
    content = ctypes.string_at(lent.data + lent.byte_offset, size) if size else b""
    return np.frombuffer(content, ml_dtypes.bfloat16).reshape(shape)


def tensor_from_array(name: str, array: np.ndarray) -> Any:
    """A response's tensor, of a contiguous array that stays as it is until the server has read it."""
    shape = (ctypes.c_int64 * array.ndim)(*array.shape)
    managed = _ManagedTensor()
    managed.tensor = _Tensor(array.ctypes.data, _CPU, 0, array.ndim, _BFLOAT, 16, 1, shape, None, 0)
    managed.deleter = ctypes.cast(_release, ctypes.c_void_p)
    address = ctypes.addressof(managed)
    _lent[address] = (managed, shape, array)
    return pb_utils.Tensor.from_dlpack(name, _new_capsule(address, b"dltensor", None))
