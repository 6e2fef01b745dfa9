"""What sizes the common operators take, one rule each: the shapes of the outputs, or the two sizes that differ.

A rule returns None where onnx's own inference is to tell the shapes; it has then checked what that does not check.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.lib.array_utils import normalize_axis_index

Shape = tuple[int, ...]
Array = np.ndarray[Any, Any]
Rule = Callable[[onnx.NodeProto, Sequence[Shape | None], Sequence[Array | None]], "Sequence[Shape | None] | None"]


class MisfitError(Exception):
    """Shapes that a node cannot take.

    Args:
        why: in words.
        sizes: two sizes that would have to be equal, where that is what is wrong.
    """

    def __init__(self, why: str, sizes: tuple[int, int] | None = None) -> None:
        super().__init__(why)
        self.why = why
        self.sizes = sizes


def _attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    for attribute in node.attribute:
        if attribute.name == name:
            return onnx.helper.get_attribute_value(attribute)
    return default


def _axis(node: onnx.NodeProto, rank: int) -> int:
    """The attribute `axis` counted from the front; one beyond the rank is an error, and the node's shape unknown."""
    return normalize_axis_index(int(_attribute(node, "axis", 0)), rank)


def _same(_: onnx.NodeProto, inputs: Sequence[Shape | None], __: Sequence[Array | None]) -> list[Shape | None]:
    return [inputs[0]]


def _broadcast(shapes: Sequence[Shape]) -> Shape:
    """numpy's rule."""
    rank = max(len(shape) for shape in shapes)
    result = [1] * rank
    for shape in shapes:
        for axis, size in enumerate(shape, rank - len(shape)):
            if size != 1 and result[axis] not in (1, size):
                raise MisfitError(
                    f"{' and '.join(str(list(s)) for s in shapes)} do not broadcast", (result[axis], size)
                )
            result[axis] = size if result[axis] == 1 else result[axis]
    return tuple(result)


def _elementwise(_: onnx.NodeProto, inputs: Sequence[Shape | None], __: Sequence[Array | None]) -> list[Shape | None]:
    return [_broadcast([shape for shape in inputs if shape is not None])]


def _matmul(
    _: onnx.NodeProto, inputs: Sequence[Shape | None], __: Sequence[Array | None]
) -> Sequence[Shape | None] | None:
    first, second = inputs[0], inputs[1]
    if not first or not second:
        return None
    inner = second[-2] if len(second) > 1 else second[0]
    if first[-1] != inner:
        raise MisfitError(f"the inner sizes of {list(first)} and {list(second)} differ", (first[-1], inner))
    if len(first) < 2 or len(second) < 2:
        return None
    return [(*_broadcast([first[:-2], second[:-2]]), first[-2], second[-1])]


def _gemm(
    node: onnx.NodeProto, inputs: Sequence[Shape | None], __: Sequence[Array | None]
) -> Sequence[Shape | None] | None:
    first, second = inputs[0], inputs[1]
    if first is None or second is None or len(first) != 2 or len(second) != 2:
        return None
    rows, inner = first[::-1] if _attribute(node, "transA", 0) else first
    other, columns = second[::-1] if _attribute(node, "transB", 0) else second
    if inner != other:
        raise MisfitError(f"the inner sizes of {list(first)} and {list(second)} differ", (inner, other))
    return [(rows, columns)]


def _concat(
    node: onnx.NodeProto, inputs: Sequence[Shape | None], __: Sequence[Array | None]
) -> Sequence[Shape | None] | None:
    shapes = [shape for shape in inputs if shape is not None]
    if not shapes or any(len(shape) != len(shapes[0]) for shape in shapes) or not shapes[0]:
        return None
    axis = _axis(node, len(shapes[0]))
    result = list(shapes[0])
    for shape in shapes[1:]:
        for index, size in enumerate(shape):
            if index != axis and size != result[index]:
                listed = " and ".join(str(list(s)) for s in (shapes[0], shape))
                raise MisfitError(f"{listed} differ outside axis {axis}", (result[index], size))
        result[axis] += shape[axis]
    return [tuple(result)]


def _transpose(
    node: onnx.NodeProto, inputs: Sequence[Shape | None], __: Sequence[Array | None]
) -> Sequence[Shape | None] | None:
    shape = inputs[0]
    if shape is None:
        return None
    order = _attribute(node, "perm", list(range(len(shape)))[::-1])
    return [tuple(shape[axis] for axis in order)] if len(order) == len(shape) else None


