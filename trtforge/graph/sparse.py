"""Dense tensors in place of sparse ones, which no builder reads.

A SparseTensorProto has dims, NNZ values, and int64 indices: `[NNZ]` linear ones, or `[NNZ, rank]` coordinates
(ONNX IR, SparseTensorProto). All other elements are zero.
"""

from __future__ import annotations

import math

import numpy as np
import onnx

from trtforge.errors import InputError
from trtforge.graph.protos import all_bodies
from trtforge.graph.storage import array_from_tensor, check_tensor, tensor_from_array
from trtforge.limits import Limits


def densify(model: onnx.ModelProto, limits: Limits) -> int:
    """Replace every sparse initializer by a dense one, in place; all inline.

    Returns:
        How many there were.

    Raises:
        InputError: external sparse data, or indices that do not fit the dims.
    """
    num_replaced = 0
    for body in all_bodies(model):
        if isinstance(body, onnx.FunctionProto):
            continue
        dense = [_dense_tensor(sparse, limits) for sparse in body.sparse_initializer]
        num_replaced += len(dense)
        del body.sparse_initializer[:]
        body.initializer.extend(dense)
    return num_replaced


def _dense_tensor(sparse: onnx.SparseTensorProto, limits: Limits) -> onnx.TensorProto:
    name = sparse.values.name
    place = f"sparse initializer {name!r}"
    for part in (sparse.values, sparse.indices):
        if part.data_location == onnx.TensorProto.EXTERNAL:
            raise InputError(f"{place} is stored outside the ONNX file", "not supported", "store it dense")
    declared = onnx.TensorProto(
        data_type=sparse.values.data_type, dims=sparse.dims, data_location=onnx.TensorProto.EXTERNAL
    )
    check_tensor(declared, place, limits)
    values = array_from_tensor(sparse.values, None)
    indices = array_from_tensor(sparse.indices, None)
    shape = tuple(sparse.dims)
    fits = values.ndim == 1 and indices.dtype == np.int64 and indices.shape[:1] == values.shape
    if fits and indices.ndim == 2 and indices.shape[1] == len(shape):
        fits = bool(((indices >= 0) & (indices < np.array(shape))).all())
        indices = np.ravel_multi_index(tuple(indices.T), shape) if fits else indices
    elif fits and indices.ndim == 1:
        fits = bool(((indices >= 0) & (indices < math.prod(shape))).all())
    else:
        fits = False
    if not fits:
        raise InputError(
            f"{place} has indices that do not fit its shape {list(shape)}",
            f"values {list(values.shape)}, indices {list(indices.shape)} of {indices.dtype}",
            "store it dense",
        )
    dense = np.zeros(math.prod(shape), values.dtype)
    dense[indices] = values
    return tensor_from_array(name, dense.reshape(shape))
