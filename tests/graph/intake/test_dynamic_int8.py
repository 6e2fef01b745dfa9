"""Dynamic INT8: bit for bit what ONNX Runtime computes, or the float products behind it.

Weights of MatMuls have 7 bits: on CPUs without VNNI, ONNX Runtime's own kernel clips sums of longer codes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graph_models import model_of, run
from intake_checks import Feeds, check_equal, codes, floats, rewritten, weights
from lint_build import RtxBuild
from onnxruntime.quantization import quantize_dynamic

from trtforge.graph.edit import all_nodes
from trtforge.graph.intake import needs_float32, refused_operators
from trtforge.graph.load import graph_from_model
from trtforge.graph.native import OnnxNative
from trtforge.graph.normalise import normalise
from trtforge.quantization.cast import cast_graph
from trtforge.quantization.placement import plan_placement
from trtforge.recipe import QuantRecipe

W7 = codes(8, 6, low=-64, high=64, dtype=np.int8)
LONG = codes(3000, 6, low=-64, high=64, dtype=np.int8)
QUANTIZE = "g (float[b,7] x) => (uint8[b,7] y, float s, uint8 z) { y, s, z = DynamicQuantizeLinear(x) }"
CENTRED = weights(w=codes(5, 2, 3, 3), o=np.array(128, np.uint8))
ZERO = {"z": np.array(7, np.uint8)}
CASES: dict[str, tuple[str, Feeds]] = {
    "quantize": (QUANTIZE, {"x": floats(30, 7)}),
    "quantize what is positive": (QUANTIZE, {"x": np.abs(floats(3, 7))}),
    "quantize zeros": (QUANTIZE, {"x": np.zeros((2, 7), np.float32)}),
    "product": (
        f"g (uint8[b,8] a, uint8 z) => (int32[b,6] y) {weights(w=W7)} {{ y = MatMulInteger(a, w, z) }}",
        {"a": codes(4, 8), **ZERO},
    ),
    "long product": (
        f"g (uint8[b,3000] a, uint8 z) => (int32[b,6] y) {weights(w=LONG)} {{ y = MatMulInteger(a, w, z) }}",
        {"a": codes(4, 3000), **ZERO},
    ),
    "product of activations": (
        "g (uint8[b,3000] a, uint8[3000,6] w, uint8 z) => (int32[b,6] y) { y = MatMulInteger(a, w, z) }",
        {"a": codes(4, 3000), "w": codes(3000, 6), **ZERO},
    ),
    "convolution": (
        f"g (uint8[b,2,6,6] x, uint8 z) => (int32[b,5,6,6] y) {CENTRED} "
        "{ y = ConvInteger<pads=[1,1,1,1]>(x, w, z, o) }",
        {"x": codes(2, 2, 6, 6), **ZERO},
    ),
    "wide convolution": (
        f"g (uint8[b,200,6,6] x, uint8 z) => (int32[b,2,6,6] y) {weights(w=codes(2, 200, 3, 3))} "
        "{ y = ConvInteger<pads=[1,1,1,1]>(x, w, z) }",
        {"x": codes(2, 200, 6, 6), **ZERO},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_integers_are_exact(name: str, native: OnnxNative, rtx_build: RtxBuild) -> None:
    graph = check_equal(*CASES[name], native, tolerance=0.0)
    if name in ("quantize", "long product"):
        assert rtx_build(graph).unreadable is None


def test_sums_are_cut_only_where_float32_is_too_short(native: OnnxNative) -> None:
    counts = {}
    for name in ("product", "long product"):
        graph = rewritten(CASES[name][0], native)
        counts[name] = sum(node.op == "MatMul" for node in graph.nodes)
    bound = int(np.abs(LONG.astype(np.int64)).sum(0).max()) * 255 / 2**24
    assert counts["product"] == 1 and bound < counts["long product"] <= bound + 2


@pytest.mark.parametrize("rule", ["DynamicQuantizeMatMul", "MatMulIntegerToFloat"])
def test_fused_products(rule: str, native: OnnxNative) -> None:
    parameters = weights(w=W7, s=np.abs(floats(6)) * 0.01, o=np.arange(6).astype(np.int8), c=floats(6))
    if rule == "DynamicQuantizeMatMul":
        body = f"g (float[b,8] x) => (float[b,6] y) {parameters} {{ y = com.microsoft.{rule}(x, w, s, o, c) }}"
        feeds: Feeds = {"x": floats(4, 8)}
    else:
        body = (
            f"g (uint8[b,8] x, float xs, uint8 z) => (float[b,6] y) {parameters} "
            f"{{ y = com.microsoft.{rule}(x, w, xs, s, z, o, c) }}"
        )
        feeds = {"x": codes(4, 8), "xs": np.array(0.02, np.float32), **ZERO}
    check_equal(body, feeds, native, tolerance=1e-6)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """A convolution and a product, and ONNX Runtime's dynamically quantized form of them."""
    parameters = weights(w=floats(6, 2, 3, 3), b=floats(6), v=floats(384, 4) * np.float32(0.1), c=floats(4))
    text = f"""<ir_version: 8, opset_import: ["": 17]> g (float[b,2,8,8] x) => (float[b,4] y) {parameters} {{
        h = Conv<pads=[1,1,1,1]>(x, w, b) r = Relu(h) k = Constant<value_ints=[0,-1]>() f = Reshape(r, k)
        m = MatMul(f, v) y = Add(m, c) }}"""
    folder = tmp_path_factory.mktemp("dynamic")
    onnx.save(onnx.parser.parse_model(text), folder / "source.onnx")
    quantize_dynamic(folder / "source.onnx", folder / "dynamic.onnx", per_channel=True)
    return onnx.load(folder / "source.onnx"), onnx.load(folder / "dynamic.onnx")


