"""Find the projections of query, key and value, in each spelling that `packed_qkv` names, and change nothing.

A product with a constant weight [K, width] and maybe a bias [width] is `Linear`. Query, key or value, followed back
from an input of Attention, is `Part` (case 1); the packed layout, followed on from its Reshape, is `Layout` (case 3).
What is matched is replaced as a whole, so nothing within it may have another reader or be an output of the graph.
A place that is none of the cases gives None; one that begins like a case and cannot be proved raises `RefusalError`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_graphsurgeon as gs

from trtforge.fusion.qkv_layout import SELECTING_OPS, RefusalError, columns_of, constant_ints, op_of, selections_of

_HEAD_PERM = [0, 2, 1, 3]
_ROLES = ("query", "key", "value")


@dataclasses.dataclass(slots=True)
class Linear:
    """x -> MatMul -> optional Add: `output` is [B, S, width]."""

    nodes: list[gs.Node]
    x: gs.Tensor
    weight: gs.Constant
    bias: gs.Constant | None
    output: gs.Variable


@dataclasses.dataclass(slots=True)
class Part:
    """One of query, key and value: columns of a linear layer, then Reshape -> Transpose."""

    linear: Linear
    nodes: list[gs.Node]
    num_heads: int
    width: int
    index: int
    output: gs.Variable


@dataclasses.dataclass(slots=True)
class Layout:
    """Case 3: `sizes` are the last three of the Reshape's five, and part i is index i of its axis `axis`."""

    linear: Linear
    nodes: list[gs.Node]
    sizes: list[int]
    perm: list[int]
    axis: int
    parts: list[gs.Variable]


