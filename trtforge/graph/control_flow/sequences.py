"""Resolve sequences whose tensors are known one by one: TensorRT has no sequences.

A walk in node order remembers of which tensors each sequence consists. What takes a tensor out of one, or joins its
tensors, then reads them directly; what only makes a sequence is dead. A sequence that an If, Loop or Scan gives, an
input, and one whose length or positions are known only at run time stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.graph.control_flow.inline import copy_body, detach, forward
from trtforge.graph.edit import all_graphs, all_nodes, is_array, is_onnx_op
from trtforge.graph.names import UniqueNames

# Tensors in one sequence; more are left alone.
_MAX_LENGTH = 4096
# Nodes, subgraphs included, that a graph may come to by copies of a SequenceMap's body.
_MAX_TOTAL_NODES = 20_000

# fmt: off
SEQUENCE_OPS = frozenset([
    "ConcatFromSequence", "SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert",
    "SequenceLength", "SequenceMap", "SplitToSequence",
])
# fmt: on

_Tensors = list[gs.Tensor]


def resolve_sequences(graph: gs.Graph) -> int:
    """Replace readers of known sequences by ordinary operators, in place, subgraphs included.

    Args:
        graph: sorted, with inferred types.

    Returns:
        How many nodes were replaced; those that only made a sequence are left for dead node removal.
    """
    if not any(node.op in SEQUENCE_OPS for holder in all_graphs(graph) for node in holder.nodes):
        return 0
    resolver = _Resolver(UniqueNames(graph), _MAX_TOTAL_NODES - sum(1 for _ in all_nodes(graph)))
    for current in all_graphs(graph):
        nodes = []
        for node in current.nodes:
            nodes += resolver.visit(node)
        current.nodes = nodes
    for node in resolver.gone:
        list.clear(node.outputs)
    detach(resolver.gone)
    return len(resolver.gone)


class _Resolver:
    """What is known of sequences so far."""

    def __init__(self, names: UniqueNames, nodes_left: int) -> None:
        self.gone: list[gs.Node] = []
        self._names = names
        self._nodes_left = nodes_left
        self._known: dict[int, _Tensors] = {}

    def visit(self, node: gs.Node) -> list[gs.Node]:
        """The nodes that stand for a node; itself where nothing is known."""
        if not is_onnx_op(node):
            return [node]
        if node.op == "Identity" and id(node.inputs[0]) in self._known:
            self._learn(node, self._known[id(node.inputs[0])])
        elif node.op == "SplitToSequence":
            return self._split(node)
        elif node.op == "SequenceMap":
            return self._map(node)
        elif node.op in _MAKERS:
            tensors = _MAKERS[node.op](node, self._known)
            if tensors is not None:
                self._learn(node, tensors)
        elif node.op in _READERS and id(node.inputs[0]) in self._known:
            return self._read(node, self._known[id(node.inputs[0])])
        return [node]

    def _learn(self, node: gs.Node, tensors: _Tensors) -> None:
        if len(tensors) <= _MAX_LENGTH:
            self._known[id(node.outputs[0])] = tensors

    def _constant(self, name: str, values: object) -> gs.Constant:
        return gs.Constant(self._names.tensor(name), np.array(values, np.int64))

    def _node(self, op: str, node: gs.Node, inputs: _Tensors, outputs: _Tensors, **attrs: object) -> gs.Node:
        return gs.Node(op, self._names.node(f"{node.name}_{op}"), attrs, inputs, outputs)

    def _variable(self, wanted: str, like: gs.Tensor | None = None) -> gs.Variable:
        return gs.Variable(self._names.tensor(wanted), None if like is None else like.dtype)

    def _read(self, node: gs.Node, tensors: _Tensors) -> list[gs.Node]:
        """Nodes that give what a SequenceAt, SequenceLength or ConcatFromSequence gives."""
        if node.op == "SequenceLength":
            results = [self._constant(f"{node.name}_length", len(tensors))]
            added: list[gs.Node] = []
        elif node.op == "SequenceAt":
            position = _constant_position(node, 1, len(tensors))
            if position is None:
                return [node]
            results, added = [tensors[position]], []
        else:
            if not tensors:
                return [node]
            results, added = self._join(node, tensors)
        self.gone.append(node)
        return [*added, *forward(results, node.outputs, self._names)]

    def _join(self, node: gs.Node, tensors: _Tensors) -> tuple[_Tensors, list[gs.Node]]:
        axis, is_new = node.attrs["axis"], bool(node.attrs.get("new_axis", 0))
        added: list[gs.Node] = []
        if is_new:
            axes = self._constant(f"{node.name}_axes", [axis])
            for index, tensor in enumerate(tensors):
                wide = self._variable(f"{node.name}_{index}", tensor)
                added.append(self._node("Unsqueeze", node, [tensor, axes], [wide]))
                tensors = [*tensors[:index], wide, *tensors[index + 1 :]]
        result = self._variable(f"{node.name}_joined", node.outputs[0])
        return [result], [*added, self._node("Concat", node, tensors, [result], axis=axis)]

    def _split(self, node: gs.Node) -> list[gs.Node]:
        """A Split, with Squeezes where one slice each is taken without its axis."""
        axis, source = node.attrs.get("axis", 0), node.inputs[0]
        sizes = _split_sizes(node, axis)
        if sizes is None or len(sizes) > _MAX_LENGTH:
            return [node]
        has_sizes = len(node.inputs) > 1 and bool(node.inputs[1].name)
        parts = [self._variable(f"{node.name}_{index}", source) for index in range(len(sizes))]
        added = [self._node("Split", node, [source, self._constant(f"{node.name}_sizes", sizes)], [*parts], axis=axis)]
        if not has_sizes and not node.attrs.get("keepdims", 1):
            axes = self._constant(f"{node.name}_axes", [axis])
            narrow = [self._variable(f"{part.name}_squeezed", source) for part in parts]
            added += [self._node("Squeeze", node, [p, axes], [n]) for p, n in zip(parts, narrow, strict=True)]
            parts = narrow
        self._known[id(node.outputs[0])] = [*parts]
        # What still reads the sequence itself, if anything does, keeps its producer.
        return [*added, self._node_of_sequence(node, [*parts])]

    def _map(self, node: gs.Node) -> list[gs.Node]:
        """One copy of a SequenceMap's body for each element."""
        body = node.attrs["body"]
        sequences = [self._known.get(id(tensor), tensor) for tensor in node.inputs]
        if not isinstance(sequences[0], list):
            return [node]
        num_nodes = len(sequences[0]) * sum(1 for _ in all_nodes(body))
        if num_nodes > self._nodes_left:
            return [node]
        self._nodes_left -= num_nodes
        elements: list[_Tensors] = [[] for _ in node.outputs]
        added: list[gs.Node] = []
        for index in range(len(sequences[0])):
            given = [entry[index] if isinstance(entry, list) else entry for entry in sequences]
            nodes, results = copy_body(body, given, self._names)
            added += nodes
            for element, result in zip(elements, results, strict=True):
                element.append(result)
        for output, tensors in zip(node.outputs, elements, strict=True):
            self._known[id(output)] = tensors
        made = [self._node_of_sequence(node, tensors, index) for index, tensors in enumerate(elements)]
        return [*added, *made]

    def _node_of_sequence(self, node: gs.Node, tensors: _Tensors, index: int = 0) -> gs.Node:
        """A SequenceConstruct in place of a node that gave a sequence; it dies with its last reader."""
        output = node.outputs[index]
        list.clear(output.inputs)
        if node not in self.gone[-1:]:
            self.gone.append(node)
        return self._node("SequenceConstruct", node, tensors, [output])


