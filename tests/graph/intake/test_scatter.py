"""Scatter with a reduction: constant indices in rounds, others by comparing all pairs."""

from __future__ import annotations

import numpy as np
import pytest
from graph_models import ops
from intake_checks import check_equal, floats, rewritten, weights
from lint_build import RtxBuild

from trtforge.graph.intake import refused_operators
from trtforge.graph.native import OnnxNative

REDUCTIONS = ("add", "mul", "min", "max")
UNIQUE = np.array([[0], [-1]])
REPEATED = np.array([[1], [1], [-1]])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("indices", [UNIQUE, REPEATED], ids=["unique", "repeated"])
def test_constant_rows(reduction: str, indices: np.ndarray, native: OnnxNative) -> None:
    count = len(indices)
    body = (
        f"g (float[4,3] x, float[{count},3] u) => (float[4,3] y) {weights(i=indices)} "
        f'{{ y = ScatterND<reduction="{reduction}">(x, i, u) }}'
    )
    graph = check_equal(body, {"x": floats(4, 3), "u": floats(count, 3)}, native, opset=18)
    assert ops(graph).count("ScatterND") == len(indices) - len(np.unique(indices)) + 1
    assert "MatMul" not in ops(graph)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_computed_rows(reduction: str, native: OnnxNative, rtx_build: RtxBuild) -> None:
    body = (
        "g (float[p,3] x, int64[u,1] i, float[u,3] v) => (float[p,3] y) "
        f'{{ y = ScatterND<reduction="{reduction}">(x, i, v) }}'
    )
    feeds = {"x": floats(5, 3), "i": np.array([[1], [1], [-1], [4]]), "v": floats(4, 3)}
    graph = check_equal(body, feeds, native, opset=18)
    if reduction == "add":
        assert rtx_build(graph).unreadable is None


def test_constant_places_that_repeat(native: OnnxNative) -> None:
    often = weights(i=np.zeros((10, 1), np.int64))
    body = f'g (float[4,3] x, float[10,3] u) => (float[4,3] y) {often} {{ y = ScatterND<reduction="add">(x, i, u) }}'
    graph = check_equal(body, {"x": floats(4, 3), "u": floats(10, 3)}, native, opset=18)
    assert "MatMul" in ops(graph) and "ScatterND" not in ops(graph)
    twice = weights(i=np.array([[0, 3, 1], [0, 2, 1]]))
    body = f"""g (float[4,3] x, float[2,3] u) => (float[4,3] y) {twice}
        {{ y = ScatterElements<axis=0, reduction="add">(x, i, u) }}"""
    check_equal(body, {"x": floats(4, 3), "u": floats(2, 3)}, native, opset=18)


def test_computed_places_of_several_axes(native: OnnxNative) -> None:
    body = """g (int32[4,5,2] x, int64[u,2] i, int32[u,2] v) => (int32[4,5,2] y)
        { y = ScatterND<reduction="add">(x, i, v) }"""
    feeds = {
        "x": np.arange(40, dtype=np.int32).reshape(4, 5, 2),
        "i": np.array([[0, -1], [3, 2], [3, 2]]),
        "v": np.arange(6, dtype=np.int32).reshape(3, 2),
    }
    check_equal(body, feeds, native, opset=18, tolerance=0.0)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("is_constant", [True, False])
def test_elements(reduction: str, axis: int, is_constant: bool, native: OnnxNative) -> None:
    indices = np.array([[0, 3, 1], [-1, 2, 2]]) if axis == 0 else np.array([[0, 2], [1, -1], [0, 1], [2, 0]])
    shape = indices.shape
    inputs, stored = ("", weights(i=indices)) if is_constant else (f", int64[{shape[0]},{shape[1]}] i", "")
    body = (
        f"g (float[4,3] x, float[{shape[0]},{shape[1]}] v{inputs}) => (float[4,3] y) {stored} "
        f'{{ y = ScatterElements<axis={axis}, reduction="{reduction}">(x, i, v) }}'
    )
    feeds = {"x": floats(4, 3), "v": floats(*shape)} | ({} if is_constant else {"i": indices})
    check_equal(body, feeds, native, opset=18)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            "g (float[4,n] x, int64[u,1] i, float[u,n] v) => (float[4,n] y) "
            '{ [n] y = ScatterND<reduction="add">(x, i, v) }',
            "the sizes of its result are open in more than the first axis",
        ),
        (
            "g (float[100000,3] x, int64[9000,1] i, float[9000,3] v) => (float[100000,3] y) "
            '{ [n] y = ScatterND<reduction="add">(x, i, v) }',
            "it has a reduction (add), and comparing all its indices with all places takes too much memory",
        ),
        (
            "g (float[4,3] x, int64[4,2] i, float[4,2] v) => (float[4,3] y) "
            '{ [n] y = ScatterElements<reduction="max">(x, i, v) }',
            "its indices do not cover the axes that it does not scatter along",
        ),
    ],
)
def test_refusals(body: str, reason: str, native: OnnxNative) -> None:
    (refused,) = refused_operators(rewritten(body, native, opset=18))
    assert (refused.node, refused.reason) == ("n", reason)
    assert refused.fix == "scatter without a reduction, or into a smaller tensor"