class Matcher:
    """Matches places of one graph; reads its outputs and its list of nodes once, its edges at each call."""

    def __init__(self, graph: gs.Graph) -> None:
        self._outputs = {tensor.name for tensor in graph.outputs}
        self._nodes = {id(node) for node in graph.nodes}

    def linear_before(self, tensor: gs.Tensor) -> Linear | None:
        """The MatMul with a constant [K, width] weight, and the Add of a constant [width] behind it, that end here."""
        nodes: list[gs.Node] = list(tensor.inputs)
        bias = None
        if nodes and op_of(nodes[0]) == "Add" and len(nodes[0].inputs) == 2:
            constants = [operand for operand in nodes[0].inputs if isinstance(operand, gs.Constant)]
            others = [operand for operand in nodes[0].inputs if not isinstance(operand, gs.Constant)]
            if len(constants) != 1 or not self._is_only_read_by(others[0], nodes[0]):
                return None
            bias = constants[0]
            nodes = [*others[0].inputs, nodes[0]]
        if not nodes or op_of(nodes[0]) != "MatMul" or len(nodes[0].inputs) != 2:
            return None
        x, weight = nodes[0].inputs
        if not isinstance(weight, gs.Constant) or len(weight.shape) != 2 or isinstance(x, gs.Constant):
            return None
        if bias is not None and tuple(bias.shape) != (weight.shape[1],):
            return None
        return Linear(nodes, x, weight, bias, tensor)

    def split_sizes(self, split: gs.Node, linear: Linear) -> list[int]:
        """The columns of each part.

        Raises:
            RefusalError: another axis, sizes that are not constant or not the whole, or a second reader of the product.
        """
        axis = split.attrs.get("axis", 0)
        rank = None if linear.output.shape is None else len(linear.output.shape)
        width = linear.weight.shape[1]
        if axis != -1 and (rank is None or axis != rank - 1):
            raise RefusalError(f"the Split is along axis {axis}, not the last")
        if not self._is_only_read_by(linear.output, split):
            raise RefusalError("the product is also read elsewhere")
        if len(split.inputs) == 1 or not split.inputs[1].name:
            share = -(-width // 3)
            sizes = [share, share, width - 2 * share]
        else:
            sizes = constant_ints(split, 1, [])
        is_whole = len(sizes) == 3 and min(sizes) > 0 and sum(sizes) == width
        if not is_whole or not all(output.name for output in split.outputs):
            raise RefusalError(f"the Split is not known to cut {width} columns into three parts")
        return sizes

    def parts_before(self, attention: gs.Node) -> list[Part]:
        """Query, key and value of an Attention.

        Raises:
            RefusalError: one of them is no part, or they are not three equal parts of one split product or of one x.
        """
        parts = [self._part_before(*pair) for pair in zip(attention.inputs[:3], _ROLES, strict=True)]
        _check_parts(parts)
        return parts

    def _part_before(self, tensor: gs.Tensor, role: str) -> Part:
        """Query, key or value, followed back from an input of Attention.

        Raises:
            RefusalError: another head layout, another reader, or no proof that the Reshape keeps B and S.
        """
        transpose = self._producer(tensor, "Transpose", role)
        if list(transpose.attrs.get("perm", ())) != _HEAD_PERM:
            raise RefusalError(f"the Transpose of the {role} has perm {transpose.attrs.get('perm')}, not {_HEAD_PERM}")
        reshape = self._producer(transpose.inputs[0], "Reshape", role)
        source = reshape.inputs[0]
        if not self._is_only_read_by(source, reshape):
            raise RefusalError(f"the {role} is also read elsewhere")
        nodes, index = [reshape, transpose], 0
        if source.inputs and op_of(source.inputs[0]) == "Split" and len(source.inputs[0].outputs) == 3:
            split = source.inputs[0]
            index = next(i for i, output in enumerate(split.outputs) if output is source)
            nodes, source = [split, *nodes], split.inputs[0]
        linear = self.linear_before(source)
        if linear is None:
            raise RefusalError(f"the {role} is not a product with a constant weight")
        width = linear.weight.shape[1]
        if op_of(nodes[0]) == "Split":
            width = self.split_sizes(nodes[0], linear)[index]
        return Part(linear, nodes, _num_heads(reshape, linear.x, width), width, index, transpose.outputs[0])

    def _producer(self, tensor: gs.Tensor, op: str, role: str) -> gs.Node:
        if not tensor.inputs or op_of(tensor.inputs[0]) != op:
            raise RefusalError(f"the {role} does not come from Reshape and Transpose")
        if len(tensor.outputs) != 1 or tensor.name in self._outputs:
            raise RefusalError(f"the {role} is also read elsewhere")
        return tensor.inputs[0]

    def layout_behind(self, reshape: gs.Node, linear: Linear) -> Layout | None:
        """Case 3, followed on from its Reshape; None where no part is taken, or one goes to Attention.

        Raises:
            RefusalError: another reader, parts that are not single indices of one axis, or no proof of B and S.
        """
        nodes, packed, perm = [reshape], reshape.outputs[0], list(range(5))
        if len(packed.outputs) == 1 and op_of(packed.outputs[0]) == "Transpose":
            nodes.append(packed.outputs[0])
            perm, packed = list(nodes[1].attrs.get("perm", perm[::-1])), nodes[1].outputs[0]
        if not any(op_of(reader) in SELECTING_OPS for reader in packed.outputs) or sorted(perm) != list(range(5)):
            return None
        is_single = self._is_only_read_by(linear.output, reshape)
        if not is_single or not self._outputs.isdisjoint(node.outputs[0].name for node in nodes):
            raise RefusalError("the product is also read elsewhere")
        sizes = reshape.outputs[0].shape
        selections = selections_of(packed, [sizes[axis] for axis in perm], self._outputs)
        if any(is_attention(reader) for selection in selections for reader in selection.output.outputs):
            return None
        axis = perm[selections[0].axis]
        if axis < 2:
            raise RefusalError(f"the parts are taken from batch or sequence of {list(sizes)}")
        columns = columns_of(reshape, linear.x, linear.weight.shape[1], 3)
        nodes += {id(node): node for selection in selections for node in selection.nodes}.values()
        if any(id(node) not in self._nodes for node in nodes):
            raise RefusalError("a part is taken inside a subgraph")
        order = [place - (place > axis) for place in perm if place != axis]
        return Layout(linear, nodes, columns, order, axis - 2, [part.output for part in selections])

    def _is_only_read_by(self, tensor: gs.Tensor, reader: gs.Node) -> bool:
        return len(tensor.outputs) == 1 and tensor.outputs[0] is reader and tensor.name not in self._outputs


def _check_parts(parts: Sequence[Part]) -> None:
    """Refuse parts that are not three equal ones of one split product or of one x."""
    widths = [part.width for part in parts]
    if len(set(widths)) > 1 or len({part.num_heads for part in parts}) > 1:
        raise RefusalError(f"the parts have {widths} columns; packing needs equal ones (grouped queries)")
    products = {id(part.linear.nodes[0]) for part in parts}
    is_split = len(products) == 1 and sorted(part.index for part in parts) == [0, 1, 2]
    is_triple = len(products) == 3 and not any(op_of(part.nodes[0]) == "Split" for part in parts)
    if not is_split and not (is_triple and len({id(part.linear.x) for part in parts}) == 1):
        raise RefusalError("query, key and value are not projections of one tensor")


def is_attention(node: gs.Node) -> bool:
    """True for the operator of ONNX, not one of that name in another domain."""
    return op_of(node) == "Attention"


def reads_packed_layout(attention: gs.Node) -> bool:
    """True when query, key and value are taken from one tensor of five axes, as case 1 does."""
    sources = []
    for tensor in attention.inputs[:3]:
        is_squeezed = bool(tensor.inputs) and op_of(tensor.inputs[0]) == "Squeeze"
        taken = tensor.inputs[0].inputs[0] if is_squeezed else tensor
        if taken.inputs and op_of(taken.inputs[0]) in SELECTING_OPS:
            sources.append(taken.inputs[0].inputs[0])
    return len(sources) == 3 and len({id(source) for source in sources}) == 1 and len(sources[0].shape or ()) == 5


def _num_heads(reshape: gs.Node, x: gs.Tensor, width: int) -> int:
    """N of a Reshape [B, S, width] -> [B, S, N, D].

    Raises:
        RefusalError: N and D are not known, or nothing proves that B and S stay.
    """
    return columns_of(reshape, x, width, 2)[0]