def _reshape(
    node: onnx.NodeProto, inputs: Sequence[Shape | None], values: Sequence[Array | None]
) -> Sequence[Shape | None] | None:
    shape, target = inputs[0], values[1] if len(values) > 1 else None
    if shape is None or target is None:
        return [None] if len(inputs) > 1 else None
    keeps_zero = bool(_attribute(node, "allowzero", 0))
    wanted = [int(size) for size in target.ravel()]
    if not keeps_zero:
        wanted = [shape[i] if size == 0 and i < len(shape) else size for i, size in enumerate(wanted)]
    count, known = math.prod(shape), math.prod(size for size in wanted if size != -1)
    text = f"{list(shape)} has {count} elements; it cannot become {[int(s) for s in target.ravel()]}"
    if -1 not in wanted:
        if count != known:
            raise MisfitError(text, (count, known))
        return [tuple(wanted)]
    if known == 0:
        # Nothing is left to divide: the open size is 0 as well.
        return [tuple(0 if size == -1 else size for size in wanted)]
    if count % known:
        raise MisfitError(text)
    return [tuple(count // known if size == -1 else size for size in wanted)]


def _gather(
    node: onnx.NodeProto, inputs: Sequence[Shape | None], values: Sequence[Array | None]
) -> Sequence[Shape | None] | None:
    shape, where, indices = inputs[0], inputs[1], values[1]
    if not shape or where is None:
        return None
    axis = _axis(node, len(shape))
    if indices is not None and indices.size and int(indices.max()) >= shape[axis]:
        raise MisfitError(
            f"it reads entry {int(indices.max())} of a table of {shape[axis]} (axis {axis} of {list(shape)})"
        )
    return [(*shape[:axis], *where, *shape[axis + 1 :])]


def _conv(
    node: onnx.NodeProto, inputs: Sequence[Shape | None], __: Sequence[Array | None]
) -> Sequence[Shape | None] | None:
    data, weight = inputs[0], inputs[1]
    if data is None or weight is None or len(data) < 3 or len(data) != len(weight):
        return None
    groups = int(_attribute(node, "group", 1))
    wanted = weight[0] if node.op_type == "ConvTranspose" else weight[1] * groups
    if data[1] != wanted:
        why = f"{list(data)} has {data[1]} channels; the weight {list(weight)} takes {wanted}"
        raise MisfitError(why, (data[1], wanted))
    if node.op_type == "ConvTranspose":
        return None
    windows = _windows(node, data, weight[2:])
    return None if windows is None else [(data[0], weight[0], *windows)]


def _pool(
    node: onnx.NodeProto, inputs: Sequence[Shape | None], __: Sequence[Array | None]
) -> Sequence[Shape | None] | None:
    data = inputs[0]
    if data is None or len(data) < 3:
        return None
    windows = _windows(node, data, tuple(_attribute(node, "kernel_shape", ())))
    if windows is None or _attribute(node, "ceil_mode", 0):
        return None
    return [(data[0], data[1], *windows)] * len(node.output)


def _windows(node: onnx.NodeProto, data: Shape, kernel: Shape) -> Shape | None:
    """How many windows fit on each axis; None where onnx is to tell.

    Raises:
        MisfitError: none does; onnx would infer a size below 1.
    """
    rank = len(data) - 2
    pads, ones = _attribute(node, "pads", [0] * 2 * rank), [1] * rank
    strides, dilations = _attribute(node, "strides", ones), _attribute(node, "dilations", ones)
    if _attribute(node, "auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        return None
    if {len(kernel), len(strides), len(dilations), len(pads) // 2} != {rank}:
        return None
    counts = []
    for axis in range(rank):
        size, window = data[axis + 2] + pads[axis] + pads[axis + rank], (kernel[axis] - 1) * dilations[axis] + 1
        if size < window:
            raise MisfitError(f"axis {axis + 2} of {list(data)} is {size} with padding; the window has {window}")
        counts.append((size - window) // strides[axis] + 1)
    return tuple(counts)


def _recurrent(node: onnx.NodeProto, inputs: Sequence[Shape | None], _: Sequence[Array | None]) -> None:
    data, weight = inputs[0], inputs[1]
    if data is None or weight is None or len(data) != 3 or len(weight) != 3:
        return
    if data[2] != weight[2]:
        raise MisfitError(f"{list(data)} has {data[2]} features; the weight takes {weight[2]}", (data[2], weight[2]))
    batch = data[0] if _attribute(node, "layout", 0) else data[1]
    for state in inputs[5:7]:
        if state is not None and len(state) == 3:
            other = state[0] if _attribute(node, "layout", 0) else state[1]
            if other != batch:
                raise MisfitError(f"{list(data)} and the initial state {list(state)} differ in batch", (batch, other))


def _norm(_: onnx.NodeProto, inputs: Sequence[Shape | None], __: Sequence[Array | None]) -> None:
    data, scale = inputs[0], inputs[1] if len(inputs) > 1 else None
    if data is not None and scale is not None and len(data) > 1 and len(scale) == 1 and data[1] != scale[0]:
        raise MisfitError(f"{list(data)} has {data[1]} channels; the scale has {scale[0]}", (data[1], scale[0]))


def _expand(
    _: onnx.NodeProto, inputs: Sequence[Shape | None], values: Sequence[Array | None]
) -> Sequence[Shape | None] | None:
    shape, target = inputs[0], values[1]
    return [None] if shape is None or target is None else [_broadcast([shape, tuple(int(s) for s in target.ravel())])]


# fmt: off
_SAME = [
    "Abs", "Acos", "Asin", "Atan", "BitwiseNot", "Cast", "Ceil", "Celu", "Clip", "Cos", "CumSum", "DequantizeLinear",
    "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "Hardmax", "Identity", "IsInf", "IsNaN",
    "LeakyRelu", "Log", "LogSoftmax", "LpNormalization", "Mish", "Neg", "Not", "QuantizeLinear", "Reciprocal", "Relu",
    "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Softmax", "Softplus", "Softsign", "Sqrt", "Swish", "Tan",
    "Tanh", "ThresholdedRelu", "Trilu",
]
ELEMENTWISE = [
    "Add", "And", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Div", "Equal", "Greater", "GreaterOrEqual",
    "Less", "LessOrEqual", "Max", "Mean", "Min", "Mod", "Mul", "Or", "Pow", "Sub", "Sum", "Where", "Xor",
]
# fmt: on

RULES: dict[str, Rule] = {
    **dict.fromkeys(_SAME, _same),
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent),
    **dict.fromkeys(("BatchNormalization", "InstanceNormalization"), _norm),
    **dict.fromkeys(("AveragePool", "LpPool", "MaxPool"), _pool),
    **dict.fromkeys(("Conv", "ConvTranspose"), _conv),
    "Concat": _concat,
    "Expand": _expand,
    "Gather": _gather,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "Reshape": _reshape,
    "Transpose": _transpose,
}
"""By operator of the default domain."""
