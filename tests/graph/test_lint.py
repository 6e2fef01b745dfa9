from __future__ import annotations

import pytest
from graph_models import graph_of
from lint_cases import CASES

from trtforge.graph.lint import RULES, Finding, lint, rule_summaries

CLEAN = """g (float[N, 2] x) => (float[N, 2] y)
    <int8[2, 2] w = {1, 2, 3, 4}, float s = {0.5}, int8 z = {0}, float[2] ws = {0.5, 1}, int8[2] wz = {0, 0}> {
    q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z)
    wd = DequantizeLinear<axis = 1>(w, ws, wz) y = MatMul(d, wd) }"""


def findings(body: str, domains: str = "", opset: int = 23) -> list[Finding]:
    graph = graph_of(body, domains=domains, opset=opset)
    for index, node in enumerate(graph.nodes):
        node.name = f"n{index}"
    found = lint(graph)
    assert all(finding.what and finding.why and finding.fix for finding in found)
    return found


def broken(body: str, **changes: str) -> list[tuple[str, str, str]]:
    return [(f.rule, f.node, f.severity) for f in findings(body, **changes)]


def test_clean_graph_has_no_findings() -> None:
    assert lint(graph_of(CLEAN)) == []


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("QuantizeLinear(x, s, z)", "QuantizeLinear(x, s)", [("omitted-zero-point", "n0", "error")]),
        ("QuantizeLinear(x, s, z)", "com.microsoft.QuantizeLinear(x, s, z)", [("microsoft-qdq", "n0", "warning")]),
        ("QuantizeLinear(x, s, z)", "QuantizeLinear<output_dtype = 3>(x, s)", []),
        ("DequantizeLinear(q, s, z)", "DequantizeLinear(q, s)", []),
        ("int8[2] wz = {0, 0}", "int8[2] wz = {0, 3}", [("nonzero-zero-point", "n2", "error")]),
        ("float s = {0.5}", "float s = {0}", [("invalid-scale", "n0", "error"), ("invalid-scale", "n1", "error")]),
        ("float[2] ws = {0.5, 1}", "float[2] ws = {0.5, -1}", [("invalid-scale", "n2", "error")]),
        ("axis = 1", "axis = 0", [("weight-axis", "n2", "error")]),
        ("axis = 1", "axis = -1", []),
        ("axis = 1", "axis = 0, block_size = 1", []),
    ],
)
def test_one_change_breaks_one_rule(old: str, new: str, expected: list[tuple[str, str, str]]) -> None:
    assert old in CLEAN
    assert broken(CLEAN.replace(old, new), domains=', "com.microsoft": 1') == expected


def test_scale_that_is_not_a_number_is_found() -> None:
    graph = graph_of(CLEAN)
    graph.nodes[0].inputs[1].values = graph.nodes[0].inputs[1].values * float("nan")
    assert {finding.rule for finding in lint(graph)} == {"invalid-scale"}


def test_unsigned_quantization_is_found() -> None:
    body = CLEAN.replace("int8 z = {0}", "uint8 z = {0}")
    assert broken(body) == [("unsigned-zero-point", "n0", "error"), ("unsigned-zero-point", "n1", "error")]


def test_zero_point_computed_at_run_time_is_found() -> None:
    body = CLEAN.replace("(float[N, 2] x)", "(float[N, 2] x, int8 z)").replace(", int8 z = {0}", "")
    assert broken(body)[0] == ("nonzero-zero-point", "n0", "error")
    assert "at run time" in findings(body)[0].what


def test_activation_with_a_scale_per_channel_is_found() -> None:
    body = CLEAN.replace("QuantizeLinear(x, s, z)", "QuantizeLinear<axis = 1>(x, ws, wz)")
    assert ("activation-scale-per-channel", "n0", "error") in broken(body)


def test_weight_with_a_scale_per_channel_may_be_quantized_in_the_graph() -> None:
    body = """g (float[N, 2] x) => (float[N, 2] y)
        <float[2, 2] w = {1, 2, 3, 4}, float[2] s = {0.5, 1}, int8[2] z = {0, 0}> {
        q = QuantizeLinear<axis = 1>(w, s, z) d = DequantizeLinear<axis = 1>(q, s, z) y = MatMul(x, d) }"""
    assert broken(body) == [("float-weight", "n0", "warning")]


@pytest.mark.parametrize(
    ("op", "attributes", "right"),
    [("Conv", "", 0), ("ConvTranspose", "", 1), ("Gemm", "<transB = 1>", 0), ("Gemm", "", 1), ("MatMul", "", 1)],
)
def test_weight_axis_depends_on_the_operator(op: str, attributes: str, right: int) -> None:
    dims = "[2, 2, 1, 1]" if "Conv" in op else "[2, 2]"
    port = "[N, 2, 4, 4]" if "Conv" in op else "[N, 2]"
    for axis in (0, 1):
        body = f"""g (float{port} x) => (float{port} y)
            <int8{dims} w = {{1, 2, 3, 4}}, float[2] s = {{0.5, 1}}, int8[2] z = {{0, 0}}> {{
            d = DequantizeLinear<axis = {axis}>(w, s, z) y = {op}{attributes}(x, d) }}"""
        assert broken(body) == ([] if axis == right else [("weight-axis", "n0", "error")])


