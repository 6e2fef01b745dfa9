from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from graph_models import graph_of, model_of, ops, parse, run, write

from trtforge.errors import ChildDiedError, InputError, InternalError
from trtforge.graph import simplify as module
from trtforge.graph.edit import all_nodes
from trtforge.graph.load import load_model
from trtforge.graph.native import OnnxNative, PreparedModel
from trtforge.graph.normalise import normalise
from trtforge.graph.save import save_model
from trtforge.graph.signature import input_specs, output_specs

QDQ = """g (float[N, 2] x) => (float[N, 2] y)
    <float[2, 2] w = {1, 2, 3, 4}, float s = {0.5}, int8 z = {0}> {
    xq = QuantizeLinear(x, s, z) xd = DequantizeLinear(xq, s, z)
    wq = QuantizeLinear(w, s, z) wd = DequantizeLinear(wq, s, z)
    y = MatMul(xd, wd) }"""
EVERYTHING = """g (float[N, 4] x, bool c, float[7] unused) => (float[N, M] y, float[N, 1] z)
    <float[4, 4] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}> {
    a = MatMul(x, w)
    sh = Shape(a)
    i0 = Constant<value_int = 0>()
    n = Gather(sh, i0)
    ax = Constant<value = int64[1] {0}>()
    n1 = Unsqueeze(n, ax)
    i1 = Constant<value_int = 1>()
    k = Gather(sh, i1)
    two = Constant<value_int = 2>()
    half = Div(k, two)
    half1 = Unsqueeze(half, ax)
    rest = Constant<value_ints = [2]>()
    target = Concat<axis = 0>(n1, half1, rest)
    r = Reshape(a, target)
    t = local.f(r)
    dead = Exp(t)
    i = Identity(t)
    y = ReduceMax<axes = [2], keepdims = 0>(i)
    z = If(c) <then_branch = tb () => (float[N, 1] p) { p = ReduceMax<axes = [1], keepdims = 1>(a) },
               else_branch = eb () => (float[N, 1] q) { q = ReduceMin<axes = [1], keepdims = 1>(a) }> }
    <domain: "local", opset_import: ["": 17]> f (p) => (o) { k = Relu(p) o = Identity(k) }"""


@pytest.fixture(scope="module")
def native() -> Iterator[OnnxNative]:
    with OnnxNative() as child:
        yield child


