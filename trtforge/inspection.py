"""What a model holds."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import onnx_graphsurgeon as gs

from trtforge.graph.edit import all_graphs, all_nodes
from trtforge.graph.lint import Finding, lint
from trtforge.graph.normalise import TARGET_OPSET
from trtforge.graph.signature import input_specs, output_specs
from trtforge.limits import DEFAULT_LIMITS, Limits
from trtforge.stages import load_source
from trtforge.tensor import TensorSpec


@dataclasses.dataclass(frozen=True, slots=True)
class ModelDescription:
    """A model as `trtforge inspect` shows it.

    Attributes:
        name, sha256, opset, inputs, outputs: of the source.
        num_nodes: subgraphs included.
        weight_bytes: bytes of all initializers.
        ops: number of nodes by operator, most frequent first.
        findings: what the linter says of it.
    """

    name: str
    sha256: str
    opset: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    num_nodes: int
    weight_bytes: int
    ops: dict[str, int]
    findings: tuple[Finding, ...]

    def to_dict(self) -> dict[str, Any]:
        """The description as JSON values."""
        return dataclasses.asdict(self)


def inspect_model(path: Path, limits: Limits = DEFAULT_LIMITS) -> ModelDescription:
    """Describe an ONNX file; nothing is run.

    Raises:
        InputError: no ONNX file, or one that breaks a rule of `graph.load`.
    """
    loaded = load_source(path, limits)
    ops = Counter(node.op for node in all_nodes(loaded.graph))
    weights = {id(tensor): tensor for graph in all_graphs(loaded.graph) for tensor in _constants(graph)}
    return ModelDescription(
        name=loaded.name,
        sha256=loaded.sha256,
        opset=loaded.opset,
        inputs=input_specs(loaded.graph),
        outputs=output_specs(loaded.graph),
        num_nodes=sum(ops.values()),
        weight_bytes=sum(int(tensor.values.nbytes) for tensor in weights.values()),
        ops=dict(sorted(ops.items(), key=lambda item: (-item[1], item[0]))),
        findings=tuple(lint(loaded.graph, TARGET_OPSET)),
    )


def _constants(graph: gs.Graph) -> list[gs.Constant]:
    return [tensor for node in graph.nodes for tensor in node.inputs if isinstance(tensor, gs.Constant)]
