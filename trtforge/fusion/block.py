"""One transformer block: attention and FFN, each with its residual Add and LayerNormalization.

    post-norm   h = norm1(x + attention(x)),  y = norm2(h + ffn(h))
    pre-norm    h = x + attention(norm1(x)),  y = h + ffn(norm2(h))

It is matched from its attention on. What the fused block cannot compute is refused here, by the contract of its op
(grouped queries, rotary embedding, other head sizes, RMSNormalization, two epsilons), and so is a block with a tensor
inside that something else reads: the block would have to be computed twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import onnx_graphsurgeon as gs

from trtforge.fusion.linear import Linears, rows_of, same_rows
from trtforge.fusion.norm import Norms
from trtforge.fusion.regions import Attention, AttentionFfnBlock, Ffn, Linear, NearMiss, Norm, Projection
from trtforge.fusion.view import StoppedError, View, is_vector, op_name, perm_of, producer_of, source_of, split_constant

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")
# Shape arithmetic that is followed from a tensor inside a block to the Reshapes that it is for.
_MAX_SHAPE_STEPS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """What blocks are made of."""

    view: View
    linears: Linears
    norms: Norms
    ffns: Mapping[str, Sequence[Ffn]]
    ffn_misses: Mapping[str, NearMiss]
    nodes: Mapping[str, gs.Node]


@dataclasses.dataclass(slots=True)
class _Residual:
    """An Add of a layer's result and what it started from; `skip` is the latter."""

    add: gs.Node
    skip: gs.Tensor
    output: gs.Tensor
    bias_add: gs.Node | None = None
    bias: gs.Tensor | None = None


def match_block(parts: Parts, attention: Attention) -> AttentionFfnBlock:
    """The block around an attention.

    Raises:
        StoppedError: where it ends, and why.
    """
    projection = _check_attention(parts, attention)
    x, output, outer = _sequence_last(parts, attention, projection)
    first = _residual(parts, output, projection, "attention")
    normalised = parts.norms.behind(x)
    is_post = _is_same(parts, first.skip, x)
    if not is_post and (normalised is None or not _is_same(parts, first.skip, normalised[1])):
        raise StoppedError(
            first.add, "it adds neither what attention reads nor what was normalised for it: no residual connection"
        )
    if not same_rows(parts.view, output, first.skip):
        raise StoppedError(first.add, "its two operands are not known to have the same batch and sequence")
    norm1 = _norm_of(parts, first.output, first.add) if is_post else (normalised or (None,))[0]
    assert norm1 is not None
    hidden = parts.norms.output(norm1) if is_post else first.output
    norm2 = None if is_post else _norm_of(parts, hidden, first.add)
    read = hidden if norm2 is None else parts.norms.output(norm2)
    ffn = _ffn_of(parts, read, first.add)
    second = _residual(parts, parts.linears.tensor(ffn.down.output), ffn.down, "the FFN")
    if not _is_same(parts, second.skip, hidden):
        raise StoppedError(second.add, "it does not add what the FFN started from: no residual connection")
    if not same_rows(parts.view, parts.linears.tensor(ffn.down.output), second.skip):
        raise StoppedError(second.add, "its two operands are not known to have the same batch and sequence")
    norm2 = norm2 or _norm_of(parts, second.output, second.add)
    result = parts.norms.output(norm2) if is_post else second.output
    _check_rest(parts, (norm1, norm2), ffn)
    names = [*attention.all_nodes(), *outer, *ffn.all_nodes(), *norm1.nodes, *norm2.nodes]
    names += [str(node.name) for r in (first, second) for node in (r.add, r.bias_add) if node is not None]
    nodes = sorted(dict.fromkeys(names), key=lambda name: parts.view.order[id(parts.nodes[name])])
    size_readers = _size_readers(parts, nodes, result)
    start = rows_of(parts.view, x if is_post else first.skip)
    if parts.view.sizes.rank(result) == parts.view.sizes.rank(start) and not same_rows(parts.view, result, start):
        raise StoppedError(second.add, "its result is not known to have the batch and sequence of its start")
    return AttentionFfnBlock(
        name=attention.name,
        order="post" if is_post else "pre",
        attention=attention,
        ffn=ffn,
        norm1=norm1,
        norm2=norm2,
        residual1=first.add.name,
        residual2=second.add.name,
        out_bias_add=None if first.bias_add is None else first.bias_add.name,
        out_bias=None if first.bias is None else first.bias.name,
        down_bias_add=None if second.bias_add is None else second.bias_add.name,
        down_bias=None if second.bias is None else second.bias.name,
        x=start.name,
        output=result.name,
        nodes=tuple(nodes),
        size_readers=tuple(size_readers),
    )


