"""Cut some nodes out of a graph, as a graph of their own.

What the nodes read from others becomes an input, of the type and shape that it has in the whole graph; what others
read from them becomes an output, and what the whole gives stays one. A small integer tensor (a shape, an axis) is no
use as an input: its producers come along, and so do those of tensors whose type or shape is unknown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.graph.cost import Shapes
from trtforge.graph.edit import all_graphs, reads_of, subgraphs_of
from trtforge.graph.signature import tensor_dtype
from trtforge.profile import Profile, ProfileSet, ShapeRange

# Elements of an integer tensor that is taken for a shape.
_SMALL = 16


@dataclasses.dataclass(frozen=True, slots=True)
class ShapeTable:
    """The shapes of a graph's tensors in every profile.

    Attributes:
        names: of the profiles.
        shapes: min, opt and max of every profile: sizes by tensor name; tensors may be missing.
        values: ranges of the values of shape-tensor inputs, per profile.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[Shapes, Shapes, Shapes], ...]
    values: tuple[Mapping[str, ShapeRange], ...]

    def ranges(self, tensor: str) -> tuple[ShapeRange, ...] | None:
        """The range of a tensor's shape in every profile; None where it is unknown, or where sizes shrink."""
        found = []
        for low, opt, high in self.shapes:
            sizes = [shapes.get(tensor) for shapes in (low, opt, high)]
            if any(size is None for size in sizes):
                return None
            span = ShapeRange(*sizes)  # type: ignore[arg-type]
            if any(not a <= b <= c for a, b, c in zip(span.min, span.opt, span.max, strict=True)):
                return None
            found.append(span)
        return tuple(found)


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """A part of a graph.

    Attributes:
        graph: the part; its nodes and tensors are copies.
        profiles: ranges of its inputs.
    """

    graph: gs.Graph
    profiles: ProfileSet


class Scissors:
    """Cuts parts out of one graph.

    Args:
        graph: sorted, element types filled in; it is not changed.
        table: shapes of its tensors.
    """

    def __init__(self, graph: gs.Graph, table: ShapeTable) -> None:
        self._graph = graph
        self._table = table
        self._index = {id(node): index for index, node in enumerate(graph.nodes)}
        self._reads = [_read_by(node) for node in graph.nodes]
        self._made_by = {
            tensor.name: index for index, node in enumerate(graph.nodes) for tensor in node.outputs if tensor.name
        }
        self._inputs = {tensor.name for tensor in graph.inputs}

    def neighbours(self, nodes: Iterable[int]) -> set[int]:
        """The nodes, those that make what they read, and those that read what they make."""
        found = set(nodes)
        for index in list(found):
            found.update(self._made_by[tensor.name] for tensor in self._reads[index] if tensor.name in self._made_by)
            for tensor in self._graph.nodes[index].outputs:
                found.update(self._index[id(reader)] for reader in tensor.outputs if id(reader) in self._index)
        return found

    def close(self, nodes: Iterable[int]) -> list[int]:
        """The nodes with those that have to come along, in order."""
        found = set(nodes)
        pending = list(found)
        while pending:
            for tensor in self._reads[pending.pop()]:
                maker = self._made_by.get(tensor.name)
                if maker is not None and maker not in found and not self._may_be_input(tensor):
                    found.add(maker)
                    pending.append(maker)
        return sorted(found)

    def cut(self, nodes: Sequence[int]) -> Cut:
        """The part that these nodes are; see `close`."""
        tensors: dict[str, gs.Tensor] = {}
        inputs: dict[str, gs.Tensor] = {}
        made = {tensor.name for index in nodes for tensor in self._graph.nodes[index].outputs if tensor.name}
        for index in nodes:
            for tensor in self._reads[index]:
                if tensor.name and tensor.name not in tensors and tensor.name not in made:
                    tensors[tensor.name] = self._copy(tensor, is_input=True)
                    if isinstance(tensor, gs.Variable):
                        inputs[tensor.name] = tensors[tensor.name]
            for tensor in self._graph.nodes[index].outputs:
                if tensor.name:
                    tensors[tensor.name] = self._copy(tensor, is_input=False)
        copies = []
        for index in nodes:
            node = self._graph.nodes[index]
            ends = [[tensors.get(t.name) or gs.Variable.empty() for t in side] for side in (node.inputs, node.outputs)]
            copies.append(node.copy(inputs=ends[0], outputs=ends[1], tensor_map=tensors))
        graph = gs.Graph(
            nodes=copies,
            inputs=list(inputs.values()),
            outputs=[tensors[name] for name in self._outputs(nodes)],
            name=self._graph.name,
            opset=self._graph.opset,
            import_domains=self._graph.import_domains,
            functions=list(self._graph.functions),
            ir_version=self._graph.ir_version,
        )
        return Cut(graph, self._profiles(list(inputs)))

    def _may_be_input(self, tensor: gs.Tensor) -> bool:
        dtype = tensor_dtype(tensor.dtype)
        spans = self._table.ranges(tensor.name)
        if dtype is None or spans is None:
            return False
        is_small = all(int(np.prod(span.max)) <= _SMALL and len(span.max) <= 1 for span in spans)
        return not (is_small and (dtype.kind in "iub"))

    def _copy(self, tensor: gs.Tensor, is_input: bool) -> gs.Tensor:
        if isinstance(tensor, gs.Constant):
            return tensor.copy()
        copy: gs.Tensor = tensor.copy()
        if not is_input or tensor.name in self._inputs:
            return copy
        spans = self._table.ranges(tensor.name) or ()
        copy.shape = [size if _is_equal(spans, axis) else None for axis, size in enumerate(spans[0].opt)]
        return copy

    def _outputs(self, nodes: Sequence[int]) -> list[str]:
        inside = set(nodes)
        asked = {tensor.name for tensor in self._graph.outputs}
        asked |= {t.name for index, reads in enumerate(self._reads) if index not in inside for t in reads}
        names: list[str] = []
        for index in nodes:
            for tensor in self._graph.nodes[index].outputs:
                if tensor.name in asked:
                    names.append(tensor.name)
        return names

    def _profiles(self, inputs: Sequence[str]) -> ProfileSet:
        profiles = []
        for number, name in enumerate(self._table.names):
            shapes = {}
            for tensor in inputs:
                spans = self._table.ranges(tensor)
                if spans is not None:
                    shapes[tensor] = spans[number]
            values = {tensor: span for tensor, span in self._table.values[number].items() if tensor in inputs}
            profiles.append(Profile(name, shapes, values))
        return ProfileSet(tuple(profiles), "file")


def _is_equal(spans: Sequence[ShapeRange], axis: int) -> bool:
    return all(span.min[axis] == span.max[axis] == spans[0].min[axis] for span in spans)


def _read_by(node: gs.Node) -> list[gs.Tensor]:
    """What a node reads, in its subgraphs too; names that a subgraph defines itself are left out."""
    own: set[str] = set()
    for body in subgraphs_of(node):
        for inner in all_graphs(body):
            own.update(tensor.name for tensor in inner.inputs)
            own.update(tensor.name for nested in inner.nodes for tensor in nested.outputs)
    return [tensor for tensor in reads_of(node) if tensor.name and tensor.name not in own]
