"""Rules on conditionals, loops and sequences that no pass could resolve (tried with TensorRT-RTX 1.7)."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_graphsurgeon as gs

from trtforge.graph.control_flow.sequences import SEQUENCE_OPS
from trtforge.graph.edit import all_nodes, is_onnx_op, subgraphs_of
from trtforge.graph.lint.findings import Finding

_FIX_SIZES = "fix the sizes that decide it: one size in the profile (min = max), or export the model with it"
# Inputs that a message names.
_MAX_NAMED = 4


def branch_ranks(graph: gs.Graph) -> Iterator[Finding]:
    """Both branches of an If that only the run decides have results of one rank."""
    for node in _nodes_with(graph, "If", "then_branch", "else_branch"):
        branches = [node.attrs["then_branch"].outputs, node.attrs["else_branch"].outputs]
        for output, first, second in zip(node.outputs, *branches, strict=False):
            ranks = [None if tensor.shape is None else len(tensor.shape) for tensor in (first, second)]
            if None not in ranks and ranks[0] != ranks[1]:
                yield Finding(
                    "branch-ranks",
                    node.name,
                    f"the branches of If {node.name!r} give {output.name!r} {ranks[0]} and {ranks[1]} dims",
                    f"TensorRT needs one rank, and the condition follows from {_origin(node.inputs[0], graph)}",
                    _FIX_SIZES,
                    "error",
                )
                break


def sequences(graph: gs.Graph) -> Iterator[Finding]:
    """There are no sequences of tensors."""
    for node in all_nodes(graph):
        if node.op in SEQUENCE_OPS and is_onnx_op(node):
            yield Finding(
                "sequences",
                node.name,
                f"TensorRT has no operator {node.op} (node {node.name!r})",
                "it has no sequences, and this one's length or positions are known only at run time",
                "export the model with tensors, or with a fixed number of elements",
                "error",
            )


def loop_values(graph: gs.Graph) -> Iterator[Finding]:
    """What a loop hands from trip to trip keeps its rank and its static sizes."""
    for node in _nodes_with(graph, "Loop", "body"):
        body = node.attrs["body"]
        for given, result in zip(node.inputs[2:], body.outputs[1:], strict=False):
            if given.shape is None or result.shape is None or _may_be_equal(given.shape, result.shape):
                continue
            yield Finding(
                "loop-values",
                node.name,
                f"Loop {node.name!r} changes the shape of a value that it carries: {result.name!r}",
                f"it goes from {list(given.shape)} to {list(result.shape)}; TensorRT needs one shape in all trips",
                f"make the number of trips constant, so that the loop can be unrolled: {_FIX_SIZES}",
                "error",
            )
            break


def loop_limit(graph: gs.Graph) -> Iterator[Finding]:
    """A loop that stacks results of its trips has a trip count."""
    for node in _nodes_with(graph, "Loop", "body"):
        if not node.inputs[0].name and len(node.outputs) > max(0, len(node.inputs) - 2):
            yield Finding(
                "loop-limit",
                node.name,
                f"Loop {node.name!r} has no trip count, and stacks results of its trips",
                "TensorRT sizes them by the trip count, and the loop's condition is more than a count",
                "export the loop with the largest number of trips",
                "error",
            )


def _nodes_with(graph: gs.Graph, op: str, *bodies: str) -> Iterator[gs.Node]:
    """Nodes of an operator that have its bodies and an input; a file that was not normalised may lack them."""
    for node in all_nodes(graph):
        is_whole = node.inputs and all(isinstance(node.attrs.get(name), gs.Graph) for name in bodies)
        if node.op == op and is_onnx_op(node) and is_whole:
            yield node


def _may_be_equal(first: list[object], second: list[object]) -> bool:
    return len(first) == len(second) and all(
        a == b or not (isinstance(a, int) and isinstance(b, int)) for a, b in zip(first, second, strict=True)
    )


def _origin(tensor: gs.Tensor, graph: gs.Graph) -> str:
    """The inputs that a tensor is computed from, in words."""
    inputs = {id(port) for port in graph.inputs}
    seen: set[int] = set()
    names: list[str] = []
    pending = [tensor]
    while pending:
        current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        if id(current) in inputs:
            names.append(f"input {current.name!r}")
        for node in current.inputs:
            pending.extend(node.inputs)
            pending.extend(t for sub in subgraphs_of(node) for inner in all_nodes(sub) for t in inner.inputs)
    shown = sorted(names)[:_MAX_NAMED]
    return ", ".join(shown) + (" and others" if len(names) > _MAX_NAMED else "") if shown else "values inside the model"
