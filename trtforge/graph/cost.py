"""Floating-point operations of the nodes that do the work: 2 per multiply-accumulate.

    Conv           output elements * C/group * prod(kernel)         weight [M, C/group, k...]
    ConvTranspose  input elements * M/group * prod(kernel)          weight [C, M/group, k...]
    MatMul, Gemm   output elements * K
    Attention      B * heads * S * S_kv * (head size of Q + head size of V)
A node whose shapes are unknown is missing from the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx_graphsurgeon as gs

from trtforge.graph.edit import is_onnx_op

Shapes = Mapping[str, tuple[int, ...]]

GEMM_OPS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_TRANSPARENT_OPS = frozenset(
    ["Cast", "DequantizeLinear", "Identity", "QuantizeLinear", "Reshape", "Squeeze", "Transpose", "Unsqueeze"]
)


def constant_weight(node: gs.Node) -> tuple[int, gs.Constant] | None:
    """The constant operand of a Conv, ConvTranspose, Gemm or MatMul, also behind Q/DQ, Cast, Transpose or Reshape.

    Returns:
        The index of the node's input that leads to it, and the constant itself; the second operand is preferred. None
        where both operands are activations or the node is of another kind.
    """
    if node.op not in GEMM_OPS or not is_onnx_op(node):
        return None
    for index in (1, 0) if node.op in ("MatMul", "Gemm") else (1,):
        if index < len(node.inputs):
            tensor = node.inputs[index]
            while not isinstance(tensor, gs.Constant) and tensor.inputs and tensor.inputs[0].op in _TRANSPARENT_OPS:
                tensor = tensor.inputs[0].inputs[0]
            if isinstance(tensor, gs.Constant):
                return index, tensor
    return None


def gemm_flops(graph: gs.Graph, shapes: Shapes) -> dict[str, int]:
    """FLOPs of every Conv, ConvTranspose, Gemm and MatMul with a constant weight, by node name.

    Args:
        shapes: concrete shapes by tensor name (`infer_shapes_at`).
    """
    flops = {}
    for node in graph.nodes:
        if constant_weight(node) is not None:
            count = _gemm_flops(node, shapes)
            if count is not None:
                flops[node.name] = count
    return flops


def attention_flops(graph: gs.Graph, shapes: Shapes) -> dict[str, int]:
    """FLOPs of every MatMul of two activations and every Attention, by node name.

    Args:
        shapes: concrete shapes by tensor name (`infer_shapes_at`).
    """
    flops = {}
    for node in graph.nodes:
        if not is_onnx_op(node):
            continue
        count = None
        if node.op == "MatMul" and constant_weight(node) is None:
            count = _gemm_flops(node, shapes)
        elif node.op == "Attention":
            count = _attention_flops(node, shapes)
        if count is not None:
            flops[node.name] = count
    return flops


def shape_of(tensor: gs.Tensor, shapes: Shapes) -> tuple[int, ...] | None:
    """A tensor's concrete shape: from `shapes`, or its own where that is static."""
    if tensor.name in shapes:
        return shapes[tensor.name]
    if tensor.shape is None or any(not isinstance(dim, int) or dim < 0 for dim in tensor.shape):
        return None
    return tuple(tensor.shape)


def _gemm_flops(node: gs.Node, shapes: Shapes) -> int | None:
    first, second = (shape_of(tensor, shapes) for tensor in node.inputs[:2])
    output = shape_of(node.outputs[0], shapes)
    if node.op == "ConvTranspose":
        return None if first is None or second is None else 2 * math.prod(first) * math.prod(second[1:])
    if output is None:
        return None
    if node.op == "Conv":
        return None if second is None else 2 * math.prod(output) * math.prod(second[1:])
    if first:
        depth = first[0] if node.op == "Gemm" and node.attrs.get("transA", 0) else first[-1]
    elif second:
        depth = second[-1] if node.op == "Gemm" and node.attrs.get("transB", 0) else second[max(-2, -len(second))]
    else:
        return None
    return 2 * math.prod(output) * depth


def _attention_flops(node: gs.Node, shapes: Shapes) -> int | None:
    query, key, value = (shape_of(tensor, shapes) or () for tensor in node.inputs[:3])
    if not (query and key and value):
        return None
    if len(query) == 3:
        num_heads, num_kv_heads = int(node.attrs.get("q_num_heads", 0)), int(node.attrs.get("kv_num_heads", 0))
        if not num_heads or not num_kv_heads:
            return None
        batch, length, size = query[0], query[1], query[2] // num_heads
        kv_length, value_size = key[1], value[2] // num_kv_heads
    else:
        batch, num_heads, length, size = query
        kv_length, value_size = key[2], value[3]
    if len(node.inputs) > 4 and node.inputs[4].name:
        past = shape_of(node.inputs[4], shapes)
        if past is None:
            return None
        kv_length += past[2]
    return 2 * batch * num_heads * length * kv_length * (size + value_size)
