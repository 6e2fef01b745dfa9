from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from graph_models import graph_of, ops
from rewrite_checks import count, normalised

from trtforge.graph.native import OnnxNative
from trtforge.graph.normalise import normalise

X = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype(np.float32)
TO_NHWC, TO_NCHW = "perm = [0, 2, 3, 1]", "perm = [0, 3, 1, 2]"


@pytest.fixture(scope="module")
def native() -> Iterator[OnnxNative]:
    with OnnxNative() as child:
        yield child


def between(nodes: str, weights: str = "") -> str:
    """A model that computes `nodes` (from t to r) in NHWC between two NCHW operators."""
    return f"""g (float[N, 3, 4, 5] x, float[N, 3, 4, 5] z) => (float[] y) {weights} {{
        a = GlobalAveragePool(x) b = Sub(x, a) t = Transpose<{TO_NHWC}>(b) u = Transpose<{TO_NHWC}>(z)
        {nodes}
        o = Transpose<{TO_NCHW}>(r) y = InstanceNormalization(o, s, s) }}"""


@pytest.mark.parametrize(
    ("nodes", "weights"),
    [
        ("r = Relu(t)", ""),
        ("k = Mul(t, w) r = Add(u, k)", "float[3] w = {1, 2, 3}"),
        ("k = Mul(w, t) r = Sub(k, u)", "float[4, 1, 1] w = {1, 2, 3, 4}"),
        ("k = Clip(t, lo, hi) c = Less(k, u) r = Where(c, k, u)", "float lo = {-1}, float hi = {2}"),
        ("r = PRelu(t, w)", "float[1, 1, 3] w = {1, 2, 3}"),
        ("r = Softmax(t)", ""),
        ("r = Softmax<axis = 1>(t)", ""),
        ("p, q = Split<axis = -1>(t, sz) r = Concat<axis = 3>(q, p)", "int64[2] sz = {1, 2}"),
        ("m = ReduceMean(t, ax) k = Exp(m) r = Mul(t, k)", "int64[2] ax = {1, -2}"),
        ("r = Pad(t, pads)", "int64[8] pads = {0, 1, 2, 0, 0, 3, 4, 0}"),
        ("q = QuantizeLinear(t, sc, zp) r = DequantizeLinear(q, sc, zp)", "float sc = {0.1}, int8 zp = {0}"),
    ],
)
def test_transposes_around_a_region_go(native: OnnxNative, nodes: str, weights: str) -> None:
    body = between(nodes, f"<float[3] s = {{1, 2, 3}}{', ' if weights else ''}{weights}>")
    graph, report = normalised(body, native, {"x": X, "z": X[::-1].copy()}, tolerance=1e-6)
    # What needs the second input needs no transpose of it either.
    assert count(graph, "Transpose") == 0 and report.num_transposes >= 2


@pytest.mark.parametrize("node", ["r = Softmax<axis = 5>(t)", "m = ReduceMean(t, ax) r = Mul(t, m)"])
def test_an_axis_beyond_the_rank_is_not_moved_to_one_that_is_there(native: OnnxNative, node: str) -> None:
    weights = "<float[3] s = {1, 2, 3}, int64[1] ax = {5}>"
    graph, report = normalise(graph_of(between(f"t5 = Identity(t) {node}", weights)), native=native)
    assert report.num_transposes == 0 and count(graph, "Transpose") == 2
    (moved,) = [node for node in graph.nodes if node.op in ("Softmax", "ReduceMean")]
    assert [moved.attrs["axis"]] == [5] if moved.op == "Softmax" else moved.inputs[1].values.tolist() == [5]


def test_residual_blocks_between_convolutions(native: OnnxNative) -> None:
    blocks = ""
    for index, source in enumerate(("t", "v0", "v1")):
        blocks += f"""i{index} = Transpose<{TO_NCHW}>({source}) c{index} = Conv(i{index}, w)
            j{index} = Transpose<{TO_NHWC}>(c{index}) k{index} = Relu(j{index}) v{index} = Add(k{index}, {source})\n"""
    weights = "<float[3] s = {1, 2, 3}, float[3, 3, 1, 1] w = {1, 2, 3, 4, 5, 6, 7, 8, 9}>"
    graph, _ = normalised(between(f"{blocks} r = Relu(v2)", weights), native, {"x": X, "z": X}, tolerance=1e-4)
    assert count(graph, "Transpose") == 0
    assert count(graph, "Conv") == 3