def test_a_real_file_is_exact_in_float32_and_stays_so_in_float16(
    quantized: tuple[onnx.ModelProto, onnx.ModelProto], native: OnnxNative, rtx_build: RtxBuild
) -> None:
    feeds = {"x": floats(3, 2, 8, 8)}
    graph, report = normalise(graph_from_model(quantized[1]), native=native)
    assert any(note.startswith("ConvInteger became ") for note in report.notes)
    expected = run(quantized[1], feeds)[0]
    np.testing.assert_array_equal(run(graph, feeds)[0], expected)
    exact = {node.name for node in graph.nodes if needs_float32(node)}
    report16 = cast_graph(graph, "float16")
    reasons = {entry.node: entry.reason for entry in report16.kept_float32}
    assert {reasons.get(name) for name in exact if name in reasons} == {"its integers are exact only in float32"}
    assert not exact & set(report16.cast_nodes)
    assert np.abs(run(graph, feeds)[0] - expected).max() < 0.02
    assert rtx_build(graph).unreadable is None


def test_the_float_form_is_nearer_to_the_model_before_quantization(
    quantized: tuple[onnx.ModelProto, onnx.ModelProto], native: OnnxNative
) -> None:
    feeds = {"x": floats(3, 2, 8, 8)}
    graph, report = normalise(graph_from_model(quantized[1]), native=native, operators="float")
    assert any("became MatMul of the floats that its codes stand for" in note for note in report.notes)
    assert [node.op for node in graph.nodes] == ["Conv", "Add", "Relu", "Reshape", "MatMul", "Add"]
    source, dynamic = (run(model, feeds)[0] for model in quantized)
    assert np.abs(run(graph, feeds)[0] - source).mean() <= np.abs(dynamic - source).mean()


def test_codes_that_something_else_reads_stay_exact(native: OnnxNative) -> None:
    body = f"""g (float[b,8] x) => (float[b,6] y, uint8[b,8] q) {weights(w=W7)} {{
        q, s, z = DynamicQuantizeLinear(x) i = MatMulInteger(q, w, z) f = Cast<to=1>(i) y = Mul(f, s) }}"""
    graph = check_equal(body, {"x": floats(4, 8)}, native, operators="float", tolerance=1e-6)
    placement = plan_placement(graph, {}, QuantRecipe())
    assert [entry.reason for entry in placement.kept_float] == ["its integers are exact only in float32"]


