"""Rules that a graph keeps before it goes to a builder (TensorRT's Q/DQ rules, read and tried with TensorRT-RTX 1.7).

An "error" is what the parser rejects, or what it accepts and then computes something else than ONNX says. A "warning"
costs speed or accuracy. One function per rule; `RULES` is the registry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.graph.edit import all_nodes, is_array, is_onnx_op
from trtforge.graph.signature import tensor_dtype

_LAYOUT_OPS = ("DepthToSpace", "Flatten", "Reshape", "SpaceToDepth", "Squeeze", "Transpose", "Unsqueeze")
_MISSING_OPS = {
    "DynamicQuantizeLinear": "quantize with fixed scales: trtforge quantize MODEL --calib DATA",
    "MatMulInteger": "start from the float model and quantize it with Q/DQ",
    "ConvInteger": "start from the float model and quantize it with Q/DQ",
}
_MISSING_DOMAINS = {
    "ai.onnx.ml": "classical machine learning operators",
    "com.microsoft": "ONNX Runtime's own operators",
}
_MAX_SHOWN = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One place where a rule is broken.

    Attributes:
        rule: name of the rule.
        node: name of the node.
        what, why, fix: as in errors.py.
        severity: "error" or "warning".
    """

    rule: str
    node: str
    what: str
    why: str
    fix: str
    severity: Literal["error", "warning"]


Rule = Callable[[gs.Graph], Iterator[Finding]]


def lint(graph: gs.Graph) -> list[Finding]:
    """Everything that breaks a rule, in order of the rules and then of the nodes; subgraphs included."""
    return [finding for rule in RULES for finding in rule(graph)]


def _nodes(graph: gs.Graph, *ops: str) -> Iterator[gs.Node]:
    return (node for node in all_nodes(graph) if node.op in ops and is_onnx_op(node))


def _values(node: gs.Node, index: int) -> np.ndarray[Any, Any] | None:
    """The values of a node's input when it is a constant of numbers."""
    tensor = node.inputs[index] if index < len(node.inputs) else None
    return tensor.values if tensor is not None and is_array(tensor) else None


def _has_input(node: gs.Node, index: int) -> bool:
    return index < len(node.inputs) and bool(node.inputs[index].name)


def omitted_zero_point(graph: gs.Graph) -> Iterator[Finding]:
    """QuantizeLinear without a zero-point or output type means uint8 by ONNX, and int8 to TensorRT."""
    for node in _nodes(graph, "QuantizeLinear"):
        if not _has_input(node, 2) and not node.attrs.get("output_dtype"):
            yield Finding(
                "omitted-zero-point",
                node.name,
                f"QuantizeLinear {node.name!r} has no zero-point",
                "by ONNX its output is then uint8; TensorRT takes it for int8",
                "write an int8 zero-point of 0",
                "error",
            )


def nonzero_zero_point(graph: gs.Graph) -> Iterator[Finding]:
    """TensorRT's quantization is symmetric, and its zero-points are constants."""
    for node in _nodes(graph, "QuantizeLinear", "DequantizeLinear"):
        if not _has_input(node, 2):
            continue
        values = _values(node, 2)
        if values is None or np.any(values.astype(np.float32) != 0):
            found = "computed at run time" if values is None else f"{values.ravel()[:_MAX_SHOWN].tolist()}"
            yield Finding(
                "nonzero-zero-point",
                node.name,
                f"{node.op} {node.name!r} has a zero-point other than 0: {found}",
                "TensorRT supports only symmetric quantization with constant zero-points of 0",
                "quantize the float model again with symmetric int8",
                "error",
            )


def unsigned_zero_point(graph: gs.Graph) -> Iterator[Finding]:
    """Quantized tensors are int8, not uint8."""
    for node in _nodes(graph, "QuantizeLinear", "DequantizeLinear"):
        if _has_input(node, 2) and tensor_dtype(node.inputs[2].dtype) in (np.dtype(np.uint8), np.dtype(np.uint16)):
            yield Finding(
                "unsigned-zero-point",
                node.name,
                f"{node.op} {node.name!r} quantizes to {tensor_dtype(node.inputs[2].dtype)}",
                "TensorRT takes it for int8, which clamps at 127 instead of 255",
                "quantize the float model again with symmetric int8",
                "error",
            )


def invalid_scale(graph: gs.Graph) -> Iterator[Finding]:
    """Scales are finite and above zero."""
    for node in _nodes(graph, "QuantizeLinear", "DequantizeLinear"):
        values = _values(node, 1)
        if values is None:
            continue
        scales = values.astype(np.float64).ravel()
        wrong = ~(np.isfinite(scales) & (scales > 0))
        if wrong.any():
            yield Finding(
                "invalid-scale",
                node.name,
                f"{node.op} {node.name!r} has {int(wrong.sum())} scales that are not positive numbers: "
                f"{scales[wrong][:_MAX_SHOWN].tolist()}",
                "every scale must be finite and above 0",
                "calibrate again; a channel that is always 0 needs a small positive scale",
                "error",
            )


