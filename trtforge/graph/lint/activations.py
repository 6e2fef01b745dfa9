"""Steps of the fixer that give activations what TensorRT computes with: int8, one scale, a zero-point of 0.

A QuantizeLinear also clamps, and a tool may have left out a Relu because a zero-point of 0 in uint8 does its work.
So where the new range is wider than the old one by more than half a step, the clamp is written in front of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trtforge.graph.edit import is_array, is_onnx_op
from trtforge.graph.lint.editor import Editor, set_input, set_inputs, set_outputs
from trtforge.graph.lint.pairs import dequantizers_of, is_moving
from trtforge.graph.lint.params import (
    INT8,
    INT8_MAX,
    INT8_MIN,
    RANGES,
    UINT8,
    Array,
    QuantParams,
    constant_input,
    float_type_of,
    producer_of,
    read_params,
)
from trtforge.graph.signature import tensor_dtype

_NON_NEGATIVE_OPS = frozenset(["Abs", "Exp", "HardSigmoid", "Relu", "Sigmoid", "Softmax", "Softplus"])
_KEEPING_SIGN_OPS = frozenset(["AveragePool", "GlobalAveragePool", "GlobalMaxPool", "ReduceMax", "ReduceMean"])
# Nodes looked at in front of a tensor to learn that it is never negative.
_MAX_STEPS = 16
WIDE_TYPES = (np.dtype(np.int16), np.dtype(np.uint16))


def mend_negative_scales(editor: Editor) -> None:
    """Step: a pair with a negative scale and a zero-point of 0 takes its absolute value."""
    for _, quantize in editor.nodes("QuantizeLinear"):
        params = read_params(quantize)
        partners = dequantizers_of(editor, quantize)
        if params is None or not params.is_symmetric_int8 or params.axis is not None or not params.scale < 0:
            continue
        if len(partners) < len(editor.readers(quantize.outputs[0])) or not _agree(params, partners):
            continue
        _set_scale(editor, [quantize, *partners], np.abs(params.scale))
        editor.record(
            "invalid-scale", [quantize, *partners], "the scale takes its absolute value; within one step at the ends"
        )
    editor.apply()


def _agree(params: QuantParams, partners: list[gs.Node]) -> bool:
    found = [read_params(node) for node in partners]
    return all(other is not None and other.is_same_as(params, params.rounding) for other in found)


def _set_scale(editor: Editor, nodes: list[gs.Node], scale: Array) -> None:
    """Give nodes a scale, each in its own type; those of one type share the initializer."""
    stored: dict[np.dtype[Any], gs.Constant] = {}
    for node in nodes:
        dtype = node.inputs[1].values.dtype
        if dtype not in stored:
            stored[dtype] = editor.constant(node.inputs[1].name, scale, dtype)
        set_input(node, 1, stored[dtype])


def make_symmetric(editor: Editor) -> None:
    """Step: pairs become int8 with one scale and a zero-point of 0."""
    outputs = editor.output_ids()
    for _, quantize in editor.nodes("QuantizeLinear"):
        params = read_params(quantize)
        partners = dequantizers_of(editor, quantize)
        if params is None or params.dtype not in (INT8, UINT8) or not params.is_valid or params.block_size:
            continue
        if (params.is_symmetric_int8 and params.axis is None) or isinstance(quantize.inputs[0], gs.Constant):
            continue
        codes = quantize.outputs[0]
        is_paired = bool(partners) and len(partners) == len(editor.readers(codes)) and id(codes) not in outputs
        if not is_paired or not _agree(params, partners):
            continue
        _make_symmetric(editor, quantize, partners, params)
    editor.apply()


def _make_symmetric(editor: Editor, quantize: gs.Node, partners: list[gs.Node], params: QuantParams) -> None:
    rule = "unsigned-zero-point" if params.dtype == UINT8 else "nonzero-zero-point"
    if params.axis is not None:
        rule = "activation-scale-per-channel"
    smallest, largest = RANGES[params.dtype]
    scales = params.scale.astype(np.float64)
    low, high = (smallest - params.zero_point) * scales, (largest - params.zero_point) * scales
    scale = np.maximum(high.max() / INT8_MAX, low.min() / INT8_MIN)
    clamp = _clamp(editor, quantize, low, high, float(scale), params)
    if clamp is None:
        return
    coarser = float(scale / scales.max())
    if params.axis is None and abs(coarser - 1) < 1e-9:
        done = "int8 codes are the uint8 ones less 128; same numbers"
    else:
        bound = "one scale, the largest" if params.axis is not None else f"int8 with scale {float(scale):.6g}"
        done = f"{bound}, which covers the same range{clamp}; within one step, {coarser:.3g} times the old one"
    codes = quantize.outputs[0]
    codes.dtype = INT8
    _set_scale(editor, [quantize, *partners], scale)
    zero = editor.constant(f"{codes.name}_zero_point", 0, np.int8)
    for node in [quantize, *partners]:
        set_inputs(node, [*node.inputs[:2], zero])
        node.attrs.pop("axis", None)
    quantize.attrs.pop("output_dtype", None)
    editor.record(rule, [quantize, *partners], done)


def _clamp(editor: Editor, quantize: gs.Node, low: Array, high: Array, scale: float, params: QuantParams) -> str | None:
    """Put in front of a QuantizeLinear what it clamped and will not any more.

    Returns:
        The words for it, "" where nothing is needed; None where it cannot be written.
    """
    source = quantize.inputs[0]
    dtype = float_type_of(source, params.scale)
    if dtype is None:
        return None
    needs_low = bool(np.any(low - INT8_MIN * scale > scale / 2)) and not (np.all(low <= 0) and _is_non_negative(source))
    needs_high = bool(np.any(INT8_MAX * scale - high > scale / 2))
    if not needs_low and not needs_high:
        return ""
    if params.axis is not None:
        if source.shape is None or not -len(source.shape) <= params.axis < len(source.shape):
            return None
        axis = params.axis % len(source.shape)
        low, high = (bound.reshape([-1] + [1] * (len(source.shape) - axis - 1)) for bound in (low, high))
        chain = [("Min", [high])] if needs_high else []
        chain += [("Max", [low])] if needs_low else []
    elif needs_low and not needs_high and not low.any():
        chain = [("Relu", [])]
    else:
        chain = [("Clip", [low, high] if needs_high else [low])]
    for op, bounds in chain:
        result = editor.variable(f"{quantize.name}_clamped", dtype, source.shape)
        operands = [editor.constant(f"{quantize.name}_bound", bound, dtype) for bound in bounds]
        editor.before(quantize, editor.node(op, f"{quantize.name}_{op}", [source, *operands], [result]))
        source = result
    set_input(quantize, 0, source)
    return f", behind {' and '.join(op for op, _ in chain)}, since it clamped"


def _is_non_negative(tensor: gs.Tensor) -> bool:
    for _ in range(_MAX_STEPS):
        node = producer_of(tensor)
        if node is None or not is_onnx_op(node):
            return False
        if node.op in _NON_NEGATIVE_OPS:
            return True
        if node.op == "Clip":
            bound = constant_input(node, 1)
            return bound is not None and bool(np.all(bound >= 0))
        if node.op == "Pad" or not (is_moving(node) or node.op in _KEEPING_SIGN_OPS):
            return False
        tensor = node.inputs[0]
    return False


def spell_out(editor: Editor) -> None:
    """Step: quantization that TensorRT has no type for, and that no pair needs, becomes float arithmetic.

    1. Codes other than symmetric int8 that something else than DequantizeLinear reads, or that are an output.
    2. DequantizeLinear of codes other than symmetric int8 that no QuantizeLinear gave, for instance a uint8 input.
    3. Pairs of 16-bit types: their steps are finer than float16's, so only the clamp is kept.
    """
    outputs = editor.output_ids()
    for _, quantize in editor.nodes("QuantizeLinear"):
        params = read_params(quantize)
        if params is None or params.axis is not None or params.dtype not in RANGES or not params.is_valid:
            continue
        if params.is_symmetric_int8 or float_type_of(quantize.inputs[0], params.scale) is None:
            continue
        codes = quantize.outputs[0]
        partners = [node for node in dequantizers_of(editor, quantize) if _agree(params, [node])]
        if params.dtype in WIDE_TYPES:
            _drop_wide_pairs(editor, quantize, partners, params)
            partners = []
        if id(codes) in outputs or len(partners) < len(editor.readers(codes)):
            _spell_quantize(editor, quantize, partners, params)
    for _, dequantize in editor.nodes("DequantizeLinear"):
        _spell_dequantize(editor, dequantize)
    editor.apply()


def _drop_wide_pairs(editor: Editor, quantize: gs.Node, partners: list[gs.Node], params: QuantParams) -> None:
    source = quantize.inputs[0]
    for node in partners:
        dtype = node.inputs[1].values.dtype
        bounds = (np.array(RANGES[params.dtype]) - params.zero_point) * params.scale.astype(np.float64)
        result = node.outputs[0]
        limits = [editor.constant(f"{node.name}_bound", bound, dtype) for bound in bounds]
        if float_type_of(source, params.scale) != dtype:
            continue
        editor.after(node, editor.node("Clip", f"{node.name}_Clip", [source, *limits], [result]))
        editor.remove(node)
        editor.record(
            "unsupported-type", [quantize, node], f"the {params.dtype} pair became a Clip to its range; within one step"
        )


def _spell_quantize(editor: Editor, quantize: gs.Node, partners: list[gs.Node], params: QuantParams) -> None:
    """Codes by Div, Round, Add, Clip and Cast; the pair keeps a QuantizeLinear of its own."""
    source, codes = quantize.inputs[0], quantize.outputs[0]
    dtype = float_type_of(source, params.scale)
    assert dtype is not None
    low, high = RANGES[params.dtype]
    steps: list[tuple[str, list[Any]]] = [("Div", [params.scale]), ("Round", [])]
    steps += [("Add", [params.zero_point])] if params.zero_point.any() else []
    steps.append(("Clip", [low, high]))
    current = source
    for op, operands in steps:
        constants = [editor.constant(f"{codes.name}_{op.lower()}", value, dtype) for value in operands]
        result = editor.variable(f"{codes.name}_{op}", dtype, source.shape)
        editor.before(quantize, editor.node(op, f"{quantize.name}_{op}", [current, *constants], [result]))
        current = result
    paired = editor.variable(f"{codes.name}_paired", params.dtype, codes.shape)
    set_outputs(quantize, [paired])
    for node in partners:
        set_input(node, 0, paired)
    to = onnx.helper.np_dtype_to_tensor_dtype(params.dtype)
    editor.before(quantize, editor.node("Cast", f"{quantize.name}_Cast", [current], [codes], to=to))
    rule = {UINT8: "unsigned-zero-point", INT8: "nonzero-zero-point"}.get(params.dtype, "unsupported-type")
    editor.record(rule, [quantize], f"{params.dtype} codes that are read as numbers come from arithmetic; same numbers")


def _spell_dequantize(editor: Editor, node: gs.Node) -> None:
    """(Cast(q) - zero_point) * scale."""
    params, codes = read_params(node), node.inputs[0]
    source = producer_of(codes)
    is_paired = source is not None and source.op == "QuantizeLinear" and id(source) not in editor.removed
    is_int32 = params is not None and params.dtype == np.int32
    if params is None or is_array(codes) or is_paired or params.is_symmetric_int8:
        return
    if params.axis is not None or not (is_int32 or params.dtype in RANGES):
        return
    dtype, result = params.scale.dtype, node.outputs[0]
    to = onnx.helper.np_dtype_to_tensor_dtype(dtype)
    steps: list[tuple[str, Array]] = [("Sub", params.zero_point)] if params.zero_point.any() else []
    steps.append(("Mul", params.scale))
    current = editor.variable(f"{result.name}_Cast", dtype, codes.shape)
    editor.before(node, editor.node("Cast", f"{node.name}_Cast", [codes], [current], to=to))
    for op, value in steps:
        is_last = op == "Mul"
        output = result if is_last else editor.variable(f"{result.name}_{op}", dtype, codes.shape)
        operand = editor.constant(f"{result.name}_{op.lower()}", value, dtype)
        editor.before(node, editor.node(op, f"{node.name}_{op}", [current, operand], [output]))
        current = output
    editor.remove(node)
    rule = {UINT8: "unsigned-zero-point", INT8: "nonzero-zero-point", np.dtype(np.int32): "int32-dequantize"}
    editor.record(
        rule.get(params.dtype, "unsupported-type"), [node], "became Cast, Sub and Mul in floating point; same numbers"
    )


def match_scale_types(editor: Editor) -> None:
    """Step: a scale takes the type of the tensor that it quantizes, or the tensor that of the scale."""
    for _, quantize in editor.nodes("QuantizeLinear"):
        params, source = read_params(quantize), quantize.inputs[0]
        dtype = tensor_dtype(source.dtype)
        if params is None or dtype is None or dtype == params.scale.dtype or not params.is_valid:
            continue
        with np.errstate(over="ignore", under="ignore"):
            scale = params.scale.astype(dtype)
        partners = dequantizers_of(editor, quantize)
        exact = params.scale.astype(np.float64)
        is_close = bool(np.all(np.abs(scale.astype(np.float64) - exact) <= exact * params.rounding))
        if is_close and _agree(params, partners):
            _set_scale(editor, partners, scale)
            set_input(quantize, 1, editor.constant(quantize.inputs[1].name, scale, dtype))
            editor.record("scale-type", [quantize], f"the scale is stored as {dtype}; within one step")
            continue
        widened = editor.variable(f"{source.name}_{params.scale.dtype}", params.scale.dtype, source.shape)
        to = onnx.helper.np_dtype_to_tensor_dtype(params.scale.dtype)
        editor.before(quantize, editor.node("Cast", f"{quantize.name}_Cast", [source], [widened], to=to))
        set_input(quantize, 0, widened)
        editor.record("scale-type", [quantize], f"the tensor is cast to {params.scale.dtype}; same numbers")
    editor.apply()
