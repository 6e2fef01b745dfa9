"""Integer products in float32, only while they are exact.

float32 holds every integer up to 2^24. A sum of products stays below that as long as the weight's absolute codes of one
output channel add up to less than 2^24 / 255; longer sums are cut into parts that do, and the parts are added as int32.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.graph.intake.emit import (
    EXACT_MARK,
    FLOAT32,
    INT32,
    Array,
    Emitter,
    constant_values,
    rank_of,
    static_size,
)
from trtforge.graph.intake.rewrites import NotYetError, RefusedError

# Every integer up to this has a float32 of its own.
_EXACT = 2**24
# Largest |code - zero-point| of an 8-bit operand.
_LARGEST = 255
# Part of the names of nodes of the float form of dynamic quantization.
FLOAT_MARK = "/float_int8/"
# The same once the scale behind the product is in its weight.
SCALED_MARK = "/scaled_float_int8/"


def as_float(emit: Emitter, codes: gs.Tensor) -> gs.Tensor:
    """8-bit codes as float32; the floats themselves where a rule of ours rounded them to codes."""
    values = constant_values(codes)
    if values is not None:
        return emit.constant(values, FLOAT32)
    maker = codes.inputs[0] if codes.inputs else None
    if maker is not None and maker.op == "Cast" and (EXACT_MARK in maker.name or FLOAT_MARK in maker.name):
        return maker.inputs[0]
    return emit.cast(codes, FLOAT32)


def stands_for_floats(codes: gs.Tensor) -> bool:
    """True for codes that are the values themselves, in the float form of dynamic quantization."""
    maker = codes.inputs[0] if codes.inputs else None
    return maker is not None and maker.op == "Cast" and FLOAT_MARK in maker.name


def centred(emit: Emitter, codes: gs.Tensor, zero_point: gs.Tensor | None, axis: int | None = None) -> gs.Tensor:
    """Codes less their zero-point, as float32.

    Args:
        axis: of a vector of zero-points, counted from the end; None where they broadcast as they are.
    """
    values, zeros = constant_values(codes), constant_values(zero_point)
    if zero_point is None or (zeros is not None and not zeros.any()):
        return as_float(emit, codes)
    if zeros is not None:
        zeros = zeros.astype(np.float32)
        zeros = zeros.reshape(()) if zeros.size == 1 else _along(zeros, axis)
        if values is not None:
            return emit.constant(values.astype(np.float32) - zeros, FLOAT32)
        offset: gs.Tensor = emit.constant(zeros, FLOAT32)
    else:
        offset = as_float(emit, zero_point)
        if axis is not None and rank_of(zero_point) == 1 and static_size(zero_point, 0) != 1:
            offset = emit("Unsqueeze", offset, emit.ints(*range(1, -axis)), dtype=FLOAT32)
    return emit("Sub", as_float(emit, codes), offset, dtype=FLOAT32, shape=codes.shape)


def _along(zeros: Array, axis: int | None) -> Array:
    return zeros if axis is None or zeros.ndim != 1 else zeros.reshape([-1, *[1] * (-axis - 1)])


def exact_matmul(emit: Emitter, first: gs.Tensor, second: gs.Tensor) -> tuple[gs.Tensor, bool]:
    """The product of two tensors of centred codes.

    Returns:
        The product, and True where it is float32; a longer sum is int32.
    """
    weight = constant_values(second)
    if weight is not None:
        parts = _parts(np.abs(weight).sum(axis=tuple(range(weight.ndim - 2))) if weight.ndim > 2 else np.abs(weight))
        length = weight.shape[-2] if weight.ndim > 1 else weight.shape[0]
    else:
        size = static_size(first, -1) or static_size(second, -2)
        if size is None:
            raise NotYetError("the length of the sums of an integer product of two activations")
        length, step = size, _EXACT // (_LARGEST * _LARGEST)
        parts = [(start, min(start + step, size)) for start in range(0, size, step)]
    if len(parts) == 1:
        return emit("MatMul", first, second, dtype=FLOAT32), True
    axis = -2 if weight is None or weight.ndim > 1 else 0
    sums = []
    for start, stop in parts:
        left = emit.slice(first, -1, start, stop)
        if weight is not None:
            right: gs.Tensor = emit.constant(np.take(weight, np.arange(start, min(stop, length)), axis), FLOAT32)
        else:
            right = emit.slice(second, -2, start, stop)
        sums.append(emit("Cast", emit("MatMul", left, right, dtype=FLOAT32), dtype=INT32, to=6))
    return _total(emit, sums), False


def exact_conv(node: gs.Node, emit: Emitter, first: gs.Tensor, weight: Array) -> tuple[gs.Tensor, bool]:
    """As `exact_matmul`, for the attributes of a convolution and weights `[M, C / groups, ...]`.

    Raises:
        RefusedError: a grouped convolution whose sums are too long for float32.
    """
    taps = np.abs(weight).sum(axis=tuple(range(2, weight.ndim)))
    parts = _parts(taps.T)
    attrs = dict(node.attrs)
    if len(parts) == 1:
        return emit("Conv", first, emit.constant(weight, FLOAT32), dtype=FLOAT32, **attrs), True
    if int(attrs.get("group", 1)) != 1:
        raise RefusedError("its groups are too wide for exact integer sums in float32", "start from the float model")
    sums = []
    for start, stop in parts:
        left = emit.slice(first, 1, start, stop)
        right = emit.constant(weight[:, start:stop], FLOAT32)
        sums.append(emit("Cast", emit("Conv", left, right, dtype=FLOAT32, **attrs), dtype=INT32, to=6))
    return _total(emit, sums), False


def _parts(weight: Array) -> list[tuple[int, int]]:
    """Where to cut sums over the first axis of `[K, N]`, so that |weight| of each part adds up to little enough."""
    columns = weight.reshape(weight.shape[0], -1).astype(np.int64)
    bound = (_EXACT - 1) // _LARGEST
    parts, start = [], 0
    total = np.zeros(columns.shape[1], np.int64)
    for index, row in enumerate(columns):
        total = total + row
        if index > start and total.max(initial=0) > bound:
            parts.append((start, index))
            start, total = index, row.copy()
    return [*parts, (start, len(columns))]


def _total(emit: Emitter, sums: list[gs.Variable]) -> gs.Variable:
    total = sums[0]
    for part in sums[1:]:
        total = emit("Add", total, part, dtype=INT32)
    return total


def as_int32(emit: Emitter, product: gs.Tensor, is_float: bool) -> gs.Tensor:
    """An integer product as int32."""
    return emit("Cast", product, dtype=INT32, to=6) if is_float else product


def product_as_float(emit: Emitter, product: gs.Tensor, is_float: bool) -> gs.Tensor:
    """An integer product as float32."""
    return product if is_float else emit("Cast", product, dtype=FLOAT32, to=1)
