from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import pytest
from graph_models import graph_of, model_of, ops
from rewrite_checks import profile_set, specialised

from trtforge.graph.native import OnnxNative
from trtforge.graph.normalise import normalise
from trtforge.graph.specialise import specialise
from trtforge.profile import Profile, ProfileSet, ShapeRange

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


@pytest.fixture(scope="module")
def native() -> Iterator[OnnxNative]:
    with OnnxNative() as child:
        yield child


RESHAPE = """g (float[N, T, 4] x) => (float[] y) <int64 zero = {0}, int64 one = {1}, int64[1] ax = {0},
    int64[1] m = {-1}> { s = Shape(x) n = Gather(s, zero) t = Gather(s, one) nt = Mul(n, t) nt1 = Unsqueeze(nt, ax)
    to = Concat<axis = 0>(nt1, m) y = Reshape(x, to) }"""


def test_fixed_dims_make_shapes_constant(native: OnnxNative) -> None:
    graph, _ = specialised(RESHAPE, native, {"x": [(2, 2), (3, 3), (4, 4)]}, {"x": X})
    assert ops(graph) == ["Reshape"] and graph.nodes[0].inputs[1].values.tolist() == [6, -1]
    assert graph.inputs[0].shape == [2, 3, 4]


def test_open_dims_keep_what_is_declared(native: OnnxNative) -> None:
    graph, _ = specialised(RESHAPE, native, {"x": [(1, 8), (3, 3), (4, 4)]}, {"x": X})
    assert graph.inputs[0].shape == ["N", 3, 4]


def test_nothing_to_decide_changes_nothing(native: OnnxNative) -> None:
    graph, _ = normalise(graph_of(RESHAPE), native=native)
    before = model_of(graph)
    assert specialise(graph, profile_set({"x": [(1, 8), (1, 9), (4, 4)]}), native) == ()
    assert model_of(graph) == before and graph.inputs[0].shape == ["N", "T", 4]


def test_a_second_run_changes_nothing(native: OnnxNative) -> None:
    graph, _ = normalise(graph_of(RESHAPE), native=native)
    profiles = profile_set({"x": [(1, 8), (3, 3), (4, 4)]})
    specialise(graph, profiles, native)
    first = model_of(graph)
    specialise(graph, profiles, native)
    assert model_of(graph) == first


def test_a_dim_that_differs_between_profiles_is_open(native: OnnxNative) -> None:
    graph, _ = normalise(graph_of(RESHAPE), native=native)
    spans = [ShapeRange((size, 3, 4), (size, 3, 4), (size, 3, 4)) for size in (1, 2)]
    profiles = ProfileSet(tuple(Profile(f"p{i}", {"x": span}) for i, span in enumerate(spans)), "file")
    specialise(graph, profiles, native)
    assert graph.inputs[0].shape == ["N", 3, 4]


def test_values_that_are_fixed_become_constants(native: OnnxNative) -> None:
    body = """g (float[N, 4] x, int64[2] shape, int64 k) => (float[] y, float[] z) <int64[1] ax = {0}> {
        y = Reshape(x, shape) a = Unsqueeze(k, ax) z = ReduceSum(x, a) }"""
    x = X[0, :2]
    sizes = {"x": [(2, 2), (4, 4)], "shape": [(2, 2)], "k": []}
    feeds = {"x": x, "shape": np.array([4, 2]), "k": np.array(1)}
    graph, notes = specialised(body, native, sizes, feeds, values={"shape": ([4, 2], [4, 2]), "k": ([1], [1])})
    assert [node.inputs[1].values.tolist() for node in graph.nodes] == [[4, 2], [1]]
    assert [tensor.name for tensor in graph.inputs] == ["x", "shape", "k"]
    assert notes[:2] == tuple(
        f"input {name!r} has one value in all profiles and became a constant" for name in ("shape", "k")
    )


def test_sizes_of_split_and_resize(native: OnnxNative) -> None:
    body = """g (float[N, 1, H, W] x) => (float[] y, float[] a)
        <int64 two = {2}, int64[1] from2 = {2}, int64[1] to4 = {4}, int64[1] ax = {0}, int64 three = {3}> {
        s = Shape(x) hw = Slice(s, from2, to4) hw2 = Mul(hw, two) nc = Slice(s, ax, from2) z = Concat<axis = 0>(nc, hw2)
        y = Resize<mode = "nearest">(x, , , z)
        w = Gather(s, three) half = Div(w, two) rest = Sub(w, half) h1 = Unsqueeze(half, ax) r1 = Unsqueeze(rest, ax)
        parts = Concat<axis = 0>(h1, r1) a, b = Split<axis = 3>(x, parts) }"""
    feeds = {"x": np.arange(15, dtype=np.float32).reshape(1, 1, 3, 5)}
    graph, _ = specialised(body, native, {"x": [(1, 1), (1, 1), (3, 3), (5, 5)]}, feeds)
    assert ops(graph) == ["Resize", "Split"]
    assert graph.nodes[0].inputs[3].values.tolist() == [1, 1, 6, 10]
    assert graph.nodes[1].inputs[1].values.tolist() == [2, 3]


@pytest.mark.parametrize("name", ["?", "N", "None", "unk__12"])
def test_one_name_for_different_ranges_is_dropped(native: OnnxNative, name: str) -> None:
    """With one size for both, the comparison would be true."""
    graph = graph_of("""g (float[A] x, float[B] z) => (int64[] y) {
        a = Shape(x) b = Shape(z) c = Sub(a, b) y = Add(c, a) }""")
    for tensor in graph.inputs:
        tensor.shape = [name]
    graph, _ = normalise(graph, native=native)
    notes = specialise(graph, profile_set({"x": [(1, 3)], "z": [(2, 5)]}), native)
    assert [tensor.shape for tensor in graph.inputs] == [[None], [None]]
    # What is no name need not be told.
    assert notes == (("dims named 'N' have different ranges: the name was dropped",) if name == "N" else ())


def test_a_true_name_stays(native: OnnxNative) -> None:
    graph, _ = normalise(graph_of("g (float[N] x, float[N] z) => (float[] y) { y = Add(x, z) }"), native=native)
    assert specialise(graph, profile_set({"x": [(1, 3)], "z": [(1, 3)]}), native) == ()
    assert [tensor.shape for tensor in graph.inputs] == [["N"], ["N"]]


def test_quantization_is_untouched(native: OnnxNative) -> None:
    body = """g (float[N, 1, 4] x) => (float[] y) <float s = {0.5}, int8 z = {0}> {
        q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) y = Squeeze(d) }"""
    graph, _ = specialised(body, native, {"x": [(2, 2), (1, 1), (4, 4)]}, {"x": X[:, :1]})
    assert ops(graph) == ["QuantizeLinear", "DequantizeLinear", "Squeeze"]
    onnx.checker.check_model(model_of(graph))
