from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from graph_models import graph_of, ops
from rewrite_checks import count, normalised

from trtforge.graph.control_flow.sequences import SEQUENCE_OPS
from trtforge.graph.native import OnnxNative
from trtforge.graph.normalise import normalise

X = np.arange(12, dtype=np.float32).reshape(2, 6)


@pytest.fixture(scope="module")
def native() -> Iterator[OnnxNative]:
    with OnnxNative() as child:
        yield child


@pytest.mark.parametrize(
    "nodes",
    [
        "s = SequenceConstruct(x, z) y = SequenceAt(s, one)",
        "s = SequenceConstruct(x, z) y = SequenceAt(s, last)",
        "s = SequenceConstruct(x, z) s2 = Identity(s) y = ConcatFromSequence<axis = 1>(s2)",
        "s = SequenceConstruct(x, z) y = ConcatFromSequence<axis = 0, new_axis = 1>(s)",
        "s = SequenceEmpty<dtype = 1>() s1 = SequenceInsert(s, x) s2 = SequenceInsert(s1, z, zero) "
        "y = ConcatFromSequence<axis = 1>(s2)",
        "s = SequenceConstruct(x, z, x) s1 = SequenceErase(s, one) s2 = SequenceErase(s1) y = SequenceAt(s2, zero)",
        "s = SplitToSequence<axis = 1>(x, two) y = SequenceAt(s, last)",
        "s = SplitToSequence<axis = 1>(x, sizes) y = SequenceAt(s, one)",
        "s = SplitToSequence<axis = 1, keepdims = 0>(x) y = SequenceAt(s, one)",
        "s = SplitToSequence<axis = 1>(x) y = ConcatFromSequence<axis = 0>(s)",
        "s = SequenceConstruct(x, z) q = SequenceMap(s, x) <body = b (float[N, 6] a, float[N, 6] k) => (float[N, 6] o) "
        "{ e = Neg(a) o = Add(e, k) }> y = ConcatFromSequence<axis = 1>(q)",
        "s = SequenceConstruct(x, z) n = SequenceLength(s) f = Cast<to = 1>(n) y = Add(x, f)",
    ],
)
def test_known_sequences_go(native: OnnxNative, nodes: str) -> None:
    body = f"""g (float[N, 6] x) => (float[] y) <int64 zero = {{0}}, int64 one = {{1}}, int64 last = {{-1}},
        int64 two = {{2}}, int64[2] sizes = {{2, 4}}> {{ z = Neg(x) {nodes} }}"""
    graph, report = normalised(body, native, {"x": X})
    assert count(graph, *SEQUENCE_OPS) == 0 and report.num_control_flow


def test_list_filled_by_a_loop(native: OnnxNative) -> None:
    """The list comprehension of a scripted module."""
    body = """g (float[N, 6] x) => (float[N, 12] y) <int64 n = {2}, bool t = {1}> {
        e = SequenceEmpty<dtype = 1>()
        s = Loop(n, t, e) <body = b (int64 i, bool c, seq(float[N, 6]) l) => (bool d, seq(float[N, 6]) m) {
            d = Identity(c) f = Cast<to = 1>(i) v = Mul(x, f) m = SequenceInsert(l, v) }>
        y = ConcatFromSequence<axis = 1>(s) }"""
    graph, _ = normalised(body, native, {"x": X})
    assert count(graph, *SEQUENCE_OPS, "Loop") == 0


@pytest.mark.parametrize(
    "nodes",
    ["s = SequenceConstruct(x, x) y = SequenceAt(s, i)", "s = SplitToSequence<axis = 0>(x) y = SequenceAt(s, i)"],
)
def test_what_only_the_run_knows_stays(native: OnnxNative, nodes: str) -> None:
    graph, _ = normalised(
        f"g (float[N, 6] x, int64 i) => (float[] y) {{ {nodes} }}", native, {"x": X, "i": np.array(1)}
    )
    assert ops(graph)[-1] == "SequenceAt"


def test_position_outside_stays(native: OnnxNative) -> None:
    body = "g (float[N, 6] x) => (float[] y) <int64 i = {5}> { s = SequenceConstruct(x, x) y = SequenceAt(s, i) }"
    assert count(normalise(graph_of(body), native=native)[0], "SequenceAt") == 1
