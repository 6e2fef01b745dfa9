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

`[0, 0, ...]` copies B and S, so no shape is computed; that needs proof that the original Reshape keeps both.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.graph.edit import is_onnx_op, remove_nodes
from trtforge.graph.names import UniqueNames

PATTERN = "packed_qkv"
HEAD_PERM = [0, 2, 1, 3]
_ROLES = ("query", "key", "value")
_SELECTING_OPS = ("Gather", "Slice", "Split")

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


class _RefusalError(Exception):
    """A near miss found while matching."""


@dataclasses.dataclass(slots=True)
class _Linear:
    """x -> MatMul -> optional Add: `output` is [B, S, width]."""

    nodes: list[gs.Node]
    x: gs.Tensor
    weight: gs.Constant
    bias: gs.Constant | None
    output: gs.Variable


@dataclasses.dataclass(slots=True)
class _Part:
    """One of query, key and value: columns of a linear layer, then Reshape -> Transpose."""

    linear: _Linear
    nodes: list[gs.Node]
    num_heads: int
    width: int
    index: int
    output: gs.Variable


@dataclasses.dataclass(slots=True)
class _Layout:
    """Case 3: `sizes` are the last three of the Reshape's five, and part i is index i of its axis `axis`."""

    linear: _Linear
    nodes: list[gs.Node]
    sizes: list[int]
    perm: list[int]
    axis: int
    parts: list[gs.Variable]


