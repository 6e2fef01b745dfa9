"""How often a Loop runs, where its condition only counts.

A while-loop of TensorFlow or PyTorch becomes a Loop without a trip count, whose body ends with `counter < limit`, maybe
with `and other < bound`. TensorRT sizes scan outputs by the trip count, so it is written down, as a constant or as
arithmetic on the limits:

    trips = 1 + max(0, min over the comparisons of (limit - first)),  or 0 if the condition before the loop is false
    trips = max(0, min over the comparisons of (limit - before)),     if that condition compares the same limits

where `first` is what a comparison sees after the first trip, and `before` what it sees before the loop. Counters grow
by one (by any constant where the limit is constant, too); a limit is a tensor from outside the loop. Exporters for old
opsets compare integers as floats, which is exact up to 2^24 trips.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.graph.edit import is_array, is_onnx_op
from trtforge.graph.names import UniqueNames
from trtforge.graph.signature import tensor_dtype

_COMPARISONS = {"Less": False, "LessOrEqual": True, "Greater": False, "GreaterOrEqual": True}
_INTEGERS = (np.dtype(np.int32), np.dtype(np.int64))


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """One `counter < limit` of a condition.

    Attributes:
        limit: the tensor compared with, from outside the loop.
        first: the counter as the comparison sees it after the first trip, less one where it is `<=`.
        step: what each trip adds.
    """

    limit: gs.Tensor
    first: int
    step: int


def scalar(tensor: gs.Tensor) -> int | float | bool | None:
    """The value of a constant with one element."""
    if not is_array(tensor) or tensor.values.size != 1:
        return None
    value: int | float | bool = tensor.values.item()
    return value


def source_of(tensor: gs.Tensor) -> gs.Tensor:
    """The tensor behind Identity nodes."""
    while tensor.inputs and tensor.inputs[0].op == "Identity":
        tensor = tensor.inputs[0].inputs[0]
    return tensor


def comparisons_of(loop: gs.Node) -> list[Comparison] | None:
    """The comparisons that a loop goes on by; None where anything else decides."""
    body = loop.attrs["body"]
    inner = {id(tensor) for node in body.nodes for tensor in node.outputs} | {id(port) for port in body.inputs}
    found = []
    for condition in _conditions(source_of(body.outputs[0])):
        # The condition that came in is true whenever the body runs.
        if condition is body.inputs[1] or scalar(condition) is True:
            continue
        comparison = _comparison(loop, condition)
        if comparison is None or id(comparison.limit) in inner:
            return None
        found.append(comparison)
    return found or None


def _conditions(tensor: gs.Tensor) -> Iterator[gs.Tensor]:
    """What a condition is the conjunction of."""
    if tensor.inputs and tensor.inputs[0].op == "And" and is_onnx_op(tensor.inputs[0]):
        for operand in tensor.inputs[0].inputs:
            yield from _conditions(source_of(operand))
    else:
        yield tensor


def _comparison(loop: gs.Node, condition: gs.Tensor) -> Comparison | None:
    parts = _parts(condition)
    tested = None if parts is None else _as_integer(parts[0])
    counter = None if tested is None else _counter(loop, tested)
    limit = None if parts is None else _as_integer(parts[1])
    if parts is None or counter is None or limit is None:
        return None
    first, step = counter
    return Comparison(limit, first - parts[2], step)


def _parts(condition: gs.Tensor) -> tuple[gs.Tensor, gs.Tensor, bool] | None:
    """The smaller and the larger operand of a comparison, and whether they may be equal."""
    node = condition.inputs[0] if condition.inputs else None
    if node is None or node.op not in _COMPARISONS or not is_onnx_op(node):
        return None
    smaller, larger = node.inputs if node.op.startswith("Less") else reversed(node.inputs)
    return smaller, larger, _COMPARISONS[node.op]


def _starts_alike(loop: gs.Node, comparisons: list[Comparison]) -> bool:
    """Whether the condition before a loop compares the same counters with the same limits, one step earlier."""
    found = set()
    for condition in _conditions(source_of(loop.inputs[1])):
        parts = _parts(condition)
        before = None if parts is None else scalar(source_of(parts[0]))
        limit = None if parts is None else _as_integer(parts[1])
        if parts is None or before is None or limit is None:
            return False
        found.add((id(limit), before - parts[2]))
    return found == {(id(entry.limit), entry.first - entry.step) for entry in comparisons}


def _as_integer(tensor: gs.Tensor) -> gs.Tensor | None:
    """An integer tensor, also behind a Cast that makes it a float."""
    tensor = source_of(tensor)
    if tensor.inputs and tensor.inputs[0].op == "Cast":
        tensor = source_of(tensor.inputs[0].inputs[0])
    return tensor if tensor_dtype(tensor.dtype) in _INTEGERS else None


def _counter(loop: gs.Node, tensor: gs.Tensor) -> tuple[int, int] | None:
    """The value that an integer has in the first trip, and what each trip adds to it."""
    body = loop.attrs["body"]
    if tensor is body.inputs[0]:
        return 0, 1
    if not tensor.inputs or tensor.inputs[0].op != "Add":
        return None
    operands = [source_of(operand) for operand in tensor.inputs[0].inputs]
    offsets = [value for operand in operands if isinstance(value := scalar(operand), int)]
    ports = [operand for operand in operands if not isinstance(operand, gs.Constant)]
    if len(offsets) != 1 or len(ports) != 1:
        return None
    if ports[0] is body.inputs[0]:
        return offsets[0], 1
    for position, port in enumerate(body.inputs[2:]):
        if ports[0] is port and offsets[0] > 0 and source_of(body.outputs[1 + position]) is tensor:
            first = scalar(source_of(loop.inputs[2 + position]))
            return (first + offsets[0], offsets[0]) if isinstance(first, int) else None
    return None


def count_trips(comparisons: list[Comparison]) -> int | None:
    """The trips of a loop whose limits are constants and whose condition is true before it; else None."""
    counts = []
    for entry in comparisons:
        limit = scalar(source_of(entry.limit))
        if not isinstance(limit, int):
            return None
        counts.append(-((entry.first - limit) // entry.step))
    return 1 + max(0, min(counts))


def trips_at_run_time(
    loop: gs.Node, comparisons: list[Comparison], names: UniqueNames
) -> tuple[list[gs.Node], gs.Tensor] | None:
    """Nodes that count a loop's trips, to stand before it, and their result; None where a counter grows otherwise."""
    if any(entry.step != 1 for entry in comparisons):
        return None
    nodes: list[gs.Node] = []

    def compute(op: str, *inputs: gs.Tensor, **attrs: int) -> gs.Variable:
        name = f"{loop.name}_trips_{op.lower()}"
        result = gs.Variable(names.tensor(name), np.dtype(np.int64), [])
        nodes.append(gs.Node(op, names.node(name), attrs, list(inputs), [result]))
        return result

    def constant(value: int | list[int]) -> gs.Constant:
        return gs.Constant(names.tensor(f"{loop.name}_trips_{len(nodes)}"), np.array(value, np.int64))

    def whole(tensor: gs.Tensor) -> gs.Variable:
        """A tensor of one element as an integer scalar."""
        return compute("Reshape", compute("Cast", tensor, to=7), constant([]))

    is_alike = _starts_alike(loop, comparisons)
    left = [compute("Sub", whole(entry.limit), constant(entry.first - is_alike)) for entry in comparisons]
    trips = compute("Max", left[0] if len(left) == 1 else compute("Min", *left), constant(0))
    if is_alike:
        return nodes, trips
    trips = compute("Add", trips, constant(1))
    if scalar(loop.inputs[1]) is not True:
        trips = compute("Mul", trips, whole(loop.inputs[1]))
    return nodes, trips
