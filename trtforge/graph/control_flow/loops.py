"""Loops: what TensorRT's parser needs said, and bodies copied where that serves.

TensorRT builds a Loop with a trip count or a condition. It does not take an empty condition, a scan output without a
bound on the trips, a carried value that changes its shape, or sequences (each tried with TensorRT-RTX 1.7).

    completed   an empty condition becomes the constant true; a trip count is added where the condition only counts
                (trips.py); a value that each trip hands on unchanged is read from outside.
    unrolled    with a constant trip count and a condition that stays true, when the copies are few, or when the
                loop could not be built otherwise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.graph.control_flow.inline import copy_body, detach, forward
from trtforge.graph.control_flow.trips import comparisons_of, count_trips, scalar, source_of, trips_at_run_time
from trtforge.graph.edit import all_graphs, all_nodes, is_onnx_op, replace_uses
from trtforge.graph.names import UniqueNames

# Nodes that the copies of a body may come to: where the builder takes the loop, and where it does not. In the same
# order, nodes of the whole graph up to which loops are unrolled: short loops in short loops are exponential.
_MAX_NODES = 512
_MAX_NEEDED_NODES = 10_000
_MAX_TOTAL_NODES = 5_000
_MAX_NEEDED_TOTAL_NODES = 20_000
# Exporters write the largest int32 or int64 where a loop has no limit.
_NO_LIMIT = 2**31 - 1


def resolve_loops(graph: gs.Graph) -> tuple[list[str], int]:
    """Complete loops and unroll those that should be, in place, subgraphs included.

    Args:
        graph: sorted, with inferred types.

    Returns:
        What was done, one sentence for each change, and how many loops read a value from outside that they carried.
    """
    if not any(_is_loop(node) for node in all_nodes(graph)):
        return [], 0
    resolver = _Resolver(UniqueNames(graph), sum(1 for _ in all_nodes(graph)))
    for current in all_graphs(graph):
        nodes = []
        resolver.kept_outputs = {id(tensor) for tensor in current.outputs}
        for node in current.nodes:
            nodes += resolver.visit(node) if _is_loop(node) else [node]
        current.nodes = nodes
    for node in resolver.gone:
        list.clear(node.outputs)
    detach(resolver.gone)
    return resolver.notes, resolver.num_simplified


def _is_loop(node: gs.Node) -> bool:
    return node.op == "Loop" and is_onnx_op(node)


class _Resolver:
    """The changes of one pass."""

    def __init__(self, names: UniqueNames, num_nodes: int) -> None:
        self.notes: list[str] = []
        self.gone: list[gs.Node] = []
        self.num_simplified = 0
        self.kept_outputs: set[int] = set()
        self._names = names
        self._num_nodes = num_nodes

    def visit(self, node: gs.Node) -> list[gs.Node]:
        """The nodes that stand for a loop: itself, completed, or the copies of its body."""
        if not _given(node, 1):
            _set_input(node, 1, gs.Constant(self._names.tensor(f"{node.name}_condition"), np.array(True)))
            self.notes.append(f"Loop {node.name!r} had no condition: it is always true")
        self._read_invariants_from_outside(node)
        added = self._write_trips(node)
        trips = _known_trips(node)
        if trips is None:
            return [*added, node]
        num_nodes = trips * sum(1 for _ in all_nodes(node.attrs["body"]))
        must = _must_unroll(node)
        total = self._num_nodes + num_nodes
        if num_nodes > (_MAX_NEEDED_NODES if must else _MAX_NODES):
            return [*added, node]
        if total > (_MAX_NEEDED_TOTAL_NODES if must else _MAX_TOTAL_NODES):
            return [*added, node]
        if trips == 0 and len(node.outputs) > len(node.inputs) - 2:
            # Scan outputs without elements, whose other sizes are unknown.
            return [*added, node]
        self._num_nodes = total
        self.notes.append(f"Loop {node.name!r} was unrolled: {trips} trips")
        return [*added, *self._unroll(node, trips)]

    def _read_invariants_from_outside(self, node: gs.Node) -> None:
        """Let a body read a value that every trip hands on unchanged from outside, e.g. a weight."""
        body = node.attrs["body"]
        kept = []
        for position, port in enumerate(body.inputs[2:]):
            outside = node.inputs[2 + position]
            is_returned = any(tensor is port for i, tensor in enumerate(body.outputs) if i != 1 + position)
            if source_of(body.outputs[1 + position]) is not port or not outside.name or is_returned:
                kept.append(position)
                continue
            replace_uses(port, outside)
            replace_uses(node.outputs[position], outside)
        # Outputs of graphs are no uses: such a value stays a carried one, which nothing in the body reads.
        kept = [p for p in range(len(body.inputs) - 2) if p in kept or id(node.outputs[p]) in self.kept_outputs]
        if len(kept) < len(body.inputs) - 2:
            _keep_carried(node, kept)
            self.num_simplified += 1

    def _write_trips(self, node: gs.Node) -> list[gs.Node]:
        """Write down a trip count that the condition proves; gives the nodes that compute it."""
        comparisons = comparisons_of(node)
        stated = _constant(node, 0)
        if comparisons is None or (_given(node, 0) and stated is None):
            return []
        proven = count_trips(comparisons) if scalar(node.inputs[1]) is True else None
        added: list[gs.Node] = []
        if proven is not None:
            proven = proven if stated is None else min(proven, stated)
            trips: gs.Tensor = gs.Constant(self._names.tensor(f"{node.name}_trips"), np.array(proven))
            self.notes.append(f"Loop {node.name!r}: its condition proves that it ends after {proven} trips")
        elif stated is None or stated >= _NO_LIMIT:
            computed = trips_at_run_time(node, comparisons, self._names)
            if computed is None:
                return []
            added, trips = computed
            _set_input(node, 1, gs.Constant(self._names.tensor(f"{node.name}_condition"), np.array(True)))
            self.notes.append(f"Loop {node.name!r} had no trip count: it follows from what its condition compares")
        else:
            return []
        _set_input(node, 0, trips)
        body = node.attrs["body"]
        # What the condition said, the trip count says.
        goes_on = gs.Variable(self._names.tensor(f"{node.name}_goes_on"), np.dtype(np.bool_), [])
        body.nodes.append(gs.Node("Identity", self._names.node(goes_on.name), {}, [body.inputs[1]], [goes_on]))
        body.outputs[0] = goes_on
        return added

    def _unroll(self, node: gs.Node, trips: int) -> list[gs.Node]:
        body = node.attrs["body"]
        carried, nodes = list(node.inputs[2:]), []
        scanned: list[list[gs.Tensor]] = [[] for _ in node.outputs[len(carried) :]]
        for trip in range(trips):
            index = gs.Constant(self._names.tensor(f"{node.name}_trip_{trip}"), np.array(trip, np.int64))
            copies, results = copy_body(body, [index, node.inputs[1], *carried], self._names)
            nodes += copies
            carried = results[1 : 1 + len(carried)]
            for elements, result in zip(scanned, results[1 + len(carried) :], strict=True):
                elements.append(result)
        joined = []
        for elements, output in zip(scanned, node.outputs[len(carried) :], strict=True):
            added, result = self._stack(node, elements, output)
            nodes += added
            joined.append(result)
        self.gone.append(node)
        return [*nodes, *forward([*carried, *joined], node.outputs, self._names)]

    def _stack(self, node: gs.Node, elements: list[gs.Tensor], output: gs.Tensor) -> tuple[list[gs.Node], gs.Tensor]:
        """Join the elements of a scan output along a new first axis."""
        name = f"{node.name}_{output.name}"
        axes = gs.Constant(self._names.tensor(f"{name}_axes"), np.array([0]))
        wide = [gs.Variable(self._names.tensor(f"{name}_element"), element.dtype) for element in elements]
        nodes = [
            gs.Node("Unsqueeze", self._names.node(f"{name}_unsqueeze"), inputs=[element, axes], outputs=[tensor])
            for element, tensor in zip(elements, wide, strict=True)
        ]
        result = gs.Variable(self._names.tensor(f"{name}_stacked"), output.dtype)
        nodes.append(gs.Node("Concat", self._names.node(f"{name}_concat"), {"axis": 0}, wide, [result]))
        return nodes, result


def _given(node: gs.Node, index: int) -> bool:
    return len(node.inputs) > index and bool(node.inputs[index].name)


def _set_input(node: gs.Node, index: int, tensor: gs.Tensor) -> None:
    while len(node.inputs) <= index:
        node.inputs.append(gs.Variable.empty())
    old = node.inputs[index]
    list.__setitem__(old.outputs, slice(None), [reader for reader in old.outputs if reader is not node])
    list.__setitem__(node.inputs, index, tensor)
    list.append(tensor.outputs, node)


def _keep_carried(node: gs.Node, kept: list[int]) -> None:
    """Drop all carried values but some from a loop."""
    body = node.attrs["body"]
    num_carried = len(body.inputs) - 2
    dropped = [node.inputs[2 + p] for p in range(num_carried) if p not in kept]
    inputs = [*node.inputs[:2], *(node.inputs[2 + p] for p in kept)]
    list.__setitem__(node.inputs, slice(None), inputs)
    read = {id(tensor) for tensor in inputs}
    for tensor in dropped:
        if id(tensor) not in read:
            list.__setitem__(tensor.outputs, slice(None), [reader for reader in tensor.outputs if reader is not node])
    list.__setitem__(node.outputs, slice(None), [*(node.outputs[p] for p in kept), *node.outputs[num_carried:]])
    body.inputs = [*body.inputs[:2], *(body.inputs[2 + p] for p in kept)]
    body.outputs = [body.outputs[0], *(body.outputs[1 + p] for p in kept), *body.outputs[1 + num_carried :]]


def _constant(node: gs.Node, index: int) -> Any | None:
    """A constant scalar input."""
    return scalar(node.inputs[index]) if _given(node, index) else None


def _known_trips(node: gs.Node) -> int | None:
    """How often a loop runs; None where only the run can tell."""
    stated = _constant(node, 0)
    if _constant(node, 1) is False or (stated is not None and stated <= 0):
        return 0
    return int(stated) if stated is not None and _stays_true(node) else None


def _stays_true(node: gs.Node) -> bool:
    """Whether a loop's condition is true before it and in every trip."""
    body = node.attrs["body"]
    condition = source_of(body.outputs[0])
    return bool(_constant(node, 1)) and (condition is body.inputs[1] or scalar(condition) is True)


def _must_unroll(node: gs.Node) -> bool:
    """Whether TensorRT cannot build a loop: a carried value changes its shape, or is a sequence."""
    body = node.attrs["body"]
    num_carried = len(node.inputs) - 2
    for first, before, after in zip(node.inputs[2:], body.inputs[2:], body.outputs[1 : 1 + num_carried], strict=False):
        tensors = (first, before, after)
        if any(isinstance(t, gs.Variable) and t.type != "tensor_type" for t in tensors):
            return True
        if first.shape is not None and after.shape is not None and list(first.shape) != list(after.shape):
            return True
    return False
