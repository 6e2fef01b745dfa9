from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs
import pytest
from graph_models import graph_of, run
from rewrite_checks import normalised

from trtforge.graph.bounds import Bounds, KnownSizes
from trtforge.graph.native import OnnxNative

X = "float[N, 4, M] x"
CONSTANTS = """int64 zero = {0}, int64 one = {1}, int64 two = {2}, int64[1] axis = {0}, int64[1] start = {1},
    int64[1] ends = {2}, int64[1] nine = {9}, float half = {0.5},
    int64[3] negative = {-1, -1, -1}, int64 big = {9007199254740993}, int64 six = {6}"""


def result(nodes: str, dims: dict[str, tuple[int, int]] | None = None, **values: tuple[int, int]) -> object:
    """The value of tensor r of a graph; None where it may have several."""
    body = (
        f"g ({X}, int64 k) => (int64[] y) <{CONSTANTS}> {{ s = Shape(x) n = Gather(s, zero) {nodes} y = Identity(r) }}"
    )
    graph: gs.Graph = graph_of(body)
    spans = {name: (np.float64(low), np.float64(high)) for name, (low, high) in values.items()}
    bounds = Bounds(KnownSizes(dims or {}, spans))
    found = {node.outputs[0].name: bounds.visit(node) for node in graph.nodes}
    return None if found["r"] is None else found["r"].tolist()


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("r = Gather(s, one)", 4),
        ("a = Slice(s, start, ends) r = Squeeze(a)", 4),
        ("a = Slice(s, axis, ends) r = Squeeze(a, axis)", None),
        # An omitted input keeps its place: the steps are those behind the axes.
        ("a = Slice(s, start, nine, , ends) r = Identity(a)", [4]),
        ("t = Shape<start = 1>(x) r = Slice(t, axis, start, , ends)", [4]),
        ("a = Gather(s, start) r = Squeeze(a, )", 4),
        ("r = Equal(s, negative)", [False] * 3),
        ("r = GreaterOrEqual(n, zero)", True),
        ("a = Shape(k) r = Identity(a)", []),
        ("r = Size(k)", 1),
        ("a = Gather(s, one) b = Mul(a, two) c = Sub(b, one) r = Div(c, two)", 3),
        ("r = Less(n, zero)", False),
        ("r = Gather(s, zero)", None),
        ("r = Equal(n, one)", None),
        # Beyond what float64 holds exactly nothing is claimed.
        ("r = Add(big, zero)", None),
        ("r = Div(one, n)", None),
    ],
)
def test_what_the_graph_alone_decides(nodes: str, expected: object) -> None:
    assert result(nodes) == expected


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("r = Equal(n, one)", False),
        ("a = Equal(n, one) r = Not(a)", True),
        ("r = Greater(n, six)", None),
        ("a = Mul(n, two) r = LessOrEqual(a, two)", False),
        ("r = Min(n, one)", 1),
        ("r = Max(n, six)", None),
        ("a = Equal(n, one) b = Where(a, zero, one) r = Cast<to = 7>(b)", 1),
        ("a = Less(n, one) b = Greater(n, six) r = And(a, b)", False),
        ("a = Greater(n, one) b = Greater(n, six) r = Or(a, b)", True),
        ("a = Cast<to = 9>(n) r = Not(a)", False),
        ("r = Sub(n, n)", None),
        # Old exporters compare integers as floats; float arithmetic rounds and is not followed.
        ("a = Cast<to = 1>(n) b = Cast<to = 1>(one) r = Less(b, a)", True),
        ("a = Cast<to = 1>(n) r = Less(half, a)", True),
        ("a = Cast<to = 1>(n) b = Mul(a, half) r = Less(b, half)", None),
        ("a = Cast<to = 10>(n) b = Cast<to = 10>(one) r = Less(b, a)", None),
        ("a = Div(n, six) r = Less(a, two)", True),
        ("a = ReduceProd<keepdims = 0>(s) r = Less(a, two)", False),
        ("a = Unsqueeze(n, axis) b = Concat<axis = 0>(a, ends) r = Equal(b, axis)", [False, False]),
    ],
)
def test_what_ranges_decide(nodes: str, expected: object) -> None:
    assert result(nodes, {"N": (2, 8), "M": (3, 3)}) == expected


def test_values_of_integer_inputs() -> None:
    assert result("r = Greater(k, one)", k=(2, 5)) is True
    assert result("r = Greater(k, two)", k=(2, 5)) is None
    assert result("r = Mul(k, two)", k=(3, 3)) == 6


@pytest.mark.parametrize(
    ("nodes", "shape", "expected"),
    [
        ("h = Shape<start = 1>(x) r = Slice(h, zero, nine, , two) q = Gather(r, last) y = Neg(q)", (3, 4, 3), [-4]),
        ("h = Shape(x) r = Slice(h, zero, nine, , two) q = Gather(r, last) y = Mul(q, q)", (2, 4, 3, 7), [9]),
    ],
)
def test_steps_behind_omitted_axes_count(nodes: str, shape: tuple[int, ...], expected: list[int]) -> None:
    sizes = ", ".join(map(str, shape[1:]))
    body = f"""g (float[N, {sizes}] x) => (int64[1] y)
        <int64[1] zero = {{0}}, int64[1] nine = {{9}}, int64[1] two = {{2}}, int64[1] last = {{-1}}> {{ {nodes} }}"""
    with OnnxNative() as native:
        graph, _ = normalised(body, native, {"x": np.zeros(shape, np.float32)})
    assert run(graph, {"x": np.zeros(shape, np.float32)})[0].tolist() == expected


def test_bounds_of_another_shape_than_the_inferred_one_are_dropped() -> None:
    body = "g (float[N, 4] x) => (int64[] y) <int64 one = {1}> { s = Shape(x) r = Gather(s, one) y = Neg(r) }"
    shape, gather, _ = graph_of(body).nodes
    shape.outputs[0].shape = [3]
    bounds = Bounds()
    assert bounds.visit(shape) is None and bounds.visit(gather) is None


def test_results_stay_inside_their_type() -> None:
    graph = graph_of("""g (float[N] x) => (int32[] y) <int32 a = {2000000000}> { r = Add(a, a) y = Identity(r) }""")
    assert Bounds().visit(graph.nodes[0]) is None
