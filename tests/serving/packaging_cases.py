"""Artifacts for the tests of packaging: tiny models of every kind of batch, built or made up around a built graph."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from support import make_manifest, save_onnx

from trtforge import build
from trtforge.artifact import describe_files
from trtforge.graph.load import load_model
from trtforge.graph.signature import input_specs, output_specs
from trtforge.manifest import MANIFEST_NAME, IoInfo, Manifest, ProfileInfo, RangeInfo
from trtforge.pipeline import BuildResult


def weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model as ONNX text, and what its profile file holds."""

    graph: str
    weights: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    profile: str | None = None


# Axis 0 counts samples, from 1 to 8.
DYNAMIC = Case(
    """dynamic (float[batch,4] x) => (float[batch,3] y, float[batch] s) {
        h = MatMul(x, w)  y = Relu(h)  s = ReduceSum<keepdims = 0>(y, last)
    }""",
    {"w": weights(4, 3), "last": np.array([1], np.int64)},
    "dims: {batch: {min: 1, opt: 4, max: 8}}\ninputs: {x: [batch, 4]}\n",
)
FIXED = Case("fixed (float[2,4] x) => (float[2,3] y) { y = MatMul(x, w) }", {"w": weights(4, 3)})
# Axis 0 is open, and the softmax over it mixes its positions: it is no batch, whatever its name.
ABSENT = Case(
    "absent (float[batch,4] x) => (float[batch,3] y) { h = MatMul(x, w)  y = Softmax<axis = 0>(h) }",
    {"w": weights(4, 3)},
    "dims: {batch: {min: 1, opt: 4, max: 8}}\ninputs: {x: [batch, 4]}\n",
)
# ids choose among 10 rows; the profiles overlap at a length of 16.
PROFILES = Case(
    """profiles (int64[batch,seq] ids, int64[batch,seq] attention_mask) => (float[batch,seq,4] y) {
        rows = Gather(table, ids)  mask = Cast<to = 1>(attention_mask)
        column = Unsqueeze(mask, last)  y = Mul(rows, column)
    }""",
    {"table": weights(10, 4), "last": np.array([2], np.int64)},
    """dims: {batch: {min: 1, opt: 2, max: 4}, seq: {min: 1, opt: 8, max: 16}}
inputs: {ids: [batch, seq], attention_mask: [batch, seq]}
profiles:
  - {name: short, dims: {batch: {min: 1, opt: 4, max: 8}}}
  - {name: long, dims: {seq: {min: 16, opt: 24, max: 32}}}
""",
)
SHAPES = Case(
    "shapes (float[n,4] x, int64[2] size) => (float[a,b] y) { y = Reshape(x, size) }",
    {},
    """dims: {n: {min: 1, opt: 2, max: 8}}
inputs: {x: [n, 4], size: [2]}
values: {size: {min: [1, 4], opt: [2, 4], max: [8, 4]}}
""",
)
SCALAR = Case(
    """scalar (float[batch,4] x, float factor) => (float[batch,4] y, float total) {
        y = Mul(x, factor)  total = ReduceSum<keepdims = 0>(y)
    }""",
    {},
    "dims: {batch: {min: 1, opt: 4, max: 8}}\ninputs: {x: [batch, 4], factor: []}\n",
)


# Weights and activations in INT8, which ONNX Runtime has to compute as written.
QUANTIZED = Case(
    """quantized (float[batch,16] x) => (float[batch,16] y) {
        q = QuantizeLinear(x, scale, zero)  d = DequantizeLinear(q, scale, zero)
        w = DequantizeLinear(codes, scale, zero)  y = MatMul(d, w)
    }""",
    {
        "scale": np.array(0.02, np.float32),
        "zero": np.array(0, np.int8),
        "codes": np.random.default_rng(3).integers(-127, 128, (16, 16)).astype(np.int8),
    },
    "dims: {batch: {min: 1, opt: 4, max: 8}}\ninputs: {x: [batch, 16]}\n",
)


def build_case(folder: Path, case: Case, name: str) -> BuildResult:
    """The case's artifact, `folder/name`, as TensorRT-RTX builds it."""
    model = save_onnx(folder / f"{name}.onnx", case.graph, **case.weights)
    profile = None
    if case.profile is not None:
        profile = folder / f"{name}.yaml"
        profile.write_text(case.profile)
    return build(
        str(model),
        output=folder / name,
        precision="fp32",
        verify="off",
        profile=None if profile is None else str(profile),
    )


def span(low: tuple[int, ...], opt: tuple[int, ...], high: tuple[int, ...]) -> RangeInfo:
    return RangeInfo(min=low, opt=opt, max=high)


def one_profile(name: str = "default", **inputs: RangeInfo) -> ProfileInfo:
    return ProfileInfo(name=name, inputs=inputs)


# Of `DYNAMIC`.
BATCHES = one_profile(x=span((1, 4), (4, 4), (8, 4)))


def make_artifact(folder: Path, case: Case = DYNAMIC, **changes: Any) -> Manifest:
    """An artifact with the case's graph, an engine of a few bytes that nothing runs, and a manifest that fits both."""
    folder.mkdir(parents=True)
    save_onnx(folder / "model.onnx", case.graph, **case.weights)
    (folder / "model.engine").write_bytes(b"engine")
    graph = load_model(folder / "model.onnx").graph
    io = [IoInfo(name=s.name, mode="input", dtype=s.dtype, shape=s.shape) for s in input_specs(graph)]
    io += [IoInfo(name=s.name, mode="output", dtype=s.dtype, shape=s.shape) for s in output_specs(graph)]
    values = {"io": tuple(io), "profiles": (BATCHES,), "files": describe_files(folder)} | changes
    manifest = make_manifest(**values)
    (folder / MANIFEST_NAME).write_text(manifest.to_json())
    return manifest
