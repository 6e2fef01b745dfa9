"""Rules that a graph keeps before it goes to a builder, and repairs (TensorRT's Q/DQ rules, tried with RTX 1.7).

An "error" is what the parser rejects, or what it accepts and then computes something else than ONNX says. A "warning"
costs speed or accuracy. One function per rule; `RULES` is the registry. `fix` mends what it can, in steps that do not
follow the rules one by one: one change often mends several findings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import onnx_graphsurgeon as gs

from trtforge.graph.lint import control_flow, operators, rules, structure
from trtforge.graph.lint.findings import Finding, Fixed
from trtforge.graph.lint.fixer import fix

Rule = Callable[..., Iterator[Finding]]
"""Takes the graph, and those of `_OF_OPSET` the opset of `lint`."""
_OF_OPSET = frozenset(("missing-op", "dynamic-quantization"))

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "missing-op": operators.missing_op,
        "unsupported-port": operators.unsupported_port,
        "dynamic-quantization": operators.dynamic_quantization,
        "qlinear-op": operators.qlinear_op,
        "microsoft-qdq": operators.microsoft_qdq,
        "branch-ranks": control_flow.branch_ranks,
        "sequences": control_flow.sequences,
        "loop-values": control_flow.loop_values,
        "loop-limit": control_flow.loop_limit,
        "omitted-zero-point": rules.omitted_zero_point,
        "nonzero-zero-point": rules.nonzero_zero_point,
        "unsigned-zero-point": rules.unsigned_zero_point,
        "unsupported-type": rules.unsupported_type,
        "invalid-scale": rules.invalid_scale,
        "activation-scale-per-channel": rules.activation_scale_per_channel,
        "weight-axis": rules.weight_axis,
        "scale-type": rules.scale_type,
        "int32-dequantize": rules.int32_dequantize,
        "quantized-scalar": rules.quantized_scalar,
        "layout-between-qdq": structure.layout_between_qdq,
        "unequal-pair": structure.unequal_pair,
        "double-qdq": structure.double_qdq,
        "duplicate-quantize": structure.duplicate_quantize,
        "lone-quantize": structure.lone_quantize,
        "float-weight": structure.float_weight,
        "runtime-scale": rules.runtime_scale,
    }
)
"""Every rule by its name, in the order in which findings are reported."""


def lint(graph: gs.Graph, opset: int = 0) -> list[Finding]:
    """Everything that breaks a rule, in order of the rules and then of the nodes; subgraphs included.

    Args:
        graph: sorted, with inferred types.
        opset: the one that a build raises the graph to before it rewrites operators; a higher one of its own counts.
    """
    return [
        finding
        for name, rule in RULES.items()
        for finding in (rule(graph, opset) if name in _OF_OPSET else rule(graph))
    ]


def rule_summaries() -> dict[str, str]:
    """What each rule wants, in one line."""
    return {name: (rule.__doc__ or "").splitlines()[0] for name, rule in RULES.items()}


__all__ = ["RULES", "Finding", "Fixed", "fix", "lint", "rule_summaries"]