@dataclasses.dataclass(frozen=True, slots=True)
class _Selection:
    """One index of one axis of a tensor; the axis is gone behind the last of `nodes`."""

    axis: int
    index: int
    nodes: tuple[gs.Node, ...]
    output: gs.Variable


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
        self._outputs = {tensor.name for tensor in graph.outputs}
        self._order = {id(node): index for index, node in enumerate(graph.nodes)}
        self._inserted: dict[int, list[gs.Node]] = {}
        self._removed: set[int] = set()
        self._names = UniqueNames(graph)

    def pack_attention_inputs(self) -> None:
        """Case 1."""
        for attention in self.graph.nodes:
            if not _is_attention(attention) or _reads_packed_layout(attention):
                continue
            try:
                parts = [self._part_before(*pair) for pair in zip(attention.inputs[:3], _ROLES, strict=True)]
                self._check_parts(parts)
            except _RefusalError as refusal:
                self.near_misses.append(NearMiss(PATTERN, attention.name, str(refusal)))
            else:
                self._pack(parts)

    def slice_splits(self) -> None:
        """Case 2."""
        for split in self.graph.nodes:
            if split.op != "Split" or len(split.outputs) != 3 or id(split) in self._removed:
                continue
            linear = self._linear_before(split.inputs[0])
            if linear is None:
                continue
            try:
                self._slice(linear, split, self._split_sizes(split, linear))
            except _RefusalError as refusal:
                self.near_misses.append(NearMiss(PATTERN, split.name, str(refusal)))

    def slice_layouts(self) -> None:
        """Case 3."""
        for reshape in self.graph.nodes:
            if reshape.op != "Reshape" or len(reshape.outputs[0].shape or ()) != 5:
                continue
            linear = self._linear_before(reshape.inputs[0])
            if linear is None:
                continue
            try:
                layout = self._layout_behind(reshape, linear)
            except _RefusalError as refusal:
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

    # Matching

    def _linear_before(self, tensor: gs.Tensor) -> _Linear | None:
        """The MatMul with a constant [K, width] weight, and the Add of a constant [width] behind it, that end here."""
        nodes: list[gs.Node] = list(tensor.inputs)
        bias = None
        if nodes and nodes[0].op == "Add":
            constants = [operand for operand in nodes[0].inputs if isinstance(operand, gs.Constant)]
            others = [operand for operand in nodes[0].inputs if not isinstance(operand, gs.Constant)]
            if len(constants) != 1 or not self._is_only_read_by(others[0], nodes[0]):
                return None
            bias = constants[0]
            nodes = [*others[0].inputs, nodes[0]]
        if not nodes or nodes[0].op != "MatMul":
            return None
        x, weight = nodes[0].inputs
        if not isinstance(weight, gs.Constant) or len(weight.shape) != 2 or isinstance(x, gs.Constant):
            return None
        if bias is not None and tuple(bias.shape) != (weight.shape[1],):
            return None
        return _Linear(nodes, x, weight, bias, tensor)

    def _split_sizes(self, split: gs.Node, linear: _Linear) -> list[int]:
        """The columns of each part.

        Raises:
            _RefusalError: another axis, sizes that are not constant, or a second reader of the product.
        """
        axis = split.attrs.get("axis", 0)
        rank = None if linear.output.shape is None else len(linear.output.shape)
        if axis != -1 and (rank is None or axis != rank - 1):
            raise _RefusalError(f"the Split is along axis {axis}, not the last")
        if not self._is_only_read_by(linear.output, split):
            raise _RefusalError("the product is also read elsewhere")
        if len(split.inputs) == 1 or not split.inputs[1].name:
            share = -(-linear.weight.shape[1] // 3)
            return [share, share, linear.weight.shape[1] - 2 * share]
        if not isinstance(split.inputs[1], gs.Constant):
            raise _RefusalError("the sizes of the Split are not constant")
        return [int(size) for size in split.inputs[1].values]

    def _part_before(self, tensor: gs.Tensor, role: str) -> _Part:
        """Query, key or value, followed back from an input of Attention.

        Raises:
            _RefusalError: another head layout, another reader, or no proof that the Reshape keeps B and S.
        """
        transpose = self._producer(tensor, "Transpose", role)
        if list(transpose.attrs.get("perm", ())) != HEAD_PERM:
            raise _RefusalError(f"the Transpose of the {role} has perm {transpose.attrs.get('perm')}, not {HEAD_PERM}")
        reshape = self._producer(transpose.inputs[0], "Reshape", role)
        source = reshape.inputs[0]
        if not self._is_only_read_by(source, reshape):
            raise _RefusalError(f"the {role} is also read elsewhere")
        nodes, index = [reshape, transpose], 0
        if source.inputs and source.inputs[0].op == "Split" and len(source.inputs[0].outputs) == 3:
            split = source.inputs[0]
            index = next(i for i, output in enumerate(split.outputs) if output is source)
            nodes, source = [split, *nodes], split.inputs[0]
        linear = self._linear_before(source)
        if linear is None:
            raise _RefusalError(f"the {role} is not a product with a constant weight")
        width = linear.weight.shape[1]
        if nodes[0].op == "Split":
            width = self._split_sizes(nodes[0], linear)[index]
        return _Part(linear, nodes, _num_heads(reshape, linear.x, width), width, index, transpose.outputs[0])

    def _producer(self, tensor: gs.Tensor, op: str, role: str) -> gs.Node:
        if not tensor.inputs or tensor.inputs[0].op != op:
            raise _RefusalError(f"the {role} does not come from Reshape and Transpose")
        if len(tensor.outputs) != 1 or tensor.name in self._outputs:
            raise _RefusalError(f"the {role} is also read elsewhere")
        return tensor.inputs[0]

    def _check_parts(self, parts: Sequence[_Part]) -> None:
        """Refuse parts that are not three equal ones of one split product or of one x."""
        widths = [part.width for part in parts]
        if len(set(widths)) > 1 or len({part.num_heads for part in parts}) > 1:
            raise _RefusalError(f"the parts have {widths} columns; packing needs equal ones (grouped queries)")
        products = {id(part.linear.nodes[0]) for part in parts}
        is_split = len(products) == 1 and sorted(part.index for part in parts) == [0, 1, 2]
        is_triple = len(products) == 3 and not any(part.nodes[0].op == "Split" for part in parts)
        if not is_split and not (is_triple and len({id(part.linear.x) for part in parts}) == 1):
            raise _RefusalError("query, key and value are not projections of one tensor")

    def _layout_behind(self, reshape: gs.Node, linear: _Linear) -> _Layout | None:
        """Case 3, followed on from its Reshape; None where no part is taken, or one goes to Attention.

        Raises:
            _RefusalError: another reader, parts that are not single indices of one axis, or no proof of B and S.
        """
        nodes, packed, perm = [reshape], reshape.outputs[0], list(range(5))
        if len(packed.outputs) == 1 and packed.outputs[0].op == "Transpose":
            nodes.append(packed.outputs[0])
            perm, packed = list(nodes[1].attrs.get("perm", perm[::-1])), nodes[1].outputs[0]
        if not any(reader.op in _SELECTING_OPS for reader in packed.outputs):
            return None
        is_single = self._is_only_read_by(linear.output, reshape)
        if not is_single or not self._outputs.isdisjoint(node.outputs[0].name for node in nodes):
            raise _RefusalError("the product is also read elsewhere")
        sizes = reshape.outputs[0].shape
        selections = self._selections(packed, [sizes[axis] for axis in perm])
        if any(_is_attention(reader) for selection in selections for reader in selection.output.outputs):
            return None
        axis = perm[selections[0].axis]
        if axis < 2:
            raise _RefusalError(f"the parts are taken from batch or sequence of {list(sizes)}")
        columns = _columns_of(reshape, linear.x, linear.weight.shape[1], 3)
        nodes += {id(node): node for selection in selections for node in selection.nodes}.values()
        if any(id(node) not in self._order for node in nodes):
            raise _RefusalError("a part is taken inside a subgraph")
        order = [place - (place > axis) for place in perm if place != axis]
        return _Layout(linear, nodes, columns, order, axis - 2, [part.output for part in selections])

    def _selections(self, packed: gs.Variable, sizes: Sequence[object]) -> list[_Selection]:
        """Every part that is read of a tensor, in the order of their indices.

        Raises:
            _RefusalError: they are not each index of one axis once.
        """
        readers = {id(reader): reader for reader in packed.outputs}.values()
        found = [selection for reader in readers for selection in self._selections_of(reader, sizes)]
        found.sort(key=lambda selection: selection.index)
        axes = {selection.axis for selection in found}
        if len(axes) != 1 or [selection.index for selection in found] != list(range(len(found))):
            raise _RefusalError("the parts are not each index of one axis, taken once")
        if sizes[axes.pop()] != len(found) or len(found) not in (2, 3):
            raise _RefusalError(f"the product has parts of {list(sizes)}; {len(found)} are read, of 2 or 3 in all")
        return found

    def _selections_of(self, reader: gs.Node, sizes: Sequence[object]) -> list[_Selection]:
        """What one node takes of a tensor with `sizes`.

        Raises:
            _RefusalError: not single, constant indices, or an axis of size 1 that stays.
        """
        axis, indices = _selected_indices(reader, sizes)
        if reader.op == "Gather" and not reader.inputs[1].shape:
            return [_Selection(axis, indices[0], (reader,), reader.outputs[0])]
        found = []
        for index, output in zip(indices, reader.outputs, strict=True):
            squeeze = output.outputs[0] if len(output.outputs) == 1 and output.name not in self._outputs else None
            if squeeze is None or squeeze.op != "Squeeze" or _constant_ints(squeeze, 1, []) not in ([axis], [axis - 5]):
                raise _RefusalError("a part keeps its axis of size 1")
            found.append(_Selection(axis, index, (reader, squeeze), squeeze.outputs[0]))
        return found

    def _is_only_read_by(self, tensor: gs.Tensor, reader: gs.Node) -> bool:
        return len(tensor.outputs) == 1 and tensor.outputs[0] is reader and tensor.name not in self._outputs

    # Rewriting

    def _pack(self, parts: Sequence[_Part]) -> None:
        """Case 1."""
        linears = list({id(part.linear.nodes[0]): part.linear for part in parts}.values())
        if len(linears) == 1:
            parts = sorted(parts, key=lambda part: part.index)
        old = {id(n): n for part in parts for n in (*part.linear.nodes, *part.nodes)}
        first = min((linear.nodes[0] for linear in linears), key=lambda node: self._order[id(node)])
        new: list[gs.Node] = []
        weight = np.concatenate([linear.weight.values for linear in linears], axis=1)
        tensor = self._linear_nodes(new, linears[0].x, first.name, weight, _concatenated_biases(linears))
        num_heads, width = parts[0].num_heads, parts[0].width
        shape = self._constant(f"{first.name}_heads_shape", np.array([0, 0, 3, num_heads, width // num_heads]))
        tensor = self._append(new, "Reshape", f"{first.name}_heads", [tensor, shape])
        tensor = self._append(new, "Transpose", f"{first.name}_parts", [tensor], {"perm": [2, 0, 3, 1, 4]})
        for index, part in enumerate(parts):
            number = self._constant(f"{first.name}_index_{index}", np.array(index))
            part.output.inputs.clear()
            self._append(new, "Gather", f"{first.name}_part_{index}", [tensor, number], {"axis": 0}, part.output)
        self._replace(first, list(old.values()), new, "packed")

    def _slice(self, linear: _Linear, split: gs.Node, sizes: Sequence[int]) -> None:
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

    def _slice_layout(self, layout: _Layout) -> None:
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


def _is_attention(node: gs.Node) -> bool:
    return node.op == "Attention" and is_onnx_op(node)


def _reads_packed_layout(attention: gs.Node) -> bool:
    """True when query, key and value are taken from one tensor of five axes, as case 1 does."""
    sources = []
    for tensor in attention.inputs[:3]:
        is_squeezed = bool(tensor.inputs) and tensor.inputs[0].op == "Squeeze"
        taken = tensor.inputs[0].inputs[0] if is_squeezed else tensor
        if taken.inputs and taken.inputs[0].op in _SELECTING_OPS:
            sources.append(taken.inputs[0].inputs[0])
    return len(sources) == 3 and len({id(source) for source in sources}) == 1 and len(sources[0].shape or ()) == 5


def _constant_ints(node: gs.Node, index: int, default: list[int]) -> list[int]:
    """The numbers of a constant input, the default where it is missing, none where it is computed."""
    tensor = node.inputs[index] if index < len(node.inputs) else None
    if tensor is None or not tensor.name:
        return default
    return [int(value) for value in tensor.values.ravel()] if isinstance(tensor, gs.Constant) else []


def _selected_indices(reader: gs.Node, sizes: Sequence[object]) -> tuple[int, list[int]]:
    """The axis that a Gather, Slice or Split reads, and the one index that each of its outputs has of it.

    Raises:
        _RefusalError: another operator, more than one index at a time, or none that is constant.
    """
    axes, indices = [reader.attrs.get("axis", 0)], list[int]()
    if reader.op == "Gather" and len(reader.inputs[1].shape or ()) < 2:
        indices = _constant_ints(reader, 1, [])
    elif reader.op == "Split" and set(_constant_ints(reader, 1, [1])) == {1}:
        indices = list(range(len(reader.outputs)))
    elif reader.op == "Slice":
        axes = _constant_ints(reader, 3, [0])
    size = sizes[axes[0]] if len(axes) == 1 else None
    if reader.op == "Slice" and isinstance(size, int) and _constant_ints(reader, 4, [1]) == [1]:
        starts, ends = _constant_ints(reader, 1, []), _constant_ints(reader, 2, [])
        indices = list(range(size)[slice(*starts, *ends)]) if len(starts) == len(ends) == 1 else []
    if len(indices) != len(reader.outputs) or not isinstance(size, int):
        raise _RefusalError(f"a {reader.op} of the product does not take one constant index at a time")
    return axes[0] % len(sizes), [index % size for index in indices]


def _num_heads(reshape: gs.Node, x: gs.Tensor, width: int) -> int:
    """N of a Reshape [B, S, width] -> [B, S, N, D].

    Raises:
        _RefusalError: N and D are not known, or nothing proves that B and S stay.
    """
    return _columns_of(reshape, x, width, 2)[0]


def _columns_of(reshape: gs.Node, x: gs.Tensor, width: int, num_sizes: int) -> list[int]:
    """The last sizes of a Reshape [B, S, width] -> [B, S, ...].

    Raises:
        _RefusalError: there are not `num_sizes` known ones, or nothing proves that B and S stay.
    """
    sizes = reshape.outputs[0].shape
    if x.shape is None or len(x.shape) != 3 or sizes is None or len(sizes) != 2 + num_sizes:
        raise _RefusalError(f"a reshape is not known to go from [B, S, {width}] to {2 + num_sizes} sizes")
    columns = [size for size in sizes[2:] if isinstance(size, int) and size > 0]
    is_known = len(columns) == num_sizes and math.prod(columns) == width
    if not is_known or not _keeps_batch_and_sequence(reshape, x):
        raise _RefusalError(f"the reshape to {list(sizes)} is not known to keep {list(x.shape[:2])}")
    return columns


def _keeps_batch_and_sequence(reshape: gs.Node, x: gs.Tensor) -> bool:
    """True when the first two sizes of the Reshape's target are those of x [B, S, K]; its others must keep the width.

    B * S stays, so that proof for one of the two is proof for both: a 0 (copy) in the target, a target that begins with
    the first size of x, or an equal number among the inferred sizes. Two equal symbols prove nothing unless B and S
    differ, since models exist that call every open size "?".
    """
    target = reshape.inputs[1]
    first = target.inputs[0].inputs[0] if target.inputs and target.inputs[0].op == "Concat" else target
    if isinstance(first, gs.Constant) and not reshape.attrs.get("allowzero", 0) and 0 in first.values[:2]:
        return True
    pairs = list(zip(reshape.outputs[0].shape, x.shape[:2], strict=False))
    if _begins_with_batch(first, x) or any(new == old and isinstance(new, int) for new, old in pairs):
        return True
    return all(new == old and new not in (None, "") for new, old in pairs) and x.shape[0] != x.shape[1]


def _begins_with_batch(sizes: gs.Tensor, x: gs.Tensor) -> bool:
    """True for Shape(x), and for index 0 of it taken by Gather or Slice, also when unsqueezed."""
    while sizes.inputs:
        node = sizes.inputs[0]
        if node.op == "Shape":
            return node.inputs[0] is x and node.attrs.get("start", 0) == 0 and list(sizes.shape or ()) != [0]
        # A slice of another length may be empty, and let the next number of the target come first.
        is_one = node.op == "Gather" or (node.op == "Slice" and list(sizes.shape or ()) == [1])
        if node.op != "Unsqueeze" and not (is_one and _constant_ints(node, 1, [])[:1] == [0]):
            return False
        sizes = node.inputs[0]
    return False


def _concatenated_biases(linears: Sequence[_Linear]) -> _Array | None:
    """The biases one after the other, zeros where a part has none; None where none has."""
    if all(linear.bias is None for linear in linears):
        return None
    parts = [
        np.zeros(linear.weight.shape[1], linear.weight.dtype) if linear.bias is None else linear.bias.values
        for linear in linears
    ]
    return np.concatenate(parts)
