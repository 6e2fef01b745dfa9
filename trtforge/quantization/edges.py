"""Edits of a graphsurgeon graph in time linear in their number.

`node.inputs[i] = tensor` scans the old tensor's consumers and compares nodes by value, which is quadratic for a
constant that thousands of nodes share. Here edits are collected and each touched tensor's consumer list is rebuilt
once.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.graph.edit import all_graphs, subgraphs_of


def is_float32(tensor: gs.Tensor) -> bool:
    """True when the tensor's element type is known to be float32."""
    return not isinstance(tensor.dtype, int) and tensor.dtype is not None and np.dtype(tensor.dtype) == np.float32


def pinned_names(graph: gs.Graph) -> set[str]:
    """Names of the tensors that must keep their name and type: graph outputs, and what subgraphs read or return."""
    pinned = {tensor.name for tensor in graph.outputs}
    for node in graph.nodes:
        for body in subgraphs_of(node):
            for inner in all_graphs(body):
                pinned.update(tensor.name for tensor in inner.outputs)
                pinned.update(tensor.name for reader in inner.nodes for tensor in reader.inputs)
    return pinned


def copy_graph(graph: gs.Graph) -> gs.Graph:
    """A copy whose nodes and tensors are new objects; graphsurgeon's own copy turns sequences into tensors."""
    copy = graph.copy()
    originals = graph.tensors()
    for name, tensor in copy.tensors().items():
        if isinstance(tensor, gs.Variable):
            tensor.type = originals[name].type
    return copy


class UniqueNames:
    """Hands out tensor and node names that the graph, its subgraphs included, does not use yet."""

    def __init__(self, graph: gs.Graph) -> None:
        self._nodes: set[str] = set()
        self._tensors: set[str] = set()
        for current in all_graphs(graph):
            self._tensors.update(tensor.name for tensor in (*current.inputs, *current.outputs))
            for node in current.nodes:
                self._nodes.add(node.name)
                self._tensors.update(tensor.name for tensor in (*node.inputs, *node.outputs))

    def tensor(self, wanted: str) -> str:
        """`wanted`, or `wanted_1`, `wanted_2` ... where it is taken."""
        return _claim(wanted, self._tensors)

    def node(self, wanted: str) -> str:
        """`wanted`, or `wanted_1`, `wanted_2` ... where it is taken."""
        return _claim(wanted, self._nodes)


def _claim(wanted: str, taken: set[str]) -> str:
    name, index = wanted, 0
    while name in taken:
        index += 1
        name = f"{wanted}_{index}"
    taken.add(name)
    return name


class InputEdits:
    """Replacements of node inputs, collected and applied together."""

    def __init__(self) -> None:
        self._edits: list[tuple[gs.Node, int, gs.Tensor]] = []

    def replace(self, node: gs.Node, index: int, tensor: gs.Tensor) -> None:
        """Plan `node.inputs[index] = tensor`."""
        self._edits.append((node, index, tensor))

    def apply(self) -> None:
        """Carry out every planned replacement."""
        lost: dict[int, tuple[gs.Tensor, Counter[int]]] = {}
        for node, index, tensor in self._edits:
            old = node.inputs[index]
            lost.setdefault(id(old), (old, Counter()))[1][id(node)] += 1
            list.__setitem__(node.inputs, index, tensor)
            list.append(tensor.outputs, node)
        for old, counts in lost.values():
            kept = []
            for consumer in old.outputs:
                if counts[id(consumer)] > 0:
                    counts[id(consumer)] -= 1
                else:
                    kept.append(consumer)
            list.__setitem__(old.outputs, slice(None), kept)
        self._edits.clear()
