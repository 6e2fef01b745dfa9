"""What TensorRT wants of Q/DQ, one function per rule (read, and tried with TensorRT-RTX 1.7)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.graph.edit import all_nodes, is_array, is_onnx_op
from trtforge.graph.lint.findings import Finding
from trtforge.graph.lint.pairs import quantizer_of
from trtforge.graph.lint.params import (
    INT8,
    RANGES,
    UINT8,
    constant_input,
    has_input,
    int_attribute,
    producer_of,
    quantized_dtype,
)
from trtforge.graph.lint.qlinear import MICROSOFT
from trtforge.graph.lint.weights import wanted_axes
from trtforge.graph.signature import tensor_dtype

_MAX_SHOWN = 3
_PARSED_TYPES = frozenset(["int8", "uint8", "int32", "int4", "float8_e4m3fn", "float4_e2m1fn"])


def qdq_nodes(graph: gs.Graph, *ops: str) -> Iterator[gs.Node]:
    """Nodes with one of these operators, subgraphs included: ONNX's own, and ONNX Runtime's spelling of Q/DQ."""
    for node in all_nodes(graph):
        is_qdq = node.op in ("QuantizeLinear", "DequantizeLinear")
        is_known = is_onnx_op(node) or (is_qdq and node.domain == MICROSOFT)
        # A graph that was not normalised may lack inputs.
        if node.op in ops and is_known and node.outputs and len(node.inputs) > is_qdq:
            yield node


def omitted_zero_point(graph: gs.Graph) -> Iterator[Finding]:
    """QuantizeLinear without a zero-point or output type means uint8 by ONNX, and int8 to TensorRT."""
    for node in qdq_nodes(graph, "QuantizeLinear"):
        if not has_input(node, 2) and not node.attrs.get("output_dtype"):
            yield Finding(
                "omitted-zero-point",
                node.name,
                f"QuantizeLinear {node.name!r} has no zero-point",
                "by ONNX its output is then uint8; TensorRT takes it for int8",
                "write an int8 zero-point of 0; trtforge lint --fix keeps the numbers of uint8",
                "error",
            )


def nonzero_zero_point(graph: gs.Graph) -> Iterator[Finding]:
    """Zero-points are constants of 0: TensorRT's quantization is symmetric."""
    for node in qdq_nodes(graph, "QuantizeLinear", "DequantizeLinear"):
        if not has_input(node, 2):
            continue
        values = constant_input(node, 2)
        if values is None or np.any(values.astype(np.float32) != 0):
            found = "computed at run time" if values is None else f"{values.ravel()[:_MAX_SHOWN].tolist()}"
            yield Finding(
                "nonzero-zero-point",
                node.name,
                f"{node.op} {node.name!r} has a zero-point other than 0: {found}",
                "TensorRT supports only symmetric quantization with constant zero-points of 0",
                "quantize the float model again with symmetric int8"
                if values is None
                else "use a symmetric int8 scale that covers the range, as trtforge lint --fix does",
                "error",
            )


def unsigned_zero_point(graph: gs.Graph) -> Iterator[Finding]:
    """Quantized tensors are int8, not uint8."""
    for node in qdq_nodes(graph, "QuantizeLinear", "DequantizeLinear"):
        if has_input(node, 2) and tensor_dtype(node.inputs[2].dtype) == UINT8:
            yield _unsigned(node)
        elif node.op == "DequantizeLinear" and not has_input(node, 2) and quantized_dtype(node) == UINT8:
            source = quantizer_of(node.inputs[0])
            # Of a pair without zero-points, omitted-zero-point speaks.
            if source is None or has_input(source, 2):
                yield _unsigned(node)


def _unsigned(node: gs.Node) -> Finding:
    return Finding(
        "unsigned-zero-point",
        node.name,
        f"{node.op} {node.name!r} has uint8 codes",
        "TensorRT takes them for int8, which ends at 127 instead of 255, or refuses them",
        "use int8 with a symmetric scale that covers the range, as trtforge lint --fix does",
        "error",
    )


def unsupported_type(graph: gs.Graph) -> Iterator[Finding]:
    """Codes are int8, int4, fp8 (E4M3) or fp4."""
    for node in qdq_nodes(graph, "QuantizeLinear", "DequantizeLinear"):
        dtype = quantized_dtype(node)
        if dtype is not None and dtype.name not in _PARSED_TYPES:
            yield Finding(
                "unsupported-type",
                node.name,
                f"{node.op} {node.name!r} has {dtype.name} codes",
                "TensorRT quantizes to int8, int4, fp8 (E4M3) and fp4",
                "leave the tensor float, as trtforge lint --fix does"
                if dtype in RANGES
                else "quantize the float model again with one of these types",
                "error",
            )


