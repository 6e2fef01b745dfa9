"""Attention spelled as MatMul, Softmax, MatMul: where Q/DQ makes its fused kernel INT8, and where it ends the fusion.

    S = Q K^T,  P = Softmax(S * scale + mask),  O = P V          Q [..., S_q, D], K^T [..., D, S_kv], V [..., S_kv, D]

TensorRT's rules, confirmed on compiled plans of TensorRT-RTX 1.7.1: pairs on all four operands Q, K^T, P and V (on two
of them alone they end the fusion), and on the result O, so the projection that reads it is quantized; nothing between
Softmax and the second product; one head size of 16, 32 or 64; at most 512 keys in every profile. The number of queries
is free, except that a single one is never fused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import onnx_graphsurgeon as gs

from trtforge.graph.cost import Shapes, shape_of

# TensorRT, "fused multi-head attention" in INT8.
MAX_KEYS = 512
HEAD_SIZES = (16, 32, 64)

LAYOUT_OPS = frozenset(("Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"))
# What may lie between the first product and the Softmax: scale and mask.
_SCORE_OPS = frozenset(("Add", "Cast", "Div", "Mul", "Sub", "Where")) | LAYOUT_OPS
# Producers looked at per Softmax: scale, mask, layout and guard are a handful, a mask's own arithmetic a dozen.
_MAX_STEPS = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Attention:
    """Two products around a Softmax.

    Attributes:
        scores: the node Q K^T.
        context: the node P V.
        readers: the nodes that read O, layout operators between.
        is_output: O is an output of the model.
        is_softmax_shared: something else reads P, or it is an output of the model.
        guard: the node between Softmax and P V, or None.
    """

    scores: gs.Node
    context: gs.Node
    readers: tuple[gs.Node, ...]
    is_output: bool
    is_softmax_shared: bool
    guard: gs.Node | None

    @property
    def nodes(self) -> tuple[gs.Node, gs.Node]:
        """Both products."""
        return self.scores, self.context


def find_attentions(graph: gs.Graph) -> list[Attention]:
    """Every attention of the main graph, in the order of its second product."""
    found = []
    outputs = {tensor.name for tensor in graph.outputs}
    for node in graph.nodes:
        if node.op != "MatMul" or not all(tensor.inputs for tensor in node.inputs):
            continue
        producer = node.inputs[0].inputs[0]
        guard = producer if producer.op in ("Where", "Cast", *LAYOUT_OPS) else None
        softmax = _softmax_behind(producer)
        scores = None if softmax is None else _scores_product(softmax)
        if scores is not None:
            readers, is_output = _readers(node.outputs[0], outputs)
            softmax_output = node.inputs[0]
            is_shared = len(softmax_output.outputs) > 1 or softmax_output.name in outputs
            found.append(Attention(scores, node, readers, is_output, is_shared, guard))
    return found


def attention_reason(attention: Attention, shapes: Shapes, largest: Shapes, quantized: Collection[str]) -> str | None:
    """Why Q/DQ would end the attention's fusion, or None.

    Args:
        attention: of the graph.
        shapes: sizes by tensor name at a profile's opt.
        largest: the same at the largest sizes of all profiles.
        quantized: names of the nodes that are quantized.
    """
    if attention.guard is not None:
        return f"{attention.guard.op} {attention.guard.name!r} stands between its Softmax and the second product"
    if attention.is_softmax_shared:
        return "its Softmax is read by others as well"
    query, value = shape_of(attention.scores.inputs[0], shapes), shape_of(attention.context.inputs[1], shapes)
    keys = shape_of(attention.context.inputs[1], largest)
    if not query or not value or not keys:
        return "its sizes are unknown"
    if query[-1] != value[-1] or query[-1] not in HEAD_SIZES:
        return f"its head sizes are {query[-1]} and {value[-1]}; INT8 attention needs one of 16, 32 or 64"
    if keys[-2] > MAX_KEYS:
        return f"it has up to {keys[-2]} keys; INT8 attention takes {MAX_KEYS}"
    if query[-2] == 1:
        return "it has a single query"
    if attention.is_output:
        return "its result is an output of the model, in the float type"
    float_reader = next((node for node in attention.readers if node.name not in quantized), None)
    if float_reader is not None:
        return f"{float_reader.op} {float_reader.name!r} reads its result in the float type"
    return None


def _softmax_behind(node: gs.Node) -> gs.Node | None:
    """The Softmax over the last axis that gives a product's first operand, possibly through a guard of masked rows."""
    for _ in range(_MAX_STEPS):
        if node.op == "Softmax":
            rank = len(node.outputs[0].shape or ())
            return node if node.attrs.get("axis", -1) in (-1, rank - 1) else None
        index = 2 if node.op == "Where" else 0
        if node.op not in ("Where", "Cast", *LAYOUT_OPS) or not node.inputs[index].inputs:
            return None
        node = node.inputs[index].inputs[0]
    return None


def _scores_product(softmax: gs.Node) -> gs.Node | None:
    """The product of two activations that a Softmax normalises, through scale and mask; the nearest one."""
    pending = list(softmax.inputs)
    for _ in range(_MAX_STEPS):
        if not pending:
            return None
        tensor = pending.pop(0)
        for producer in tensor.inputs:
            if producer.op == "MatMul":
                if not any(isinstance(operand, gs.Constant) for operand in producer.inputs):
                    return producer
            elif producer.op in _SCORE_OPS:
                # The first input of a Where is its condition.
                pending.extend(producer.inputs[1:] if producer.op == "Where" else producer.inputs)
    return None


def _readers(tensor: gs.Tensor, outputs: Collection[str]) -> tuple[tuple[gs.Node, ...], bool]:
    """The nodes that read a tensor, also through layout operators, each once; and whether an output does."""
    readers: dict[int, gs.Node] = {}
    is_output = False
    pending = [tensor]
    while pending:
        current = pending.pop()
        is_output |= current.name in outputs
        for node in current.outputs:
            if node.op in LAYOUT_OPS:
                pending.extend(node.outputs)
            else:
                readers[id(node)] = node
    return tuple(readers.values()), is_output
