from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from graph_models import ops
from rewrite_checks import count, normalised, specialised

from trtforge.graph.native import OnnxNative

X = np.arange(8, dtype=np.float32).reshape(2, 4) - 3

BRANCHES = """<then_branch = tb () => (float[N, 4] a) { a = Neg(x) },
    else_branch = eb () => (float[N, 4] b) { b = Exp(x) }>"""


@pytest.fixture(scope="module")
def native() -> Iterator[OnnxNative]:
    with OnnxNative() as child:
        yield child


@pytest.mark.parametrize(("flag", "op"), [(1, "Neg"), (0, "Exp")])
def test_constant_condition_takes_its_branch(native: OnnxNative, flag: int, op: str) -> None:
    body = f"g (float[N, 4] x) => (float[N, 4] y) <bool c = {{{flag}}}> {{ y = If(c){BRANCHES} }}"
    graph, report = normalised(body, native, {"x": X})
    assert ops(graph) == [op] and report.num_control_flow == 1
    assert report.notes == (
        f"If 'If_0' always takes its {'then' if flag else 'else'}_branch, which stands in its place",
    )


def test_condition_of_the_run_stays(native: OnnxNative) -> None:
    body = f"g (bool c, float[N, 4] x) => (float[N, 4] y) {{ y = If(c){BRANCHES} }}"
    graph, report = normalised(body, native, {"x": X, "c": np.array(True)}, {"x": X, "c": np.array(False)})
    assert ops(graph) == ["If"] and report.num_control_flow == 0


def test_comparison_of_ranks_is_decided_by_inference(native: OnnxNative) -> None:
    """What TorchScript writes around an LSTM: nested, with branches of different rank and values from outside."""
    body = """g (float[N, 4] x) => (float[] y) <int64 three = {3}, int64 two = {2}> {
        s = Shape(x) r = Size(s) c = Equal(r, two)
        h = If(c) <then_branch = t1 () => (float[] a) { ax = Constant<value_ints = [0]>() a = Unsqueeze(x, ax) },
                   else_branch = e1 () => (float[] b) { b = Identity(x) }>
        hs = Shape(h) hr = Size(hs) c2 = Equal(hr, three)
        y = If(c2) <then_branch = t2 () => (float[] p) {
                p = If(c) <then_branch = t3 () => (float[] q) { q = Add(h, x) },
                           else_branch = e3 () => (float[] q2) { q2 = Neg(h) }> },
            else_branch = e2 () => (float[] o) { o = Exp(x) }> }"""
    graph, report = normalised(body, native, {"x": X})
    assert ops(graph) == ["Unsqueeze", "Add"] and report.num_control_flow == 3


def test_nested_branches_keep_what_they_read_from_outside(native: OnnxNative) -> None:
    body = """g (bool c, float[N, 4] x) => (float[N, 4] y, float[N, 4] z) <bool t = {1}> {
        k = Relu(x)
        y, z = If(c) <then_branch = tb () => (float[N, 4] a, float[N, 4] a2) {
                a = If(t) <then_branch = t2 () => (float[N, 4] d) { e = Neg(k) d = Add(e, x) },
                           else_branch = e2 () => (float[N, 4] f) { f = Exp(k) }>
                a2 = Identity(a) },
            else_branch = eb () => (float[N, 4] b, float[N, 4] b2) { b = Exp(k) b2 = Neg(k) }> }"""
    graph, _ = normalised(body, native, {"x": X, "c": np.array(True)}, {"x": X, "c": np.array(False)})
    assert count(graph, "If") == 1 and ops(graph) == ["Relu", "If"]


def test_branch_that_gives_a_constant(native: OnnxNative) -> None:
    body = """g (float[N, 4] x) => (float[N, 4] y, float[2] z) <bool c = {1}, float[2] w = {1, 2}> {
        v = If(c) <then_branch = tb () => (float[2] a) { a = Constant<value = float[2] {3, 4}>() },
                   else_branch = eb () => (float[2] b) { b = Neg(w) }>
        z = Identity(v)
        y = Relu(x) }"""
    graph, _ = normalised(body, native, {"x": X})
    assert count(graph, "If") == 0


SQUEEZE_IF_ONE = """g (float[N, M, 4] x) => (float[] y) <int64 one = {1}, int64 i = {1}> {
    s = Shape(x) n = Gather(s, i) c = Equal(n, one)
    y = If(c) <then_branch = t () => (float[] a) { ax = Constant<value_ints = [1]>() a = Squeeze(x, ax) },
               else_branch = e () => (float[N, M, 4] b) { b = Exp(x) }> }"""


@pytest.mark.parametrize(("sizes", "op"), [((1, 1), "Squeeze"), ((2, 9), "Exp"), ((3, 3), "Exp")])
def test_profile_decides_whether_a_dim_is_one(native: OnnxNative, sizes: tuple[int, int], op: str) -> None:
    x = np.ones((2, sizes[0], 4), np.float32)
    graph, notes = specialised(SQUEEZE_IF_ONE, native, {"x": [(1, 8), sizes, (4, 4)]}, {"x": x})
    assert ops(graph) == [op] and sum(note.startswith("If ") for note in notes) == 1


def test_profile_that_allows_both_leaves_the_conditional(native: OnnxNative) -> None:
    x = np.ones((2, 3, 4), np.float32)
    graph, notes = specialised(SQUEEZE_IF_ONE, native, {"x": [(1, 8), (1, 9), (4, 4)]}, {"x": x}, {"x": x[:, :1]})
    assert count(graph, "If") == 1 and notes == ()
