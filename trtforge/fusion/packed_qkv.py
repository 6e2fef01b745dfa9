"""Respell the projections of attention's query, key and value so that their product stays INT8 and fuses best.

With B batch, S sequence, K input width, N heads and D head size, a product whose result is cut up by Split falls back
to half precision under Q/DQ. What TensorRT-RTX 1.7.1 keeps in INT8 depends on how attention is spelled:

Case 1: the three parts go to one `Attention`. The best spelling is one product and a layout that applies scales, bias
    and head order in one kernel:

    x [B, S, K] -> MatMul w [K, 3ND] -> Add b [3ND] -> Reshape [B, S, 3, N, D] -> Transpose [3, B, N, S, D]
        -> Gather 0, 1, 2 -> each [B, N, S, D]

    Case 1a: found as one MatMul (+ Add) -> Split -> each Reshape [B, S, N, D] -> Transpose [B, N, S, D].
    Case 1b: found as three MatMuls (+ Add) of one x, each -> Reshape -> Transpose; their weights are concatenated.
Case 2: MatMul (+ Add) -> Split into three, going anywhere else (MatMul - Softmax - MatMul above all, where the packed
    layout falls back to half precision too): three MatMuls with the weight's slices. They share x, therefore its Q,
    and the builder merges them into one INT8 product. Three MatMuls that are there already stay.
Case 3: the packed layout itself, its parts going anywhere but to `Attention` (most vision transformers):

    MatMul (+ Add) -> Reshape [B, S, 3, N, D] -> Transpose -> parts 0, 1, 2 of the axis of size 3

    The 3 may be at any of the last three places, the Transpose of any order or absent, and a part taken by Gather, by
    Slice and Squeeze or by Split and Squeeze. With the same columns of the weight, each part becomes MatMul (+ Add)
    -> Reshape [B, S, N, D] -> Transpose in the order that is left. Two parts (key and value) are done alike.

Case 1 has the form that `lower_attention` gives other spellings of attention where a trial build shows that it pays; it
is tried only for a mask that could be spelled better. Cases 2 and 3 give what that trial is compared with, and what
stays where it does not pay.

`[0, 0, ...]` copies B and S, so no shape is computed; that needs proof that the original Reshape keeps both.
Here the graph is rewritten; `qkv_match` finds the cases and `qkv_layout` proves what they need.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.fusion.qkv_layout import RefusalError, op_of
from trtforge.fusion.qkv_match import Layout, Linear, Matcher, Part, is_attention, reads_packed_layout
from trtforge.graph.edit import remove_nodes
from trtforge.graph.names import UniqueNames

PATTERN = "packed_qkv"

_Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]


@dataclasses.dataclass(frozen=True, slots=True)
class NearMiss:
    """A place that begins like the pattern and was left as it is."""

    pattern: str
    node: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Rewrite:
    """A place that was respelled.

    Attributes:
        node: the product that now computes it (cases 2 and 3: the first of them).
        lowered_to: "packed" (case 1) or "sliced" (cases 2 and 3).
        replaced: the nodes that are gone.
    """

    node: str
    lowered_to: str
    replaced: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class PackedQkvReport:
    """What `pack_qkv` did, in graph order."""

    rewritten: tuple[Rewrite, ...]
    near_misses: tuple[NearMiss, ...]


def pack_qkv(graph: gs.Graph) -> PackedQkvReport:
    """Respell every query-key-value projection of the main graph.

    Args:
        graph: normalised, float, before Q/DQ; modified in place. Its outputs stay equal up to the order of summation.
    """
    packer = _Packer(graph)
    packer.pack_attention_inputs()
    packer.slice_splits()
    packer.slice_layouts()
    packer.finish()
    return PackedQkvReport(tuple(packer.rewritten), tuple(packer.near_misses))


class _Packer:
    def __init__(self, graph: gs.Graph) -> None:
        self.graph = graph
        self.rewritten: list[Rewrite] = []
        self.near_misses: list[NearMiss] = []
        self._order = {id(node): index for index, node in enumerate(graph.nodes)}
        self._inserted: dict[int, list[gs.Node]] = {}
        self._removed: set[int] = set()
        self._names = UniqueNames(graph)
        self._matcher = Matcher(graph)

    def pack_attention_inputs(self) -> None:
        """Case 1."""
        for attention in self.graph.nodes:
            if not is_attention(attention) or reads_packed_layout(attention):
                continue
            try:
                parts = self._matcher.parts_before(attention)
            except RefusalError as refusal:
                self.near_misses.append(NearMiss(PATTERN, attention.name, str(refusal)))
            else:
                self._pack(parts)

    def slice_splits(self) -> None:
        """Case 2."""
        for split in self.graph.nodes:
            if op_of(split) != "Split" or len(split.outputs) != 3 or id(split) in self._removed:
                continue
            linear = self._matcher.linear_before(split.inputs[0])
            if linear is None:
                continue
            try:
                self._slice(linear, split, self._matcher.split_sizes(split, linear))
            except RefusalError as refusal:
                self.near_misses.append(NearMiss(PATTERN, split.name, str(refusal)))

    def slice_layouts(self) -> None:
        """Case 3."""
        for reshape in self.graph.nodes:
            if op_of(reshape) != "Reshape" or len(reshape.outputs[0].shape or ()) != 5:
                continue
            linear = self._matcher.linear_before(reshape.inputs[0])
            if linear is None:
                continue
            try:
                layout = self._matcher.layout_behind(reshape, linear)
            except RefusalError as refusal:
                self.near_misses.append(NearMiss(PATTERN, reshape.name, str(refusal)))
            else:
                if layout is not None:
                    self._slice_layout(layout)

    def finish(self) -> None:
        """Put the new nodes in, take the old ones out."""
        nodes: list[gs.Node] = []
        for node in self.graph.nodes:
            nodes.extend(self._inserted.get(id(node), ()))
            nodes.append(node)
        self.graph.nodes = nodes
        remove_nodes(self.graph, lambda node: id(node) in self._removed)

    def _pack(self, parts: Sequence[Part]) -> None:
        """Case 1."""
        linears = list({id(part.linear.nodes[0]): part.linear for part in parts}.values())
        if len(linears) == 1:
            parts = sorted(parts, key=lambda part: part.index)
        old = {id(n): n for part in parts for n in (*part.linear.nodes, *part.nodes)}
        first = min((linear.nodes[0] for linear in linears), key=lambda node: self._order[id(node)])
        new: list[gs.Node] = []
        weight = np.concatenate([linear.weight.values for linear in linears], axis=1)
        tensor = self._linear_nodes(new, linears[0].x, first.name, weight, _concatenated_biases(linears))
        num_heads, head_size = parts[0].num_heads, parts[0].width // parts[0].num_heads
        shape = self._constant(f"{first.name}_heads_shape", np.array([0, 0, 3, num_heads, head_size]))
        tensor = self._append(new, "Reshape", f"{first.name}_heads", [tensor, shape])
        tensor = self._append(new, "Transpose", f"{first.name}_parts", [tensor], {"perm": [2, 0, 3, 1, 4]})
        # By its five axes a later pass knows that this is packed.
        batch, sequence = linears[0].x.shape[:2]
        tensor.shape = [3, batch, num_heads, sequence, head_size]
        for index, part in enumerate(parts):
            number = self._constant(f"{first.name}_index_{index}", np.array(index))
            part.output.inputs.clear()
            self._append(new, "Gather", f"{first.name}_part_{index}", [tensor, number], {"axis": 0}, part.output)
        self._replace(first, list(old.values()), new, "packed")

    def _slice(self, linear: Linear, split: gs.Node, sizes: Sequence[int]) -> None:
        """Case 2."""
        new: list[gs.Node] = []
        name, start = linear.nodes[0].name, 0
        for index, (part, size) in enumerate(zip(list(split.outputs), sizes, strict=True)):
            columns = slice(start, start + size)
            start += size
            weight = np.ascontiguousarray(linear.weight.values[:, columns])
            bias = None if linear.bias is None else linear.bias.values[columns]
            part.inputs.clear()
            self._linear_nodes(new, linear.x, name if index == 0 else f"{name}_part_{index}", weight, bias, part)
        self._replace(linear.nodes[0], [*linear.nodes, split], new, "sliced")

    def _slice_layout(self, layout: Layout) -> None:
        """Case 3."""
        new: list[gs.Node] = []
        linear, name = layout.linear, layout.linear.nodes[0].name
        columns = np.arange(linear.weight.shape[1]).reshape(layout.sizes)
        kept = [size for axis, size in enumerate(layout.sizes) if axis != layout.axis]
        shape = self._constant(f"{name}_heads_shape", np.array([0, 0, *kept]))
        for index, output in enumerate(layout.parts):
            product = name if index == 0 else f"{name}_part_{index}"
            chosen = columns.take(index, axis=layout.axis).ravel()
            bias = None if linear.bias is None else linear.bias.values[chosen]
            tensor = self._linear_nodes(new, linear.x, product, linear.weight.values.take(chosen, axis=1), bias)
            output.inputs.clear()
            is_ordered = layout.perm == sorted(layout.perm)
            last = output if is_ordered else None
            tensor = self._append(new, "Reshape", f"{product}_heads", [tensor, shape], {}, last)
            if not is_ordered:
                self._append(new, "Transpose", f"{product}_order", [tensor], {"perm": layout.perm}, output)
        self._replace(linear.nodes[0], [*linear.nodes, *layout.nodes], new, "sliced")

    def _linear_nodes(
        self,
        new: list[gs.Node],
        x: gs.Tensor,
        name: str,
        weight: _Array,
        bias: _Array | None,
        output: gs.Variable | None = None,
    ) -> gs.Variable:
        """MatMul (+ Add) with new constants; the MatMul is called `name`, which the old one gives up."""
        constant = self._constant(f"{name}_weight", weight)
        tensor = self._append(new, "MatMul", name, [x, constant], {}, output if bias is None else None)
        new[-1].name = name
        if bias is None:
            return tensor
        return self._append(new, "Add", f"{name}_bias", [tensor, self._constant(f"{name}_bias", bias)], {}, output)

    def _append(
        self,
        new: list[gs.Node],
        op: str,
        name: str,
        inputs: list[gs.Tensor],
        attrs: dict[str, object] | None = None,
        output: gs.Variable | None = None,
    ) -> gs.Variable:
        result = gs.Variable(self._names.tensor(f"{name}_output"), inputs[0].dtype) if output is None else output
        new.append(gs.Node(op, self._names.node(name), attrs or {}, inputs, [result]))
        return result

    def _constant(self, name: str, values: _Array) -> gs.Constant:
        return gs.Constant(self._names.tensor(name), values)

    def _replace(self, first: gs.Node, old: Sequence[gs.Node], new: list[gs.Node], lowered_to: str) -> None:
        self._inserted[id(first)] = new
        self._removed.update(id(node) for node in old)
        self.rewritten.append(Rewrite(first.name, lowered_to, tuple(node.name for node in old)))


def _concatenated_biases(linears: Sequence[Linear]) -> _Array | None:
    """The biases one after the other, zeros where a part has none; None where none has."""
    if all(linear.bias is None for linear in linears):
        return None
    parts = [
        np.zeros(linear.weight.shape[1], linear.weight.dtype) if linear.bias is None else linear.bias.values
        for linear in linears
    ]
    return np.concatenate(parts)
