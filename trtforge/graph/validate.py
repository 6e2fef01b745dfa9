"""The rules that a ModelProto keeps before any pass sees it.

  1. It has a graph with nodes and outputs, at most `Limits.model_nodes` nodes, and imports the default opset once and
     every other domain that it uses; a domain whose functions it defines has all that it calls.
  2. Inputs and outputs are tensors with names that can be printed.
  3. Every attribute is of a kind that onnx-graphsurgeon keeps (it drops the others silently).
  4. Static single assignment: a name has one producer per graph, every name that is read is produced in the graph or
     in one around it, and nodes have an order in which each reads only earlier names.
Each check costs time linear in the model.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator

import onnx
from onnx import AttributeProto

from trtforge.errors import InputError
from trtforge.graph.order import stable_order
from trtforge.graph.protos import Body, all_bodies, child_graphs
from trtforge.limits import Limits

DEFAULT_DOMAINS = ("", "ai.onnx")
_EXPORT_AGAIN = "export the model again"
# Nodes of a cycle that a message names.
_MAX_SHOWN = 6
# Domains that hold operators of their own besides functions that a model may define there.
_OPERATOR_DOMAINS = {"ai.onnx.ml", "com.microsoft", "trtforge"}
_KEPT_ATTRIBUTES = {
    AttributeProto.FLOAT,
    AttributeProto.INT,
    AttributeProto.STRING,
    AttributeProto.TENSOR,
    AttributeProto.GRAPH,
    AttributeProto.FLOATS,
    AttributeProto.INTS,
    AttributeProto.STRINGS,
}


def check_model(model: onnx.ModelProto, source: str, limits: Limits) -> int:
    """Check rules 1 to 4; unsorted nodes are sorted and negative sizes opened, in place.

    Args:
        source: how an error names the model.

    Returns:
        The opset of the default domain.

    Raises:
        InputError: the first rule that is broken, with the node or tensor.
    """
    if not model.HasField("graph") or not model.graph.node:
        raise InputError(
            f"{source} holds no {'nodes' if model.HasField('graph') else 'graph'}",
            "it is not an ONNX model, or it is truncated",
            "export or download it again",
        )
    if not model.graph.output:
        raise InputError(f"the graph of {source} has no outputs", "there is nothing to compute", _EXPORT_AGAIN)
    bodies = list(all_bodies(model))
    nodes = [node for body in bodies for node in body.node]
    _check_size(len(nodes), source, limits)
    opset = _default_opset(model, source)
    _check_ports(model.graph)
    for node in nodes:
        _check_attributes(node)
    _check_defined(model, nodes)
    for body in bodies:
        _check_unique_names(body)
    _check_reads(model.graph, ())
    for function in model.functions:
        _check_reads(function, ())
    for body in all_bodies(model):
        _sort_nodes(body)
        _open_negative_sizes(body)
    return opset


def _open_negative_sizes(body: Body) -> None:
    """Some exporters (paddle2onnx) write an open size as -1, which ONNX leaves unset."""
    ports = [*body.input, *body.output] if isinstance(body, onnx.GraphProto) else []
    for info in [*ports, *body.value_info]:
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_value < 0:
                dim.Clear()


def _check_size(num_nodes: int, source: str, limits: Limits) -> None:
    if num_nodes > limits.model_nodes:
        raise InputError(
            f"{source} has {num_nodes} nodes",
            f"the limit is {limits.model_nodes}, subgraphs and functions included",
            f"check the file, or raise it with --limit model_nodes={num_nodes}",
        )


def _default_opset(model: onnx.ModelProto, source: str) -> int:
    versions = [entry.version for entry in model.opset_import if entry.domain in DEFAULT_DOMAINS]
    if len(set(versions)) != 1 or versions[0] < 1:
        found = f"it imports {versions}" if versions else "it imports only other domains, or is truncated"
        raise InputError(f"{source} does not say which ONNX opset it uses", found, _EXPORT_AGAIN)
    return int(versions[0])


def _has_control_characters(name: str) -> bool:
    return any(unicodedata.category(char) in ("Cc", "Zl", "Zp") for char in name)


def _check_ports(graph: onnx.GraphProto) -> None:
    stored = {tensor.name for tensor in graph.initializer}
    ports = [("input", port) for port in graph.input if port.name not in stored]
    ports += [("output", port) for port in graph.output]
    seen: set[tuple[str, str]] = set()
    for kind, port in ports:
        if not port.name or _has_control_characters(port.name):
            raise InputError(
                f"the model's {kind} {port.name!r} has a name that cannot be used",
                "an input or output needs a name without control characters",
                f"rename the {kind} in the exporter",
            )
        value = port.type.WhichOneof("value")
        if value not in ("tensor_type", None) or (value is None and kind == "input"):
            raise InputError(
                f"the model's {kind} {port.name!r} is not a tensor",
                f"its type is {(value or 'missing').removesuffix('_type')}; TensorRT takes and gives only tensors",
                "export the model with tensors as inputs and outputs",
            )
        if kind == "input" and port.type.tensor_type.elem_type not in onnx.TensorProto.DataType.values()[1:]:
            raise InputError(
                f"the model's input {port.name!r} has no element type",
                f"it states type {port.type.tensor_type.elem_type}, which ONNX does not define",
                _EXPORT_AGAIN,
            )
        if (kind, port.name) in seen:
            raise InputError(f"the model has two {kind}s named {port.name!r}", "names are unique", _EXPORT_AGAIN)
        seen.add((kind, port.name))


def _check_defined(model: onnx.ModelProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Refuse nodes of a domain that is not imported, or of one whose functions the model holds, but not this one."""
    imported = {entry.domain for holder in (model, *model.functions) for entry in holder.opset_import}
    functions = {(function.domain, function.name) for function in model.functions}
    own_domains = {domain for domain, _ in functions} - _OPERATOR_DOMAINS
    for node in nodes:
        if node.domain in DEFAULT_DOMAINS or (node.domain, node.op_type) in functions:
            continue
        where = f"node {node.name!r} is a {node.domain}.{node.op_type}, which nothing defines"
        if node.domain not in imported:
            raise InputError(where, f"the model does not import the domain {node.domain!r}", _EXPORT_AGAIN)
        if node.domain in own_domains:
            known = ", ".join(sorted(name for domain, name in functions if domain == node.domain)[:_MAX_SHOWN])
            raise InputError(where, f"its functions of the domain {node.domain!r} are: {known}", _EXPORT_AGAIN)


