"""Steps of the fixer for stored tensors: int8 codes, scales per output channel, float biases."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.graph.edit import is_array, is_onnx_op
from trtforge.graph.lint.activations import WIDE_TYPES
from trtforge.graph.lint.editor import Editor, set_input, set_inputs
from trtforge.graph.lint.params import (
    INT8,
    INT8_MAX,
    INT8_MIN,
    RANGES,
    UINT8,
    ZERO_CHANNEL_SCALE,
    Array,
    QuantParams,
    producer_of,
    quantize_symmetric,
    read_params,
)

WEIGHTED_OPS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def channel_axis(node: gs.Node, rank: int) -> int:
    """The axis of a weighted node's second input that holds its output channels."""
    if node.op == "Gemm":
        return 0 if node.attrs.get("transB", 0) else 1
    return {"Conv": 0, "ConvTranspose": 1, "MatMul": rank - 1}[node.op]


def wanted_axes(dequantize: gs.Node, rank: int) -> list[tuple[gs.Node, int]]:
    """The weighted nodes that read a dequantized weight, through a Transpose too, and the axis that each expects."""
    result = dequantize.outputs[0]
    found = []
    for reader in {id(node): node for node in result.outputs}.values():
        if is_weighted(reader) and reader.inputs[1] is result and channel_axis(reader, rank) < rank:
            found.append((reader, channel_axis(reader, rank)))
        elif reader.op == "Transpose" and is_onnx_op(reader) and reader.outputs:
            order = reader.attrs.get("perm", list(range(rank))[::-1])
            turned = reader.outputs[0]
            if not isinstance(order, list) or sorted(order) != list(range(rank)):
                continue
            found += [
                (user, order[channel_axis(user, rank)])
                for user in {id(node): node for node in turned.outputs}.values()
                if is_weighted(user) and user.inputs[1] is turned and channel_axis(user, rank) < rank
            ]
    return found


def is_weighted(node: gs.Node) -> bool:
    """True for an operator whose second input can be a weight."""
    return node.op in WEIGHTED_OPS and is_onnx_op(node) and len(node.inputs) > 1


def store_quantized(editor: Editor) -> None:
    """Step: a stored float tensor behind QuantizeLinear is stored as its codes."""
    outputs = editor.output_ids()
    for _, node in editor.nodes("QuantizeLinear"):
        params, source = read_params(node), node.inputs[0]
        if params is None or not is_array(source) or params.dtype not in RANGES or not params.is_valid:
            continue
        if not params.fits(source.values.shape) or id(node.outputs[0]) in outputs:
            continue
        node.outputs[0].to_constant(params.quantize(source.values))
        editor.remove(node)
        editor.record("float-weight", [node], f"its codes are stored as {params.dtype}; same numbers")
    editor.apply()


def store_dequantized(editor: Editor) -> None:
    """Step: stored int32 and 16-bit codes, and scalars, become the float tensor that they stand for."""
    outputs = editor.output_ids()
    for _, node in editor.nodes("DequantizeLinear"):
        params, codes = read_params(node), node.inputs[0]
        if params is None or not is_array(codes):
            continue
        is_wide = params.dtype in (np.dtype(np.int32), *WIDE_TYPES)
        if not is_wide and (codes.values.ndim > 0 or params.dtype not in (INT8, UINT8)):
            continue
        if not params.fits(codes.values.shape) or id(node.outputs[0]) in outputs:
            continue
        node.outputs[0].to_constant(params.dequantize(codes.values).astype(params.scale.dtype))
        editor.remove(node)
        wide = "int32-dequantize" if params.dtype == np.int32 else "unsupported-type"
        rule = wide if is_wide else "quantized-scalar"
        editor.record(rule, [node], f"stored as {params.scale.dtype}; same numbers")
    editor.apply()