def test_scale_of_another_type_than_the_tensor_is_a_warning() -> None:
    body = """g (float16[N, 2] x) => (float[N, 2] y) <float s = {0.5}, int8 z = {0}> {
        q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }"""
    assert broken(body) == [("scale-type", "n0", "warning")]


def test_quantized_bias_is_found() -> None:
    body = """g (float[N, 2] x) => (float[N, 2] y) <int32[2] b = {1, 2}, float s = {0.5}> {
        d = DequantizeLinear(b, s) y = Add(x, d) }"""
    assert broken(body) == [("int32-dequantize", "n0", "error")]


def test_layout_op_between_quantize_and_dequantize_is_a_warning() -> None:
    body = """g (float[2, 3] x) => (float[3, 2] y) <float s = {0.5}, int8 z = {0}> {
        q = QuantizeLinear(x, s, z) t = Transpose(q) u = Transpose(t) d = DequantizeLinear(u, s, z)
        y = Transpose(d) }"""
    assert broken(body) == [("layout-between-qdq", "n1", "warning"), ("layout-between-qdq", "n2", "warning")]


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        ("DynamicQuantizeLinear(x)", "dynamic-quantization"),
        ("MatMulInteger(x, x)", "dynamic-quantization"),
        ("ConvInteger(x, x)", "dynamic-quantization"),
        ("com.microsoft.DynamicQuantizeMatMul(x, x)", "dynamic-quantization"),
        ("com.microsoft.DynamicQuantizeLSTM(x, x)", "dynamic-quantization"),
        ("QLinearMatMul(x, x)", "qlinear-op"),
        ("com.microsoft.QGemm(x, x)", "qlinear-op"),
        ("ai.onnx.ml.Scaler(x)", "missing-op"),
        ("com.microsoft.SkipLayerNormalization(x)", "missing-op"),
    ],
)
def test_operator_that_the_builder_lacks_is_named_with_its_node(call: str, rule: str) -> None:
    domains = ', "ai.onnx.ml": 3, "com.microsoft": 1'
    (finding,) = findings(f"g (float[2] x) => (float[2] y) {{ y = {call} }}", domains)
    assert (finding.rule, finding.node, finding.severity) == (rule, "n0", "error")
    assert call.split("(", maxsplit=1)[0] in finding.what and "'n0'" in finding.what


def test_operators_are_judged_by_the_opset_of_the_build() -> None:
    graph = graph_of(
        "g (float[2] x) => (float[2] y) { y = com.microsoft.Gelu(x) }", domains=', "com.microsoft": 1', opset=17
    )
    (stays,), (raised,) = lint(graph), lint(graph, 23)
    assert stays.why == "Gelu needs opset 20; the model stays at 17"
    assert (raised.rule, raised.why) == ("missing-op", "only ONNX Runtime and others run it")


def test_subgraphs_are_looked_at() -> None:
    body = """g (float[2] x, bool c) => (float[2] y) {
        y = If (c) <then_branch = tb () => (float[2] t) { t = com.microsoft.FastGelu(x) },
                    else_branch = eb () => (float[2] e) { e = Neg(x) }> }"""
    assert [finding.rule for finding in lint(graph_of(body, domains=', "com.microsoft": 1'))] == ["missing-op"]


def test_findings_bear_the_name_of_their_rule() -> None:
    for case in CASES.values():
        graph = graph_of(case.body, domains=', "com.microsoft": 1')
        for name, rule in RULES.items():
            assert {finding.rule for finding in rule(graph)} <= {name}


def test_every_rule_has_a_line_of_its_own() -> None:
    lines = rule_summaries()
    assert list(lines) == list(RULES)
    assert len(set(lines.values())) == len(RULES)
    assert all(line.endswith(".") and len(line) < 120 for line in lines.values())


def test_nodes_that_lack_inputs_are_passed_over() -> None:
    """A graph that was not normalised may be damaged."""
    body = """g (float[2] x) => (float[2] y) { q = QuantizeLinear(x) d = DequantizeLinear(q) r = Reshape()
        m = com.microsoft.QuantizeLinear(x) t = Concat() y = Add(r, d) }"""
    assert {rule for rule, _, _ in broken(body, domains=', "com.microsoft": 1')} == {"microsoft-qdq"}


@pytest.mark.parametrize("opset", [20, 23])
def test_attention_without_a_value_is_passed_over(opset: int) -> None:
    body = "g (float[1, 2, 4, 8] x) => (float[1, 2, 4, 8] y) { y = Attention(x, x) }"
    assert not [found for found in findings(body, opset=opset) if found.rule != "missing-op"]


def test_scale_of_a_constant_node_is_no_run_time_scale() -> None:
    body = """g (float[2] x) => (float[2] y) <int8 z = {0}> {
        s = Constant<value = float {0.5}>() q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }"""
    assert broken(body) == []


def test_plain_8_bit_numbers_may_be_moved() -> None:
    body = """g (int64[2] i) => (int32[2] y) <int8[4] table = {1, 2, 3, 4}> {
        t = Gather(table, i) y = Cast<to = 6>(t) }"""
    assert broken(body) == []
