from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from graph_models import ops
from rewrite_checks import count, normalised, specialised

from trtforge.graph.native import OnnxNative

X = np.arange(8, dtype=np.float32).reshape(2, 4) / 8
DOUBLE = """<body = b (int64 i, bool c, float[N, 4] a) => (bool d, float[N, 4] z) { d = Identity(c) z = Add(a, a) }>"""


@pytest.fixture(scope="module")
def native() -> Iterator[OnnxNative]:
    with OnnxNative() as child:
        yield child


@pytest.mark.parametrize("inputs", ["n, t, x", "n, , x"])
def test_short_loop_is_unrolled(native: OnnxNative, inputs: str) -> None:
    body = f"g (float[N, 4] x) => (float[N, 4] y) <int64 n = {{3}}, bool t = {{1}}> {{ y = Loop({inputs}){DOUBLE} }}"
    graph, report = normalised(body, native, {"x": X})
    assert ops(graph) == ["Add"] * 3
    assert report.notes[-1] == "Loop 'Loop_0' was unrolled: 3 trips"


def test_trip_number_and_scan_outputs(native: OnnxNative) -> None:
    body = """g (float[4, 3] x) => (float[3] y, float[2, 3] w) <int64 n = {2}, bool t = {1}, float[3] s = {0, 0, 0}> {
        y, w = Loop(n, t, s) <body = b (int64 i, bool c, float[3] a) => (bool d, float[3] z, float[3] q) {
            d = Identity(c) row = Gather<axis = 0>(x, i) z = Add(a, row) q = Neg(z) }> }"""
    graph, _ = normalised(body, native, {"x": np.arange(12, dtype=np.float32).reshape(4, 3)})
    assert count(graph, "Loop") == 0 and graph.outputs[1].shape == [2, 3]


def test_zero_trips_give_what_goes_in(native: OnnxNative) -> None:
    body = f"g (float[N, 4] x) => (float[N, 4] y) <int64 n = {{0}}, bool t = {{1}}> {{ y = Loop(n, t, x){DOUBLE} }}"
    graph, _ = normalised(body, native, {"x": X})
    assert ops(graph) == ["Identity"]


def test_loop_that_is_false_at_first_never_runs(native: OnnxNative) -> None:
    body = f"g (float[N, 4] x) => (float[N, 4] y) <int64 n = {{7}}, bool t = {{0}}> {{ y = Loop(n, t, x){DOUBLE} }}"
    graph, _ = normalised(body, native, {"x": X})
    assert ops(graph) == ["Identity"]


def test_long_loop_stays_and_gets_a_condition(native: OnnxNative) -> None:
    body = f"g (float[N, 4] x) => (float[N, 4] y) <int64 n = {{1000}}> {{ y = Loop(n, , x){DOUBLE} }}"
    graph, report = normalised(body, native, {"x": X})
    assert ops(graph) == ["Loop"] and graph.nodes[0].inputs[1].values.item() is True
    assert report.notes == ("Loop 'Loop_0' had no condition: it is always true",)


def test_loop_whose_value_grows_is_unrolled_although_it_is_long(native: OnnxNative) -> None:
    body = """g (float[N, 4] x) => (float[M, 4] y) <int64 n = {300}, bool t = {1}> {
        y = Loop(n, t, x) <body = b (int64 i, bool c, float[K, 4] a) => (bool d, float[L, 4] z) {
            d = Identity(c) z = Concat<axis = 0>(a, x) }> }"""
    graph, _ = normalised(body, native, {"x": X})
    assert ops(graph) == ["Concat"] * 300


