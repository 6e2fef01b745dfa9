from __future__ import annotations

import pytest
from graph_models import parse

from trtforge.graph.dims.shape_inputs import find_shape_inputs

CASES = {
    "reshape": "g (float[4] x, int64[2] s) => (float[a, b] y) { y = Reshape(x, s) }",
    "arithmetic": "g (float[a] x, int64 s) => (float[b] y) <int64 two = {2}, int64[1] z = {0}> "
    "{ t = Mul(s, two) u = Unsqueeze(t, z) y = Slice(x, z, u) }",
    "range": "g (float[a] x, int32 s) => (int32[b] y) <int32 o = {0}, int32 l = {1}> { y = Range(o, s, l) }",
    "branch": "g (float[a] x, int64 s) => (float[a] y) <int64 k = {16000}> { c = Equal(s, k) y = If (c) <"
    "then_branch = t () => (float[a] p) { p = Neg(x) }, else_branch = e () => (float[a] q) { q = Exp(x) }> }",
    "inside a branch": "g (float[a] x, bool c, int64[1] s) => (float[b] y) { y = If (c) <"
    "then_branch = t () => (float[b] p) { p = Reshape(x, s) }, else_branch = e () => (float[a] q) { q = Exp(x) }> }",
    "trip count": "g (float[a] x, int64 s) => (float[a] y) <bool c = {1}> { y = Loop (s, c, x) <body = body "
    "(int64 i, bool d, float[a] v) => (bool d, float[a] w) { w = Neg(v) }> }",
}


@pytest.mark.parametrize("text", CASES.values(), ids=CASES)
def test_inputs_whose_values_decide_shapes_or_branches_are_found_with_the_node(text: str) -> None:
    found = find_shape_inputs(parse(text))
    assert "s" in found
    assert "node" in found["s"]


@pytest.mark.parametrize(
    "text",
    [
        "g (float[a, 4] x, int64[a] s) => (float[b, 4] y) { y = Gather(x, s) }",
        "g (float[4] x, float[2] s) => (float[2] y) <int64[1] z = {0}, int64[1] o = {2}> "
        "{ t = Slice(x, z, o) y = Add(t, s) }",
        "g (int64[a, b] s) => (int64[c] y) <int64[1] m = {-1}> { t = Shape(s) y = Reshape(s, m) }",
        "g (float[a] x, int64[a] s) => (int64[b] y) { t = Shape(s) y = Expand(s, t) }",
    ],
    ids=["indices", "floats", "shape only", "its own shape"],
)
def test_inputs_that_only_hold_data_are_not(text: str) -> None:
    assert find_shape_inputs(parse(text)) == {}
