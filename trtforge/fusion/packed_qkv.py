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

`[0, 0, 3, N, D]` copies B and S, so no shape is computed; that needs proof that the original Reshape keeps both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.graph.edit import is_onnx_op, remove_nodes
from trtforge.graph.names import UniqueNames

PATTERN = "packed_qkv"
HEAD_PERM = [0, 2, 1, 3]


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
        node: the product that now computes it (case 2: the first of three).
        lowered_to: "packed" (case 1) or "sliced" (case 2).
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


def pack_qkv(graph: gs.Graph) -> PackedQkvReport:
    """Respell every query-key-value projection of the main graph.

    Args:
        graph: normalised, float, before Q/DQ; modified in place. Its outputs stay equal up to the order of summation.
    """
    packer = _Packer(graph)
    packer.pack_attention_inputs()
    packer.slice_splits()
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
            if attention.op != "Attention" or not is_onnx_op(attention):
                continue
            try:
                parts = [self._part_before(tensor) for tensor in attention.inputs[:3]]
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
            raise _RefusalError(f"the Split {split.name!r} is along axis {axis}, not the last")
        if not self._is_only_read_by(linear.output, split):
            raise _RefusalError(f"{linear.output.name!r} is also read elsewhere")
        if len(split.inputs) == 1 or not split.inputs[1].name:
            share = -(-linear.weight.shape[1] // 3)
            return [share, share, linear.weight.shape[1] - 2 * share]
        if not isinstance(split.inputs[1], gs.Constant):
            raise _RefusalError(f"the sizes of the Split {split.name!r} are not constant")
        return [int(size) for size in split.inputs[1].values]

    def _part_before(self, tensor: gs.Tensor) -> _Part:
        """Query, key or value, followed back from an input of Attention.

        Raises:
            _RefusalError: another head layout, another reader, or no proof that the Reshape keeps B and S.
        """
        transpose = self._producer(tensor, "Transpose")
        if list(transpose.attrs.get("perm", ())) != HEAD_PERM:
            raise _RefusalError(f"the transpose {transpose.name!r} has perm {transpose.attrs.get('perm')}")
        reshape = self._producer(transpose.inputs[0], "Reshape")
        source = reshape.inputs[0]
        if not self._is_only_read_by(source, reshape):
            raise _RefusalError(f"{source.name!r} is also read elsewhere")
        nodes, index = [reshape, transpose], 0
        if source.inputs and source.inputs[0].op == "Split" and len(source.inputs[0].outputs) == 3:
            split = source.inputs[0]
            index = next(i for i, output in enumerate(split.outputs) if output is source)
            nodes, source = [split, *nodes], split.inputs[0]
        linear = self._linear_before(source)
        if linear is None:
            raise _RefusalError(f"{source.name!r} is not a product with a constant weight")
        width = linear.weight.shape[1]
        if nodes[0].op == "Split":
            width = self._split_sizes(nodes[0], linear)[index]
        return _Part(linear, nodes, _num_heads(reshape, linear.x, width), width, index, transpose.outputs[0])

    def _producer(self, tensor: gs.Tensor, op: str) -> gs.Node:
        if not tensor.inputs or tensor.inputs[0].op != op:
            raise _RefusalError(f"{tensor.name!r} does not come from a {op}")
        if len(tensor.outputs) != 1 or tensor.name in self._outputs:
            raise _RefusalError(f"{tensor.name!r} is also read elsewhere")
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

    def _linear_nodes(
        self,
        new: list[gs.Node],
        x: gs.Tensor,
        name: str,
        weight: np.ndarray[tuple[int, ...], np.dtype[np.generic]],
        bias: np.ndarray[tuple[int, ...], np.dtype[np.generic]] | None,
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

    def _constant(self, name: str, values: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> gs.Constant:
        return gs.Constant(self._names.tensor(name), values)

    def _replace(self, first: gs.Node, old: Sequence[gs.Node], new: list[gs.Node], lowered_to: str) -> None:
        self._inserted[id(first)] = new
        self._removed.update(id(node) for node in old)
        self.rewritten.append(Rewrite(first.name, lowered_to, tuple(node.name for node in old)))


def _num_heads(reshape: gs.Node, x: gs.Tensor, width: int) -> int:
    """N of a Reshape [B, S, width] -> [B, S, N, D].

    Raises:
        _RefusalError: N and D are not known, or nothing proves that B and S stay.
    """
    sizes = reshape.outputs[0].shape
    if x.shape is None or len(x.shape) != 3 or sizes is None or len(sizes) != 4:
        raise _RefusalError(f"the reshape {reshape.name!r} is not known to be [B, S, width] -> [B, S, N, D]")
    heads = [size for size in sizes[2:] if isinstance(size, int) and size > 0]
    if len(heads) != 2 or heads[0] * heads[1] != width or not _keeps_batch_and_sequence(reshape, x):
        raise _RefusalError(f"the reshape {reshape.name!r} to {list(sizes)} is not known to keep {list(x.shape[:2])}")
    return heads[0]


def _keeps_batch_and_sequence(reshape: gs.Node, x: gs.Tensor) -> bool:
    """True when the first two sizes of the Reshape's target are those of x [B, S, K].

    Proof is a target that starts with 0 (copy), or equal inferred sizes; two equal symbols prove nothing, since models
    exist that call every open size "?".
    """
    target = reshape.inputs[1]
    if isinstance(target, gs.Constant) and not reshape.attrs.get("allowzero", 0) and int(target.values[0]) == 0:
        return True
    sizes = list(reshape.outputs[0].shape[:2])
    if any(size in (None, "") for size in sizes) or sizes != list(x.shape[:2]):
        return False
    return sizes[0] != sizes[1] or isinstance(sizes[0], int)


def _concatenated_biases(linears: Sequence[_Linear]) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]] | None:
    """The biases one after the other, zeros where a part has none; None where none has."""
    if all(linear.bias is None for linear in linears):
        return None
    parts = [
        np.zeros(linear.weight.shape[1], linear.weight.dtype) if linear.bias is None else linear.bias.values
        for linear in linears
    ]
    return np.concatenate(parts)