@pytest.mark.parametrize("axes", [(), (1,)])
def test_weights_of_an_lstm_become_floats(axes: tuple[int, ...], native: OnnxNative, tmp_path: Path) -> None:
    parameters = weights(w=floats(1, 12, 5) * 0.5, r=floats(1, 12, 3) * 0.5, b=floats(1, 24))
    text = f"""<ir_version: 8, opset_import: ["": 17]> g (float[t,b,5] x) => (float[t,1,b,3] y, float[1,b,3] h)
        {parameters} {{ y, h, c = LSTM<hidden_size=3>(x, w, r, b) }}"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "source.onnx")
    quantize_dynamic(tmp_path / "source.onnx", tmp_path / "dynamic.onnx", per_channel=bool(axes))
    dynamic, source = onnx.load(tmp_path / "dynamic.onnx"), onnx.load(tmp_path / "source.onnx")
    assert [node.op_type for node in dynamic.graph.node] == ["DynamicQuantizeLSTM"]
    feeds = {"x": floats(6, 2, 5)}
    graph, _ = normalise(graph_from_model(dynamic), native=native)
    assert [node.op for node in all_nodes(graph)] == ["LSTM"]
    for found, exact, rounded in zip(run(graph, feeds), run(source, feeds), run(dynamic, feeds), strict=True):
        assert np.abs(found - exact).mean() <= np.abs(rounded - exact).mean() + 1e-4


def test_quantized_attention_and_embeddings(native: OnnxNative) -> None:
    parameters = weights(w=codes(8, 24, low=-64, high=64, dtype=np.int8), c=floats(24))
    body = f"""g (uint8[b,s,8] x, float xs, uint8 z) => (float[b,s,8] y) {parameters[:-1]},
        float ws = {{0.01}}, int8 wz = {{0}}> {{
        y = com.microsoft.QAttention<num_heads=2>(x, w, c, xs, ws, , z, wz) }}"""
    feeds = {"x": codes(2, 5, 8), "xs": np.array(0.02, np.float32), **ZERO}
    check_equal(body, feeds, native, tolerance=1e-5)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("y = ConvInteger(q, q)", "its weight is computed at run time"),
        (
            "y = com.microsoft.DynamicQuantizeLSTM(x, q, q, , , , , , x, q, x, q)",
            "its weights are computed at run time",
        ),
    ],
)
def test_refusals(call: str, reason: str, native: OnnxNative) -> None:
    body = f"g (float[1,2,3,3] x, uint8[1,2,3,3] q) => (int32[1,1,1,1] y) {{ [n] {call} }}"
    (refused,) = refused_operators(rewritten(body.replace("int32[1,1,1,1] y", "int32[a,b,c,d] y"), native))
    assert refused.node == "n" and refused.reason == reason and refused.fix


def test_products_in_subgraphs(native: OnnxNative) -> None:
    body = f"""g (bool c, uint8[b,8] a) => (int32[b,6] y) {weights(w=W7)} {{
        y = If(c) <then_branch = t () => (int32[b,6] p) {{ p = MatMulInteger(a, w) }},
                   else_branch = e () => (int32[b,6] q) {{ n = MatMulInteger(a, w) q = Neg(n) }}> }}"""
    for flag in (True, False):
        check_equal(body, {"c": np.array(flag), "a": codes(3, 8)}, native, tolerance=0.0)


def test_models_without_such_operators_are_left_alone(native: OnnxNative) -> None:
    body = "g (float[N,4] x) => (float[N,4] y) { a = Relu(x) y = Mul(a, x) }"
    kept, exact = (model_of(rewritten(body, native, operators=mode)) for mode in ("keep", "exact"))
    assert exact.SerializeToString(deterministic=True) == kept.SerializeToString(deterministic=True)
