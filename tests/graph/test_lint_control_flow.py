"""What no pass could resolve is named; the messages, and that TensorRT-RTX really refuses each of the graphs."""

from __future__ import annotations

import pytest
from graph_models import graph_of
from lint_build import RtxBuild

from trtforge.errors import InputError, TrtForgeError
from trtforge.graph.lint import lint
from trtforge.graph.normalise import normalise

SQUEEZE = """g (float[N, 4] x) => (float[] y) <int64 one = {1}, int64 zero = {0}> { s = Shape(x) n = Gather(s, zero)
    c = Equal(n, one) y = If(c)
        <then_branch = t () => (float[4] a) { ax = Constant<value_ints = [0]>() a = Squeeze(x, ax) },
         else_branch = e () => (float[N, 4] b) { b = Exp(x) }> }"""
SEQUENCE = "g (float[N, 4] x, int64 i) => (float[] y) { z = Neg(x) s = SequenceConstruct(x, z) y = SequenceAt(s, i) }"
GROWING = """g (float[N, 4] x) => (float[] y) <bool t = {1}, int64 zero = {0}> { s = Shape(x) n = Gather(s, zero)
    y = Loop(n, t, x) <body = b (int64 i, bool c, float[N, 4] a) => (bool d, float[A, B, C] z) {
        d = Identity(c) ax = Constant<value_ints = [0]>() z = Unsqueeze(a, ax) }> }"""
UNLIMITED = """g (float[N, 4] x) => (float[N, 4] y, float[K, N, 4] w) <float lim = {10}, bool t = {1}> {
    y, w = Loop(, t, x) <body = b (int64 i, bool c, float[N, 4] a) => (bool d, float[N, 4] z, float[N, 4] q) {
        z = Add(a, a) q = Neg(z) m = ReduceMax<keepdims = 0>(z) d = Less(m, lim) }> }"""


@pytest.mark.parametrize(
    ("body", "rule", "what", "why"),
    [
        (SQUEEZE, "branch-ranks", "the branches of If 'If_3' give 'y' 1 and 2 dims", "follows from input 'x'"),
        (SEQUENCE, "sequences", "no operator SequenceConstruct (node 'SequenceConstruct_1')", "only at run time"),
        (GROWING, "loop-values", "Loop 'Loop_2' changes the shape of a value that it carries: 'z'", "one shape"),
        (UNLIMITED, "loop-limit", "Loop 'Loop_0' has no trip count", "more than a count"),
    ],
)
def test_unresolved_control_flow_is_named(rtx_build: RtxBuild, body: str, rule: str, what: str, why: str) -> None:
    graph, _ = normalise(graph_of(body))
    findings = [finding for finding in lint(graph) if finding.rule == rule]
    assert what in findings[0].what and why in findings[0].why and findings[0].fix
    assert findings[0].severity == "error"
    with pytest.raises(TrtForgeError):
        rtx_build(graph)


@pytest.mark.parametrize(
    "body",
    [
        """g (bool c, float[N, 4] x) => (float[N, 4] y) { y = If(c)
            <then_branch = t () => (float[N, 4] a) { a = Neg(x) },
             else_branch = e () => (float[N, 4] b) { b = Exp(x) }> }""",
        UNLIMITED.replace("Loop(, t", "Loop(n, t").replace("float lim", "int64 n = {30}, float lim"),
        """g (float[2] s, float[T, 2] x) => (float[2] y, float[T, 2] z) { y, z = Scan<num_scan_inputs = 1,
            body = b (float[2] a, float[2] i) => (float[2] o, float[2] p) { o = Add(a, i) p = Neg(o) }>(s, x) }""",
        """g (float[N, 4] x) => (float[N, 4] y) <int64 n = {1000}> {
            y = Loop(n, , x) <body = b (int64 i, bool c, float[N, 4] a) => (bool d, float[N, 4] z) {
                d = Identity(c) z = Tanh(a) }> }""",
    ],
)
def test_control_flow_that_stays_is_built(rtx_build: RtxBuild, body: str) -> None:
    graph, _ = normalise(graph_of(body))
    assert any(node.op in ("If", "Loop", "Scan") for node in graph.nodes)
    assert lint(graph) == []
    rtx_build(graph)


@pytest.mark.parametrize("missing", ["then_branch", "else_branch", "inputs"])
def test_a_damaged_conditional_is_left_to_normalisation(missing: str) -> None:
    graph = graph_of(SQUEEZE)
    node = next(node for node in graph.nodes if node.op == "If")
    if missing == "inputs":
        node.inputs.clear()
    else:
        del node.attrs[missing]
    assert [finding for finding in lint(graph) if finding.rule == "branch-ranks"] == []
    with pytest.raises(InputError, match="lacks"):
        normalise(graph)
