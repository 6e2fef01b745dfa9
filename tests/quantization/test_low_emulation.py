from __future__ import annotations

import numpy as np
import pytest
from quant_cases import graph_from_text, model_of, normal, run

from trtforge.quantization.cast import cast_graph
from trtforge.quantization.emulation import as_computed, emulate_bfloat16
from trtforge.quantization.op_types import BFLOAT16
from trtforge.quantization.placement import plan_placement
from trtforge.quantization.qdq import insert_qdq
from trtforge.recipe import QuantRecipe

MLP = "g (float[b, 32] x) => (float[b, 16] y) { [up] h = MatMul(x, w1) r = Relu(h) [down] y = MatMul(r, w2) }"


def cast_mlp():
    graph = graph_from_text(MLP, w1=normal(32, 64), w2=normal(64, 16, seed=1))
    cast_graph(graph, "bfloat16")
    return graph


def rounded(values):
    return values.astype(BFLOAT16).astype(np.float32)


def test_onnx_runtime_has_no_bfloat16_matmul_on_the_cpu():
    with pytest.raises(Exception, match="NOT_IMPLEMENTED"):
        run(cast_mlp(), x=normal(2, 32))


def test_twin_rounds_weights_and_every_result_once():
    x = normal(8, 32, seed=3)
    hidden = np.maximum(rounded(rounded(x) @ rounded(normal(32, 64))), 0)
    expected = rounded(hidden @ rounded(normal(64, 16, seed=1)))
    actual = run(emulate_bfloat16(cast_mlp()), x=x)[0]
    # Another order of summation may round the other way: one bfloat16 step, 2**-8.
    assert np.abs(actual - expected).max() <= 2**-7 * np.abs(expected).max()
    assert np.array_equal(actual, rounded(actual))


def test_twin_leaves_the_graph_as_it_was():
    graph = cast_mlp()
    before = model_of(graph).SerializeToString(deterministic=True)
    emulate_bfloat16(graph)
    assert model_of(graph).SerializeToString(deterministic=True) == before


def test_twin_of_a_quantized_graph_runs():
    graph = graph_from_text(MLP, w1=normal(32, 64), w2=normal(64, 16, seed=1))
    insert_qdq(graph, plan_placement(graph, {}, QuantRecipe()), {"x": 4.0, "r": 30.0}, BFLOAT16)
    cast_graph(graph, "bfloat16")
    x = normal(8, 32, seed=3)
    expected = np.maximum(x @ normal(32, 64), 0) @ normal(64, 16, seed=1)
    assert np.abs(run(emulate_bfloat16(graph), x=x)[0] - expected).max() < 0.05 * np.abs(expected).max()


def test_twin_of_casts_and_fills_keeps_their_values():
    text = """g (int64[b, 4] ids, float[b, 4] x) => (float[b, 4] y) {
        f = Cast<to=1>(ids) s = Shape(x) m = ConstantOfShape<value=float[1] {-2.5}>(s)
        a = Add(f, m) p = Mul(a, x) y = Exp(p)
    }"""
    graph = graph_from_text(text)
    cast_graph(graph, "bfloat16")
    actual = run(emulate_bfloat16(graph), ids=np.array([[1, 2, 3, 4]]), x=np.ones((1, 4), np.float32))[0]
    assert np.allclose(actual, np.exp(np.float32([[-1.5, -0.5, 0.5, 1.5]])))


SQUARES = "g (float[b, 8] x) => (float[b, 8] y) { s = Mul(x, x) t = Add(s, s) y = Mul(t, small) }"


def cast_squares():
    graph = graph_from_text(SQUARES, small=np.float32(2**-10))
    cast_graph(graph, "float16")
    return graph


def test_onnx_runtime_alone_rounds_and_overflows_nothing_between_float16_nodes():
    """The reason for the twin: should this fail, ONNX Runtime computes float16 as written."""
    x = np.full((1, 8), 1000.1, np.float32)
    assert run(cast_squares(), x=x)[0] == pytest.approx(2 * 1000.1**2 * 2**-10, rel=1e-5)


