"""Stored codes that no product reads."""

from __future__ import annotations

import numpy as np
from graph_models import graph_of, ops, run

from trtforge.graph.lint import fix, lint

LOOKUP = """g (int64[b,2] i, float[b,2,3] x) => (float[b,2,3] y, float[b,2,3] u)
    <uint8[4,3] t = {0, 1, 2, 250, 4, 5, 6, 7, 8, 9, 10, 255}, float s = {0.1}, uint8 z = {100},
     uint8[3] r = {1, 2, 255}> {
    [look] q = Gather(t, i) [first] e = DequantizeLinear(q, s, z) [row] d = DequantizeLinear(r, s, z)
    y = Add(e, x) u = Add(e, d) }"""


def test_asymmetric_tables_and_rows_become_floats_with_the_same_numbers() -> None:
    feeds = {"i": np.array([[0, 3], [2, 1]]), "x": np.ones((2, 2, 3), np.float32)}
    graph = graph_of(LOOKUP)
    expected = run(graph, feeds)
    fixed = fix(graph)
    assert {(entry.rule, entry.nodes, entry.what) for entry in fixed} == {
        ("unsigned-zero-point", ("first",), "the table that it reads is stored as float32; same numbers"),
        ("unsigned-zero-point", ("row",), "stored as float32; same numbers"),
    }
    assert ops(graph) == ["Gather", "Add", "Add"] and not lint(graph)
    for found, before in zip(run(graph, feeds), expected, strict=True):
        np.testing.assert_array_equal(found, before)
    assert fix(graph) == []


def test_symmetric_tables_stay_codes() -> None:
    graph = graph_of(LOOKUP.replace("uint8", "int8").replace("250", "-50").replace("255", "-1").replace("{100}", "{0}"))
    assert all("float32" not in entry.what for entry in fix(graph))
    assert any(node.op == "DequantizeLinear" for node in graph.nodes)


def test_a_table_is_found_behind_other_layout_ops() -> None:
    body = LOOKUP.replace("[first] e = DequantizeLinear(q, s, z)", "p = Transpose(q) e0 = DequantizeLinear(p, s, z)")
    body = body.replace("y = Add(e, x)", "e = Transpose(e0) y = Add(e, x)")
    feeds = {"i": np.array([[0, 3], [2, 1]]), "x": np.ones((2, 2, 3), np.float32)}
    graph = graph_of(body)
    expected = run(graph, feeds)
    fix(graph)
    assert not any(node.op == "DequantizeLinear" for node in graph.nodes)
    for found, before in zip(run(graph, feeds), expected, strict=True):
        np.testing.assert_array_equal(found, before)
