"""The inputs and outputs of a graph as plain values. An initializer that is listed as an input (IR 3) is not one."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.errors import InputError
from trtforge.graph.storage import numpy_dtype
from trtforge.tensor import TensorSpec

_FLOAT32 = np.dtype(np.float32)


def tensor_dtype(dtype: Any) -> np.dtype[Any] | None:
    """A tensor's type, which onnx-graphsurgeon gives as a numpy or an ONNX one, as a numpy or ml_dtypes one."""
    if dtype is None:
        return None
    return numpy_dtype(dtype) if isinstance(dtype, int) else np.dtype(dtype)


def is_float32(tensor: gs.Tensor) -> bool:
    """True when the tensor's element type is known to be float32."""
    dtype = tensor.dtype
    return dtype is not None and not isinstance(dtype, int) and np.dtype(dtype) == _FLOAT32


def input_specs(graph: gs.Graph) -> tuple[TensorSpec, ...]:
    """The graph's inputs in order."""
    return tuple(_spec(tensor) for tensor in graph.inputs if not isinstance(tensor, gs.Constant))


def output_specs(graph: gs.Graph) -> tuple[TensorSpec, ...]:
    """The graph's outputs in order.

    Raises:
        InputError: an output states no element type and none was inferred.
    """
    return tuple(_spec(tensor) for tensor in graph.outputs)


def _spec(tensor: gs.Tensor) -> TensorSpec:
    dtype = tensor_dtype(tensor.dtype)
    if dtype is None:
        raise InputError(
            f"{tensor.name!r} has no known element type",
            "the model does not state it and it cannot be inferred",
            "state the type in the exporter",
        )
    shape = None if tensor.shape is None else tuple(_dim(dim) for dim in tensor.shape)
    return TensorSpec(tensor.name, dtype.name, shape)


def _dim(dim: Any) -> int | str | None:
    if isinstance(dim, str):
        return dim or None
    return None if dim is None or dim < 0 else int(dim)
