"""ONNX Runtime's quantized operators, one by one: converted, equal within a step, built; and what is left, and why."""

from __future__ import annotations

import numpy as np
import pytest
from graph_models import graph_of, ops, parse, run
from lint_build import RtxBuild

from trtforge.graph.lint import fix, lint
from trtforge.graph.normalise import normalise

DOMAIN = ', "com.microsoft": 1'
S, T, Y = "float s = {0.05}, uint8 z = {120}", "float t = {0.03}, uint8 u = {10}", "float ys = {0.1}, uint8 yz = {100}"
# Weights of 7 bits: beyond, ONNX Runtime's kernels saturate uint8 x int8 products on CPUs without VNNI.
CONV_WEIGHT = "int8[2, 4, 1, 1] w = {1, -2, 3, 4, 50, -60, 7, 63}, float[2] ws = {0.02, 0.05}, int8[2] wz = {0, 0}"
GEMM_CODES = "w = {-63, 5, 40, 33, -60, 12, 63, 8, -3, -50, 63, 32}"
GEMM_WEIGHT = f"int8[4, 3] {GEMM_CODES}, float[3] ws = {{0.05, 0.02, 0.1}}"
SAME, ROWS = "[N, 4, 4, 4]", "[N, 4, 4, 3]"

# Operator, its inputs, their initializers, and the shape of its output.
CALLS = [
    ("QLinearConv", "(q, s, z, w, ws, wz, ys, yz, b)", f"{CONV_WEIGHT}, int32[2] b = {{500, -900}}", "[N, 2, 4, 4]"),
    ("com.microsoft.QLinearConv", "(q, s, z, w, ws, wz, ys, yz)", CONV_WEIGHT, "[N, 2, 4, 4]"),
    ("QLinearMatMul", "(q, s, z, w, ws, wz, ys, yz)", f"{GEMM_WEIGHT}, int8[3] wz = {{0, 0, 0}}", ROWS),
    ("QLinearMatMul", "(q, s, z, w, w1, m, ys, yz)", f"{GEMM_WEIGHT}, float[1] w1 = {{0.05}}, int8 m = {{3}}", ROWS),
    ("com.microsoft.QLinearAdd", "(q, s, z, q, t, u, ys, yz)", T, SAME),
    ("com.microsoft.QLinearMul", "(q, s, z, q, t, u, ys, yz)", T, SAME),
    ("com.microsoft.QLinearSigmoid", "(q, s, z, ys, yz)", T, SAME),
    ("com.microsoft.QLinearLeakyRelu<alpha = 0.2>", "(q, s, z, ys, yz)", T, SAME),
    ("com.microsoft.QLinearSoftmax<axis = -1, opset = 13>", "(q, s, z, ys, yz)", T, SAME),
    ("com.microsoft.QLinearAveragePool<kernel_shape = [2, 2]>", "(q, s, z, ys, yz)", T, "[N, 4, 3, 3]"),
    ("com.microsoft.QLinearGlobalAveragePool", "(q, s, z, ys, yz)", T, "[N, 4, 1, 1]"),
    ("com.microsoft.QLinearConcat<axis = 1>", "(ys, yz, q, s, z, q, t, u)", T, "[N, 8, 4, 4]"),
    ("com.microsoft.QLinearWhere", "(c, q, s, z, q, t, u, ys, yz)", f"{T}, bool[4] c = {{1, 0, 0, 1}}", SAME),
]  # fmt: skip


def image(call: str, inits: str, shape: str) -> str:
    """A float image, quantized, through one operator, dequantized."""
    return f"""g (float[N, 4, 4, 4] x) => (float{shape} y) <{S}, {Y}, {inits}> {{
        q = QuantizeLinear(x, s, z) r = {call} y = DequantizeLinear(r, ys, yz) }}"""


@pytest.mark.parametrize(("op", "inputs", "inits", "shape"), CALLS)
def test_operator_becomes_qdq_around_its_float_form(
    op: str, inputs: str, inits: str, shape: str, rtx_build: RtxBuild
) -> None:
    body = image(op + inputs, inits, shape)
    feeds = {"x": np.random.default_rng(0).uniform(-8, 8, (8, 4, 4, 4)).astype(np.float32)}
    (before,) = run(parse(body, opset=20, domains=DOMAIN), feeds)
    graph, _ = normalise(graph_of(body, opset=20, domains=DOMAIN), 13)
    assert "qlinear-op" in {finding.rule for finding in lint(graph)}
    name = graph.nodes[1].name
    converted = [entry for entry in fix(graph) if entry.rule == "qlinear-op"]
    assert [entry.nodes for entry in converted] == [(name,)], "the float operator keeps the node's name"
    assert lint(graph) == []
    assert fix(graph) == []
    assert not any("QLinear" in name for name in ops(graph))
    (after,) = run(graph, feeds)
    # The output's symmetric step, and what the input's symmetric step moves the result by at most.
    output_step = 155 * 0.1 / 127
    input_step = 135 * 0.05 / 127
    gains = {"Conv": 63 * 0.05 * 4, "MatMul": 63 * 0.1 * 4, "Mul": 2 * 8}
    gain = next((value for kind, value in gains.items() if kind in op), 1.0)
    assert np.abs(after - before).max() <= output_step + gain * input_step
    rtx_build(graph)