def _check_attributes(node: onnx.NodeProto) -> None:
    seen: set[str] = set()
    for attribute in node.attribute:
        if attribute.name in seen:
            raise InputError(
                f"node {node.name!r} ({node.op_type}) has two attributes {attribute.name!r}",
                "attribute names are unique",
                _EXPORT_AGAIN,
            )
        seen.add(attribute.name)
        if attribute.type not in _KEPT_ATTRIBUTES:
            raise InputError(
                f"attribute {attribute.name!r} of node {node.name!r} ({node.op_type}) cannot be used",
                f"its kind is {attribute.type}, and only numbers, text, dense tensors and graphs are supported",
                "export the model without it",
            )
        for text in [attribute.s, *attribute.strings]:
            try:
                text.decode()
            except UnicodeDecodeError as err:
                raise InputError(
                    f"attribute {attribute.name!r} of node {node.name!r} ({node.op_type}) cannot be used",
                    "it holds bytes that are not UTF-8 text",
                    _EXPORT_AGAIN,
                ) from err


def _names_given(body: Body) -> Iterator[tuple[str, str | onnx.NodeProto]]:
    """Each name that a body defines itself, with the node that gives it or what else does."""
    if isinstance(body, onnx.GraphProto):
        # Up to IR 3 an initializer is listed as an input too, and is still one definition.
        initializers = [tensor.name for tensor in body.initializer] + [t.values.name for t in body.sparse_initializer]
        stored = set(initializers)
        yield from ((name, "an initializer") for name in initializers)
        yield from ((port.name, "a graph input") for port in body.input if port.name not in stored)
    else:
        yield from ((name, "a function input") for name in body.input)
    for node in body.node:
        for name in node.output:
            if name:
                yield name, node


