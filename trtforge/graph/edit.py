"""Linear-time edits of an onnx-graphsurgeon graph.

A tensor object is shared by all its readers, those in subgraphs included, and knows them (`tensor.outputs`) and its
producer (`tensor.inputs`). onnx-graphsurgeon keeps both sides in step by comparing whole nodes, which is quadratic for
a tensor with many readers; the functions here set both sides themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import onnx_graphsurgeon as gs
from onnx_graphsurgeon.ir.tensor import LazyValues

from trtforge.errors import InternalError
from trtforge.graph.collection import without_collection
from trtforge.graph.order import stable_order
from trtforge.graph.validate import DEFAULT_DOMAINS


def is_onnx_op(node: gs.Node) -> bool:
    """True for an operator of ONNX's default domain."""
    return node.domain is None or node.domain in DEFAULT_DOMAINS


def is_array(tensor: gs.Tensor) -> bool:
    """True for a constant with numbers; strings stay in their protobuf form."""
    return isinstance(tensor, gs.Constant) and not isinstance(tensor._values, LazyValues)


def subgraphs_of(node: gs.Node) -> list[gs.Graph]:
    """The graphs that a node holds directly (If, Loop, Scan)."""
    return [value for value in node.attrs.values() if isinstance(value, gs.Graph)]


def all_graphs(graph: gs.Graph) -> Iterator[gs.Graph]:
    """A graph, then every graph nested in it, outer before inner, in node order."""
    pending = [graph]
    while pending:
        current = pending.pop()
        yield current
        nested = [v for node in current.nodes if node.attrs for v in node.attrs.values() if isinstance(v, gs.Graph)]
        pending.extend(reversed(nested))


def all_nodes(graph: gs.Graph) -> Iterator[gs.Node]:
    """Every node of a graph, subgraphs included."""
    for current in all_graphs(graph):
        yield from current.nodes


def reads_of(node: gs.Node) -> Iterator[gs.Tensor]:
    """What a node reads, and what its bodies read or return; tensors that a body makes itself are among it."""
    yield from node.inputs
    for body in subgraphs_of(node):
        for inner in all_graphs(body):
            yield from inner.outputs
            for nested in inner.nodes:
                yield from nested.inputs


def pinned_names(graph: gs.Graph) -> set[str]:
    """Names of the tensors that must keep their name and type: graph outputs, and what subgraphs read or return."""
    pinned = {tensor.name for tensor in graph.outputs}
    for node in graph.nodes:
        for body in subgraphs_of(node):
            for inner in all_graphs(body):
                pinned.update(tensor.name for tensor in inner.outputs)
                pinned.update(tensor.name for reader in inner.nodes for tensor in reader.inputs)
    return pinned


@without_collection()
def copy_graph(graph: gs.Graph) -> gs.Graph:
    """A copy whose nodes, subgraphs and tensors are new objects, and whose weights and other attributes are shared.

    graphsurgeon's own copy makes every tensor twice and turns sequences into tensors.
    """
    copies: dict[int, gs.Tensor] = {}

    def copy_tensors(tensors: list[gs.Tensor]) -> list[gs.Tensor]:
        for tensor in tensors:
            if id(tensor) not in copies:
                copies[id(tensor)] = copy = tensor.copy()
                if isinstance(tensor, gs.Variable):
                    copy.type = tensor.type
        return [copies[id(tensor)] for tensor in tensors]

    def copy_node(node: gs.Node) -> gs.Node:
        attrs = {name: copy_of(value) if isinstance(value, gs.Graph) else value for name, value in node.attrs.items()}
        return gs.Node(node.op, node.name, attrs, copy_tensors(node.inputs), copy_tensors(node.outputs), node.domain)

    def copy_of(current: gs.Graph) -> gs.Graph:
        return gs.Graph(
            [copy_node(node) for node in current.nodes],
            copy_tensors(current.inputs),
            copy_tensors(current.outputs),
            name=current.name,
            doc_string=current.doc_string,
            opset=current.opset,
            import_domains=current.import_domains,
            functions=current.functions,
            ir_version=current.ir_version,
        )

    return copy_of(graph)


class InputEdits:
    """Replacements of node inputs, collected and applied together."""

    def __init__(self) -> None:
        self._edits: list[tuple[gs.Node, int, gs.Tensor]] = []

    def replace(self, node: gs.Node, index: int, tensor: gs.Tensor) -> None:
        """Plan `node.inputs[index] = tensor`."""
        self._edits.append((node, index, tensor))

    def apply(self) -> None:
        """Carry out every planned replacement; each touched tensor's list of readers is rebuilt once."""
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


def replace_uses(old: gs.Tensor, new: gs.Tensor) -> int:
    """Make every reader of one tensor read another; lists of graph outputs are left alone.

    Returns:
        How many node inputs changed.
    """
    num_changed = 0
    readers = list({id(node): node for node in old.outputs}.values())
    for node in readers:
        for index, tensor in enumerate(node.inputs):
            if tensor is old:
                list.__setitem__(node.inputs, index, new)
                list.append(new.outputs, node)
                num_changed += 1
    list.clear(old.outputs)
    return num_changed


def remove_nodes(graph: gs.Graph, is_removed: Callable[[gs.Node], bool]) -> int:
    """Take nodes out of a graph and its subgraphs, and out of their tensors' lists.

    Returns:
        How many were removed.
    """
    removed: set[int] = set()
    touched: dict[int, gs.Tensor] = {}
    for current in list(all_graphs(graph)):
        kept = []
        for node in current.nodes:
            if not is_removed(node):
                kept.append(node)
                continue
            # What a removed If or Loop holds goes with it.
            for gone in [node, *(inner for sub in subgraphs_of(node) for inner in all_nodes(sub))]:
                removed.add(id(gone))
                touched.update((id(tensor), tensor) for tensor in [*gone.inputs, *gone.outputs])
        if len(kept) < len(current.nodes):
            current.nodes = kept
    for tensor in touched.values():
        for users in (tensor.inputs, tensor.outputs):
            list.__setitem__(users, slice(None), [node for node in users if id(node) not in removed])
    return len(removed)


def remove_dead_nodes(graph: gs.Graph) -> int:
    """Remove nodes that contribute to no output, subgraphs included; graph inputs stay.

    Returns:
        How many were removed.
    """
    live: set[int] = set()
    seen: set[int] = set()
    pending: list[gs.Tensor] = list(graph.outputs)
    while pending:
        tensor = pending.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        for node in tensor.inputs:
            if id(node) not in live:
                live.add(id(node))
                pending.extend(node.inputs)
                for inner in subgraphs_of(node):
                    pending.extend(inner.outputs)
    return remove_nodes(graph, lambda node: id(node) not in live)


def sort_nodes(graph: gs.Graph) -> None:
    """Order nodes so that each comes after its producers and otherwise stays where it was, subgraphs included.

    Raises:
        InternalError: the graph has a cycle.
    """
    for current in all_graphs(graph):
        index_of = {id(node): index for index, node in enumerate(current.nodes)}
        needs = []
        for node in current.nodes:
            producers = (producer for tensor in reads_of(node) for producer in tensor.inputs)
            needs.append({index_of[id(producer)] for producer in producers if id(producer) in index_of})
        order = stable_order(needs)
        if len(order) < len(current.nodes):
            raise InternalError(
                f"graph {current.name!r} has a cycle", "a pass connected nodes wrongly", "report the model"
            )
        current.nodes = [current.nodes[index] for index in order]
