"""Old opsets, raised: each case gives what ONNX Runtime gives for the source, or what its opset's text says."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from graph_models import graph_of, run
from rewrite_checks import count, normalised

from trtforge.errors import InputError
from trtforge.graph.edit import is_array
from trtforge.graph.native import OnnxNative
from trtforge.graph.normalise import normalise

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 3, 4, 5)).astype(np.float32)
SYMBOLIC = "float[A, B, C, D] x"


@pytest.fixture(scope="module")
def native() -> Iterator[OnnxNative]:
    with OnnxNative() as child:
        yield child


@pytest.mark.parametrize("port", ["float[2, 3, 4, 5] x", SYMBOLIC])
@pytest.mark.parametrize(
    ("opsets", "weights", "nodes"),
    [
        ((7, 8), "", 'y = Upsample<mode = "nearest", scales = [1.0, 1.0, 2.0, 2.0]>(x)'),
        ((7, 8), "", 'y = Upsample<mode = "linear", scales = [1.0, 1.0, 2.0, 2.0]>(x)'),
        ((9,), "float[4] s = {1, 1, 1.5, 1.7}", 'y = Upsample<mode = "nearest">(x, s)'),
        ((9,), "float[4] s = {1, 1, 1.5, 3}", 'y = Upsample<mode = "linear">(x, s)'),
        ((10,), "float[4] s = {1, 1, 2, 1.7}", 'y = Resize<mode = "nearest">(x, s)'),
        ((10,), "float[4] s = {1, 1, 0.6, 0.5}", 'y = Resize<mode = "nearest">(x, s)'),
        ((10,), "float[4] s = {1, 1, 2, 0.7}", 'y = Resize<mode = "linear">(x, s)'),
        ((7, 11, 12, 13), "", "y = Hardmax<axis = 2>(x)"),
        ((7, 12), "", "y = Hardmax(x)"),
        ((7, 12, 13), "", "y = Softmax<axis = 1>(x)"),
        ((7, 12), "", "y = LogSoftmax(x)"),
        ((7, 10, 11), "", "y = Clip(x)"),
        ((7, 10), "", "y = Pad<pads = [0, 0, 1, 2, 0, 0, 0, 1], value = 1.5>(x)"),
        ((7, 9), "", "y = Slice<axes = [2, 3], starts = [1, -3], ends = [9, 9223372036854775807]>(x)"),
        ((7, 9), "", "y, k = TopK<k = 2>(x)"),
        ((7, 10, 12), "", "y = Dropout(x)"),
        ((7, 11, 13, 17), "", "y = ReduceMax<axes = [1, 3], keepdims = 0>(x)"),
        ((13, 17), "int64[4] s = {1, 1, 1, 2}", "a = Tile(x, s) y, z = Split<axis = 3>(a)"),
    ],
)
def test_meaning_survives(native: OnnxNative, port: str, opsets: tuple[int, ...], weights: str, nodes: str) -> None:
    for opset in opsets:
        body = f"g ({port}) => (float[] y) {f'<{weights}>' if weights else ''} {{ {nodes} }}"
        _, report = normalised(body, native, {"x": X}, opset=opset, tolerance=1e-6)
        assert (report.source_opset, report.opset) == (opset, 23)


@pytest.mark.parametrize(
    "nodes", ["y = Clip<min = 0.25, max = 0.5>(x)", "y = Pad<pads = [0, 0, 1, 2], value = 0.5>(x)"]
)
def test_bounds_and_values_get_the_type_of_their_tensor(native: OnnxNative, nodes: str) -> None:
    x = np.array([[0.1, 0.4, 0.9]], np.float16)
    for opset in (7, 10):
        body = f"g (float16[N, 3] x) => (float16[] y) {{ {nodes} }}"
        graph, report = normalised(body, native, {"x": x}, opset=opset)
        assert report.opset == 23
        values = [tensor.values for tensor in graph.nodes[0].inputs if is_array(tensor)]
        assert {value.dtype for value in values if value.dtype.kind == "f"} == {np.dtype(np.float16)}


def test_normalisation_of_two_dims_is_per_channel_anyway(native: OnnxNative) -> None:
    body = """g (float[N, 3] x) => (float[] y)
        <float[3] s = {1, 2, 3}, float[3] b = {0.1, 0.2, 0.3}, float[3] m = {0.5, 0.6, 0.7}, float[3] v = {1, 2, 3}>
        { y = BatchNormalization<spatial = 0>(x, s, b, m, v) }"""
    graph, report = normalised(body, native, {"x": X[0, :, :3, 0].T.copy()[:2]}, opset=8, tolerance=1e-6)
    assert report.opset == 23 and "spatial" not in graph.nodes[0].attrs


def test_normalisation_in_training_is_refused(native: OnnxNative) -> None:
    body = """g (float[N, 3] x) => (float[] y)
        <float[3] s = {1, 2, 3}, float[3] b = {0, 0, 0}, float[3] m = {0, 0, 0}, float[3] v = {1, 2, 3}>
        { y, a, c, d, e = BatchNormalization(x, s, b, m, v) }"""
    with pytest.raises(InputError, match="opset 8 cannot be raised to 23: BatchNormalization"):
        normalise(graph_of(body, opset=8), native=native)


# ONNX Runtime has no kernels below opset 7: expected values are what the operators' text says.
B = np.array([10, 20, 30], np.float32)


@pytest.mark.parametrize("port", ["float[2, 3, 4, 5] x", SYMBOLIC])
@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("y = Add<axis = 1, broadcast = 1>(x, b)", X + B.reshape(3, 1, 1)),
        ("y = Mul<axis = -3, broadcast = 1>(x, b)", X * B.reshape(3, 1, 1)),
        ("y = Sub<broadcast = 1>(x, c)", X - np.arange(5, dtype=np.float32)),
        ("y = Div(x, x)", X / X),
        ("y = PRelu(x, b)", np.where(X < 0, X * B.reshape(3, 1, 1), X)),
        ("y = Clip<min = -0.5, max = 0.5>(x)", X.clip(-0.5, 0.5)),
    ],
)
def test_broadcasts_before_opset_7(native: OnnxNative, port: str, nodes: str, expected: np.ndarray) -> None:
    weights = "<float[3] b = {10, 20, 30}, float[5] c = {0, 1, 2, 3, 4}>"
    graph, _ = normalise(graph_of(f"g ({port}) => (float[] y) {weights} {{ {nodes} }}", opset=6), native=native)
    np.testing.assert_allclose(run(graph, {"x": X})[0], expected, rtol=1e-6)


def test_gemm_before_opset_7(native: OnnxNative) -> None:
    body = """g (float[M, K] x) => (float[] y) <float[5, 2] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, float[2] c = {1, 2}>
        { y = Gemm<broadcast = 1>(x, w, c) }"""
    graph, _ = normalise(graph_of(body, opset=6), native=native)
    x = X[0, 0]
    expected = x @ np.arange(1, 11, dtype=np.float32).reshape(5, 2) + np.array([1, 2], np.float32)
    np.testing.assert_allclose(run(graph, {"x": x})[0], expected, rtol=1e-5)


def test_cast_by_the_name_of_a_type(native: OnnxNative) -> None:
    graph, _ = normalise(
        graph_of('g (float[N] x) => (int32[N] y) { y = Cast<to = "INT32">(x) }', opset=5), native=native
    )
    assert run(graph, {"x": np.array([1.7, -2.2], np.float32)})[0].tolist() == [1, -2]


def test_repaired_operators_inside_a_model_keep_their_neighbours(native: OnnxNative) -> None:
    body = """g (float[A, 3, C, D] x) => (float[] y, float[] z) {
        u = Upsample<mode = "linear", scales = [1.0, 1.0, 2.0, 2.0]>(x) c = Clip<min = 0.0>(u) p = Pad<pads = [0, 0, 1,
        2, 0, 0, 0, 1]>(c) y = Softmax<axis = 1>(p) k = Hardmax(p) a, b = Split<axis = 2>(u) z = Add(a, b) }"""
    for opset in (7, 8):
        graph, report = normalised(body, native, {"x": X}, opset=opset, tolerance=1e-6)
        assert report.opset == 23 and count(graph, "Upsample") == 0
        assert [tensor.name for tensor in graph.outputs] == ["y", "z"]


def test_operator_without_a_newer_kernel_stops_at_opset_21(native: OnnxNative) -> None:
    body = """g (float[1, 2, 8, 8] x, float[1, 4] r, int64[1] b) => (float[] y) {
        y = RoiAlign<output_height = 2, output_width = 2, sampling_ratio = 2>(x, r, b) }"""
    feeds = {"x": RNG.standard_normal((1, 2, 8, 8)).astype(np.float32), "r": np.array([[1, 1, 6, 6]], np.float32)}
    _, report = normalised(body, native, {**feeds, "b": np.array([0])}, opset=10, tolerance=1e-6)
    assert report.opset == 21 and report.notes == ()


def test_repairs_reach_into_branches(native: OnnxNative) -> None:
    body = """g (bool c, float[2, 3, 4, 5] x) => (float[] y) { y = If(c)
        <then_branch = t () => (float[] a) { u = Upsample<mode = "linear", scales = [1.0, 1.0, 2.0, 2.0]>(x)
            a = GlobalMaxPool(u) },
         else_branch = e () => (float[] b) { k = Hardmax<axis = 1>(x) b = GlobalAveragePool(k) }> }"""
    feeds = [{"c": np.array(choice), "x": X} for choice in (True, False)]
    graph, report = normalised(body, native, *feeds, opset=8, tolerance=1e-6)
    assert report.opset == 23 and count(graph, "If") == 1 and count(graph, "Upsample") == 0