def invalid_scale(graph: gs.Graph) -> Iterator[Finding]:
    """Scales are finite and above zero."""
    for node in qdq_nodes(graph, "QuantizeLinear", "DequantizeLinear"):
        values = constant_input(node, 1)
        if values is None:
            continue
        scales = values.astype(np.float64).ravel()
        wrong = ~(np.isfinite(scales) & (scales > 0))
        if wrong.any():
            is_weight = is_array(node.inputs[0]) and bool(np.isfinite(scales).all())
            yield Finding(
                "invalid-scale",
                node.name,
                f"{node.op} {node.name!r} has {int(wrong.sum())} scales that are not positive numbers: "
                f"{scales[wrong][:_MAX_SHOWN].tolist()}",
                "every scale must be finite and above 0",
                "give channels that are always 0 a small positive scale, as trtforge lint --fix does"
                if is_weight
                else "calibrate again with data that reaches this tensor, or leave it float",
                "error",
            )


def runtime_scale(graph: gs.Graph) -> Iterator[Finding]:
    """Scales are constants, so that INT8 kernels can be chosen."""
    for node in qdq_nodes(graph, "QuantizeLinear", "DequantizeLinear"):
        source = producer_of(node.inputs[1])
        if not isinstance(node.inputs[1], gs.Constant) and (source is None or source.op != "Constant"):
            yield Finding(
                "runtime-scale",
                node.name,
                f"{node.op} {node.name!r} has a scale that is computed at run time",
                "the builder does not know it, and runs what follows in floating point",
                "quantize with fixed scales: trtforge quantize MODEL --calib DATA, from the float model",
                "warning",
            )


def activation_scale_per_channel(graph: gs.Graph) -> Iterator[Finding]:
    """Activations have one scale; TensorRT accepts several and computes with something else."""
    for node in qdq_nodes(graph, "QuantizeLinear"):
        size = int(np.prod(node.inputs[1].shape)) if isinstance(node.inputs[1], gs.Constant) else 1
        if size > 1 and not isinstance(node.inputs[0], gs.Constant):
            yield Finding(
                "activation-scale-per-channel",
                node.name,
                f"QuantizeLinear {node.name!r} has {size} scales for an activation",
                "TensorRT supports one scale per activation; only weights may have one per channel",
                "quantize activations per tensor; trtforge lint --fix takes the largest scale",
                "error",
            )


def weight_axis(graph: gs.Graph) -> Iterator[Finding]:
    """A weight's per-channel scales lie along the output channels; any other axis builds and gives wrong numbers."""
    for source in qdq_nodes(graph, "DequantizeLinear"):
        scale = constant_input(source, 1)
        rank = len(source.inputs[0].shape or source.outputs[0].shape or ())
        if scale is None or scale.size <= 1 or not rank or source.attrs.get("block_size"):
            continue
        axis = int_attribute(source, "axis", 1)
        if axis is None:
            continue
        axis = axis + rank if axis < 0 else axis
        for node, expected in wanted_axes(source, rank):
            if axis != expected:
                yield Finding(
                    "weight-axis",
                    source.name,
                    f"DequantizeLinear {source.name!r} scales the weight of {node.op} {node.name!r} along axis {axis}",
                    f"TensorRT expects axis {expected} for this {node.op}, accepts others, and computes wrong results"
                    if node.inputs[1] is source.outputs[0]
                    else f"the output channels are axis {expected}; the {node.op} does not run in INT8 otherwise",
                    f"quantize the weight along axis {expected}, as trtforge lint --fix does",
                    "error" if node.inputs[1] is source.outputs[0] else "warning",
                )


def scale_type(graph: gs.Graph) -> Iterator[Finding]:
    """A scale has the type of the tensor that it quantizes."""
    for node in qdq_nodes(graph, "QuantizeLinear"):
        found, expected = tensor_dtype(node.inputs[1].dtype), tensor_dtype(node.inputs[0].dtype)
        if found is not None and expected is not None and found != expected:
            yield Finding(
                "scale-type",
                node.name,
                f"QuantizeLinear {node.name!r} has a {found} scale for a {expected} tensor",
                "TensorRT expects one type for both",
                f"store the scale as {expected}, or cast the tensor to {found}, as trtforge lint --fix does",
                "warning",
            )


def int32_dequantize(graph: gs.Graph) -> Iterator[Finding]:
    """A bias is not quantized."""
    for node in qdq_nodes(graph, "DequantizeLinear"):
        if tensor_dtype(node.inputs[0].dtype) == np.dtype(np.int32):
            yield Finding(
                "int32-dequantize",
                node.name,
                f"DequantizeLinear {node.name!r} has an int32 input",
                "TensorRT dequantizes only 8-bit and 4-bit tensors",
                "keep the bias in floating point, as trtforge lint --fix does",
                "error",
            )


def quantized_scalar(graph: gs.Graph) -> Iterator[Finding]:
    """A stored scalar, such as the value of a Pad, is not quantized."""
    for node in qdq_nodes(graph, "DequantizeLinear"):
        codes = constant_input(node, 0)
        if codes is not None and codes.ndim == 0 and codes.dtype in (INT8, UINT8):
            yield Finding(
                "quantized-scalar",
                node.name,
                f"DequantizeLinear {node.name!r} has the stored scalar {node.inputs[0].name!r} for codes",
                "TensorRT-RTX takes stored codes only with a shape",
                "store the number in floating point, as trtforge lint --fix does",
                "error",
            )
