"""Rules on operators: what TensorRT has no parser for, and how ONNX Runtime spells quantization."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.graph.edit import all_graphs, all_nodes, is_onnx_op
from trtforge.graph.intake import full_name, is_rewritten, refused_operators
from trtforge.graph.lint.editor import Editor
from trtforge.graph.lint.findings import Finding
from trtforge.graph.lint.params import has_input
from trtforge.graph.lint.qlinear import DYNAMIC_OPS, MICROSOFT, is_quantized_operator, reason_to_leave
from trtforge.graph.signature import tensor_dtype

QDQ_OPS = ("QuantizeLinear", "DequantizeLinear")
_MISSING_TYPES = {"int16": "int32", "uint16": "int32", "uint32": "int64", "uint64": "int64", "object": "numbers"}
_REWRITTEN = "build with trtforge, which writes it in operators that TensorRT has"


def _is_dynamic(node: gs.Node) -> bool:
    return node.op in DYNAMIC_OPS and (is_onnx_op(node) or node.domain == MICROSOFT)


def missing_op(graph: gs.Graph, opset: int = 0) -> Iterator[Finding]:
    """Operators that no TensorRT parser has."""

    def is_mine(node: gs.Node) -> bool:
        return not _is_dynamic(node) and not is_quantized_operator(node)

    refused = {entry.node: entry for entry in refused_operators(graph, opset, is_mine)}
    for node in filter(is_mine, all_nodes(graph)):
        if node.name in refused:
            reason, fix = refused[node.name].reason, refused[node.name].fix
        elif is_rewritten(node):
            reason, fix = "only ONNX Runtime and others run it", _REWRITTEN
        else:
            continue
        yield Finding("missing-op", node.name, _no_operator(node), reason, fix, "error")


def dynamic_quantization(graph: gs.Graph, opset: int = 0) -> Iterator[Finding]:
    """Scales found anew for every input: TensorRT has no operator for that."""
    refused = {entry.node: entry for entry in refused_operators(graph, opset, _is_dynamic)}
    for node in filter(_is_dynamic, all_nodes(graph)):
        entry = refused.get(node.name)
        why = "it belongs to dynamic quantization, where scales depend on each input; TensorRT's are fixed before"
        yield Finding(
            "dynamic-quantization",
            node.name,
            _no_operator(node),
            f"{why}; {entry.reason}" if entry else why,
            entry.fix if entry else f"{_REWRITTEN}; for INT8 start from the float model",
            "error",
        )


def unsupported_port(graph: gs.Graph) -> Iterator[Finding]:
    """Inputs and outputs have types that TensorRT has."""
    for kind, tensors in (("input", graph.inputs), ("output", graph.outputs)):
        for tensor in tensors:
            dtype = None if isinstance(tensor, gs.Constant) else tensor_dtype(tensor.dtype)
            if dtype is not None and dtype.name in _MISSING_TYPES:
                yield Finding(
                    "unsupported-port",
                    tensor.name,
                    f"{kind} {tensor.name!r} is {dtype.name}",
                    "TensorRT has no such type",
                    f"export the model with {_MISSING_TYPES[dtype.name]} there",
                    "error",
                )


def _no_operator(node: gs.Node) -> str:
    form = ", or not in this form" if is_onnx_op(node) and not _is_dynamic(node) else ""
    return f"TensorRT has no operator {full_name(node)}{form} (node {node.name!r})"


def qlinear_op(graph: gs.Graph) -> Iterator[Finding]:
    """Quantized operators (QLinearConv ...), which TensorRT has no parser for."""
    for node in all_nodes(graph):
        if is_quantized_operator(node):
            reason = reason_to_leave(node)
            yield Finding(
                "qlinear-op",
                node.name,
                f"TensorRT has no operator {full_name(node)} (node {node.name!r})",
                "it reads quantization only from Q/DQ pairs around float operators",
                f"start from the float model and quantize it with Q/DQ ({reason})"
                if reason
                else "write it as Q/DQ around the float operator, as trtforge lint --fix does",
                "error",
            )


def microsoft_qdq(graph: gs.Graph) -> Iterator[Finding]:
    """Q/DQ in ONNX Runtime's own domain instead of ONNX's."""
    for node in all_nodes(graph):
        if node.domain == MICROSOFT and node.op in QDQ_OPS:
            yield Finding(
                "microsoft-qdq",
                node.name,
                f"{node.op} {node.name!r} is in the domain {MICROSOFT}",
                "tools that know only ONNX's operators take it for something else; without axis it has one scale",
                f"use ONNX's own {node.op}, as trtforge lint --fix does",
                "warning",
            )


def convert_microsoft_qdq(editor: Editor) -> None:
    """Step: com.microsoft's Q/DQ become ONNX's where that has the types."""
    for holder in all_graphs(editor.graph):
        for node in holder.nodes:
            if node.domain != MICROSOFT or node.op not in QDQ_OPS:
                continue
            if not has_input(node, 0) or not has_input(node, 1) or not node.outputs:
                continue
            scale = tensor_dtype(node.inputs[1].dtype)
            # fp16 scales came to ONNX with opset 19.
            if scale is None or (scale != np.float32 and editor.graph.opset < 19):
                continue
            # Without an axis com.microsoft means one scale, whatever ONNX's default is.
            node.domain = None
            editor.record("microsoft-qdq", [node], f"{node.op} of ONNX's own domain; same numbers")
