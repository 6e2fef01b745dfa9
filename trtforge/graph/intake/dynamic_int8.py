"""Dynamic INT8 as ONNX Runtime writes it: scales found anew for every input, integer products, a scale behind.

The exact form computes the same integers in float32 (integers.py). The float form leaves activations as they are and
multiplies by the weights that the codes stand for: what quantization is to start from. DynamicQuantizeLinear decides
for all that reads it: in the float form its codes are the values, its scale is 1 and its zero-point 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.graph.edit import is_onnx_op
from trtforge.graph.intake.emit import (
    BOOL,
    EXACT_MARK,
    FLOAT32,
    Array,
    Emitter,
    constant_values,
    dtype_of,
    optional_input,
    rank_of,
)
from trtforge.graph.intake.integers import (
    FLOAT_MARK,
    SCALED_MARK,
    as_float,
    as_int32,
    centred,
    exact_conv,
    exact_matmul,
    product_as_float,
    stands_for_floats,
)
from trtforge.graph.intake.microsoft_attention import attention_on_projection
from trtforge.graph.intake.rewrites import NotYetError, RefusedError

Results = Sequence[gs.Tensor | None]
Rule = Callable[[gs.Node, Emitter], Results]

_FROM_FLOAT = "start from the float model"
_UINT8 = np.dtype(np.uint8)


def _codes(emit: Emitter, x: gs.Tensor) -> tuple[gs.Tensor, gs.Tensor, gs.Tensor]:
    """uint8 codes of x as float32, their scale, and their zero-point as float32."""
    zero, one, top = (emit.constant(value, FLOAT32) for value in (0.0, 1.0, 255.0))
    smallest = emit("Min", emit("ReduceMin", x, dtype=FLOAT32, shape=[], keepdims=0), zero, dtype=FLOAT32, shape=[])
    largest = emit("Max", emit("ReduceMax", x, dtype=FLOAT32, shape=[], keepdims=0), zero, dtype=FLOAT32, shape=[])
    span = emit("Sub", largest, smallest, dtype=FLOAT32, shape=[])
    step = emit("Div", span, top, dtype=FLOAT32, shape=[])
    is_flat = emit("Equal", span, zero, dtype=BOOL, shape=[])
    scale = emit("Where", is_flat, one, step, dtype=FLOAT32, shape=[])
    below = emit("Div", emit("Neg", smallest, dtype=FLOAT32, shape=[]), scale, dtype=FLOAT32, shape=[])
    offset = emit("Round", emit("Clip", below, zero, top, dtype=FLOAT32, shape=[]), dtype=FLOAT32, shape=[])
    steps = emit("Round", emit("Div", x, scale, dtype=FLOAT32, shape=x.shape), dtype=FLOAT32, shape=x.shape)
    shifted = emit("Add", steps, offset, dtype=FLOAT32, shape=x.shape)
    return emit("Clip", shifted, zero, top, dtype=FLOAT32, shape=x.shape), scale, offset


def dynamic_quantize(node: gs.Node, emit: Emitter) -> Results:
    """ReduceMin, ReduceMax, Div, Round and Clip; same numbers, or none where the float form is asked for."""
    x = node.inputs[0]
    if not emit.exact_products and _can_be_float(node, emit):
        emit.mark = FLOAT_MARK
        codes, zero = (emit("Cast", t, dtype=_UINT8, shape=t.shape, to=2) for t in (x, emit.constant(0, FLOAT32)))
        return [codes, emit.constant(1.0, FLOAT32), zero]
    emit.mark = EXACT_MARK
    codes, scale, offset = _codes(emit, emit.cast(x, FLOAT32))
    return [
        emit("Cast", codes, dtype=_UINT8, shape=x.shape, to=2),
        scale,
        emit("Cast", offset, dtype=_UINT8, shape=[], to=2),
    ]


def _can_be_float(node: gs.Node, emit: Emitter) -> bool:
    """Whether only products with stored weights read the codes, and only Casts to float read those."""
    if emit.is_output(node.outputs[0]) or any(emit.is_output(output) for output in node.outputs[2:]):
        return False
    readers = [reader for output in (node.outputs[0], *node.outputs[2:]) for reader in output.outputs]
    return all(_takes_floats(reader, emit) for reader in readers)


def _takes_floats(node: gs.Node, emit: Emitter) -> bool:
    if node.op == "MatMulIntegerToFloat":
        return constant_values(node.inputs[1]) is not None
    if node.op not in ("MatMulInteger", "ConvInteger") or constant_values(node.inputs[1]) is None:
        return False
    result = node.outputs[0]
    if emit.is_output(result):
        return False
    return all(
        reader.op == "Cast" and is_onnx_op(reader) and reader.attrs.get("to") in (1, np.float32)
        for reader in result.outputs
    )


def matmul_integer(node: gs.Node, emit: Emitter) -> Results:
    """MatMul of the codes in float32; same numbers."""
    is_float = stands_for_floats(node.inputs[0])
    emit.mark = FLOAT_MARK if is_float else EXACT_MARK
    weight = _weight(emit, node, 1, 3)
    if is_float:
        product = emit("MatMul", as_float(emit, node.inputs[0]), weight, dtype=FLOAT32)
        return [product]
    first = centred(emit, node.inputs[0], optional_input(node, 2), axis=-2)
    return [as_int32(emit, *exact_matmul(emit, first, weight))]


def _weight(emit: Emitter, node: gs.Node, index: int, zero_point: int) -> gs.Tensor:
    return centred(emit, node.inputs[index], optional_input(node, zero_point))


def conv_integer(node: gs.Node, emit: Emitter) -> Results:
    """Conv of the codes in float32; same numbers."""
    codes = constant_values(node.inputs[1])
    if codes is None:
        raise RefusedError("its weight is computed at run time", "store the weight as a constant")
    is_float = stands_for_floats(node.inputs[0])
    emit.mark = FLOAT_MARK if is_float else EXACT_MARK
    zeros = optional_input(node, 3)
    if zeros is not None and constant_values(zeros) is None:
        raise RefusedError("the zero-point of its weight is computed at run time", "store it as a constant")
    weight = np.asarray(centred(emit, node.inputs[1], zeros, axis=-codes.ndim).values, np.float32)
    if is_float:
        product = emit(
            "Conv", as_float(emit, node.inputs[0]), emit.constant(weight, FLOAT32), dtype=FLOAT32, **node.attrs
        )
        return [product]
    first = centred(emit, node.inputs[0], optional_input(node, 2))
    return [as_int32(emit, *exact_conv(node, emit, first, weight))]


def matmul_integer_to_float(node: gs.Node, emit: Emitter) -> Results:
    """MatMul of the codes in float32, and Mul; same numbers but for the last bit."""
    return [_scaled_product(node, emit, scales=(2, 3), zero_points=(4, 5), bias=6)]


def _scaled_product(
    node: gs.Node, emit: Emitter, *, scales: tuple[int, int], zero_points: tuple[int, int], bias: int
) -> gs.Tensor:
    """The product of codes, times both scales, plus the bias."""
    is_float = stands_for_floats(node.inputs[0])
    emit.mark = FLOAT_MARK if is_float else EXACT_MARK
    weight = _weight(emit, node, 1, zero_points[1])
    if is_float:
        product: gs.Tensor = emit("MatMul", as_float(emit, node.inputs[0]), weight, dtype=FLOAT32)
    else:
        first = centred(emit, node.inputs[0], optional_input(node, zero_points[0]))
        product = product_as_float(emit, *exact_matmul(emit, first, weight))
    # ONNX Runtime multiplies the scales first.
    factor = _product_of_scales(emit, node.inputs[scales[0]], node.inputs[scales[1]])
    scaled = emit("Mul", product, factor, dtype=FLOAT32)
    added = optional_input(node, bias)
    return scaled if added is None else emit("Add", scaled, added, dtype=FLOAT32)


def _product_of_scales(emit: Emitter, first: gs.Tensor, second: gs.Tensor) -> gs.Tensor:
    known = constant_values(first), constant_values(second)
    if known[0] is not None and known[1] is not None:
        return emit.constant(known[0].astype(np.float32) * known[1].astype(np.float32), FLOAT32)
    return emit("Mul", first, second, dtype=FLOAT32)


def dynamic_quantize_matmul(node: gs.Node, emit: Emitter) -> Results:
    """As DynamicQuantizeLinear and MatMulIntegerToFloat."""
    x, weight_scale, bias = node.inputs[0], node.inputs[2], optional_input(node, 4)
    is_float = not emit.exact_products and constant_values(node.inputs[1]) is not None
    emit.mark = FLOAT_MARK if is_float else EXACT_MARK
    weight = _weight(emit, node, 1, 3)
    if is_float:
        scaled = emit("Mul", emit("MatMul", x, weight, dtype=FLOAT32), weight_scale, dtype=FLOAT32)
    else:
        codes, scale, offset = _codes(emit, x)
        centre = emit("Sub", codes, offset, dtype=FLOAT32, shape=x.shape)
        product = product_as_float(emit, *exact_matmul(emit, centre, weight))
        factor = emit("Mul", scale, weight_scale, dtype=FLOAT32)
        scaled = emit("Mul", product, factor, dtype=FLOAT32)
    return [scaled if bias is None else emit("Add", scaled, bias, dtype=FLOAT32)]


def scaled_product(node: gs.Node, emit: Emitter) -> Results:
    """The scale behind a product of codes: kept in float32, or multiplied into the weight of the float form."""
    for product, factor in (node.inputs, node.inputs[::-1]):
        maker = _behind_cast(product)
        if maker is None:
            continue
        if EXACT_MARK in maker.name:
            emit.mark = EXACT_MARK
            return [emit("Mul", _without_round_trip(product, maker), factor, dtype=FLOAT32, shape=product.shape)]
        values, weight = constant_values(factor), constant_values(maker.inputs[1])
        spread = None if values is None or weight is None else _spread(values, weight, maker.op)
        if spread is not None:
            emit.mark = SCALED_MARK
            scaled = emit.constant(weight * spread, FLOAT32)
            return [emit(maker.op, maker.inputs[0], scaled, dtype=FLOAT32, **maker.attrs)]
    raise NotYetError("the scale behind a product of integers")


def is_scale_of_product(node: gs.Node) -> bool:
    """True for a Mul behind a product of codes."""
    if EXACT_MARK in node.name:
        return False
    makers = [_behind_cast(tensor) for tensor in node.inputs]
    return any(maker is not None for maker in makers)


def _without_round_trip(product: gs.Tensor, maker: gs.Node) -> gs.Tensor:
    """The float32 product itself where it was only turned to int32 and back."""
    is_turned = maker.op == "Cast" and product.inputs[0].op == "Cast" and dtype_of(maker.inputs[0]) == FLOAT32
    return maker.inputs[0] if is_turned and maker is not product.inputs[0] else product


def _behind_cast(tensor: gs.Tensor) -> gs.Node | None:
    """The node of ours that made a product, seen through the model's Cast to float; None for any other tensor."""
    maker = tensor.inputs[0] if tensor.inputs else None
    if maker is not None and maker.op == "Cast" and EXACT_MARK not in maker.name:
        maker = maker.inputs[0].inputs[0] if maker.inputs[0].inputs else None
    if maker is None:
        return None
    is_float_form = FLOAT_MARK in maker.name and maker.op in ("MatMul", "Conv")
    is_exact = EXACT_MARK in maker.name and tensor.inputs[0].op == "Cast" and maker.op in ("Cast", "Add")
    return maker if is_float_form or is_exact else None


