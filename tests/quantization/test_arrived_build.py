"""`build --int8` of a model that arrives quantized in part."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from support import save_onnx

import trtforge

SIZE = 64
SCALE_X, SCALE_H = np.float32(0.0312347), np.float32(0.0567891)
GRAPH = f"""
part (float[batch, 16, {SIZE}] x) => (float[batch, 16, {SIZE}] y) {{
    [q_x] xq = QuantizeLinear (x, scale_x, zero)
    [dq_x] xd = DequantizeLinear (xq, scale_x, zero)
    [dq_w1] w1d = DequantizeLinear <axis = 1> (w1, scale_w1, zeros)
    [complete] a = MatMul (xd, w1d)
    [relu] h = Relu (a)
    [q_h] hq = QuantizeLinear (h, scale_h, zero)
    [dq_h] hd = DequantizeLinear (hq, scale_h, zero)
    [activation_only] b = MatMul (hd, w2)
    [tanh] t = Tanh (b)
    [dq_w3] w3d = DequantizeLinear <axis = 1> (w3, scale_w3, zeros)
    [weight_only] c = MatMul (t, w3d)
    [gelu] g = Gelu (c)
    [float] y = MatMul (g, w4)
}}"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> trtforge.BuildResult:
    folder = tmp_path_factory.mktemp("arrived")
    random = np.random.default_rng(3)
    weights = [(random.normal(size=(SIZE, SIZE)) / 8).astype(np.float32) for _ in range(4)]
    scales = [(np.abs(weight).max(axis=0) / 127).astype(np.float32) for weight in weights]
    codes = [np.rint(weight / scale).astype(np.int8) for weight, scale in zip(weights, scales, strict=True)]
    model = save_onnx(
        folder / "part.onnx",
        GRAPH,
        scale_x=SCALE_X,
        scale_h=SCALE_H,
        zero=np.zeros((), np.int8),
        zeros=np.zeros(SIZE, np.int8),
        w1=codes[0],
        scale_w1=scales[0],
        w2=weights[1],
        w3=codes[2],
        scale_w3=scales[2],
        w4=weights[3],
    )
    (folder / "calibration").mkdir()
    np.savez(folder / "calibration" / "part.npz", x=random.normal(size=(48, 16, SIZE)).astype(np.float32))
    return trtforge.build(model, precision="int8", gpu="sm_86", output=folder / "out")


def test_every_product_runs_in_int8(built: trtforge.BuildResult) -> None:
    assert built.manifest.precision.gemm_flops_fraction == {"int8": 1.0}
    assert built.passed


def test_only_what_was_missing_is_calibrated(built: trtforge.BuildResult) -> None:
    assert built.manifest.calibration is not None
    assert set(built.manifest.calibration.amax) == {"t", "g"}


def test_scales_that_came_are_those_of_the_source_in_float16(built: trtforge.BuildResult) -> None:
    model = onnx.load(str(built.directory / "model.onnx"))
    nodes = {node.name: node for node in model.graph.node}
    values = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for node, scale in (("q_x", SCALE_X), ("dq_x", SCALE_X), ("q_h", SCALE_H), ("dq_h", SCALE_H)):
        assert values[nodes[node].input[1]] == np.float16(scale)
    assert sum(node.op_type == "QuantizeLinear" for node in model.graph.node) == 4


def test_the_manifest_says_what_came_quantized(built: trtforge.BuildResult) -> None:
    came = [note for note in built.manifest.notes if " came quantized: " in note]
    assert len(came) >= 2 and all(len(note.split(" came quantized: ")[1]) > 10 for note in came)