def test_pairs_and_chains_merge(native: OnnxNative) -> None:
    body = f"""g (float[N, 3, 4, 5] x) => (float[] y, float[] z, float[] k) {{
        a = Transpose<{TO_NHWC}>(x) b = Transpose<{TO_NHWC}>(a) c = Transpose<{TO_NHWC}>(b) y = GlobalMaxPool(c)
        d = Transpose(x) e = Transpose(d) z = GlobalMaxPool(e) k = GlobalMaxPool(b) }}"""
    graph, _ = normalised(body, native, {"x": X})
    perms = [node.attrs["perm"] for node in graph.nodes if node.op == "Transpose"]
    # Three quarter turns are none, two transposes with reversed axes are none; only b is left, from x.
    assert perms == [[0, 3, 1, 2]]
    assert [node.inputs[0].name for node in graph.nodes if node.op == "GlobalMaxPool"][:2] == ["x", "x"]


def test_a_transpose_that_others_read_is_not_moved_for_nothing(native: OnnxNative) -> None:
    body = f"""g (float[N, 3, 4, 5] x) => (float[] y, float[] z) {{
        t = Transpose<{TO_NHWC}>(x) y = Relu(t) z = Exp(y) }}"""
    graph, report = normalised(body, native, {"x": X})
    assert ops(graph) == ["Transpose", "Relu", "Exp"] and report.num_transposes == 0


def test_result_that_leaves_in_the_old_order(native: OnnxNative) -> None:
    """Two transposes in and two that turn back go; the output gets one."""
    body = f"""g (float[N, 3, 4, 5] x, float[N, 3, 4, 5] z) => (float[] y, float[] o1, float[] o2) {{
        t = Transpose<{TO_NHWC}>(x) u = Transpose<{TO_NHWC}>(z)
        y = Add(t, u) k = Relu(y)
        p = Transpose<{TO_NCHW}>(k) q = Transpose<{TO_NCHW}>(y) o1 = Softmax<axis = 1>(p) o2 = GlobalMaxPool(q) }}"""
    graph, _ = normalised(body, native, {"x": X, "z": X + 1}, tolerance=1e-6)
    assert count(graph, "Transpose") == 1
    assert [tensor.name for tensor in graph.outputs] == ["y", "o1", "o2"]


def test_scales_along_an_axis_keep_their_place(native: OnnxNative) -> None:
    nodes = "q = QuantizeLinear<axis = 3>(t, sc, zp) r = DequantizeLinear<axis = 3>(q, sc, zp)"
    body = between(nodes, "<float[3] s = {1, 2, 3}, float[3] sc = {0.1, 0.2, 0.3}, int8[3] zp = {0, 0, 0}>")
    graph, _ = normalised(body, native, {"x": X, "z": X}, tolerance=1e-6)
    assert count(graph, "Transpose") == 2


def test_unknown_ranks_are_left(native: OnnxNative) -> None:
    body = f"""g (float[N, 3, 4, 5] x, int64[4] k) => (float[] y) {{
        v = Reshape(x, k) t = Transpose<{TO_NHWC}>(v) y0 = Relu(t) y = Transpose<{TO_NCHW}>(y0) }}"""
    graph, _ = normalised(body, native, {"x": X, "k": np.array([2, 3, 4, 5])})
    assert count(graph, "Transpose") == 0


@pytest.mark.parametrize("perm", ["0, 1, 2, 9", "0, 0, 1, 2", "0, 2, 1"])
def test_a_transpose_that_is_no_permutation_is_left_alone(native: OnnxNative, perm: str) -> None:
    body = f"""g (float[N, 3, 4, 5] x) => (float[] y) {{
        t = Transpose<perm = [0, 2, 1, 3]>(x) u = Transpose<perm = [{perm}]>(t) y = Relu(u) }}"""
    graph, _ = normalise(graph_of(body), native=native)
    perms = [node.attrs["perm"] for node in graph.nodes if node.op == "Transpose"]
    assert perms == [[0, 2, 1, 3], [int(axis) for axis in perm.split(",")]]