def test_twin_of_a_float16_graph_rounds_every_result_and_overflows():
    graph = cast_squares()
    low = np.float16(100.1) * np.float16(100.1)
    expected = (low + low) * np.float16(2**-10)
    assert run(as_computed(graph), x=np.full((1, 8), 100.1, np.float32))[0].tolist() == [[float(expected)] * 8]
    assert np.isinf(run(as_computed(graph), x=np.full((1, 8), 1000.1, np.float32))[0]).all()


def test_twin_keeps_the_type_that_an_attribute_states():
    text = """g (float[b, 4] x) => (float[b, 4] y) {
        n = EyeLike<dtype = 10>(x) h = Add(n, n) y = Cast<to = 1>(h)
    }"""
    y = run(as_computed(graph_from_text(text)), x=np.zeros((2, 4), np.float32))[0]
    assert np.array_equal(y, 2 * np.eye(2, 4))


@pytest.mark.parametrize(
    "text",
    [
        "g (float16[b, 4] x) => (float[b, 4] y) { h = Mul(x, x) r = Sqrt(h) y = Cast<to = 1>(r) }",
        "g (float[b, 4] x) => (float16[b, 4] y) { c = Cast<to = 10>(x) h = Mul(c, c) y = Sqrt(h) }",
        "g (float16[b, 4] x) => (float16[b, 4] h, float16[b, 4] y) { h = Mul(x, x) y = Sqrt(h) }",
        """g (float[b, 4] x, bool yes) => (float[b, 4] y) { c = Cast<to = 10>(x)
           i = If(yes) <then_branch = t () => (float16[b, 4] r) { h = Mul(c, c) r = Sqrt(h) },
                        else_branch = e () => (float16[b, 4] n) { n = Neg(c) }>
           y = Cast<to = 1>(i) }""",
        """g (float16[b, 4] x, bool yes) => (float16[b, 4] y) {
           y = If(yes) <then_branch = t () => (float16[b, 4] r) { h = Mul(x, x) r = Sqrt(h) },
                        else_branch = e () => (float16[b, 4] n) { n = Identity(x) }> }""",
        """g (float16[b, 4] x, bool yes) => (float16[b, 4] y) { n = Constant<value = int64 {1}>()
           y = Loop(n, yes, x) <body = l (int64 i, bool going, float16[b, 4] v)
               => (bool more, float16[b, 4] r) { more = Identity(going) h = Mul(v, v) r = Sqrt(h) }> }""",
    ],
)
def test_float16_at_the_ends_and_in_bodies_is_rounded(text):
    graph = graph_from_text(text)
    feeds = {tensor.name: np.array(True) for tensor in graph.inputs if tensor.name == "yes"}
    dtype = np.dtype(graph.inputs[0].dtype)
    for value, expected in ((100.1, np.sqrt(np.float16(100.1) ** 2)), (1000.0, np.inf)):
        *_, y = run(as_computed(graph), x=np.full((1, 4), value, dtype), **feeds)
        assert y.dtype == graph.outputs[-1].dtype
        assert np.array_equal(y.astype(np.float32), np.full((1, 4), np.float16(expected), np.float32))


def test_both_types_of_a_graph_are_rounded():
    text = """g (float[b, 4] x) => (float[b, 4] y) {
        c = Cast<to = 16>(x) a = Add(c, c) f = Cast<to = 1>(a)
        h = Cast<to = 10>(f) m = Mul(h, h) r = Sqrt(m) y = Cast<to = 1>(r) }"""
    graph = graph_from_text(text)
    # 100.1 is 100 in bfloat16; 400 squared is no float16.
    for value, expected in ((100.1, np.sqrt(np.float16(200) ** 2)), (200.0, np.inf)):
        y = run(as_computed(graph), x=np.full((1, 4), value, np.float32))[0]
        assert np.array_equal(y, np.full((1, 4), np.float16(expected), np.float32))


def test_a_graph_without_float16_is_run_as_it_is():
    graph = graph_from_text("g (float[b, 4] x) => (float[b, 4] y) { y = Mul(x, x) }")
    assert as_computed(graph) is graph
