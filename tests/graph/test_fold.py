from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs
import pytest
from graph_models import graph_of, ops, run

from trtforge.graph.edit import all_nodes
from trtforge.graph.fold import fold_constants


def folded(body: str, opset: int = 23) -> tuple[gs.Graph, int]:
    graph = graph_of(body, opset=opset)
    report = fold_constants(graph)
    return graph, report.num_folded


def test_chain_of_constants_becomes_one() -> None:
    graph, count = folded("""g (float[2] x) => (float[2] y) <float[2] a = {1, 2}, float[2] b = {3, 4}> {
        s = Add(a, b) t = Mul(s, b) y = Add(x, t) }""")
    assert (ops(graph), count) == (["Add"], 2)
    np.testing.assert_array_equal(graph.nodes[0].inputs[1].values, [12, 24])


def test_compressed_weight_is_expanded_through_cast_and_mul() -> None:
    """Weight compression without DequantizeLinear: builders cannot use it until it is folded."""
    graph, _ = folded("""g (float[N, 2] x) => (float[N, 2] y) <int8[2, 2] q = {1, 2, 3, 4}, float[2] s = {0.5, 2}> {
        f = Cast<to = 1>(q) w = Mul(f, s) y = MatMul(x, w) }""")
    np.testing.assert_array_equal(graph.nodes[0].inputs[1].values, [[0.5, 4], [1.5, 8]])


def test_transposed_weight_is_folded() -> None:
    graph, _ = folded("""g (float[N, 3] x) => (float[N, 2] y) <float[2, 3] v = {1, 2, 3, 4, 5, 6}> {
        w = Transpose(v) y = MatMul(x, w) }""")
    np.testing.assert_array_equal(graph.nodes[0].inputs[1].values, [[1, 4], [2, 5], [3, 6]])


@pytest.mark.parametrize("op", ["QuantizeLinear", "DequantizeLinear"])
def test_quantization_of_a_constant_stays(op: str) -> None:
    source = "float[2] a = {1, 2}" if op == "QuantizeLinear" else "int8[2] a = {1, 2}"
    graph, count = folded(f"""g (float[2] x) => (float[2] y) <{source}, float s = {{0.5}}, int8 z = {{0}}> {{
        q = {op}(a, s, z) c = Cast<to = 1>(q) y = Add(x, c) }}""")
    assert (ops(graph), count) == ([op, "Cast", "Add"], 0)


@pytest.mark.parametrize("op", ["RandomNormalLike", "Bernoulli", "Dropout"])
def test_random_operators_stay(op: str) -> None:
    graph, count = folded(f"g (float[2] x) => (float[2] y) <float[2] a = {{1, 2}}> {{ r = {op}(a) y = Add(x, r) }}")
    assert (ops(graph), count) == ([op, "Add"], 0)


def test_operator_of_another_domain_stays() -> None:
    graph = graph_of(
        "g (float[2] x) => (float[2] y) <float[2] a = {1, 2}> { r = com.example.Add(a, a) y = Add(x, r) }",
        domains=', "com.example": 1',
    )
    assert fold_constants(graph).num_folded == 0


def test_node_that_gives_an_output_stays() -> None:
    graph, count = folded(
        "g (float[2] x) => (float[2] y, float[2] z) <float[2] a = {1, 2}> { z = Neg(a) y = Add(x, z) }"
    )
    assert (ops(graph), count) == (["Neg", "Add"], 0)


def test_node_that_fails_stays() -> None:
    graph, count = folded("""g (float[2] x) => (float[2] y) <float[2] a = {1, 2}, float[3] b = {1, 2, 3}> {
        s = Add(a, b) y = Add(x, s) }""")
    assert (ops(graph), count) == (["Add", "Add"], 0)


@pytest.mark.parametrize(
    "node",
    [
        "big = ConstantOfShape(huge)",
        "big = Expand(one, huge)",
        "big = Tile(one, huge)",
        "big = Range(zero, limit, step)",
        "big = Pad(one, pads)",
        "big = Gather(one, many)",
    ],
)
def test_result_that_would_be_huge_is_left_and_named(node: str) -> None:
    graph = graph_of(f"""g (float[1] x) => (float[1] y)
        <int64[1] huge = {{1000000000000}}, float[1] one = {{1}}, int64 zero = {{0}}, int64 limit = {{1000000000000}},
         int64 step = {{1}}, int64[2] pads = {{0, 1000000000000}}> {{
        {node} s = Size(big) f = Cast<to = 1>(s) y = Add(x, f) }}""")
    graph.nodes[0].name = "bomb"
    if "many" in node:
        graph.nodes[0].inputs[0] = gs.Constant("wide", np.zeros((1, 10_000), np.float32))
        graph.nodes[0].inputs[1] = gs.Constant("many", np.zeros(10_000, np.int64))
    report = fold_constants(graph)
    assert (report.num_folded, report.skipped) == (0, ("bomb",))


def test_small_generated_constant_is_folded() -> None:
    graph, count = folded("""g (float[4] x) => (float[4] y) <float zero = {0}, float four = {4}, float one = {1}> {
        r = Range(zero, four, one) y = Add(x, r) }""")
    assert count == 1
    np.testing.assert_array_equal(graph.nodes[0].inputs[1].values, [0, 1, 2, 3])