@pytest.mark.parametrize(
    ("op", "limit", "trips"), [("Less", 4, 4), ("LessOrEqual", 4, 5), ("Less", 0, 1), ("Less", -5, 1)]
)
def test_counter_in_the_condition_proves_the_trips(native: OnnxNative, op: str, limit: int, trips: int) -> None:
    body = f"""g (float[N, 4] x) => (float[N, 4] y, int64 k, float[M, N, 4] w)
        <int64 n = {{{limit}}}, int64 one = {{1}}, int64 zero = {{0}}, bool t = {{1}}> {{
        y, k, w = Loop(, t, x, zero) <body = b (int64 i, bool c, float[N, 4] a, int64 j)
            => (bool d, float[N, 4] z, int64 jj, float[N, 4] q) {{
            z = Add(a, a) jj = Add(j, one) q = Neg(z) d = {op}(jj, n) }}> }}"""
    graph, report = normalised(body, native, {"x": X})
    assert count(graph, "Loop") == 0
    assert report.notes[:2] == (
        f"Loop 'Loop_0': its condition proves that it ends after {trips} trips",
        f"Loop 'Loop_0' was unrolled: {trips} trips",
    )


def test_condition_that_the_values_decide_stays(native: OnnxNative) -> None:
    body = """g (float[N, 4] x) => (float[N, 4] y) <float lim = {10}, bool t = {1}, int64 n = {9223372036854775807}> {
        y = Loop(n, t, x) <body = b (int64 i, bool c, float[N, 4] a) => (bool d, float[N, 4] z) {
            z = Add(a, a) m = ReduceMax<keepdims = 0>(z) d = Less(m, lim) }> }"""
    graph, report = normalised(body, native, {"x": X})
    assert ops(graph) == ["Loop"] and report.num_control_flow == 0


def test_loop_in_a_branch_with_values_from_outside(native: OnnxNative) -> None:
    body = f"""g (bool c, float[N, 4] x) => (float[N, 4] y) <int64 n = {{2}}, bool t = {{1}}> {{
        k = Relu(x)
        y = If(c) <then_branch = tb () => (float[N, 4] p) {{ p = Loop(n, t, k){
        DOUBLE.replace("bool c", "bool c2").replace("Identity(c)", "Identity(c2)")
    } }},
                   else_branch = eb () => (float[N, 4] q) {{ q = Neg(k) }}> }}"""
    graph, _ = normalised(body, native, {"x": X, "c": np.array(True)}, {"x": X, "c": np.array(False)})
    assert count(graph, "Loop") == 0 and count(graph, "If") == 1 and count(graph, "Add") == 2


def test_profile_fixes_the_trip_count(native: OnnxNative) -> None:
    body = """g (float[N, 4] x) => (float[4] y) <int64 zero = {0}, bool t = {1}, float[4] s = {0, 0, 0, 0}> {
        sh = Shape(x) n = Gather(sh, zero)
        y = Loop(n, t, s) <body = b (int64 i, bool c, float[4] a) => (bool d, float[4] z) {
            d = Identity(c) r = Gather<axis = 0>(x, i) z = Add(a, r) }> }"""
    graph, _ = specialised(body, native, {"x": [(2, 2), (4, 4)]}, {"x": X})
    assert count(graph, "Loop") == 0 and graph.inputs[0].shape == [2, 4]
    graph, _ = specialised(body, native, {"x": [(1, 2), (4, 4)]}, {"x": X})
    assert count(graph, "Loop") == 1


