"""Attention: softmax(scale Q K^T + mask) V, as the operator of ONNX or as two products around a Softmax.

    Q [B, N, S, D], K^T [B, N, D, T] -> MatMul -> scale -> mask -> Softmax -> guard
        -> MatMul with V [B, N, T, D] -> [B, N, S, D]

Scale is Mul or Div by a number, before the mask. The mask is an Add, or a Where between the scores and a low number.
The guard is Where(IsNaN(p), 0, p), which PyTorch writes for rows in which every key is hidden. The core needs no
projections: where rotary embedding or a cache stands between, query, key and value are taken as they arrive, and say
what stands there.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.fusion.heads import follow_heads
from trtforge.fusion.linear import Linears
from trtforge.fusion.masks import HIDDEN, explain_mask, fill_of
from trtforge.fusion.regions import Attention, Heads, Linear, MaskTerm, Stop
from trtforge.fusion.sizes import same_size
from trtforge.fusion.view import StoppedError, View, number_of, op_name, perm_of, producer_of, scaled_input, source_of
from trtforge.graph.signature import tensor_dtype

# Nodes between Q K^T and Softmax, and between P V and the output projection.
_MAX_STEPS = 16
_LABELS = {4: ("B", "N", "S", "D"), 3: ("BN", "S", "D")}


@dataclasses.dataclass(slots=True)
class _Core:
    """The arithmetic of one attention."""

    scores: gs.Node
    softmax: gs.Node
    context: gs.Node
    scale: float
    terms: list[MaskTerm]
    masks: list[gs.Tensor]
    nodes: list[gs.Node]


def looks_like_attention(view: View, node: gs.Node) -> bool:
    """True for an `Attention` node, and for a Softmax that a product of two activations feeds or reads."""
    if op_name(node) == "Attention":
        return True
    if op_name(node) != "Softmax" or not node.outputs:
        return False
    return _product_before(node.inputs[0]) is not None or any(
        _is_product(reader) and not isinstance(reader.inputs[1], gs.Constant)
        for reader in view.readers(node.outputs[0])
    )


def match_attention(view: View, linears: Linears, node: gs.Node) -> Attention:
    """The attention around a Softmax or `Attention` node.

    Raises:
        StoppedError: it is none that can be fused; says where it stopped and why.
    """
    if op_name(node) == "Attention":
        return _from_operator(view, linears, node)
    core = _core_of(view, node)
    for product in (core.scores, core.context):
        rank = view.sizes.rank(product.outputs[0])
        if rank not in _LABELS:
            raise StoppedError(product, f"its products have {'unknown' if rank < 0 else rank} axes, not 3 or 4")
    labels = _LABELS[view.sizes.rank(core.scores.outputs[0])]
    query = follow_heads(view, linears, core.scores.inputs[0], "query", labels)
    key = follow_heads(view, linears, core.scores.inputs[1], "key", (*labels[:-2], labels[-1], labels[-2]))
    labels = _LABELS[view.sizes.rank(core.context.outputs[0])]
    value = follow_heads(view, linears, core.context.inputs[1], "value", labels)
    return _finish(view, linears, core, (query, key, value), list(labels), is_causal=False)


def _from_operator(view: View, linears: Linears, node: gs.Node) -> Attention:
    if any(tensor.name for tensor in node.outputs[1:]) or len(node.inputs) < 3:
        raise StoppedError(node, "its scores or its keys and values are read as well")
    if any(tensor.name for tensor in node.inputs[4:]) or node.attrs.get("softcap", 0.0):
        raise StoppedError(node, "it has a past, lengths or a softcap")
    mask = node.inputs[3] if len(node.inputs) > 3 and node.inputs[3].name else None
    rank = view.sizes.rank(node.inputs[0])
    if rank not in (3, 4):
        raise StoppedError(node, "its query has an unknown number of axes")
    labels = ("B", "S", "W") if rank == 3 else _LABELS[4]
    counts = [node.attrs.get(name) if rank == 3 else None for name in ("q_num_heads", "kv_num_heads", "kv_num_heads")]
    parts = [
        follow_heads(view, linears, tensor, role, labels, count)
        for tensor, role, count in zip(node.inputs[:3], ("query", "key", "value"), counts, strict=True)
    ]
    scale = float(node.attrs.get("scale", 0.0))
    if not scale:
        size = view.sizes.last(node.inputs[0])
        head_size = parts[0].projection.head_size if parts[0].projection else size if rank == 4 else None
        if not head_size and size and counts[0]:
            head_size = size // int(counts[0])
        if not head_size:
            raise StoppedError(node, "its head size is not known")
        scale = 1.0 / math.sqrt(head_size)
    terms = [MaskTerm(node.name, mask.name, "keep" if _is_bool(mask) else "additive")] if mask is not None else []
    core = _Core(node, node, node, scale, terms, [] if mask is None else [mask], [node])
    is_causal = bool(node.attrs.get("is_causal", 0))
    return _finish(view, linears, core, (parts[0], parts[1], parts[2]), list(labels), is_causal=is_causal)


def _core_of(view: View, softmax: gs.Node) -> _Core:
    """The core around a Softmax.

    Raises:
        StoppedError: another operator among the scores, a reader that needs them, or another axis.
    """
    rank = view.sizes.rank(softmax.inputs[0])
    if softmax.attrs.get("axis", -1) not in (-1, rank - 1):
        raise StoppedError(softmax, f"its Softmax is along axis {softmax.attrs.get('axis')}, not the last")
    core = _Core(softmax, softmax, softmax, 1.0, [], [], [softmax])
    tensor = softmax.inputs[0]
    for _ in range(_MAX_STEPS):
        node = producer_of(tensor)
        if node is None:
            raise StoppedError(softmax, "its scores are no product of query and key")
        if view.only_reader(node.outputs[0]) is not core.nodes[-1]:
            raise StoppedError(node, "its scores are also read elsewhere")
        core.nodes.append(node)
        if _is_product(node) and not any(isinstance(operand, gs.Constant) for operand in node.inputs):
            core.scores = node
            break
        tensor = _before_scores(view, core, node)
    else:
        raise StoppedError(softmax, f"more than {_MAX_STEPS} nodes stand between Q K^T and its Softmax")
    core.terms.reverse()
    core.masks.reverse()
    _find_context(view, core)
    return core


def _before_scores(view: View, core: _Core, node: gs.Node) -> gs.Tensor:
    """The scores in front of a scale or mask, which is noted."""
    op, scaled = op_name(node), scaled_input(node)
    if scaled is not None:
        core.scale *= scaled[1]
        return scaled[0]
    if op == "Cast":
        return node.inputs[0]
    if op == "Add" and len(node.inputs) == 2:
        index = _scores_operand(node)
        mask = node.inputs[1 - index]
        if core.scale != 1.0:
            raise StoppedError(node, "its mask is added before the scale, and is scaled with the scores")
        if number_of(mask) != 0:
            core.terms.append(MaskTerm(node.name, mask.name, "additive"))
            core.masks.append(mask)
        return node.inputs[index]
    if op == "Where" and len(node.inputs) == 3:
        fills = [fill_of(tensor) for tensor in node.inputs[1:]]
        for is_keep, fill, other in ((True, fills[1], fills[0]), (False, fills[0], fills[1])):
            if fill is not None and fill * core.scale <= HIDDEN and other is None:
                kind: Literal["keep", "hide"] = "keep" if is_keep else "hide"
                core.terms.append(MaskTerm(node.name, node.inputs[0].name, kind, fill * core.scale))
                core.masks.append(node.inputs[0])
                return node.inputs[1 if is_keep else 2]
    if op in ("Reshape", "Unsqueeze", "Squeeze") and _keeps_matrices(view, node):
        return node.inputs[0]
    what = "softcap (Tanh)" if op == "Tanh" else op or f"{node.domain}.{node.op}"
    raise StoppedError(node, f"{what} stands between Q K^T and its Softmax")


def _keeps_matrices(view: View, node: gs.Node) -> bool:
    """True for a change of layout that leaves the last two axes [S, T] alone."""
    before, after = view.sizes.of(node.inputs[0]), view.sizes.of(node.outputs[0])
    if before is None or after is None:
        return False
    return all(same_size(a, b) for a, b in zip(before[-2:], after[-2:], strict=False))


def _find_context(view: View, core: _Core) -> None:
    """The product P V, through a guard of masked rows or a Cast."""
    tensor = core.softmax.outputs[0]
    for _ in range(4):
        readers = [node for node in view.readers(tensor) if op_name(node) != "Shape"]
        guard = _guard_of(readers, tensor)
        if guard is not None and not view.is_pinned(tensor):
            core.nodes += readers
            tensor = guard.outputs[0]
            continue
        reader = view.only_reader(tensor)
        if reader is None:
            node = next((node for node in readers if not _is_product(node)), core.softmax)
            raise StoppedError(node, "its attention weights are also read elsewhere, or are an output")
        if _is_product(reader) and source_of(reader.inputs[0]) is tensor:
            if isinstance(reader.inputs[1], gs.Constant):
                raise StoppedError(reader, "its value is a constant")
            core.context = reader
            core.nodes.append(reader)
            return
        if op_name(reader) not in ("Cast", "Reshape") or (
            op_name(reader) == "Reshape" and not _keeps_matrices(view, reader)
        ):
            raise StoppedError(reader, f"{reader.op} stands between its Softmax and the product with the value")
        core.nodes.append(reader)
        tensor = reader.outputs[0]
    raise StoppedError(core.softmax, "its attention weights are not multiplied with a value")


def _guard_of(readers: list[gs.Node], tensor: gs.Tensor) -> gs.Node | None:
    """The Where of Where(IsNaN(p), 0, p)."""
    found = {op_name(node): node for node in readers}
    if len(readers) != 2 or set(found) != {"IsNaN", "Where"}:
        return None
    where = found["Where"]
    is_guard = source_of(where.inputs[2]) is tensor and number_of(where.inputs[1]) == 0.0
    return where if is_guard and producer_of(where.inputs[0]) is found["IsNaN"] else None


def _finish(
    view: View,
    linears: Linears,
    core: _Core,
    parts: tuple[Heads, Heads, Heads],
    labels: list[str],
    *,
    is_causal: bool,
) -> Attention:
    query, key, value = parts
    num_heads, head_size = _counts(view, core, query, labels)
    kv_heads = [part.projection.num_heads for part in (key, value) if part.projection]
    if value.scale != 1.0:
        raise StoppedError(core.context, f"its value is scaled by {value.scale:g}")
    if len(set(kv_heads)) > 1:
        raise StoppedError(core.scores, f"key and value have {kv_heads} heads")
    sized = {part.projection.head_size for part in parts if part.projection}
    if len(sized) > 1:
        raise StoppedError(core.scores, f"query, key and value have heads of sizes {sorted(sized)}")
    mask = explain_mask(view, core.terms, core.masks, is_causal=is_causal)
    output = _Output(labels)
    output.follow(view, linears, core.context.outputs[0])
    # In the order of the graph, whichever way they were found.
    inner = sorted({id(node): node for node in core.nodes}.values(), key=lambda node: view.order[id(node)])
    return Attention(
        name=core.softmax.name,
        spelling="Attention" if core.scores is core.softmax else "MatMul",
        scores=core.scores.name,
        softmax=core.softmax.name,
        context=core.context.name,
        query=query,
        key=key,
        value=value,
        scale=core.scale,
        num_heads=num_heads,
        num_kv_heads=kv_heads[0] if kv_heads else num_heads,
        head_size=head_size,
        mask=mask,
        core_output=core.context.outputs[0].name,
        output_projection=output.linear,
        output_stop=output.stop,
        nodes=tuple(str(node.name) for node in inner),
        output_nodes=tuple(str(node.name) for node in output.nodes),
        is_output_sequence_first=output.labels[0] in ("S", "SB"),
    )


def _counts(view: View, core: _Core, query: Heads, labels: list[str]) -> tuple[int, int]:
    """N and D.

    Raises:
        StoppedError: neither the projection nor the sizes tell them.
    """
    if query.projection is not None:
        return query.projection.num_heads * query.repeats, query.projection.head_size
    sizes = view.sizes.of(core.scores.inputs[0]) or ()
    last = sizes[-1] if sizes else None
    num_heads = core.scores.attrs.get("q_num_heads") if labels[-1] == "W" else sizes[1] if len(sizes) == 4 else None
    if not isinstance(num_heads, int) or not isinstance(last, int) or num_heads < 1:
        reason = "" if query.stop is None else f": {query.stop.reason}"
        raise StoppedError(core.scores, f"its number of heads or its head size is not known{reason}")
    return num_heads, last // num_heads if labels[-1] == "W" else last


class _Output:
    """The linear layer that reads [B, S, N * D] behind attention, or what reads it instead.

    Attributes:
        labels: of the axes of the tensor that was reached; W is N and D side by side, BS or SB rows of both.
        nodes: layout nodes in between.
        linear, stop: one of them, once followed.
    """

    def __init__(self, labels: list[str]) -> None:
        self.labels = labels
        self.nodes: list[gs.Node] = []
        self.linear: Linear | None = None
        self.stop: Stop | None = None

    def follow(self, view: View, linears: Linears, tensor: gs.Tensor) -> None:
        """Look for it behind P V."""
        for _ in range(_MAX_STEPS):
            reader = view.only_reader(tensor)
            if reader is None:
                node = producer_of(tensor) or view.graph.nodes[0]
                self.stop = Stop(str(node.name), "its result is an output, or has several readers")
                return
            if self.labels[-1] == "W" and linears.of_product(reader) is not None:
                self.linear = linears.of_product(reader)
                return
            reason = self._go_over(view, reader)
            if reason is not None:
                self.stop = Stop(str(reader.name), reason)
                return
            self.nodes.append(reader)
            tensor = reader.outputs[0]
        self.stop = Stop(str(self.nodes[-1].name), "no linear layer reads its result")

    def _go_over(self, view: View, node: gs.Node) -> str | None:
        """Follow one node; the reason where it is no layout node."""
        op, perm = op_name(node), perm_of(node, len(self.labels)) if op_name(node) == "Transpose" else None
        if perm is not None:
            self.labels = [self.labels[axis] for axis in perm]
            return None
        if op in ("Cast", "Identity"):
            return None
        if op != "Reshape":
            return f"{node.op} stands between attention and its output projection"
        labels = self._joined(view, node)
        if labels is None:
            return "a Reshape does not put its heads side by side, or is not known to keep batch and sequence"
        self.labels = labels
        return None

    def _joined(self, view: View, node: gs.Node) -> list[str] | None:
        """Labels behind a Reshape."""
        before, after, labels = view.sizes.of(node.inputs[0]), view.sizes.of(node.outputs[0]), self.labels
        if before is None or after is None or len(before) != len(labels):
            return None
        if before == after:
            return labels
        if labels[-1] == "W":
            is_rows = len(after) == 2 and len(labels) == 3 and same_size(before[-1], after[-1])
            return ["".join(labels[:2]), "W"] if is_rows else None
        if labels == ["BN", "S", "D"]:
            keeps = len(after) == 4 and same_size(before[1], after[2]) and same_size(before[2], after[3])
            return ["B", "N", "S", "D"] if keeps else None
        width = after[-1]
        if labels == ["S", "BN", "D"]:
            keeps = len(after) == 3 and same_size(before[0], after[0])
            return ["S", "B", "W"] if keeps and isinstance(width, int) else None
        numbers = [size for size in before[2:] if isinstance(size, int)]
        if labels[2:] != ["N", "D"] or len(numbers) != 2 or math.prod(numbers) != width:
            return None
        if len(after) == 2:
            return ["".join(labels[:2]), "W"]
        # With the width kept, one size proves the other.
        keeps = len(after) == 3 and any(same_size(a, b) for a, b in zip(before[:2], after[:2], strict=True))
        return [*labels[:2], "W"] if keeps else None


def _product_before(tensor: gs.Tensor) -> gs.Node | None:
    """The nearest product of two activations among what gives a tensor; a few nodes are looked at."""
    pending, num_steps = [tensor], 0
    while pending and num_steps < _MAX_STEPS:
        num_steps += 1
        node = producer_of(pending.pop(0))
        if node is None or op_name(node) == "Softmax":
            continue
        if _is_product(node):
            if not any(isinstance(operand, gs.Constant) for operand in node.inputs):
                return node
        elif op_name(node) in ("Add", "Cast", "Div", "Max", "Mul", "Reshape", "Sub", "Tanh", "Where"):
            pending.extend(node.inputs[1:] if op_name(node) == "Where" else node.inputs)
    return None


def _scores_operand(node: gs.Node) -> int:
    """Which operand of an Add is the scores: the one that comes from a product, else the first."""
    if isinstance(node.inputs[0], gs.Constant):
        return 1
    is_second = _product_before(node.inputs[0]) is None and _product_before(node.inputs[1]) is not None
    return 1 if is_second else 0


def _is_product(node: gs.Node) -> bool:
    return op_name(node) == "MatMul" and len(node.inputs) == 2


def _is_bool(tensor: gs.Tensor) -> bool:
    return tensor_dtype(tensor.dtype) == np.dtype(bool)