def _spread(scale: Array, weight: Array, op: str) -> Array | None:
    """A scale of the output channels in the shape of the weight; None where it is not one."""
    if scale.size == 1:
        return scale.reshape(())
    if op == "MatMul":
        return scale.reshape(-1) if scale.shape[-1] == scale.size == weight.shape[-1] else None
    channels = weight.shape[0]
    expected = [(channels, *[1] * (weight.ndim - 2)), (1, channels, *[1] * (weight.ndim - 2))]
    return scale.reshape(channels, *[1] * (weight.ndim - 1)) if scale.shape in expected else None


def dynamic_quantize_lstm(node: gs.Node, emit: Emitter) -> Results:
    """LSTM with the weights that the codes stand for; activations are not rounded to 8 bits."""
    weights = []
    for index, scale, zero_point in ((1, 8, 9), (2, 10, 11)):
        codes, steps, zeros = (constant_values(node.inputs[i]) for i in (index, scale, zero_point))
        if codes is None or steps is None or zeros is None:
            raise RefusedError("its weights are computed at run time", "store the weights as constants")
        # Weights are [directions, input, 4 * hidden]: LSTM wants the other two axes swapped.
        shape = (codes.shape[0], 1, -1)
        zeros = zeros.astype(np.float32).reshape(shape)
        values = (codes.astype(np.float32) - zeros) * steps.astype(np.float32).reshape(shape)
        weights.append(emit.constant(np.ascontiguousarray(values.transpose(0, 2, 1)), FLOAT32))
    emit.mark = FLOAT_MARK
    others = [optional_input(node, index) for index in range(3, 8)]
    inputs = [node.inputs[0], *weights, *others]
    return emit.many("LSTM", inputs, [FLOAT32] * len(node.outputs), **node.attrs)


def quantized_attention(node: gs.Node, emit: Emitter) -> Results:
    """The product of the codes in float32, then MatMul, Softmax and MatMul."""
    if rank_of(node.inputs[0]) != 3:
        raise RefusedError("its input has no batch axis", _FROM_FLOAT)
    if constant_values(node.inputs[1]) is None:
        raise RefusedError("its weight is computed at run time", "store the weight as a constant")
    packed = _scaled_product(node, emit, scales=(3, 4), zero_points=(6, 7), bias=2)
    emit.mark = "/"
    return attention_on_projection(node, emit, packed, FLOAT32, mask=5, past=8, extra=None)


STANDARD_RULES: Mapping[str, Rule] = {
    "DynamicQuantizeLinear": dynamic_quantize,
    "MatMulInteger": matmul_integer,
    "ConvInteger": conv_integer,
}
"""By operator of ONNX."""
MICROSOFT_RULES: Mapping[str, Rule] = {
    "DynamicQuantizeMatMul": dynamic_quantize_matmul,
    "MatMulIntegerToFloat": matmul_integer_to_float,
    "DynamicQuantizeLSTM": dynamic_quantize_lstm,
    "QAttention": quantized_attention,
}
"""By operator of com.microsoft."""
