"""Small models of many kinds, with data and a profile for each: what the fuzz run damages."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx

CLASSIFIER = """g (float[batch, 32] x) => (float[batch, 16] y) {
    h = MatMul(x, w)
    b = Add(h, bias)
    a = Relu(b)
    y = Gemm<transB = 1>(a, v)
}"""
IMAGE = """g (float[batch, 3, height, 16] x) => (float[batch, c, hh, ww] y) {
    h = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2]>(x, k)
    s = Sigmoid(h)
    m = Mul(h, s)
    u = Resize<mode = "nearest">(m, , scales)
    t = ConvTranspose<kernel_shape = [2, 2], strides = [2, 2]>(u, kt)
    y = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(t)
}"""
QUANTIZED = """g (float[batch, 8] x) => (float[batch, 4] y)
    <float s = {0.05}, int8 z = {0}, float[4] ws = {0.01, 0.02, 0.03, 0.04}, int8[4] wz = {0, 0, 0, 0}> {
    q = QuantizeLinear(x, s, z)
    d = DequantizeLinear(q, s, z)
    wd = DequantizeLinear<axis = 1>(codes, ws, wz)
    y = MatMul(d, wd)
}"""
BRANCHES = """g (float[batch, 8] x) => (float[batch, 8] y) <float zero = {0}> {
    sum = ReduceSum<keepdims = 0>(x)
    c = Greater(sum, zero)
    y = If(c) <then_branch = tb () => (float[batch, 8] p) { p = Relu(x) },
               else_branch = eb () => (float[batch, 8] e) { e = Neg(x) }>
}"""
LOOP = """g (float[batch, 8] x) => (float[batch, 8] y) <int64 trips = {3}, bool go = {1}> {
    y = Loop(trips, go, x) <body = b (int64 i, bool c, float[batch, 8] h) => (bool co, float[batch, 8] ho)
        { co = Identity(c) ho = Sqrt(h) }>
}"""
SHAPES = """g (int64[batch, seq] ids) => (float[batch, seq, 32] y) <int64 one = {1}, int64[1] axis = {0}> {
    e = Gather(table, ids)
    sh = Shape(ids)
    n = Gather<axis = 0>(sh, one)
    n1 = Unsqueeze(n, axis)
    p = Slice(positions, axis, n1, axis)
    h = Add(e, p)
    l = LayerNormalization<axis = -1>(h, gamma)
    y = MatMul(l, w)
}"""
FUNCTION = """g (float[batch, 8] x) => (float[batch, 8] y) { y = local.f(x) }
    <domain: "local", opset_import: ["": 20]> f (p) => (o) { k = Relu(p) o = Softmax(k) }"""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with what a build reads beside it.

    Attributes:
        name: of the kind.
        text: the graph.
        weights: shapes of its initializers.
        profile: YAML.
        feeds: shape of each input, the first axis being samples; an integer input counts up to 7.
        external: the weights lie in a file beside the model.
    """

    name: str
    text: str
    weights: dict[str, tuple[int, ...]]
    profile: str
    feeds: dict[str, tuple[int, ...]]
    external: bool = False


WIDE = "dims: {batch: {min: 1, opt: 4, max: 8}}\ninputs: {x: [batch, 32]}\n"
BATCH = "dims: {batch: {min: 1, opt: 4, max: 8}}\ninputs: {x: [batch, 8]}\n"
CASES = (
    Case("classifier", CLASSIFIER, {"w": (32, 64), "bias": (64,), "v": (16, 64)}, WIDE, {"x": (16, 32)}),
    Case("external", CLASSIFIER, {"w": (32, 64), "bias": (64,), "v": (16, 64)}, WIDE, {"x": (16, 32)}, external=True),
    Case(
        "image",
        IMAGE,
        {"k": (16, 3, 3, 3), "kt": (16, 4, 2, 2), "scales": (4,)},
        "dims:\n  batch: {min: 1, opt: 2, max: 4}\n  height: {min: 8, opt: 16, max: 32}\n"
        "inputs:\n  x: [batch, 3, height, 16]\n",
        {"x": (16, 3, 16, 16)},
    ),
    Case("quantized", QUANTIZED, {"codes": (8, 4)}, BATCH, {"x": (16, 8)}),
    Case("branches", BRANCHES, {}, BATCH, {"x": (16, 8)}),
    Case("loop", LOOP, {}, BATCH, {"x": (16, 8)}),
    Case(
        "shapes",
        SHAPES,
        {"table": (32, 32), "positions": (24, 32), "gamma": (32,), "w": (32, 32)},
        "dims: {batch: {min: 1, opt: 2, max: 4}, seq: {min: 1, opt: 8, max: 24}}\ninputs: {ids: [batch, seq]}\n"
        "profiles: [{name: short, dims: {seq: {max: 8}}}, {name: long, dims: {seq: {min: 8, opt: 16}}}]\n",
        {"ids": (16, 8)},
    ),
    Case("function", FUNCTION, {}, BATCH, {"x": (16, 8)}),
)


def model_of(case: Case) -> onnx.ModelProto:
    """The model with seeded weights inside."""
    domains = ', "local": 1' if "local" in case.text else ""
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 20{domains}]>\n{case.text}')
    rng = np.random.default_rng(3)
    for name, shape in case.weights.items():
        values = rng.normal(size=shape).astype(np.float32)
        if name == "codes":
            values = np.clip(values * 50, -127, 127).astype(np.int8)
        elif name == "scales":
            values = np.array([1, 1, 2, 2], np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    return model


def write_case(case: Case, folder: Path) -> None:
    """Write `model.onnx` (with `model.data`), `profile.yaml` and `data.npz`."""
    model = model_of(case)
    path = folder / "model.onnx"
    if case.external:
        onnx.save(model, path, save_as_external_data=True, location="model.data", size_threshold=0)
    else:
        onnx.save(model, path)
    (folder / "profile.yaml").write_text(case.profile)
    rng = np.random.default_rng(5)
    is_text = "ids" in case.feeds
    arrays = {
        name: rng.integers(0, 8, shape) if is_text else rng.normal(size=shape).astype(np.float32)
        for name, shape in case.feeds.items()
    }
    np.savez(folder / "data.npz", **arrays)
