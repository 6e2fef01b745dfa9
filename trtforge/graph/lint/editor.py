"""How the fixer changes a graph: steps plan their edits on it, `apply` carries them out in linear time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from trtforge.graph.edit import all_graphs, is_onnx_op, remove_dead_nodes
from trtforge.graph.lint.findings import Fixed
from trtforge.graph.names import UniqueNames


class Editor:
    """A graph under repair.

    Inputs and outputs of nodes change at once; nodes take and leave their places with `apply`, which ends each step.

    Attributes:
        graph: modified in place.
        fixed: what was done so far.
        removed: identities of the nodes that `apply` will take out.
    """

    def __init__(self, graph: gs.Graph) -> None:
        self.graph = graph
        self.fixed: list[Fixed] = []
        self.names = UniqueNames(graph)
        self._before: dict[int, list[gs.Node]] = {}
        self._after: dict[int, list[gs.Node]] = {}
        self.removed: set[int] = set()
        self._num_applied = 0

    def nodes(self, *ops: str) -> list[tuple[gs.Graph, gs.Node]]:
        """Nodes of ONNX's own domain with one of these operators and the graph that holds each, in order."""
        return [
            (holder, node)
            for holder in all_graphs(self.graph)
            for node in holder.nodes
            if node.op in ops and is_onnx_op(node) and id(node) not in self.removed
        ]

    def output_ids(self) -> set[int]:
        """Identities of the tensors that a graph, nested ones included, gives as outputs."""
        return {id(tensor) for holder in all_graphs(self.graph) for tensor in holder.outputs}

    def record(self, rule: str, nodes: list[gs.Node], what: str) -> None:
        """Note a change for the user; every change is noted, so that `apply` knows of it."""
        self.fixed.append(Fixed(rule, tuple(dict.fromkeys(node.name for node in nodes)), what))

    def constant(self, name: str, values: npt.ArrayLike, dtype: npt.DTypeLike) -> gs.Constant:
        """A new initializer."""
        return gs.Constant(self.names.tensor(name), np.array(values, dtype))

    def variable(self, name: str, dtype: Any, shape: Any) -> gs.Variable:
        """A new tensor."""
        return gs.Variable(self.names.tensor(name), dtype, shape)

    def node(self, op: str, name: str, inputs: list[gs.Tensor], outputs: list[gs.Tensor], **attrs: Any) -> gs.Node:
        """A new node; `before` or `after` gives it its place."""
        node = gs.Node(op, self.names.node(name), attrs=attrs)
        set_inputs(node, inputs)
        set_outputs(node, outputs)
        return node

    def before(self, anchor: gs.Node, *nodes: gs.Node) -> None:
        """Place new nodes right before another; several calls keep their order."""
        self._before.setdefault(id(anchor), []).extend(nodes)

    def after(self, anchor: gs.Node, *nodes: gs.Node) -> None:
        """Place new nodes right after another; several calls keep their order."""
        self._after.setdefault(id(anchor), []).extend(nodes)

    def remove(self, node: gs.Node) -> None:
        """Take a node out."""
        self.removed.add(id(node))

    def apply(self) -> None:
        """Insert and remove nodes, and those that no output needs any more; rebuild every list of readers."""
        if len(self.fixed) == self._num_applied:
            return
        self._num_applied = len(self.fixed)
        for holder in list(all_graphs(self.graph)):
            holder.nodes = list(self._placed(holder.nodes))
        self._before.clear()
        self._after.clear()
        self.removed.clear()
        _relink(self.graph)
        remove_dead_nodes(self.graph)

    def readers(self, tensor: gs.Tensor) -> list[gs.Node]:
        """The nodes that read a tensor now, each once, subgraphs included."""
        nodes = {id(node): node for node in tensor.outputs if id(node) not in self.removed}
        return [node for node in nodes.values() if any(given is tensor for given in node.inputs)]

    def _placed(self, nodes: list[gs.Node]) -> Iterator[gs.Node]:
        for node in nodes:
            yield from self._placed(self._before.get(id(node), []))
            if id(node) not in self.removed:
                yield node
            yield from self._placed(self._after.get(id(node), []))


def set_inputs(node: gs.Node, tensors: list[gs.Tensor]) -> None:
    """Give a node other inputs; the old tensors forget it with `Editor.apply`."""
    list.__setitem__(node.inputs, slice(None), tensors)
    for tensor in tensors:
        list.append(tensor.outputs, node)


def set_input(node: gs.Node, index: int, tensor: gs.Tensor) -> None:
    """Give a node another input; the old tensor forgets it with `Editor.apply`."""
    list.__setitem__(node.inputs, index, tensor)
    list.append(tensor.outputs, node)


def set_outputs(node: gs.Node, tensors: list[gs.Tensor]) -> None:
    """Make a node the producer of these tensors."""
    list.__setitem__(node.outputs, slice(None), tensors)
    for tensor in tensors:
        list.__setitem__(tensor.inputs, slice(None), [node])


def _relink(graph: gs.Graph) -> None:
    tensors: dict[int, gs.Tensor] = {}
    producers: dict[int, list[gs.Node]] = {}
    readers: dict[int, list[gs.Node]] = {}
    for holder in all_graphs(graph):
        tensors.update((id(tensor), tensor) for tensor in [*holder.inputs, *holder.outputs])
        for node in holder.nodes:
            for tensor in node.inputs:
                tensors[id(tensor)] = tensor
                readers.setdefault(id(tensor), []).append(node)
            for tensor in node.outputs:
                tensors[id(tensor)] = tensor
                producers.setdefault(id(tensor), []).append(node)
    for key, tensor in tensors.items():
        list.__setitem__(tensor.inputs, slice(None), producers.get(key, []))
        list.__setitem__(tensor.outputs, slice(None), readers.get(key, []))