def activation_scale_per_channel(graph: gs.Graph) -> Iterator[Finding]:
    """Activations have one scale; TensorRT accepts several and computes with something else."""
    for node in _nodes(graph, "QuantizeLinear"):
        size = int(np.prod(node.inputs[1].shape)) if isinstance(node.inputs[1], gs.Constant) else 1
        if size > 1 and not isinstance(node.inputs[0], gs.Constant):
            yield Finding(
                "activation-scale-per-channel",
                node.name,
                f"QuantizeLinear {node.name!r} has {size} scales for an activation",
                "TensorRT supports one scale per activation; only weights may have one per channel",
                "quantize activations per tensor",
                "error",
            )


def weight_axis(graph: gs.Graph) -> Iterator[Finding]:
    """A weight's per-channel scales lie along the output channels; any other axis builds and gives wrong numbers."""
    for node in _nodes(graph, "Conv", "ConvTranspose", "MatMul", "Gemm"):
        source = node.inputs[1].inputs[0] if len(node.inputs) > 1 and node.inputs[1].inputs else None
        if source is None or source.op != "DequantizeLinear" or source.attrs.get("block_size"):
            continue
        scale, rank = _values(source, 1), len(node.inputs[1].shape or source.inputs[0].shape or ())
        if scale is None or scale.size <= 1 or not rank:
            continue
        expected = {
            "Conv": 0,
            "ConvTranspose": 1,
            "MatMul": rank - 1,
            "Gemm": 0 if node.attrs.get("transB", 0) else 1,
        }[node.op]
        axis = source.attrs.get("axis", 1)
        if (axis + rank if axis < 0 else axis) != expected:
            yield Finding(
                "weight-axis",
                source.name,
                f"DequantizeLinear {source.name!r} scales the weight of {node.op} {node.name!r} along axis {axis}",
                f"TensorRT expects axis {expected} for this {node.op}, accepts others, and computes wrong results",
                f"quantize the weight along axis {expected}",
                "error",
            )


def scale_type(graph: gs.Graph) -> Iterator[Finding]:
    """A scale has the type of the tensor that it quantizes."""
    for node in _nodes(graph, "QuantizeLinear"):
        found, expected = tensor_dtype(node.inputs[1].dtype), tensor_dtype(node.inputs[0].dtype)
        if found is not None and expected is not None and found != expected:
            yield Finding(
                "scale-type",
                node.name,
                f"QuantizeLinear {node.name!r} has a {found} scale for a {expected} tensor",
                "TensorRT expects one type for both",
                f"store the scale as {expected}",
                "warning",
            )


def int32_dequantize(graph: gs.Graph) -> Iterator[Finding]:
    """A bias is not quantized."""
    for node in _nodes(graph, "DequantizeLinear"):
        if tensor_dtype(node.inputs[0].dtype) == np.dtype(np.int32):
            yield Finding(
                "int32-dequantize",
                node.name,
                f"DequantizeLinear {node.name!r} has an int32 input",
                "TensorRT dequantizes only 8-bit and 4-bit tensors",
                "keep the bias in floating point",
                "error",
            )


def layout_between_qdq(graph: gs.Graph) -> Iterator[Finding]:
    """Nothing that moves data stands between a Q and its DQ."""
    quantized = {id(t) for node in _nodes(graph, "QuantizeLinear") for t in node.outputs}
    for node in _nodes(graph, *_LAYOUT_OPS):
        if id(node.inputs[0]) in quantized:
            quantized.update(id(tensor) for tensor in node.outputs)
            yield Finding(
                "layout-between-qdq",
                node.name,
                f"{node.op} {node.name!r} stands between QuantizeLinear and DequantizeLinear",
                "the pair is then not fused into the layer that follows",
                f"move the {node.op} in front of the QuantizeLinear",
                "warning",
            )


def missing_op(graph: gs.Graph) -> Iterator[Finding]:
    """Operators that no TensorRT parser has."""
    for node in all_nodes(graph):
        fix = _MISSING_OPS.get(node.op)
        if node.op.startswith("QLinear"):
            fix = "start from the float model and quantize it with Q/DQ"
        domain = node.domain or ""
        if domain in _MISSING_DOMAINS:
            fix = fix or "export the model without them, before any ONNX Runtime optimisation"
        if fix:
            reason = f"{domain} holds {_MISSING_DOMAINS[domain]}" if domain in _MISSING_DOMAINS else ""
            yield Finding(
                "missing-op",
                node.name,
                f"TensorRT has no operator {f'{domain}.' if domain else ''}{node.op} (node {node.name!r})",
                reason or "its parser rejects the model",
                fix,
                "error",
            )


RULES: tuple[Rule, ...] = (
    missing_op,
    omitted_zero_point,
    nonzero_zero_point,
    unsigned_zero_point,
    invalid_scale,
    activation_scale_per_channel,
    weight_axis,
    scale_type,
    int32_dequantize,
    layout_between_qdq,
)
"""Every rule, in the order in which findings are reported."""
