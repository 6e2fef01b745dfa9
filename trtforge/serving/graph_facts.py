"""What serving has to know of a graph itself: its ports, whether it has Q/DQ, and which inputs are indices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

import onnx_graphsurgeon as gs

from trtforge.graph.edit import all_nodes, is_onnx_op
from trtforge.graph.load import load_model
from trtforge.graph.signature import input_specs, output_specs
from trtforge.limits import DEFAULT_LIMITS, Limits
from trtforge.tensor import TensorSpec

_QDQ = frozenset(["QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"])
# Operators that hand integers on as they are.
_KEEPS_VALUES = frozenset(
    ["Cast", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"]
)


@dataclasses.dataclass(frozen=True, slots=True)
class GraphFacts:
    """What a graph tells.

    Attributes:
        inputs: in its order.
        outputs: likewise.
        has_qdq: it quantizes, so ONNX Runtime has to compute it as written.
        integer_limits: number of rows that an input chooses from, by its name; the smallest where it chooses from
            several tables.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    has_qdq: bool
    integer_limits: Mapping[str, int]


def read_facts(path: Path, limits: Limits = DEFAULT_LIMITS) -> GraphFacts:
    """The facts of an ONNX file.

    Raises:
        InputError: it cannot be read.
    """
    graph = load_model(path, limits).graph
    found: dict[str, int] = {}
    for tensor in graph.inputs:
        rows = list(_rows_behind(tensor))
        if rows:
            found[tensor.name] = min(rows)
    has_qdq = any(node.op in _QDQ and is_onnx_op(node) for node in all_nodes(graph))
    return GraphFacts(input_specs(graph), output_specs(graph), has_qdq, found)


def _rows_behind(tensor: gs.Tensor) -> Iterator[int]:
    """Rows of each constant table that a tensor's values index."""
    pending, seen = [tensor], {tensor.name}
    while pending:
        current = pending.pop()
        for node in current.outputs:
            if not is_onnx_op(node) or not node.inputs or not node.outputs:
                continue
            if node.op == "Gather" and len(node.inputs) == 2 and node.inputs[1] is current:
                table = node.inputs[0]
                if isinstance(table, gs.Constant) and table.shape:
                    yield int(table.shape[node.attrs.get("axis", 0)])
            elif node.op in _KEEPS_VALUES and node.inputs[0] is current and node.outputs[0].name not in seen:
                seen.add(node.outputs[0].name)
                pending.append(node.outputs[0])