def test_doubling_without_end_is_stopped() -> None:
    rows = "\n".join(f"c{i + 1} = Concat<axis = 0>(c{i}, c{i})" for i in range(40))
    graph = graph_of(
        f"g (float[1] x) => (float[1] y) <float[1] c0 = {{1}}> {{ {rows} s = ReduceMax(c40) y = Add(x, s) }}"
    )
    fold_constants(graph)
    assert max(t.values.nbytes for node in graph.nodes for t in node.inputs if isinstance(t, gs.Constant)) <= 2**25


def test_copies_without_end_stay_within_the_budget() -> None:
    rows = "\n".join(f"c{i} = Cast<to = 11>(w) y{i + 1} = Mul(y{i}, c{i})" for i in range(60))
    graph = graph_of(f"g (double[1] y0) => (double[2000000] y60) {{ w = Relu(y0) {rows} }}")
    weight = gs.Constant("w8", np.zeros(2_000_000, np.float32))
    for node in graph.nodes:
        if node.op == "Cast":
            node.inputs[0] = weight
    report = fold_constants(graph)
    assert report.num_folded == (256 * 2**20 + 8 * weight.values.nbytes) // (2_000_000 * 8)
    assert len(report.skipped) == 60 - report.num_folded


def test_shape_of_static_sizes_is_a_constant() -> None:
    graph, count = folded("g (float[2, 3] x) => (int64[2] y) { s = Shape(x) y = Add(s, s) }")
    assert count == 1
    np.testing.assert_array_equal(graph.nodes[0].inputs[0].values, [2, 3])


def test_shape_of_dynamic_sizes_stays() -> None:
    assert folded("g (float[N, 3] x) => (int64[2] y) { s = Shape(x) y = Add(s, s) }")[1] == 0


def test_static_part_of_a_dynamic_shape_is_a_constant() -> None:
    graph, _ = folded("""g (float[N, 3, 5] x) => (int64 y, int64[2] z, int64 w)
        <int64 one = {1}, int64 zero = {0}, int64[1] a = {1}, int64[1] b = {3}> {
        s = Shape(x) g = Gather(s, one) y = Neg(g) t = Slice(s, a, b) z = Neg(t) h = Gather(s, zero) w = Neg(h) }""")
    assert ops(graph) == ["Shape", "Neg", "Neg", "Gather", "Neg"]
    assert graph.nodes[1].inputs[0].values.tolist() == 3
    assert graph.nodes[2].inputs[0].values.tolist() == [3, 5]


def test_part_of_a_shape_is_a_constant() -> None:
    graph, count = folded("g (float[N, 3] x) => (int64[1] y) { s = Shape<start = 1>(x) y = Neg(s) }")
    assert count == 1
    assert graph.nodes[0].inputs[0].values.tolist() == [3]


def test_result_that_contradicts_the_inferred_type_is_not_used() -> None:
    graph = graph_of("g (float[2] x) => (float[2] y) <float[2] a = {1, 2}, float16[2] s> { s = Neg(a) y = Add(x, s) }")
    assert fold_constants(graph).num_folded == 0


def test_subgraphs_are_folded_too() -> None:
    graph, count = folded("""g (float[2] x, bool c) => (float[2] y) <float[2] a = {1, 2}> {
        y = If (c) <then_branch = tb () => (float[2] t) { n = Neg(a) t = Add(n, x) },
                    else_branch = eb () => (float[2] e) { e = Neg(a) }> }""")
    assert count == 1 and [node.op for node in all_nodes(graph)] == ["If", "Add", "Neg"]
    x = np.array([1, 1], np.float32)
    np.testing.assert_array_equal(run(graph, {"x": x, "c": np.array(True)})[0], [0, -1])
    np.testing.assert_array_equal(run(graph, {"x": x, "c": np.array(False)})[0], [-1, -2])


def test_every_output_of_a_split_becomes_a_constant() -> None:
    graph, _ = folded("""g (float[2] x) => (float[2] y) <float[4] a = {1, 2, 3, 4}> {
        p, q = Split<num_outputs = 2>(a) s = Add(x, p) y = Mul(s, q) }""")
    assert ops(graph) == ["Add", "Mul"]
    np.testing.assert_array_equal(graph.nodes[1].inputs[1].values, [3, 4])


def test_integer_division_rounds_as_onnx_says() -> None:
    graph, _ = folded(
        "g (int64[2] x) => (int64[2] y) <int64[2] a = {7, 9}, int64 two = {2}> { d = Div(a, two) y = Add(x, d) }"
    )
    assert graph.nodes[0].inputs[1].values.tolist() == [3, 4]


def test_pick_from_a_part_of_a_shape_is_not_a_pick_from_the_whole() -> None:
    graph, count = folded("""g (float[N, 3, M] x) => (int64 y) <int64 one = {1}> {
        s = Shape<start = 1>(x) g = Gather(s, one) y = Neg(g) }""")
    assert (ops(graph), count) == (["Shape", "Gather", "Neg"], 0)


def test_result_that_contradicts_an_inferred_size_is_not_used() -> None:
    graph = graph_of("g (float[2] x) => (float[2] y) <float[2] a = {1, 2}, float[3] s> { s = Neg(a) y = Add(x, s) }")
    assert fold_constants(graph).num_folded == 0