@pytest.mark.parametrize(("transposed", "shape"), [(0, "[4, 3]"), (1, "[3, 4]")])
def test_gemm_with_bias_and_without_output_scale(transposed: int, shape: str, rtx_build: RtxBuild) -> None:
    """QGemm adds its bias in the accumulator, which alpha scales too, and gives floats where it has no output scale."""
    body = f"""g (float[N, 4] x) => (float[N, 3] y) <float s = {{0.0625}}, uint8 z = {{128}}, int8{shape} {GEMM_CODES},
        float[3] ws = {{0.5, 0.25, 1}}, int8[3] wz = {{0, 0, 0}}, int32[3] b = {{500, -900, 77}}> {{
        q = QuantizeLinear(x, s, z)
        y = com.microsoft.QGemm<alpha = 0.5, transB = {transposed}>(q, s, z, w, ws, wz, b) }}"""
    feeds = {"x": np.random.default_rng(0).uniform(-8, 8, (8, 4)).astype(np.float32)}
    (before,) = run(parse(body, opset=20, domains=DOMAIN), feeds)
    graph, _ = normalise(graph_of(body, opset=20, domains=DOMAIN), 13)
    fix(graph)
    assert ops(graph) == ["QuantizeLinear", "DequantizeLinear", "DequantizeLinear", "Gemm"]
    (after,) = run(graph, feeds)
    np.testing.assert_allclose(after, before, rtol=1e-6)
    rtx_build(graph)


@pytest.mark.parametrize(
    ("call", "inits", "reason"),
    [
        ("com.microsoft.QLinearReduceMean<axes = [1]>(q, s, z, ys, yz)", T, "its float form is not known"),
        ("com.microsoft.QLinearGlobalAveragePool<channels_last = 1>(q, s, z, ys, yz)", T, "channels last"),
        ("com.microsoft.QLinearSoftmax<axis = 1, opset = 11>(q, s, z, ys, yz)", T, "Softmax over several axes"),
        ("com.microsoft.QLinearSigmoid(q)", T, "it lacks inputs"),
        ("com.microsoft.QLinearSigmoid(q, m, z, ys, yz)", T, "not constants"),
        ("com.microsoft.QLinearSigmoid(q, s, z, m, yz)", T, "not constants"),
        ("com.microsoft.QLinearSigmoid(q, s, z, ys, m)", T, "not constants"),
        ("com.microsoft.QLinearSigmoid(q, s, z, ys, w3)", "uint8[3] w3 = {1, 2, 3}", "do not fit"),
        ("QLinearConv(q, s, z, w, w3, wz, ys, yz)", f"{CONV_WEIGHT}, float[3] w3 = {{1, 2, 3}}", "do not fit"),
        ("QLinearConv(q, s, z, w, ws, w3, ys, yz)", f"{CONV_WEIGHT}, int8[3] w3 = {{1, 2, 3}}", "do not fit"),
        ("QLinearConv(q, s, z, w, ws, wz, ys, yz, b)", f"{CONV_WEIGHT}, int32[5] b = {{1, 2, 3, 4, 5}}", "do not fit"),
        ("QLinearConv(q, s, z, w, ws, wz, ys, yz, i)", CONV_WEIGHT, "its bias is not a constant"),
        ("QLinearMatMul(q, ws, wz, q, s, z, ys, yz)", CONV_WEIGHT, "the axis of its scales is not known"),
    ],
)
def test_operator_that_cannot_be_converted_is_left_and_explained(call: str, inits: str, reason: str) -> None:
    body = image(call, inits, "[N, 4, 4, 4]").replace("x) =>", "x, float m, int32[2] i) =>")
    graph = graph_of(body, opset=20, domains=DOMAIN)
    fix(graph)
    (finding,) = (finding for finding in lint(graph) if finding.rule == "qlinear-op")
    assert reason in finding.fix
    assert "start from the float model" in finding.fix