def _check_attention(parts: Parts, attention: Attention) -> Linear:
    """Refuse an attention that no block holds; gives its output projection.

    Raises:
        StoppedError: what is missing or cannot be computed.
    """
    heads = (attention.query, attention.key, attention.value)
    for part in heads:
        if part.stop is not None:
            raise StoppedError(parts.nodes[part.stop.node], part.stop.reason)
    projections = [part.projection for part in heads if part.projection is not None]
    softmax = parts.nodes[attention.softmax]
    if len({projection.linear.x for projection in projections}) > 1:
        node = parts.nodes[projections[1].linear.product]
        raise StoppedError(node, "query and key or value are projections of different tensors (cross-attention)")
    if len({projection.is_sequence_first for projection in projections}) > 1:
        raise StoppedError(softmax, "query, key and value have batch and sequence in different orders")
    _check_rows(parts, projections)
    shared = attention.shared_heads()
    if shared is not None:
        raise StoppedError(parts.nodes[projections[1].linear.product], shared)
    if attention.output_projection is None:
        stop = attention.output_stop
        assert stop is not None
        raise StoppedError(parts.nodes[stop.node], stop.reason)
    width = attention.num_heads * attention.head_size
    if attention.output_projection.width != width:
        node = parts.nodes[attention.output_projection.product]
        what = f"{attention.num_heads} heads of {attention.head_size} are {width} wide, the block"
        raise StoppedError(node, f"{what} {attention.output_projection.width}")
    return attention.output_projection


def _check_rows(parts: Parts, projections: Sequence[Projection]) -> None:
    """Refuse attention within parts of the sequence: a Reshape before it may group the rows of x anew (windows).

    Raises:
        StoppedError: query, key and value differ, or x has another batch and sequence.
    """
    x = parts.view.sizes.of(parts.linears.tensor(projections[0].linear.x)) or ()
    rows = [projection.rows[::-1] if projection.is_sequence_first else projection.rows for projection in projections]
    wanted = {*rows, *([x[:2]] if len(x) == 3 else [])}
    if len(wanted) > 1 or any(None in sizes for sizes in wanted):
        node = parts.nodes[projections[0].linear.product]
        raise StoppedError(node, "attention is not known to see batch and sequence as the block has them (windows)")


def _sequence_last(parts: Parts, attention: Attention, out: Linear) -> tuple[gs.Tensor, gs.Tensor, list[str]]:
    """x and the attention's result as [B, S, H], and the Transposes of an attention that runs on [S, B, H].

    Raises:
        StoppedError: one of the two is transposed and the other is not.
    """
    projection = attention.query.projection
    assert projection is not None
    x, output = parts.linears.tensor(projection.linear.x), parts.linears.tensor(out.output)
    if projection.is_sequence_first != attention.is_output_sequence_first:
        raise StoppedError(parts.nodes[out.product], "its input and output differ in the order of batch and sequence")
    if not projection.is_sequence_first:
        return x, output, []
    before, after = producer_of(x), parts.view.only_reader(output)
    if before is None or after is None or not _swaps(before) or not _swaps(after):
        raise StoppedError(parts.nodes[out.product], "it runs on [sequence, batch, width], and the block with it")
    return rows_of(parts.view, before.inputs[0]), after.outputs[0], [str(before.name), str(after.name)]


def _swaps(node: gs.Node) -> bool:
    return op_name(node) == "Transpose" and perm_of(node, 3) == [1, 0, 2]


def _residual(parts: Parts, tensor: gs.Tensor, linear: Linear, what: str) -> _Residual:
    """The residual Add that reads a layer's result, and the bias that may come behind it.

    Raises:
        StoppedError: another node reads it, or several do.
    """
    add = parts.view.only_reader(tensor)
    if add is None:
        raise StoppedError(parts.nodes[linear.product], f"the result of {what} is an output, or has several readers")
    constants = [operand for operand in add.inputs if isinstance(operand, gs.Constant)]
    if op_name(add) != "Add" or len(add.inputs) != 2 or constants:
        scale = " (a layer scale)" if op_name(add) == "Mul" and constants else ""
        raise StoppedError(add, f"{add.op}{scale} stands between {what} and its residual Add")
    index = 0 if source_of(add.inputs[0]) is tensor else 1
    residual = _Residual(add, source_of(add.inputs[1 - index]), add.outputs[0])
    behind = parts.view.only_reader(residual.output)
    operands = split_constant(behind) if behind is not None and op_name(behind) == "Add" else None
    if linear.bias is None and operands is not None and is_vector(operands[1], linear.width):
        assert behind is not None
        residual.bias_add, residual.bias, residual.output = behind, operands[1], behind.outputs[0]
    return residual