@pytest.mark.parametrize("start", ["t", "c0", "c1"])
def test_trips_that_follow_from_a_shape(native: OnnxNative, start: str) -> None:
    """A while-loop of TensorFlow: weights and the limit are carried along, integers are compared as floats."""
    body = f"""g (float[T, 4] x) => (float[4] h, float[T, 4] w) <int64 zero = {{0}}, int32 i0 = {{0}},
        int32 one = {{1}}, bool t = {{1}}, float[4] s = {{0, 0, 0, 0}},
        float[4, 4] k = {{1, 2, 3, 4, 5, 6, 7, 8, 9, 8, 7, 6, 5, 4, 3, 2}}> {{
        sh = Shape(x) n64 = Gather(sh, zero) n = Cast<to = 6>(n64) c0 = Less(i0, n) c1 = Less(one, n)
        ti, h, n2, k2, w = Loop(, {start}, i0, s, n, k) <body = b (int64 it, bool c, int32 i, float[4] a, int32 m,
                float[4, 4] kk) => (bool d, int32 j, float[4] z, int32 m2, float[4, 4] k3, float[4] q) {{
            j = Add(i, one) r = Gather<axis = 0>(x, i) p = MatMul(r, kk) z = Tanh(p) q = Identity(z)
            jf = Cast<to = 1>(j) mf = Cast<to = 1>(m) d = Less(jf, mf) m2 = Identity(m) k3 = Identity(kk) }}> }}"""
    feeds = [{"x": np.ones((size, 4), np.float32) / size} for size in (3, 1, 2)]
    graph, report = normalised(body, native, *feeds, tolerance=1e-6)
    loop = next(node for node in graph.nodes if node.op == "Loop")
    assert loop.inputs[0].name and loop.inputs[1].values.item() is True and len(loop.inputs) == 4
    assert [node.op for node in loop.attrs["body"].nodes].count("Less") == 0
    product = next(node for node in loop.attrs["body"].nodes if node.op == "MatMul")
    assert product.inputs[1].values.shape == (4, 4)
    assert report.notes[-1] == "Loop 'Loop_5' had no trip count: it follows from what its condition compares"
    graph, _ = specialised(body, native, {"x": [(3, 3), (4, 4)]}, feeds[0])
    assert count(graph, "Loop") == 0


@pytest.mark.parametrize(
    ("condition", "trips"),
    [
        ("p = Less(j, five) q = Less(j, three) d = And(p, q)", 3),
        ("p = Greater(five, j) d = And(p, c)", 5),
        ("p = GreaterOrEqual(three, j) q = Identity(p) d = Identity(q)", 4),
        ("e = Add(i, two) d = Less(e, five)", 4),
    ],
)
def test_spellings_of_a_counting_condition(native: OnnxNative, condition: str, trips: int) -> None:
    body = f"""g (float[N, 4] x) => (float[N, 4] y) <int64 one = {{1}}, int64 two = {{2}}, int64 three = {{3}},
        int64 five = {{5}}, int64 zero = {{0}}, bool t = {{1}}> {{
        k, y = Loop(, t, zero, x) <body = b (int64 i, bool c, int64 k0, float[N, 4] a)
            => (bool d, int64 j, float[N, 4] z) {{ j = Add(k0, one) z = Add(a, a) {condition} }}> }}"""
    graph, _ = normalised(body, native, {"x": X})
    assert ops(graph) == ["Add"] * trips


@pytest.mark.parametrize(
    "condition",
    [
        "p = Less(j, five) m = ReduceMax<keepdims = 0>(z) q = Less(m, lim) d = And(p, q)",
        "p = Less(j, five) q = Less(j, three) d = Or(p, q)",
        "w = Mul(k0, two) d = Less(w, five)",
        "d = Less(five, j)",
    ],
)
def test_conditions_that_do_more_than_count_stay(native: OnnxNative, condition: str) -> None:
    body = f"""g (float[N, 4] x) => (float[N, 4] y) <int64 one = {{1}}, int64 two = {{2}}, int64 three = {{3}},
        int64 five = {{5}}, int64 zero = {{1}}, bool t = {{1}}, float lim = {{10}}> {{
        k, y = Loop(, t, zero, x) <body = b (int64 i, bool c, int64 k0, float[N, 4] a)
            => (bool d, int64 j, float[N, 4] z) {{ j = Add(k0, one) z = Add(a, a) {condition} }}> }}"""
    graph, _ = normalised(body, native, {"x": X})
    assert count(graph, "Loop") == 1


def test_carried_value_that_is_an_output_stays(native: OnnxNative) -> None:
    body = """g (float[N, 4] x) => (float[N, 4] y, float[N, 4] w) <int64 n = {1000}, bool t = {1}> {
        y, w = Loop(n, t, x, x) <body = b (int64 i, bool c, float[N, 4] a, float[N, 4] k)
            => (bool d, float[N, 4] z, float[N, 4] k2) { d = Identity(c) z = Sub(k, a) k2 = Identity(k) }> }"""
    graph, _ = normalised(body, native, {"x": X})
    assert len(graph.nodes[0].inputs) == 4 and len(graph.nodes[0].outputs) == 2
