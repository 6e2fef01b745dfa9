"""Compute one node on known values with ONNX's own reference implementation.

Only ops on the list below are computed: they are deterministic, hold no state or subgraph, and their work is linear in
the elements that they read and write. Quantization ops are not among them, so nothing is ever folded across Q/DQ. The
number of elements written is known before any is: a hostile `Range` or `Expand` takes no memory.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

Array = np.ndarray[Any, Any]

# fmt: off
_BROADCAST_OPS = frozenset([
    "Abs", "Add", "And", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Cast", "Ceil", "Cos",
    "Div", "Equal", "Erf", "Exp", "Floor", "Greater", "GreaterOrEqual", "IsNaN", "Less", "LessOrEqual", "Log", "Max",
    "Min", "Mod", "Mul", "Neg", "Not", "Or", "Pow", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Sqrt",
    "Sub", "Tanh", "Where", "Xor",
])
_MOVING_OPS = frozenset([
    "ArgMax", "ArgMin", "CastLike", "Clip", "Flatten", "GatherElements", "Identity", "NonZero", "ReduceMax",
    "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "Shape", "Size", "Slice", "Split", "Squeeze",
    "Transpose", "Trilu", "Unsqueeze",
])
# fmt: on
_GROWING_OPS = frozenset(["Concat", "ConstantOfShape", "Expand", "Gather", "Pad", "Range", "Tile"])

EVALUABLE_OPS = _BROADCAST_OPS | _MOVING_OPS | _GROWING_OPS


def count_output_elements(node: onnx.NodeProto, inputs: Sequence[Array | None]) -> int:
    """Upper bound of the elements that each output of an evaluable node holds, from its input values.

    Raises:
        ValueError: the inputs do not fit the op.
    """
    given = [array for array in inputs if array is not None]
    if node.op_type in _BROADCAST_OPS:
        return int(math.prod(np.broadcast_shapes(*(array.shape for array in given))))
    if node.op_type not in _GROWING_OPS:
        return max((array.size * max(1, array.ndim) for array in given), default=0)
    if node.op_type == "Concat":
        return sum(array.size for array in given)
    if not given:
        raise ValueError(f"{node.op_type} without inputs")
    first, rest = given[0], given[1:]
    if node.op_type == "ConstantOfShape":
        return int(math.prod(int(size) for size in first.ravel()))
    if node.op_type == "Range":
        start, limit, delta = (float(array.item()) for array in given)
        return max(0, math.ceil((limit - start) / delta))
    if node.op_type == "Gather":
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
        return int(first.size // max(1, first.shape[axis]) * rest[0].size)
    factors = [int(value) for value in rest[0].ravel()]
    if node.op_type == "Expand":
        return int(math.prod(np.broadcast_shapes(first.shape, tuple(factors))))
    if node.op_type == "Tile":
        return first.size * math.prod(factors)
    # Pad: every axis grows at most by all pads together.
    return math.prod(size + sum(max(0, pad) for pad in factors) for size in first.shape)


def evaluate_node(node: onnx.NodeProto, inputs: Sequence[Array | None], opset: int) -> list[Array]:
    """The outputs of one evaluable node.

    Args:
        node: with `len(inputs)` inputs; an omitted optional one is None.
        opset: version of the default domain.

    Raises:
        Exception: whatever the reference implementation raises on inputs that do not fit.
    """
    canonical = onnx.NodeProto()
    canonical.CopyFrom(node)
    canonical.name = ""
    canonical.input[:] = [f"i{index}" if array is not None else "" for index, array in enumerate(inputs)]
    canonical.output[:] = [f"o{index}" if name else "" for index, name in enumerate(node.output)]
    known = {name: array for name, array in zip(canonical.input, inputs, strict=True) if name}
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outputs = _evaluator(canonical.SerializeToString(deterministic=True), opset).run(None, known)
    return [np.require(np.asarray(output), requirements="C") for output in outputs]


@functools.lru_cache(maxsize=256)
def _evaluator(node: bytes, opset: int) -> ReferenceEvaluator:
    """The evaluator of a serialised node; a large model has few different ones, and making it takes longest."""
    proto = onnx.NodeProto.FromString(node)
    inputs, outputs = ([onnx.ValueInfoProto(name=n) for n in names if n] for names in (proto.input, proto.output))
    graph = onnx.helper.make_graph([proto], "node", inputs, outputs)
    return ReferenceEvaluator(graph, opsets={"": opset})
