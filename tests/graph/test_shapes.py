from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_graphsurgeon as gs
import pytest
from graph_models import graph_of, run

from trtforge.errors import InputError
from trtforge.graph.native import OnnxNative
from trtforge.graph.shapes import infer_shapes_at

CHAIN = """g (float[N, S, 6] x) => (float[N, 2, S, 3] y) <int64 zero = {0}, int64 one = {1}, int64 two = {2},
    int64[1] ax = {0}> {
    s = Shape(x) n = Gather(s, zero) t = Gather(s, one) h = Gather(s, two)
    half = Div(h, two) n1 = Unsqueeze(n, ax) t1 = Unsqueeze(t, ax) two1 = Unsqueeze(two, ax) h1 = Unsqueeze(half, ax)
    target = Concat<axis = 0>(n1, t1, two1, h1) r = Reshape(x, target)
    p = Transpose<perm = [0, 2, 1, 3]>(r)
    s2 = Shape(p) e = Expand(one, s2) f = Cast<to = 1>(e) y = Add(p, f) }"""


@pytest.fixture(scope="module")
def native() -> Iterator[OnnxNative]:
    with OnnxNative() as child:
        yield child


def test_reshape_and_expand_computed_from_shapes_resolve(native: OnnxNative) -> None:
    graph = graph_of(CHAIN)
    shapes = infer_shapes_at(graph, {"x": (4, 5, 6)}, native)
    expected = {"x": (4, 5, 6), "r": (4, 5, 2, 3), "p": (4, 2, 5, 3), "e": (4, 2, 5, 3), "y": (4, 2, 5, 3)}
    assert {name: shapes[name] for name in expected} == expected
    x = np.zeros((4, 5, 6), np.float32)
    assert run(graph, {"x": x})[0].shape == shapes["y"]
    assert set(shapes) == set(graph.tensors())


def test_static_inputs_need_no_shape(native: OnnxNative) -> None:
    graph = graph_of("g (float[N, 2] x, float[3, 2] b) => (float[M, 2] y) { y = Concat<axis = 0>(x, b) }")
    assert infer_shapes_at(graph, {"x": (4, 2)}, native)["y"] == (7, 2)


def test_declared_output_shape_does_not_stand_in_the_way(native: OnnxNative) -> None:
    graph = graph_of("g (float[N] x) => (float[9] y) { y = Concat<axis = 0>(x, x) }")
    assert infer_shapes_at(graph, {"x": (3,)}, native)["y"] == (6,)


def test_branches_and_foreign_operators_use_their_symbolic_sizes(native: OnnxNative) -> None:
    graph = graph_of(
        """g (float[N, 4] x, bool c) => (float[N, 4] y) <float[N, 4] a> {
        a = com.example.F(x)
        b = If (c) <then_branch = tb () => (float[N, 4] t) { t = Neg(a) },
                    else_branch = eb () => (float[N, 4] e) { e = Exp(a) }>
        y = Relu(b) }""",
        domains=', "com.example": 1',
    )
    shapes = infer_shapes_at(graph, {"x": (7, 4), "c": ()}, native)
    assert (shapes["a"], shapes["b"], shapes["y"]) == ((7, 4), (7, 4), (7, 4))


def test_output_of_a_foreign_operator_has_its_declared_shape(native: OnnxNative) -> None:
    graph = graph_of("g (float[N] x) => (float[N, 4] y) { y = com.example.F(x) }", domains=', "com.example": 1')
    assert infer_shapes_at(graph, {"x": (7,)}, native)["y"] == (7, 4)


def test_shared_symbol_with_two_sizes_is_not_believed(native: OnnxNative) -> None:
    body = "g (float[N] x, float[N] z) => (float[N] y) <float[N] a> { a = com.example.F(x) y = Relu(a) }"
    graph = graph_of(body, domains=', "com.example": 1')
    shapes = infer_shapes_at(graph, {"x": (3,), "z": (5,)}, native)
    assert "a" not in shapes and "y" not in shapes


def test_size_that_depends_on_data_is_missing(native: OnnxNative) -> None:
    graph = graph_of("g (float[N] x) => (int64[1, M] y) { y = NonZero(x) }")
    assert "y" not in infer_shapes_at(graph, {"x": (3,)}, native)


def test_weights_have_shapes_without_their_data(native: OnnxNative) -> None:
    graph = graph_of("g (float[N, 40] x) => (float[N, 40] y) { y = MatMul(x, x) }")
    graph.nodes[0].inputs[1] = gs.Constant("w", np.zeros((40, 50), np.float32))
    shapes = infer_shapes_at(graph, {"x": (3, 40)}, native)
    assert shapes["w"] == (40, 50) and shapes["y"] == (3, 50)


def test_huge_shape_takes_no_memory(native: OnnxNative) -> None:
    graph = graph_of("g (float[N] x) => (float[M] y) { s = Shape(x) c = ConstantOfShape(s) y = Add(x, c) }")
    assert infer_shapes_at(graph, {"x": (2**40,)}, native)["y"] == (2**40,)


def test_unknown_input_is_named() -> None:
    with pytest.raises(InputError, match="no input 'z'") as caught:
        infer_shapes_at(graph_of(CHAIN), {"z": (1,)})
    assert "x" in caught.value.why and caught.value.fix


def test_wrong_rank_is_refused() -> None:
    with pytest.raises(InputError, match=r"'x' cannot have the shape \[1, 2\]") as caught:
        infer_shapes_at(graph_of(CHAIN), {"x": (1, 2)})
    assert "3 dims" in caught.value.why and caught.value.fix