def _check_unique_names(body: Body) -> None:
    givers: dict[str, str | onnx.NodeProto] = {}
    for name, giver in _names_given(body):
        if name in givers:
            first, second = (
                given if isinstance(given, str) else f"node {given.name!r} ({given.op_type})"
                for given in (givers[name], giver)
            )
            raise InputError(
                f"tensor {name!r} is produced twice",
                f"by {first} and by {second}; a name has one producer",
                _EXPORT_AGAIN,
            )
        givers[name] = giver


def _check_reads(body: Body, outer: tuple[frozenset[str], ...]) -> None:
    names = frozenset(name for name, _ in _names_given(body))
    scopes = (*outer, names)
    for node in body.node:
        for name in node.input:
            if name and name not in names and not any(name in scope for scope in outer):
                raise InputError(
                    f"node {node.name!r} ({node.op_type}) reads tensor {name!r}, which nothing produces",
                    "it is no input, no initializer and no node's output",
                    _EXPORT_AGAIN,
                )
        for graph in child_graphs(node):
            _check_reads(graph, scopes)
    outputs = body.output if isinstance(body, onnx.FunctionProto) else [port.name for port in body.output]
    for name in outputs:
        if name not in names:
            raise InputError(
                f"output {name!r} of graph {body.name!r} is produced by no node of it",
                "a subgraph gives back an outer value only through an Identity" if outer else "nothing computes it",
                _EXPORT_AGAIN,
            )


def _free_names(node: onnx.NodeProto) -> Iterator[str]:
    """What a node reads, its subgraphs included; inner names may be among them."""
    yield from node.input
    for graph in child_graphs(node):
        for inner in graph.node:
            yield from _free_names(inner)


def _sort_nodes(body: Body) -> None:
    """Put nodes in an order in which each reads earlier names (rule 4); a sorted body is left alone."""
    producer = {name: index for index, node in enumerate(body.node) for name in node.output if name}
    needs = [{producer[name] for name in _free_names(node) if name in producer} for node in body.node]
    if all(max(need, default=-1) < index for index, need in enumerate(needs)):
        return
    order = stable_order(needs)
    if len(order) < len(needs):
        cycle = [body.node[index] for index in _find_cycle(needs, set(order))]
        path = " -> ".join(f"{node.name!r} ({node.op_type})" for node in [*cycle, cycle[0]])
        raise InputError(
            f"the graph has a cycle: {path if len(cycle) <= _MAX_SHOWN else _shorten(path)}",
            "a node cannot need its own result",
            _EXPORT_AGAIN,
        )
    nodes = [onnx.NodeProto.FromString(body.node[index].SerializeToString()) for index in order]
    del body.node[:]
    body.node.extend(nodes)


def _find_cycle(needs: list[set[int]], sorted_nodes: set[int]) -> list[int]:
    """The nodes of one cycle, each before one that reads it, the first one listed first."""
    step: dict[int, int] = {}
    index = min(set(range(len(needs))) - sorted_nodes)
    # What could not be sorted needs something else that could not, so that this ends in a cycle.
    while index not in step:
        step[index] = min(need for need in needs[index] if need not in sorted_nodes)
        index = step[index]
    cycle = [index]
    while step[cycle[-1]] != index:
        cycle.append(step[cycle[-1]])
    cycle.reverse()
    start = cycle.index(min(cycle))
    return cycle[start:] + cycle[:start]


def _shorten(path: str) -> str:
    steps = path.split(" -> ")
    return " -> ".join([*steps[:_MAX_SHOWN], f"({len(steps) - _MAX_SHOWN - 1} more nodes)", steps[-1]])
