from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from graph_models import ops, run
from rewrite_checks import normalised, specialised

from trtforge.graph.native import OnnxNative

BODY = "g (float[N, 1, M, 4] x) => (float[] y) { a = Squeeze(x) y = Neg(a) }"
STATIC = "g (float[1, 3, 1, 4] x) => (float[] y) { a = Squeeze(x) y = Neg(a) }"
X = np.arange(24, dtype=np.float32)


@pytest.fixture(scope="module")
def native() -> Iterator[OnnxNative]:
    with OnnxNative() as child:
        yield child


def test_axes_of_static_sizes_are_written_down(native: OnnxNative) -> None:
    graph, report = normalised(STATIC, native, {"x": X[:12].reshape(1, 3, 1, 4)})
    assert graph.nodes[0].inputs[1].values.tolist() == [0, 2] and graph.nodes[0].outputs[0].shape == [3, 4]
    assert report.notes == ()


def test_open_sizes_wait_for_a_profile(native: OnnxNative) -> None:
    graph, _ = normalised(BODY, native, {"x": X.reshape(2, 1, 3, 4)})
    assert len(graph.nodes[0].inputs) == 1


@pytest.mark.parametrize(
    ("sizes", "shape", "axes"),
    [
        ([(2, 8), (1, 1), (3, 9), (4, 4)], (2, 1, 3, 4), [1]),
        ([(1, 1), (1, 1), (3, 9), (4, 4)], (1, 1, 6, 4), [0, 1]),
        ([(1, 1), (1, 1), (1, 1), (4, 4)], (1, 1, 1, 4), [0, 1, 2]),
    ],
)
def test_profile_says_which_axes_are_one(
    native: OnnxNative, sizes: list[tuple[int, int]], shape: tuple[int, ...], axes: list[int]
) -> None:
    x = np.resize(X, shape)
    graph, _ = specialised(BODY, native, {"x": sizes}, {"x": x})
    assert graph.nodes[0].inputs[1].values.tolist() == axes


def test_axis_that_may_be_one_stays_and_is_named(native: OnnxNative) -> None:
    graph, notes = specialised(BODY, native, {"x": [(1, 8), (1, 1), (3, 9), (4, 4)]}, {"x": X.reshape(2, 1, 3, 4)})
    assert graph.nodes[0].inputs[1].values.tolist() == [1]
    assert notes == ("Squeeze 'Squeeze_0' removes axes [1], which it left open; axis 0 may be 1 and stays",)


def test_no_axis_that_is_surely_one_removes_none(native: OnnxNative) -> None:
    """A Squeeze with an empty list of axes would remove every axis of size 1."""
    body = "g (float[N, 4] x) => (float[] y) { a = Squeeze(x) y = Neg(a) }"
    graph, notes = specialised(body, native, {"x": [(1, 8), (4, 4)]}, {"x": X[:8].reshape(2, 4)})
    assert ops(graph) == ["Neg"] and run(graph, {"x": X[:4].reshape(1, 4)})[0].shape == (1, 4)
    assert notes == ("Squeeze 'Squeeze_0' removes nothing; axis 0 may be 1 and stays",)


def test_given_axes_stay(native: OnnxNative) -> None:
    body = "g (float[1, 1, 4] x) => (float[] y) <int64[1] a = {0}> { y = Squeeze(x, a) }"
    graph, report = normalised(body, native, {"x": X[:4].reshape(1, 1, 4)})
    assert ops(graph) == ["Squeeze"] and graph.nodes[0].inputs[1].values.tolist() == [0] and report.notes == ()
