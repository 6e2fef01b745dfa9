"""ScatterElements and ScatterND with a reduction, which no TensorRT parser takes.

1. Constant indices that do not repeat: gather the old values, reduce, scatter without a reduction. Indices that repeat
   a few times take as many rounds.
2. Otherwise, all pairs of update and place: a matrix of `index == place`. Float sums are then a MatMul, everything else
   a reduction over masked copies. Order of summation is not ONNX's, whose own is not defined either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.graph.intake.emit import (
    BOOL,
    INT64,
    Array,
    Dtype,
    Emitter,
    constant_values,
    dtype_of,
    front_axis,
    rank_of,
    static_size,
)
from trtforge.graph.intake.rewrites import NotYetError, RefusedError

Results = Sequence[gs.Tensor | None]

# Rounds for constant indices that repeat.
_MAX_ROUNDS = 8
# Elements of the masked copies, as far as sizes are static: 256 MB of float32.
_MAX_ELEMENTS = 2**26
_COMBINE = {"add": "Add", "mul": "Mul", "min": "Min", "max": "Max"}
_REDUCE = {"add": "ReduceSum", "mul": "ReduceProd", "min": "ReduceMin", "max": "ReduceMax"}
_FIX = "scatter without a reduction, or into a smaller tensor"


def reduction_of(node: gs.Node) -> str:
    """ "none", "add", "mul", "min" or "max"."""
    return str(node.attrs.get("reduction", "none"))


def scatter_nd(node: gs.Node, emit: Emitter) -> Results:
    """Gathering, reducing and scattering of constant indices; of others, products with a matrix of matches."""
    data, indices, updates = node.inputs
    known = constant_values(indices)
    if known is not None:
        rounds = _rounds(known.reshape(-1, known.shape[-1]), _dims(data, known.shape[-1]))
        if rounds is not None:
            return [_nd_in_rounds(node, emit, known, rounds)]
    return [_nd_by_matches(node, emit, data, indices, updates)]


def _dims(data: gs.Tensor, depth: int) -> list[int | None]:
    return [static_size(data, axis) for axis in range(depth)]


def _rounds(indices: Array, dims: Sequence[int | None]) -> list[Array] | None:
    """Rows of indices in groups of which none holds a place twice; None where that takes too many."""
    if any(dim is None for dim in dims) and (indices < 0).any():
        return None
    sizes = np.array([dim or 0 for dim in dims], np.int64)
    places = np.where(indices < 0, indices + sizes, indices)
    _, inverse, counts = np.unique(places, axis=0, return_inverse=True, return_counts=True)
    if counts.max(initial=0) > _MAX_ROUNDS:
        return None
    order = np.argsort(inverse.reshape(-1), kind="stable")
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    occurrence = np.empty(len(order), np.int64)
    occurrence[order] = np.arange(len(order)) - starts
    return [np.flatnonzero(occurrence == number) for number in range(int(counts.max(initial=1)))]


def _nd_in_rounds(node: gs.Node, emit: Emitter, indices: Array, rounds: Sequence[Array]) -> gs.Tensor:
    data, _, updates = node.inputs
    dtype, op = dtype_of(data), _COMBINE[reduction_of(node)]
    rows = indices.reshape(-1, indices.shape[-1])
    result = data
    for picked in rounds:
        if len(rounds) == 1:
            places, values = emit.constant(indices, INT64), updates
        else:
            tail = rank_of(updates) - (indices.ndim - 1)
            sizes = [static_size(updates, axis - tail) for axis in range(tail)]
            if any(size is None for size in sizes):
                raise NotYetError(f"the shape of {updates.name!r}")
            flat = emit.reshape(updates, len(rows), *(size or 0 for size in sizes))
            places = emit.constant(rows[picked], INT64)
            values = emit("Gather", flat, emit.constant(picked, INT64), dtype=dtype, axis=0)
        old = emit("GatherND", result, places, dtype=dtype)
        result = emit("ScatterND", result, places, emit(op, old, values, dtype=dtype), dtype=dtype, shape=data.shape)
    return result


def _nd_by_matches(node: gs.Node, emit: Emitter, data: gs.Tensor, indices: gs.Tensor, updates: gs.Tensor) -> gs.Tensor:
    depth = static_size(indices, rank_of(indices) - 1)
    rank = rank_of(data)
    if depth is None:
        raise NotYetError(f"the last size of {indices.name!r}")
    inner = [static_size(data, axis) for axis in range(1, depth)]
    tail = [static_size(data, axis) for axis in range(depth, rank)]
    if any(size is None for size in [*inner, *tail]):
        raise RefusedError("the sizes of its result are open in more than the first axis", _FIX)
    strides = [math.prod(size or 0 for size in inner[axis:]) for axis in range(depth)]
    width = math.prod(size or 0 for size in tail)
    rows = emit.reshape(emit.cast(indices, INT64), -1, depth)
    sizes = emit("Shape", data, dtype=INT64, shape=[depth], start=0, end=depth)
    rows = _wrapped(emit, rows, sizes)
    if depth > 1:
        rows = emit("Mul", rows, emit.ints(*strides), dtype=INT64)
    places = emit("ReduceSum", rows, emit.ints(1), dtype=INT64, keepdims=1)
    table = emit.reshape(data, -1, width)
    values = emit.reshape(updates, -1, width)
    count = static_size(indices, 0) if rank_of(indices) == 2 else None
    _check_size(node, [count, static_size(data, 0), *strides[:1], width])
    result = _combine_matches(node, emit, table, places, values, emit.size_of(table, 0))
    return emit("Reshape", result, emit("Shape", data, dtype=INT64), dtype=dtype_of(data), shape=data.shape)


def _combine_matches(
    node: gs.Node, emit: Emitter, table: gs.Tensor, places: gs.Tensor, values: gs.Tensor, num_places: gs.Tensor
) -> gs.Variable:
    """`table [P, R]` reduced with `values [U, R]` at `places [U, 1]`."""
    kind, dtype = reduction_of(node), dtype_of(node.inputs[0])
    matches = emit("Equal", places, emit.positions(num_places), dtype=BOOL)
    if kind == "add" and dtype.kind == "f":
        weights = emit("Transpose", emit.cast(matches, dtype), dtype=dtype, perm=[1, 0])
        return emit("Add", table, emit("MatMul", weights, values, dtype=dtype), dtype=dtype)
    mask = emit("Unsqueeze", matches, emit.ints(2), dtype=BOOL)
    copies = emit("Unsqueeze", values, emit.ints(1), dtype=dtype)
    return _masked(emit, kind, dtype, table, mask, copies, 0)


def _masked(
    emit: Emitter, kind: str, dtype: Dtype, table: gs.Tensor, mask: gs.Tensor, copies: gs.Tensor, axis: int
) -> gs.Variable:
    """The table reduced with the copies where the mask is true, over one axis of the copies."""
    masked = emit("Where", mask, copies, emit.constant(_neutral(kind, dtype), dtype), dtype=dtype)
    reduced = emit(_REDUCE[kind], masked, emit.ints(axis), dtype=dtype, keepdims=0)
    return emit(_COMBINE[kind], table, reduced, dtype=dtype)


def _neutral(kind: str, dtype: Dtype) -> Any:
    if kind in ("add", "mul"):
        return 0 if kind == "add" else 1
    if dtype.kind == "f":
        return np.inf if kind == "min" else -np.inf
    bounds = np.iinfo(dtype)
    return bounds.max if kind == "min" else bounds.min


def _wrapped(emit: Emitter, indices: gs.Tensor, sizes: gs.Tensor) -> gs.Variable:
    """Negative indices counted from the end."""
    negative = emit("Less", indices, emit.constant(0, INT64), dtype=BOOL)
    return emit("Where", negative, emit("Add", indices, sizes, dtype=INT64), indices, dtype=INT64)


def _check_size(node: gs.Node, sizes: Sequence[int | None]) -> None:
    if math.prod(size for size in sizes if size is not None) > _MAX_ELEMENTS:
        raise RefusedError(
            f"it has a reduction ({reduction_of(node)}), and comparing all its indices with all places takes too much "
            "memory",
            _FIX,
        )


def scatter_elements(node: gs.Node, emit: Emitter) -> Results:
    """Gathering, reducing and scattering of constant indices; of others, products with a matrix of matches."""
    data, indices, updates = node.inputs
    rank, dtype, kind = rank_of(data), dtype_of(data), reduction_of(node)
    axis = front_axis(int(node.attrs.get("axis", 0)), rank)
    known = constant_values(indices)
    if known is not None and _is_unique(known, axis, static_size(data, axis)):
        places = emit.constant(known, INT64)
        old = emit("GatherElements", data, places, dtype=dtype, axis=axis)
        new = emit(_COMBINE[kind], old, updates, dtype=dtype)
        return [emit("ScatterElements", data, places, new, dtype=dtype, shape=data.shape, axis=axis)]
    for other in range(rank):
        if other != axis and (
            static_size(data, other) is None or static_size(data, other) != static_size(indices, other)
        ):
            same_name = data.shape[other] == (indices.shape or [None] * rank)[other] is not None
            if not same_name:
                raise RefusedError("its indices do not cover the axes that it does not scatter along", _FIX)
    _check_size(node, [*(static_size(data, other) for other in range(rank)), static_size(indices, axis)])
    order = [*(other for other in range(rank) if other != axis), axis]
    table, places, values = (emit.transpose(t, *order) for t in (data, emit.cast(indices, INT64), updates))
    places = _wrapped(emit, places, emit.size_of(data, axis))
    every = emit.positions(emit.size_of(data, axis))
    mask = emit("Equal", emit("Unsqueeze", places, emit.ints(-1), dtype=INT64), every, dtype=BOOL)
    copies = emit("Unsqueeze", values, emit.ints(-1), dtype=dtype)
    result = _masked(emit, kind, dtype, table, mask, copies, -2)
    return [emit.transpose(result, *(order.index(other) for other in range(rank)))]


def _is_unique(indices: Array, axis: int, size: int | None) -> bool:
    if (indices < 0).any():
        if size is None:
            return False
        indices = np.where(indices < 0, indices + size, indices)
    ordered = np.sort(indices, axis=axis)
    return not bool((np.diff(ordered, axis=axis) == 0).any())


RULES: Mapping[str, Any] = {"ScatterND": scatter_nd, "ScatterElements": scatter_elements}
"""By operator; for nodes with a reduction."""
