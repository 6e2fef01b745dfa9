"""Operators without a form in TensorRT, and what the user can do about each."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_graphsurgeon as gs

from trtforge.graph.edit import is_onnx_op
from trtforge.graph.intake.ml import REASONS as ML_REASONS
from trtforge.graph.intake.rewrites import Refused

_TEXT = "it works on text"
_RANDOM = "it gives another result at each run"
_LOOPS = "it holds a whole search with the model inside"
_STANDARD: Mapping[str, str] = {
    **dict.fromkeys(("StringConcat", "StringNormalizer", "StringSplit", "RegexFullMatch", "TfIdfVectorizer"), _TEXT),
    "ImageDecoder": "it decodes image files",
    **dict.fromkeys(("Bernoulli", "Multinomial"), _RANDOM),
    **dict.fromkeys(("Optional", "OptionalGetElement", "OptionalHasElement"), "it works on values that may be missing"),
}
_MICROSOFT: Mapping[str, str] = {
    **dict.fromkeys(("Tokenizer", "StringSplit", "WordConvEmbedding"), _TEXT),
    **dict.fromkeys(("BeamSearch", "GreedySearch", "Sampling", "WhisperBeamSearch"), _LOOPS),
    "MurmurHash3": "it works on bits",
}
_DOMAINS: Mapping[str, tuple[str, str]] = {
    "com.microsoft": (
        "it is an operator of ONNX Runtime's own that has no standard form here",
        "save the model before ONNX Runtime's optimisation, or with ORT_ENABLE_BASIC",
    ),
    "com.microsoft.nchwc": (
        "ONNX Runtime laid the file out for one kind of CPU",
        "save the model before ONNX Runtime's optimisation, or with ORT_ENABLE_EXTENDED at most",
    ),
    "com.ms.internal.nhwc": (
        "ONNX Runtime laid the file out for one kind of device",
        "save the model before ONNX Runtime's optimisation, or with ORT_ENABLE_EXTENDED at most",
    ),
    "ai.onnx.contrib": ("it is a custom operator of onnxruntime-extensions, usually for text or images", ""),
    "ai.onnx.ml": ("TensorRT has no classical machine learning operators", ""),
}
# What lint's own rules speak of, and what they mend.
_QUANTIZED = ("QuantizeLinear", "DequantizeLinear")


def refusal(node: gs.Node) -> Refused | None:
    """Why TensorRT does not take a node that no rule replaces; None where it may."""
    domain = "" if is_onnx_op(node) else str(node.domain)
    if domain == "com.microsoft" and (node.op in _QUANTIZED or node.op.startswith("QLinear") or node.op == "QGemm"):
        return None
    table = {"": _STANDARD, "com.microsoft": _MICROSOFT, "ai.onnx.ml": ML_REASONS}.get(domain, {})
    reason, fix = table.get(node.op), ""
    if reason is None:
        if domain not in _DOMAINS:
            return None
        reason, fix = _DOMAINS[domain]
    name = f"{domain}.{node.op}" if domain else str(node.op)
    return Refused(node.name, name, reason, fix or _cut(node))


def _cut(node: gs.Node) -> str:
    names = [tensor.name for tensor in node.inputs if isinstance(tensor, gs.Variable) and tensor.name]
    quoted = ", ".join(repr(name) for name in names[:4])
    return f"it runs outside TensorRT: cut the model there, and keep {quoted} as its outputs"
