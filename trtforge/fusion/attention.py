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

from trtforge.fusion.attention_output import AttentionOutput
from trtforge.fusion.heads import follow_heads
from trtforge.fusion.linear import Linears
from trtforge.fusion.masks import HIDDEN, explain_mask, fill_of
from trtforge.fusion.regions import Attention, Heads, MaskTerm
from trtforge.fusion.sizes import same_size
from trtforge.fusion.view import (
    StoppedError,
    View,
    casts_to_float,
    number_of,
    op_name,
    producer_of,
    scaled_input,
    source_of,
)
from trtforge.graph.signature import tensor_dtype

# Nodes between Q K^T and Softmax.
_MAX_STEPS = 16
_LABELS = {4: ("B", "N", "S", "D"), 3: ("BN", "S", "D")}


@dataclasses.dataclass(slots=True)
class _Core:
    """The arithmetic of one attention.

    Attributes:
        layouts: nodes between the two products that part or join batch and heads, and the size that heads have there.
    """

    scores: gs.Node
    softmax: gs.Node
    context: gs.Node
    scale: float
    terms: list[MaskTerm]
    masks: list[gs.Tensor]
    nodes: list[gs.Node]
    layouts: list[tuple[gs.Node, object]] = dataclasses.field(default_factory=list)


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
    if not view.is_last_axis(softmax.attrs.get("axis", -1), softmax.inputs[0]):
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
    if casts_to_float(node):
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
    if op in ("Reshape", "Unsqueeze", "Squeeze") and _keeps_matrices(view, core, node):
        return node.inputs[0]
    what = "softcap (Tanh)" if op == "Tanh" else op or f"{node.domain}.{node.op}"
    raise StoppedError(node, f"{what} stands between Q K^T and its Softmax")


def _keeps_matrices(view: View, core: _Core, node: gs.Node) -> bool:
    """True for a change of layout that leaves the last two axes [S, T] alone; the heads that it shows are noted."""
    before, after = view.sizes.of(node.inputs[0]), view.sizes.of(node.outputs[0])
    if before is None or after is None:
        return False
    core.layouts += [(node, sizes[1]) for sizes in (before, after) if len(sizes) == 4]
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
        is_layout = op_name(reader) == "Reshape" and _keeps_matrices(view, core, reader)
        if not casts_to_float(reader) and not is_layout:
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
    for node, size in core.layouts:
        if size != num_heads:
            raise StoppedError(node, f"it is not known to part its {num_heads} heads from the batch")
    kv_heads = [part.projection.num_heads for part in (key, value) if part.projection]
    if value.scale != 1.0:
        raise StoppedError(core.context, f"its value is scaled by {value.scale:g}")
    if len(set(kv_heads)) > 1:
        raise StoppedError(core.scores, f"key and value have {kv_heads} heads")
    sized = {part.projection.head_size for part in parts if part.projection}
    if len(sized) > 1:
        raise StoppedError(core.scores, f"query, key and value have heads of sizes {sorted(sized)}")
    mask = explain_mask(view, core.terms, core.masks, is_causal=is_causal)
    output = AttentionOutput(labels)
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