def _norm_of(parts: Parts, tensor: gs.Tensor, add: gs.Node) -> Norm:
    """The normalisation that reads the result of a residual Add.

    Raises:
        StoppedError: none does, or several do.
    """
    found = parts.norms.of.get(rows_of(parts.view, tensor).name, [])
    if len(found) != 1:
        readers = ", ".join(sorted({str(node.op) for node in parts.view.readers(tensor)})) or "nothing"
        what = "no LayerNormalization reads" if not found else "several LayerNormalizations read"
        raise StoppedError(add, f"{what} the residual sum (its readers: {readers})")
    return found[0]


def _ffn_of(parts: Parts, tensor: gs.Tensor, add: gs.Node) -> Ffn:
    """The one FFN that reads a tensor.

    Raises:
        StoppedError: none, or what kept the one that is there from matching.
    """
    name = rows_of(parts.view, tensor).name
    found = parts.ffns.get(name, ())
    if len(found) == 1:
        return found[0]
    miss = parts.ffn_misses.get(name)
    if miss is not None:
        raise StoppedError(parts.nodes[miss.node], miss.reason)
    node = next((reader for reader in parts.view.readers(tensor) if op_name(reader) not in ("Add", "Shape")), add)
    raise StoppedError(node, "no FFN reads the attention's result" if not found else "several FFNs read one tensor")


def _check_rest(parts: Parts, norms: tuple[Norm, Norm], ffn: Ffn) -> None:
    """Refuse normalisations and activations that the block's op does not have.

    Raises:
        StoppedError: names the node.
    """
    for norm in norms:
        if norm.kind != "layer":
            raise StoppedError(parts.nodes[norm.node], "RMSNormalization: the block takes LayerNormalization")
    if norms[0].epsilon != norms[1].epsilon:
        what = f"its epsilon is {norms[1].epsilon:g}, that of the first {norms[0].epsilon:g}"
        raise StoppedError(parts.nodes[norms[1].node], what)
    if ffn.activation.kind not in ACTIVATIONS:
        what = f"its activation is {ffn.activation.kind}; the block takes {', '.join(ACTIVATIONS)}"
        raise StoppedError(parts.nodes[ffn.activation.node], what)


def _size_readers(parts: Parts, names: Sequence[str], result: gs.Tensor) -> list[str]:
    """The nodes outside that read sizes of tensors inside a block; all else outside it is refused.

    Raises:
        StoppedError: names the reader.
    """
    inside = set(names)
    found: list[str] = []
    for name in names:
        for tensor in parts.nodes[name].outputs:
            if tensor is result:
                continue
            if parts.view.is_pinned(tensor):
                is_output = any(tensor is output for output in parts.view.graph.outputs)
                where = "is an output" if is_output else "is read in a subgraph"
                raise StoppedError(parts.nodes[name], f"its result {tensor.name!r} {where}")
            for reader in parts.view.readers(tensor):
                if reader.name in inside:
                    continue
                if not _reads_sizes_for(parts.view, reader, inside):
                    raise StoppedError(reader, f"it reads {tensor.name!r}, which is inside the block")
                found.append(str(reader.name))
    return list(dict.fromkeys(found))


def _reads_sizes_for(view: View, node: gs.Node, inside: set[str]) -> bool:
    """True for a Shape that serves nodes of the block alone (Reshapes, masks), and for a Transpose in front of such."""
    if op_name(node) == "Transpose":
        readers = view.readers(node.outputs[0])
        is_for_shapes = bool(readers) and all(op_name(reader) == "Shape" for reader in readers)
        return is_for_shapes and all(_reads_sizes_for(view, reader, inside) for reader in readers)
    if op_name(node) != "Shape":
        return False
    pending, seen = [node], {id(node)}
    while pending:
        current = pending.pop()
        if len(seen) > _MAX_SHAPE_STEPS or any(view.is_pinned(tensor) for tensor in current.outputs):
            return False
        for reader in (reader for tensor in current.outputs for reader in view.readers(tensor)):
            if reader.name not in inside and id(reader) not in seen:
                seen.add(id(reader))
                pending.append(reader)
    return True


def _is_same(parts: Parts, one: gs.Tensor, other: gs.Tensor) -> bool:
    return rows_of(parts.view, one) is rows_of(parts.view, other)
