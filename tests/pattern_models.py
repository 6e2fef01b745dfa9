"""One small model per pattern that breaks real models: built as it is, built after a rewrite, or refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx.parser

Arrays = Mapping[str, np.ndarray]
DOMAINS = ', "com.microsoft": 1, "ai.onnx.ml": 3, "com.example": 1'


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A model and what one command makes of it.

    Attributes:
        name: what is special about the model.
        text: the graph, as ONNX text.
        feeds: data to calibrate and verify with, first axis = samples; None for none.
        says: pieces of the error where it is refused, else of what the build reports (manifest and stderr).
        code: 0 is an engine whose graph gives the source's outputs in ONNX Runtime, 1 one whose graph does not, 2 a
            refusal.
        options: of the command.
        weights: initializers.
        opset, ir: of the model.
        profile: content of the profile file; empty for none.
    """

    name: str
    text: str
    feeds: Arrays | None
    says: tuple[str, ...] = ()
    code: int = 0
    options: tuple[str, ...] = ("--fp16",)
    weights: Arrays = dataclasses.field(default_factory=dict)
    opset: int = 20
    ir: int = 10
    profile: str = ""


def write_pattern(pattern: Pattern, folder: Path) -> list[str]:
    """Write model, data and profile into a folder; gives the command line that builds it."""
    header = f'<ir_version: {pattern.ir}, opset_import: ["": {pattern.opset}{DOMAINS}]>\n'
    model = onnx.parser.parse_model(header + pattern.text)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(w, name) for name, w in pattern.weights.items())
    onnx.save(model, str(folder / "model.onnx"))
    command = ["build", str(folder / "model.onnx"), *pattern.options, "-o", str(folder / "out"), "--gpu", "sm_86"]
    if pattern.feeds is not None:
        np.savez(folder / "data.npz", **pattern.feeds)
        command += ["--calib", str(folder / "data.npz")]
    if pattern.profile:
        (folder / "profile.yaml").write_text(pattern.profile)
        command += ["--profile", str(folder / "profile.yaml")]
    return command


def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
    """Normally distributed numbers, the same for the same shape."""
    return (np.random.default_rng(shape).normal(size=shape) * scale).astype(np.float32)


def codes(*shape: int, low: int = -64, high: int = 64, dtype: type = np.int8) -> np.ndarray:
    """Uniformly distributed integers, the same for the same shape."""
    return np.random.default_rng(shape).integers(low, high, shape).astype(dtype)


INT8 = ("--int8",)
ROW, IMAGE = normal(10, 8), normal(10, 8, 10, 10)
IMAGE16 = normal(10, 16, 10, 10)
ROW_TO_ROW = "g (float[b,8] x) => (float[b,8] y)"
ROW_TO_6 = "g (float[b,8] x) => (float[b,6] y)"
TO_IMAGE = "g (float[b,8,10,10] x) => (float[b,c,h,w] y)"
TO_IMAGE16 = "g (float[b,16,10,10] x) => (float[b,c,h,w] y)"
HEADS = {name: normal(10, 2, 16, 32) for name in "qkv"}
QKV = "g (float[b,2,16,32] q, float[b,2,16,32] k, float[b,2,16,32] v)"
