"""Builders that several test files share."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser

from trtforge.data import Batch, Dataset
from trtforge.manifest import (
    BackendInfo,
    FileInfo,
    IoInfo,
    Manifest,
    ModelInfo,
    ParityInfo,
    PlanInfo,
    PrecisionInfo,
    ProfileInfo,
    RangeInfo,
)
from trtforge.tensor import TensorSpec

# The builder refuses two of its nodes, and names neither.
DILATED_TWICE = """g (float[1,4,8,8] x) => (float[1,4,a,b] y) {
    [plain] h = ConvTranspose(x, w)
    [first] u = ConvTranspose<dilations = [2,2], strides = [2,2]>(h, w)
    [second] y = ConvTranspose<dilations = [2,2], strides = [2,2]>(u, w)
}"""
HEADER = '<ir_version: 10, opset_import: ["" : 20]>\n'


def save_onnx(path: Path, text: str, *, external: bool = False, **weights: np.ndarray) -> Path:
    """Save an ONNX text graph, with initializers given by name."""
    model = onnx.parser.parse_model(HEADER + text)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    if external:
        onnx.save(model, str(path), save_as_external_data=True, location=f"{path.name}.data", size_threshold=0)
    else:
        onnx.save(model, str(path))
    return path


def dataset_of(*batches: Batch, specs: tuple[TensorSpec, ...] = (), **changes: Any) -> Dataset:
    """A dataset in memory."""
    count = sum(len(batch) for batch in batches)
    labelled = all(batch.labels is not None for batch in batches)
    return Dataset("memory", specs, count, "0" * 64, labelled, lambda _: iter(batches), **changes)


def npy_bytes(array: np.ndarray, *, allow_pickle: bool = False, version: tuple[int, int] | None = None) -> bytes:
    """An array as `.npy` bytes."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, version=version, allow_pickle=allow_pickle)
    return buffer.getvalue()


def zip_of(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    """A zip file with these members."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def make_manifest(**changes: Any) -> Manifest:
    """A small valid manifest."""
    values: dict[str, Any] = {
        "trtforge_version": "0.1.0",
        "inputs_sha256": "a" * 64,
        "model": ModelInfo(name="m", sha256="b" * 64),
        "backend": BackendInfo(name="tensorrt-rtx", version="1.7.1"),
        "targets": ("sm_86",),
        "precision": PrecisionInfo(
            requested="fp16",
            nodes={"fp16": 2},
            gemm_flops_fraction={"fp16": 1.0},
            attention_flops_fraction={},
            kept_float=(),
        ),
        "fusion": (),
        "near_misses": (),
        "plan": PlanInfo(kernels=0, gemm={}, fused_attention=0, layers=()),
        "profiles": (ProfileInfo(name="default", inputs={"x": RangeInfo(min=(1, 4), opt=(8, 4), max=(8, 4))}),),
        "io": (IoInfo(name="x", mode="input", dtype="float32", shape=("batch", 4)),),
        "calibration": None,
        "parity": ParityInfo(reference="r", candidate="c", verified=False, passed=None, budget=0.99),
        "files": {name: FileInfo(sha256="c" * 64, bytes=3) for name in ("model.engine", "model.onnx")},
        "timings_s": {"build": 1.5},
        "environment": {"tf32": True},
    }
    return Manifest(**(values | changes))