def _constructed(node: gs.Node, _known: Mapping[int, _Tensors]) -> _Tensors | None:
    return list(node.inputs)


def _empty(_node: gs.Node, _known: Mapping[int, _Tensors]) -> _Tensors | None:
    return []


def _inserted(node: gs.Node, known: Mapping[int, _Tensors]) -> _Tensors | None:
    tensors = known.get(id(node.inputs[0]))
    if tensors is None:
        return None
    has_position = len(node.inputs) > 2 and bool(node.inputs[2].name)
    position = _constant_position(node, 2, len(tensors), is_insertion=True) if has_position else len(tensors)
    return None if position is None else [*tensors[:position], node.inputs[1], *tensors[position:]]


def _erased(node: gs.Node, known: Mapping[int, _Tensors]) -> _Tensors | None:
    tensors = known.get(id(node.inputs[0]))
    if not tensors:
        return None
    has_position = len(node.inputs) > 1 and bool(node.inputs[1].name)
    position = _constant_position(node, 1, len(tensors)) if has_position else len(tensors) - 1
    return None if position is None else [*tensors[:position], *tensors[position + 1 :]]


_MAKERS: Mapping[str, Callable[[gs.Node, Mapping[int, _Tensors]], _Tensors | None]] = {
    "SequenceConstruct": _constructed,
    "SequenceEmpty": _empty,
    "SequenceErase": _erased,
    "SequenceInsert": _inserted,
}
_READERS = ("ConcatFromSequence", "SequenceAt", "SequenceLength")


def _constant_position(node: gs.Node, index: int, length: int, is_insertion: bool = False) -> int | None:
    """A constant position in a sequence, counted from its start; None where it is unknown or outside."""
    tensor = node.inputs[index]
    if not is_array(tensor) or tensor.values.size != 1:
        return None
    position = int(tensor.values.item())
    position += length if position < 0 else 0
    return position if 0 <= position < length + is_insertion else None


def _split_sizes(node: gs.Node, axis: int) -> Sequence[int] | None:
    """The sizes of a SplitToSequence's parts, where the axis is static and the split constant."""
    shape = node.inputs[0].shape
    size = shape[axis] if shape is not None and -len(shape) <= axis < len(shape) else None
    if not isinstance(size, int):
        return None
    if len(node.inputs) < 2 or not node.inputs[1].name:
        return [1] * size
    if not is_array(node.inputs[1]):
        return None
    split = node.inputs[1].values
    if split.ndim:
        return [int(part) for part in split]
    step = int(split)
    return [min(step, size - start) for start in range(0, size, step)] if step > 0 else None
