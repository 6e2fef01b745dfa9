"""Names of nodes and tensors.

`make_names_unique` works on a graph and changes as little as it can: a name that is empty or taken gets a new one, all
others stay, so that reports speak the model's language.
`UniqueNames` hands out names for the nodes and tensors that a pass adds.
`shorten_names` works on a model just before the build and changes everything but the inputs and outputs of the top
graph, because builders echo names into logs verbatim: node i becomes `n<i>`, tensor j `t<j>`, in list order, outer
before inner. A name that an input or output has is skipped. A subgraph reads outer names; it may shadow them, so each
graph is renamed with its own scope on top of those around it.
`drop_false_dim_names` removes the names that inputs' dims cannot mean to share: TensorRT takes one name for one size.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import onnx
import onnx_graphsurgeon as gs

from trtforge.graph.edit import all_graphs
from trtforge.graph.protos import child_graphs


@dataclasses.dataclass(frozen=True, slots=True)
class NameMap:
    """The way back from short names.

    Attributes:
        nodes: short name -> original name of a node ("" where it had none).
        tensors: short name -> original name of a tensor.
    """

    nodes: dict[str, str]
    tensors: dict[str, str]


def make_names_unique(graph: gs.Graph) -> int:
    """Give every node and tensor its own name, subgraphs included; inputs and outputs of the top graph keep theirs.

    Returns:
        How many names changed.
    """
    return _name_nodes(graph) + _name_tensors(graph)


def _name_nodes(graph: gs.Graph) -> int:
    num_changed = 0
    nodes = [node for holder in all_graphs(graph) for node in holder.nodes]
    names = Names({node.name for node in nodes})
    used: set[str] = set()
    for index, node in enumerate(nodes):
        if not node.name or node.name in used:
            node.name = names.claim(node.name or f"{node.op}_{index}")
            num_changed += 1
        used.add(node.name)
    return num_changed


def _name_tensors(graph: gs.Graph) -> int:
    tensors: dict[int, gs.Tensor] = {id(tensor): tensor for tensor in [*graph.inputs, *graph.outputs]}
    for holder in all_graphs(graph):
        for tensor in holder.inputs:
            tensors.setdefault(id(tensor), tensor)
        for node in holder.nodes:
            for tensor in [*node.inputs, *node.outputs]:
                if tensor.name:
                    tensors.setdefault(id(tensor), tensor)
        for tensor in holder.outputs:
            tensors.setdefault(id(tensor), tensor)
    names = Names({tensor.name for tensor in tensors.values()})
    used: set[str] = set()
    num_changed = 0
    for tensor in tensors.values():
        if tensor.name in used:
            tensor.name = names.claim(tensor.name)
            num_changed += 1
        used.add(tensor.name)
    return num_changed


class Names:
    """Hands out names that are not taken; linear in the number of names asked for."""

    def __init__(self, taken: set[str]) -> None:
        self._taken = taken
        self._last: dict[str, int] = {}

    def claim(self, wanted: str) -> str:
        """`wanted`; where it is taken, `wanted_1` or the next number that is free."""
        name, number = wanted, self._last.get(wanted, 0)
        while name in self._taken:
            number += 1
            name = f"{wanted}_{number}"
        self._last[wanted] = number
        self._taken.add(name)
        return name


class UniqueNames:
    """Hands out tensor and node names that a graph, its subgraphs included, does not use yet."""

    def __init__(self, graph: gs.Graph) -> None:
        graphs = list(all_graphs(graph))
        nodes = [node for holder in graphs for node in holder.nodes]
        tensors = {tensor.name for holder in graphs for tensor in (*holder.inputs, *holder.outputs)}
        tensors.update(tensor.name for node in nodes for tensor in (*node.inputs, *node.outputs))
        self._nodes = Names({node.name for node in nodes})
        self._tensors = Names(tensors)

    def tensor(self, wanted: str) -> str:
        """`wanted`, or `wanted_1`, `wanted_2` ... where it is taken."""
        return self._tensors.claim(wanted)

    def node(self, wanted: str) -> str:
        """`wanted`, or `wanted_1`, `wanted_2` ... where it is taken."""
        return self._nodes.claim(wanted)


def shorten_names(model: onnx.ModelProto) -> NameMap:
    """Give every node and tensor a short ASCII name, in place; weights are not touched, external ones neither.

    Returns:
        The map back.
    """
    graph = model.graph
    ports = {port.name for port in [*graph.input, *graph.output]}
    renamer = _Renamer(ports)
    renamer.rename_graph(graph, [{name: name for name in ports}], is_top=True)
    for function in model.functions:
        renamer.rename_function(function)
    return NameMap(renamer.nodes, renamer.tensors)


def is_dim_name(name: str) -> bool:
    """Whether a dim's name can mean one size: "?", "None" and "unk__12" are what exporters write for an unknown one."""
    return any(char.isalnum() for char in name) and name != "None" and not name.startswith("unk__")