def requantize_weights(editor: Editor) -> None:
    """Step: stored codes become symmetric int8, with scales along the output channels where they are per channel."""
    for _, node in editor.nodes("DequantizeLinear"):
        params, codes = read_params(node), node.inputs[0]
        if params is None or not is_array(codes) or params.dtype not in (INT8, UINT8) or params.block_size:
            continue
        if params.fits(codes.values.shape) and np.isfinite(params.scale.astype(np.float64)).all():
            _requantize(editor, node, params)
    editor.apply()


def _requantize(editor: Editor, node: gs.Node, params: QuantParams) -> None:
    codes = node.inputs[0].values
    wanted = wanted_axes(node, codes.ndim)
    is_clean = params.is_symmetric_int8 and params.is_valid
    has_wrong_axis = params.axis is not None and any(axis != params.axis % codes.ndim for _, axis in wanted)
    if is_clean and not has_wrong_axis:
        return
    shifted = None if has_wrong_axis else shift(codes, params)
    if shifted is not None:
        _store(editor, node, *shifted, params.axis)
        editor.record(_rule(params), [node], "its codes are shifted to int8 with a zero-point of 0; same numbers")
        return
    values = params.dequantize(codes)
    axes: list[int | None] = [*dict.fromkeys(axis for _, axis in wanted)] or [params.axis]
    for axis in axes[1:]:
        # Each further axis gets a copy for the nodes that expect it.
        copy = _copy_for(editor, node, [user for user, other in wanted if other == axis])
        _store(editor, copy, *quantize_symmetric(values, axis), axis)
    _store(editor, node, *quantize_symmetric(values, axes[0]), axes[0])
    along = f"along axis {axes[0]}" if axes[0] is not None else "with one scale"
    rule = "weight-axis" if has_wrong_axis else _rule(params)
    editor.record(rule, [node], f"quantized again {along} as symmetric int8; within one step")


def _rule(params: QuantParams) -> str:
    if not params.is_valid:
        return "invalid-scale"
    return "unsigned-zero-point" if params.dtype == UINT8 else "nonzero-zero-point"


def shift(codes: Array, params: QuantParams) -> tuple[Array, Array] | None:
    """Codes less their zero-points and positive scales, where that is exact."""
    scale = params.spread(params.scale, codes.shape).astype(np.float64)
    shifted = codes.astype(np.int32) - params.spread(params.zero_point, codes.shape)
    shifted = np.where(scale == 0, 0, np.where(scale < 0, -shifted, shifted))
    if shifted.size and (shifted.min() < INT8_MIN or shifted.max() > INT8_MAX):
        return None
    positive = np.where(params.scale == 0, ZERO_CHANNEL_SCALE, np.abs(params.scale.astype(np.float32)))
    return shifted.astype(np.int8), positive


def _store(editor: Editor, node: gs.Node, codes: Array, scale: Array, axis: int | None) -> None:
    name, dtype = node.inputs[0].name, node.inputs[1].values.dtype
    stored = editor.constant(f"{name}_int8", codes, np.int8)
    scales = editor.constant(node.inputs[1].name, scale, dtype)
    set_inputs(node, [stored, scales, editor.constant(f"{name}_zero_point", np.zeros(scale.shape), np.int8)])
    if axis is None:
        node.attrs.pop("axis", None)
    else:
        node.attrs["axis"] = axis


def _copy_for(editor: Editor, node: gs.Node, users: list[gs.Node]) -> gs.Node:
    """A second DequantizeLinear for these readers, and a second Transpose where one lies between."""
    result = node.outputs[0]
    output = editor.variable(f"{result.name}_copy", result.dtype, result.shape)
    copy = editor.node("DequantizeLinear", f"{node.name}_copy", list(node.inputs), [output], **node.attrs)
    editor.after(node, copy)
    for user in users:
        between = producer_of(user.inputs[1])
        if between is node or between is None:
            set_input(user, 1, output)
            continue
        turned = editor.variable(f"{between.outputs[0].name}_copy", result.dtype, user.inputs[1].shape)
        again = editor.node("Transpose", f"{between.name}_copy", [output], [turned], **between.attrs)
        editor.before(user, again)
        set_input(user, 1, turned)
    return copy
