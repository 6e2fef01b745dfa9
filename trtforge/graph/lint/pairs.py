"""Steps of the fixer that bring Q/DQ into pairs: a float tensor, its QuantizeLinear, and DequantizeLinears that agree.

What remains of a quantized tensor after these steps is read by DequantizeLinear nodes only, as far as it can be.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.graph.edit import all_graphs, all_nodes, is_array, is_onnx_op, replace_uses
from trtforge.graph.lint.editor import Editor, set_input, set_inputs, set_outputs
from trtforge.graph.lint.params import (
    INT8,
    RANGES,
    UINT8,
    Array,
    QuantParams,
    constant_input,
    has_input,
    producer_of,
    read_params,
)
from trtforge.graph.signature import tensor_dtype

# Operators that move elements of their first input and leave their values alone; pooling and padding commute too.
MOVING_OPS = frozenset(
    [
        "DepthToSpace",
        "Expand",
        "Flatten",
        "Gather",
        "GatherElements",
        "GatherND",
        "Identity",
        "MaxPool",
        "Pad",
        "Reshape",
        "Resize",
        "Slice",
        "SpaceToDepth",
        "Split",
        "Squeeze",
        "Tile",
        "Transpose",
        "Unsqueeze",
    ]
)


def quantizer_of(tensor: gs.Tensor) -> gs.Node | None:
    """The QuantizeLinear that computes a tensor, if one does."""
    node = producer_of(tensor)
    return node if node is not None and node.op == "QuantizeLinear" and is_onnx_op(node) else None


def dequantizers_of(editor: Editor, quantize: gs.Node) -> list[gs.Node]:
    """The DequantizeLinear nodes that read what a QuantizeLinear gives."""
    codes = quantize.outputs[0]
    return [node for node in editor.readers(codes) if node.op == "DequantizeLinear" and node.inputs[0] is codes]


def is_moving(node: gs.Node) -> bool:
    """True for a node that commutes with quantization by one scale."""
    if node.op not in MOVING_OPS or not is_onnx_op(node) or not node.inputs or not node.outputs:
        return False
    if node.op == "Resize":
        mode = node.attrs.get("mode", "nearest")
        return bool(mode == "nearest" and node.attrs.get("coordinate_transformation_mode") != "tf_crop_and_resize")
    if node.op == "MaxPool":
        return len(node.outputs) == 1
    return node.op != "Pad" or not has_input(node, 2) or constant_input(node, 2) is not None


def write_zero_points(editor: Editor) -> None:
    """Step: QuantizeLinear gets the uint8 zero-point that ONNX means when there is none."""
    for _, node in editor.nodes("QuantizeLinear"):
        if has_input(node, 2) or node.attrs.get("output_dtype") or constant_input(node, 1) is None:
            continue
        scale = node.inputs[1].values
        zero = editor.constant(f"{node.outputs[0].name}_zero_point", np.zeros(scale.shape), UINT8)
        set_inputs(node, [*node.inputs[:2], zero])
        editor.record("omitted-zero-point", [node], "its zero-point of 0 is written, uint8 as ONNX means it")
    editor.apply()


def move_layout_ops(editor: Editor) -> None:
    """Step: what moves elements of a quantized tensor moves those of the float tensor in front of QuantizeLinear."""
    for node in all_nodes(editor.graph):
        if node.op == "Concat" and is_onnx_op(node):
            _move_concat(editor, node)
        elif is_moving(node) and quantizer_of(node.inputs[0]) is not None:
            _move_before(editor, node)
    outputs = editor.output_ids()
    stored = stored_nodes(list(all_nodes(editor.graph)))
    for holder in all_graphs(editor.graph):
        for node in reversed(holder.nodes):
            if id(node) in stored and not any(id(tensor) in outputs for tensor in node.outputs):
                _dequantize_before(editor, node)
    editor.apply()


def _one_scale(quantize: gs.Node) -> bool:
    scale = quantize.inputs[1]
    return bool(scale.values.size == 1 if is_array(scale) else scale.shape is not None and list(scale.shape) == [])


def _requantize(editor: Editor, quantize: gs.Node, node: gs.Node) -> None:
    """Let a node give floats, each followed by a QuantizeLinear like the given one."""
    source = quantize.inputs[0]
    floats = []
    for result in list(node.outputs):
        moved = editor.variable(f"{result.name}_float", source.dtype, result.shape)
        floats.append(moved)
        inputs = [moved, *quantize.inputs[1:]]
        again = editor.node("QuantizeLinear", f"{node.name}_QuantizeLinear", inputs, [result], **quantize.attrs)
        editor.after(node, again)
    set_outputs(node, floats)
    editor.record("layout-between-qdq", [node], f"{node.op} moved in front of QuantizeLinear; same numbers")


def _move_before(editor: Editor, node: gs.Node) -> None:
    quantize = quantizer_of(node.inputs[0])
    assert quantize is not None
    if not _one_scale(quantize):
        return
    if node.op == "Pad" and node.attrs.get("mode", "constant") == "constant":
        params = read_params(quantize)
        if params is None or params.dtype not in RANGES:
            return
        codes = constant_input(node, 2) if has_input(node, 2) else np.zeros((), params.dtype)
        assert codes is not None
        values = params.dequantize(codes).reshape(())
        pad = editor.constant(f"{node.name}_value", values, tensor_dtype(quantize.inputs[0].dtype) or np.float32)
        set_inputs(node, [*node.inputs[:2], pad, *node.inputs[3:]])
    set_input(node, 0, quantize.inputs[0])
    _requantize(editor, quantize, node)


def _move_concat(editor: Editor, node: gs.Node) -> None:
    quantizers = [quantizer_of(tensor) for tensor in node.inputs]
    params = [None if quantize is None else read_params(quantize) for quantize in quantizers]
    first = params[0] if params else None
    if first is None or first.axis is not None or not all(p is not None and p.is_same_as(first) for p in params):
        return
    assert quantizers[0] is not None
    set_inputs(node, [quantize.inputs[0] for quantize in quantizers if quantize is not None])
    _requantize(editor, quantizers[0], node)


def stored_nodes(nodes: Sequence[gs.Node]) -> set[int]:
    """Identities of the nodes, of these moving ones in order, that stand between stored codes and DequantizeLinear.

    8-bit constants that reach no DequantizeLinear are plain numbers.
    """
    codes: set[int] = set()
    for node in nodes:
        first = node.inputs[0]
        if is_moving(node) and (id(first) in codes or (is_array(first) and first.values.dtype in (INT8, UINT8))):
            codes.update(id(tensor) for tensor in node.outputs)
    found: set[int] = set()
    for node in reversed(nodes):
        readers = [reader for tensor in node.outputs if id(tensor) in codes for reader in tensor.outputs]
        if any(id(reader) in found or (reader.op == "DequantizeLinear" and is_onnx_op(reader)) for reader in readers):
            found.add(id(node))
    return found


def _dequantize_before(editor: Editor, node: gs.Node) -> None:
    """Dequantize in front of a node that moves stored codes, instead of after it."""
    if node.op == "Pad" or len(node.outputs) != 1:
        return
    readers = editor.readers(node.outputs[0])
    params = [read_params(reader) if reader.op == "DequantizeLinear" else None for reader in readers]
    first = params[0] if params else None
    if first is None or first.axis is not None or not all(p is not None and p.is_same_as(first) for p in params):
        return
    source, scale = node.inputs[0], readers[0].inputs[1]
    floats = editor.variable(f"{source.name}_dequantized", scale.dtype, source.shape)
    inputs = [source, *readers[0].inputs[1:]]
    added = editor.node("DequantizeLinear", f"{node.name}_DequantizeLinear", inputs, [floats], **readers[0].attrs)
    editor.before(node, added)
    set_input(node, 0, floats)
    result = readers[0].outputs[0]
    set_outputs(node, [result])
    for reader in readers:
        editor.remove(reader)
        if reader is not readers[0]:
            replace_uses(reader.outputs[0], result)
    editor.record("layout-between-qdq", [node], f"{node.op} moved behind DequantizeLinear; same numbers")


def agree_pairs(editor: Editor) -> None:
    """Step: a DequantizeLinear takes the parameters of its QuantizeLinear; the difference becomes Mul and Add."""
    for _, quantize in editor.nodes("QuantizeLinear"):
        given = read_params(quantize)
        if given is None or given.axis is not None or not given.scale.all():
            continue
        for dequantize in dequantizers_of(editor, quantize):
            wanted = read_params(dequantize)
            if wanted is None or wanted.axis is not None or wanted.dtype != given.dtype or wanted.is_same_as(given):
                continue
            _agree(editor, quantize, dequantize, given, wanted)
    editor.apply()


def _agree(editor: Editor, quantize: gs.Node, dequantize: gs.Node, given: QuantParams, wanted: QuantParams) -> None:
    dtype, is_close = wanted.scale.dtype, given.is_same_as(wanted, given.rounding)
    if is_close and dtype != given.scale.dtype:
        # A rounded copy in another type.
        return
    ratio = wanted.scale.astype(np.float64) / given.scale.astype(np.float64)
    shift = (given.zero_point.astype(np.float64) - wanted.zero_point) * wanted.scale.astype(np.float64)
    with np.errstate(over="ignore", under="ignore"):
        stored = np.array([given.scale.astype(dtype), ratio.astype(dtype), shift.astype(dtype)])
    # Half precision may hold neither the scale nor the ratio.
    if not np.isfinite(stored).all() or abs(stored[0].astype(np.float64) / given.scale - 1) > given.rounding:
        return
    scale = editor.constant(dequantize.inputs[1].name, given.scale, dtype)
    zero = editor.constant(f"{dequantize.outputs[0].name}_zero_point", given.zero_point, given.dtype)
    set_inputs(dequantize, [dequantize.inputs[0], scale, zero])
    if is_close:
        editor.record("unequal-pair", [dequantize], "takes the scale of its QuantizeLinear; within half a step")
        return
    steps = [("Mul", ratio, 1.0), ("Add", shift, 0.0)]
    steps = [(op, value, neutral) for op, value, neutral in steps if value != neutral]
    result = dequantize.outputs[0]
    current = editor.variable(f"{result.name}_paired", dtype, result.shape)
    set_outputs(dequantize, [current])
    for index, (op, value, _) in enumerate(steps):
        is_last = index == len(steps) - 1
        output = result if is_last else editor.variable(f"{result.name}_scaled", dtype, result.shape)
        operand = editor.constant(f"{result.name}_{op.lower()}", value, dtype)
        editor.after(dequantize, editor.node(op, f"{dequantize.name}_{op}", [current, operand], [output]))
        current = output
    words = " and ".join(op for op, _, _ in steps)
    editor.record(
        "unequal-pair", [dequantize], f"takes the scale of {quantize.name!r}; {words} makes up for it; same numbers"
    )


def collapse_double_pairs(editor: Editor) -> None:
    """Step: DequantizeLinear -> QuantizeLinear with equal parameters is nothing."""
    outputs = editor.output_ids()
    for _, quantize in editor.nodes("QuantizeLinear"):
        before = producer_of(quantize.inputs[0])
        if before is None or before.op != "DequantizeLinear" or not is_onnx_op(before):
            continue
        first, second = read_params(before), read_params(quantize)
        if first is None or second is None or not first.is_same_as(second) or id(quantize.outputs[0]) in outputs:
            continue
        replace_uses(quantize.outputs[0], before.inputs[0])
        editor.remove(quantize)
        editor.record("double-qdq", [quantize], f"dropped: {before.name!r} has the same codes; same numbers")
    editor.apply()


def merge_duplicates(editor: Editor) -> None:
    """Step: QuantizeLinear nodes of one tensor with equal parameters become one with several readers."""
    outputs = editor.output_ids()
    first: dict[tuple[object, ...], gs.Node] = {}
    for holder, quantize in editor.nodes("QuantizeLinear"):
        key = duplicate_key(holder, quantize)
        if key is None or id(quantize.outputs[0]) in outputs:
            continue
        kept = first.setdefault(key, quantize)
        if kept is not quantize:
            replace_uses(quantize.outputs[0], kept.outputs[0])
            editor.remove(quantize)
            editor.record("duplicate-quantize", [quantize], f"merged into {kept.name!r}; same numbers")
    editor.apply()


def duplicate_key(holder: gs.Graph, quantize: gs.Node) -> tuple[object, ...] | None:
    """Equal for QuantizeLinear nodes that do the same; None where that cannot be told."""
    params = read_params(quantize)
    if params is None:
        return None
    numbers: tuple[Array, Array] = (params.scale, params.zero_point)
    layout = (params.dtype, params.axis, params.block_size, params.scale.dtype)
    return (id(holder), id(quantize.inputs[0]), *layout, *(array.tobytes() for array in numbers))