def false_dim_names(
    places: Mapping[str, Sequence[tuple[str, int]]], profiles: Sequence[Mapping[str, Sequence[Sequence[int]]]]
) -> tuple[str, ...]:
    """The names of inputs' dims that are no names ("?"), or stand for several ranges in a profile.

    Args:
        places: inputs and axes that have a name, by that name.
        profiles: per profile, min, opt and max of each input's shape.
    """
    dropped = []
    for name, dims in places.items():
        spans = [
            {tuple(shape[axis] for shape in ranges[port]) for port, axis in dims if port in ranges}
            for ranges in profiles
        ]
        if not is_dim_name(name) or any(len(span) > 1 for span in spans):
            dropped.append(name)
    return tuple(dropped)


def drop_false_dim_names(
    model: onnx.ModelProto, profiles: Sequence[Mapping[str, Sequence[Sequence[int]]]]
) -> tuple[str, ...]:
    """Remove the names of inputs' dims that are no names ("?") or stand for several ranges, in place.

    Args:
        model: its inputs are changed.
        profiles: see `false_dim_names`.

    Returns:
        The names removed.
    """
    places: dict[str, list[tuple[str, int, onnx.TensorShapeProto.Dimension]]] = {}
    for port in model.graph.input:
        for axis, dim in enumerate(port.type.tensor_type.shape.dim):
            if dim.dim_param:
                places.setdefault(dim.dim_param, []).append((port.name, axis, dim))
    named = {name: [(port, axis) for port, axis, _ in dims] for name, dims in places.items()}
    dropped = false_dim_names(named, profiles)
    for _, _, dim in itertools.chain.from_iterable(places[name] for name in dropped):
        dim.Clear()
    return dropped


class _Renamer:
    """One numbering of nodes and tensors over a model."""

    def __init__(self, reserved: set[str]) -> None:
        self.nodes: dict[str, str] = {}
        self.tensors: dict[str, str] = {}
        self._node_names = _numbered("n", reserved)
        self._tensor_names = _numbered("t", reserved)

    def _define(self, name: str, scope: dict[str, str], keep: bool = False) -> str:
        """The short name of a tensor that the innermost scope defines; the empty name means none."""
        if not name:
            return ""
        if name not in scope and not keep:
            scope[name] = next(self._tensor_names)
            self.tensors[scope[name]] = name
        return scope.setdefault(name, name)

    def rename_graph(self, graph: onnx.GraphProto, scopes: list[dict[str, str]], is_top: bool = False) -> None:
        """Rename a graph; `scopes` are the names around it, innermost last (for the top graph: its ports)."""
        scope = scopes[-1] if is_top else {}
        scopes = scopes if is_top else [*scopes, scope]
        for port in graph.input:
            port.name = self._define(port.name, scope)
        for tensor in graph.initializer:
            tensor.name = self._define(tensor.name, scope)
        for sparse in graph.sparse_initializer:
            sparse.values.name = self._define(sparse.values.name, scope)
        self._rename_nodes(graph.node, scopes)
        for port in graph.output:
            port.name = _look_up(port.name, scopes)
        _rename_infos(graph.value_info, scopes)
        for note in graph.quantization_annotation:
            note.tensor_name = _look_up(note.tensor_name, scopes)
            for entry in note.quant_parameter_tensor_names:
                entry.value = _look_up(entry.value, scopes)

    def rename_function(self, function: onnx.FunctionProto) -> None:
        """Rename a function's body, whose names are its own."""
        scope: dict[str, str] = {}
        function.input[:] = [self._define(name, scope) for name in function.input]
        self._rename_nodes(function.node, [scope])
        function.output[:] = [_look_up(name, [scope]) for name in function.output]
        _rename_infos(function.value_info, [scope])

    def _rename_nodes(self, nodes: Iterable[onnx.NodeProto], scopes: list[dict[str, str]]) -> None:
        for node in nodes:
            short = next(self._node_names)
            self.nodes[short] = node.name
            node.name = short
            node.input[:] = [_look_up(name, scopes) for name in node.input]
            for inner in child_graphs(node):
                self.rename_graph(inner, scopes)
            node.output[:] = [self._define(name, scopes[-1]) for name in node.output]


def _numbered(prefix: str, reserved: set[str]) -> Iterator[str]:
    number = 0
    while True:
        if f"{prefix}{number}" not in reserved:
            yield f"{prefix}{number}"
        number += 1


def _rename_infos(infos: Any, scopes: list[dict[str, str]]) -> None:
    """Rename declared types; those of names that nothing defines are dropped, with the names."""
    known = [info for info in infos if any(info.name in scope for scope in scopes)]
    copies = [onnx.ValueInfoProto.FromString(info.SerializeToString()) for info in known]
    for info in copies:
        info.name = _look_up(info.name, scopes)
    del infos[:]
    infos.extend(copies)


def _look_up(name: str, scopes: list[dict[str, str]]) -> str:
    """The short name of what a name refers to, innermost scope first; unknown names stay."""
    return next((scope[name] for scope in reversed(scopes) if name in scope), name)