def test_one_pass_over_everything_keeps_the_numbers(native: OnnxNative) -> None:
    source = parse(EVERYTHING, opset=17, ir=8, domains=', "local": 1')
    graph, report = normalise(graph_of(EVERYTHING, opset=17, domains=', "local": 1'), native=native)
    assert (report.source_opset, report.opset, graph.opset, report.num_inlined) == (17, 23, 23, 1)
    assert ops(graph) == ["MatMul", "Shape", "Gather", "Unsqueeze", "Concat", "Reshape", "Relu", "ReduceMax", "If"]
    assert graph.functions == [] and not any(node.op == "Constant" for node in all_nodes(graph))
    for flag in (True, False):
        feeds = {
            "x": np.arange(12, dtype=np.float32).reshape(3, 4) - 6,
            "c": np.array(flag),
            "unused": np.zeros(7, np.float32),
        }
        for found, expected in zip(run(graph, feeds), run(source, feeds), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_ports_keep_names_order_and_types(native: OnnxNative) -> None:
    graph = graph_of(EVERYTHING, opset=17, domains=', "local": 1')
    before = input_specs(graph), output_specs(graph)
    result, _ = normalise(graph, native=native)
    assert (input_specs(result), output_specs(result)) == before
    assert [tensor.name for tensor in result.inputs] == ["x", "c", "unused"]


def test_the_second_run_changes_nothing(tmp_path: Path, native: OnnxNative) -> None:
    first, _ = normalise(graph_of(EVERYTHING, opset=17, domains=', "local": 1'), native=native)
    save_model(first, tmp_path / "1.onnx")
    second, report = normalise(load_model(tmp_path / "1.onnx").graph, native=native)
    save_model(second, tmp_path / "2.onnx")
    assert (tmp_path / "1.onnx").read_bytes() == (tmp_path / "2.onnx").read_bytes()
    counts = (report.num_inlined, report.num_constants, report.num_folded, report.num_identities, report.num_dead)
    assert counts == (0, 0, 0, 0, 0) and report.num_renamed == 0


def test_types_are_inferred_and_wrong_ones_forgotten(native: OnnxNative) -> None:
    graph = graph_of("g (float[N, 4] x) => (float[N, 4] y) <int8[9] a> { a = Relu(x) y = Exp(a) }")
    result, _ = normalise(graph, native=native)
    inner = result.nodes[0].outputs[0]
    assert (inner.dtype, inner.shape) == (np.float32, ["N", 4])


def test_false_size_of_an_output_that_is_read_is_not_folded(native: OnnxNative) -> None:
    body = "g (float[N, 4] x) => (float[1, 4] r, int64[2] y, float[1, 4] z) { r = Relu(x) y = Shape(r) z = Neg(r) }"
    graph, _ = normalise(graph_of(body), native=native)
    assert run(graph, {"x": np.zeros((3, 4), np.float32)})[1].tolist() == [3, 4]
    assert [tensor.shape for tensor in graph.outputs] == [["N", 4], [2], [1, 4]]


def test_types_of_unknown_operators_are_believed(native: OnnxNative) -> None:
    body = "g (float[N, 4] x) => (float[N, 4] y) <float[N, 4] a> { a = com.example.F(x) y = Exp(a) }"
    result, _ = normalise(graph_of(body, domains=', "com.example": 1'), native=native)
    assert result.nodes[0].outputs[0].shape == ["N", 4]


def test_quantization_is_never_folded(native: OnnxNative) -> None:
    result, report = normalise(graph_of(QDQ, opset=13), native=native)
    assert report.num_qdq == 4
    assert ops(result) == ["QuantizeLinear", "DequantizeLinear"] * 2 + ["MatMul"]
    x = np.array([[1, 2], [-3, 0.4]], np.float32)
    np.testing.assert_array_equal(run(result, {"x": x})[0], run(parse(QDQ, opset=13, ir=8), {"x": x})[0])


def test_dead_quantization_may_go(native: OnnxNative) -> None:
    body = QDQ.replace("y = MatMul(xd, wd)", "y = MatMul(x, w)")
    result, report = normalise(graph_of(body, opset=13), native=native)
    assert (ops(result), report.num_qdq) == (["MatMul"], 0)


def test_lost_quantization_is_an_internal_error(native: OnnxNative, monkeypatch: pytest.MonkeyPatch) -> None:
    def drop_first(graph: gs.Graph) -> int:
        node = graph.nodes[0]
        if node.op == "QuantizeLinear":
            graph.nodes[1].outputs[0].outputs[0].inputs[0] = graph.inputs[0]
        return 0

    monkeypatch.setattr(module, "remove_identities", drop_first)
    with pytest.raises(InternalError, match="from 4 to 2"):
        normalise(graph_of(QDQ, opset=13), native=native)


def test_functions_of_plugins_are_kept(native: OnnxNative) -> None:
    body = """g (float[2] x) => (float[2] y) { a = trtforge.f(x) y = local.h(a) }
        <domain: "trtforge", opset_import: ["": 23]> f (a) => (b) { b = Mul(a, a) }
        <domain: "local", opset_import: ["": 23]> h (a) => (b) { b = Neg(a) }"""
    for opset in (21, 23):
        result, report = normalise(
            graph_of(body.replace("23", str(opset)), opset=opset, domains=', "trtforge": 1, "local": 1'), native=native
        )
        assert ops(result) == ["f", "Neg"] and report.num_inlined == 1
        assert [(function.domain, function.name) for function in result.functions] == [("trtforge", "f")]
        np.testing.assert_array_equal(run(result, {"x": np.array([1, 3], np.float32)})[0], [-1, -9])


def test_functions_of_plugins_are_read_at_their_own_opset(native: OnnxNative) -> None:
    """Axes were an attribute of Unsqueeze up to opset 12."""
    body = """g (float[2] x) => (float[] y) { y = trtforge.f(x) }
        <domain: "trtforge", opset_import: ["": 11]> f (a) => (b) { b = Unsqueeze<axes = [0]>(a) }"""
    for function, opset in ((11, 23), (17, 11)):
        text = body.replace('["": 11]', f'["": {function}]')
        if function == 17:
            text = text.replace("b = Unsq", "c = Constant<value_ints = [0]>() b = Unsq")
            text = text.replace("<axes = [0]>(a)", "(a, c)")
        result, report = normalise(graph_of(text, opset=opset, domains=', "trtforge": 1'), native=native)
        assert ops(result) == ["f"] and report.opset == 23


def test_unknown_operators_pass_through_the_opset_conversion(native: OnnxNative) -> None:
    body = """g (float[N, 4] x) => (float[N, 1] y) {
        a = com.microsoft.FastGelu(x) b = MyPlugin(a) y = ReduceMax<axes = [1]>(b) }"""
    graph = graph_of(body, opset=13, domains=', "com.microsoft": 1')
    result, report = normalise(graph, native=native, operators="keep")
    assert report.opset == 23 and report.notes == ()
    assert [(node.op, node.domain or "") for node in result.nodes] == [
        ("FastGelu", "com.microsoft"),
        ("MyPlugin", ""),
        ("ReduceMax", ""),
    ]
    assert {entry.domain for entry in model_of(result).opset_import} == {"", "com.microsoft"}


def test_newer_opset_is_kept(native: OnnxNative) -> None:
    result, report = normalise(graph_of("g (float[2] x) => (float[2] y) { y = Relu(x) }", opset=25), native=native)
    assert (result.opset, report.opset) == (25, 25)


def test_opset_that_onnx_does_not_know_is_refused() -> None:
    with pytest.raises(InputError, match="opset 99") as caught:
        normalise(graph_of("g (float[2] x) => (float[2] y) { y = Relu(x) }", opset=99))
    assert str(onnx.defs.onnx_opset_version()) in caught.value.why and caught.value.fix


class FailingConverter:
    """A child whose converter gave up."""

    def prepare(self, model: onnx.ModelProto, opset: int) -> PreparedModel:
        return PreparedModel(model, 0, 0, "Relu: no adapter", "")

    def infer(self, model: onnx.ModelProto) -> onnx.ModelProto:
        return model


def test_opset_that_cannot_be_raised_stays_from_19_on() -> None:
    graph = graph_of("g (float[2] x) => (float[2] y) { y = Relu(x) }", opset=19)
    result, report = normalise(graph, native=FailingConverter())  # type: ignore[arg-type]
    assert (result.opset, report.opset) == (19, 19)
    assert report.notes == ("opset 19 instead of 23: Relu: no adapter",)


class HalfwayConverter(FailingConverter):
    """A child whose converter gave up on the way."""

    def prepare(self, model: onnx.ModelProto, opset: int) -> PreparedModel:
        next(entry for entry in model.opset_import if not entry.domain).version = 21
        return super().prepare(model, opset)


def test_opset_that_was_raised_far_enough_is_taken() -> None:
    graph = graph_of("g (float[2] x) => (float[2] y) { y = Relu(x) }", opset=17)
    result, report = normalise(graph, native=HalfwayConverter())  # type: ignore[arg-type]
    assert (result.opset, report.source_opset, report.opset) == (21, 17, 21)
    assert report.notes == ("opset 21 instead of 23: Relu: no adapter",)


def test_opset_below_19_that_cannot_be_raised_names_the_operator() -> None:
    graph = graph_of("g (float[2] x) => (float[2] y) { y = Relu(x) }", opset=18)
    with pytest.raises(InputError, match="opset 18 cannot be raised to 23: Relu") as caught:
        normalise(graph, native=FailingConverter())  # type: ignore[arg-type]
    assert "no adapter" in caught.value.why and "19" in caught.value.fix


def test_node_that_lacks_an_input_is_named(native: OnnxNative) -> None:
    model = parse("g (float[2] x) => (float[2] y) { y = Add(x, x) }")
    del model.graph.node[0].input[1]
    model.graph.node[0].name = "sum"
    graph = graph_of(onnx.printer.to_text(model.graph))
    graph.nodes[0].name = "sum"
    with pytest.raises(InputError, match=r"'sum' \(Add\) lacks an input"):
        normalise(graph, native=native)


def test_required_input_that_is_left_empty_is_named(native: OnnxNative) -> None:
    graph = graph_of("g (float[2] x) => (float[2] y) { y = Clip(, x) }")
    with pytest.raises(InputError, match=r"\(Clip\) lacks an input"):
        normalise(graph, native=native)


def test_optional_input_may_be_left_empty(native: OnnxNative) -> None:
    graph = graph_of("g (float[2] x, float m) => (float[2] y) { y = Clip(x, , m) }")
    assert ops(normalise(graph, native=native)[0]) == ["Clip"]


def test_body_that_is_missing_or_does_not_fit_is_named(native: OnnxNative) -> None:
    body = """g (bool c, float[2] x) => (float[2] y) { y = If(c) <then_branch = t () => (float[2] a) { a = Neg(x) },
        else_branch = e () => (float[2] b) { b = Exp(x) }> }"""
    graph = graph_of(body)
    graph.nodes[0].attrs.pop("else_branch")
    with pytest.raises(InputError, match=r"'If_0' \(If\) lacks the attribute 'else_branch'"):
        normalise(graph, native=native)
    graph = graph_of(body)
    graph.nodes[0].attrs["else_branch"].outputs *= 2
    with pytest.raises(InputError, match=r"the else_branch of node 'If_0' \(If\) does not fit") as caught:
        normalise(graph, native=native)
    assert "0 inputs and 2 outputs; 0 and 1 were expected" in caught.value.why
    loop = graph_of("""g (float[2] x) => (float[2] y) <int64 n = {3}, bool t = {1}> { y = Loop(n, t, x)
        <body = b (int64 i, bool c, float[2] a) => (bool d, float[2] z) { d = Identity(c) z = Add(a, a) }> }""")
    loop.nodes[0].attrs["body"].inputs.pop()
    with pytest.raises(InputError, match=r"the body of node 'Loop_0' \(Loop\) does not fit"):
        normalise(loop, native=native)


def test_attribute_of_another_kind_is_named(native: OnnxNative) -> None:
    graph = graph_of("g (float[2] x) => (float[4] y) { y = Concat<axis = 0>(x, x) }")
    graph.nodes[0].attrs["axis"] = "zero"
    with pytest.raises(InputError, match=r"attribute 'axis' of node 'Concat_0' \(Concat\)") as caught:
        normalise(graph, native=native)
    assert caught.value.why == "its kind is STRING; it has to be INT"


def test_function_that_calls_itself_is_refused(native: OnnxNative) -> None:
    body = """g (float[2] x) => (float[2] y) { y = local.f(x) }
        <domain: "local", opset_import: ["": 23, "local": 1]> f (a) => (b) { b = local.f(a) }"""
    with pytest.raises(InputError, match="functions cannot be inlined") as caught:
        normalise(graph_of(body, domains=', "local": 1'), native=native)
    assert "recursive" in caught.value.why and caught.value.fix


def test_function_of_an_older_opset_is_converted(native: OnnxNative) -> None:
    body = """g (float[2, 3] x) => (float[2, 1] y) { y = local.f(x) }
        <domain: "local", opset_import: ["": 13]> f (a) => (b) { b = ReduceMax<axes = [1]>(a) }"""
    result, _ = normalise(graph_of(body, opset=20, domains=', "local": 1'), native=native)
    assert ops(result) == ["ReduceMax"] and len(result.nodes[0].inputs) == 2


def test_crash_of_the_child_names_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with OnnxNative() as child:
        child._child._process.kill()
        with pytest.raises(ChildDiedError, match="ONNX model reading"):
            normalise(graph_of("g (float[2] x) => (float[2] y) { y = Relu(x) }"), native=child)


def test_weights_are_shared_not_copied(native: OnnxNative) -> None:
    weight = np.ones((30, 30), np.float32)
    graph = graph_of("g (float[N, 30] x) => (float[N, 30] y) { y = MatMul(x, x) }", opset=17)
    graph.nodes[0].inputs[1] = gs.Constant("w", weight)
    result, _ = normalise(graph, native=native)
    assert result.nodes[0].inputs[1].values is weight


def test_names_become_unique_and_say_the_operator(native: OnnxNative) -> None:
    result, report = normalise(graph_of("g (float[2] x) => (float[2] y) { a = Neg(x) y = Exp(a) }"), native=native)
    assert [node.name for node in result.nodes] == ["Neg_0", "Exp_1"] and report.num_renamed == 2


def test_result_of_a_file_is_the_result_of_its_graph(tmp_path: Path, native: OnnxNative) -> None:
    model = parse(QDQ, opset=13, ir=8)
    loaded, _ = normalise(load_model(write(model, tmp_path)).graph, native=native)
    direct, _ = normalise(graph_of(QDQ, opset=13), native=native)
    assert model_of(loaded) == model_of(direct)


class ChangingConverter(FailingConverter):
    """A child that renames an output and reports Q/DQ nodes that are not there."""

    def __init__(self, num_qdq: int) -> None:
        self.num_qdq = num_qdq

    def prepare(self, model: onnx.ModelProto, opset: int) -> PreparedModel:
        model.graph.node[0].output[0] = model.graph.output[0].name = "other"
        return PreparedModel(model, 0, self.num_qdq, "", "types are beyond me")


@pytest.mark.parametrize(
    ("num_qdq", "message"), [(0, "changed the model's outputs"), (2, "opset conversion changed .* from 2 to 0")]
)
def test_conversion_that_changes_more_than_the_opset_is_an_internal_error(num_qdq: int, message: str) -> None:
    graph = graph_of("g (float[2] x) => (float[2] y) { y = Relu(x) }")
    with pytest.raises(InternalError, match=message):
        normalise(graph, native=ChangingConverter(num_qdq))  # type: ignore[arg-type]


class BlindInference(FailingConverter):
    """A child that cannot infer types."""

    def prepare(self, model: onnx.ModelProto, opset: int) -> PreparedModel:
        return PreparedModel(model, 0, 0, "", "no types today")


def test_failed_inference_is_noted() -> None:
    graph = graph_of("g (float[2] x) => (float[2] y) { y = Relu(x) }")
    _, report = normalise(graph, native=BlindInference())  # type: ignore[arg-type]
    assert report.notes == ("types not inferred: no types today",)


def test_types_of_a_scan_body_stay_the_same_in_a_second_run(tmp_path: Path, native: OnnxNative) -> None:
    """Sizes that only folding reveals must not reach the body in one run and not in the other."""
    body = """g (float[4] s0, float[4, 2, 2] x) => (float[2, 2] y, float[4, 2, 2] z)
        <int64[2] four = {4, 4}, int64[2] two = {2, 2}> {
        target = Div(four, two) s = Reshape(s0, target)
        y, z = Scan<num_scan_inputs = 1, body = b (float[] a, float[] i) => (float[] o, float[] p) {
            o = Add(a, i) p = Identity(o) }>(s, x) }"""
    first, _ = normalise(graph_of(body), native=native)
    save_model(first, tmp_path / "1.onnx")
    second, _ = normalise(load_model(tmp_path / "1.onnx").graph, native=native)
    assert model_of(second) == onnx.load(tmp_path / "1.onnx")
