from __future__ import annotations

import pytest
from graph_models import graph_of, ops

from trtforge.errors import InternalError
from trtforge.graph.edit import all_nodes, remove_dead_nodes, remove_nodes, replace_uses, sort_nodes

BRANCHES = """g (float[2] x, bool c) => (float[2] y) {
    a = Neg(x)
    dead = Abs(a)
    y = If (c) <then_branch = tb () => (float[2] t) { t = Add(a, x) unused = Exp(a) },
                else_branch = eb () => (float[2] e) { e = Mul(x, x) }> }"""


def test_dead_nodes_go_and_what_a_subgraph_reads_stays() -> None:
    graph = graph_of(BRANCHES)
    assert remove_dead_nodes(graph) == 2
    assert [node.op for node in all_nodes(graph)] == ["Neg", "If", "Add", "Mul"]
    assert [reader.op for reader in graph.nodes[0].outputs[0].outputs] == ["Add"]


def test_a_removed_node_takes_its_subgraphs_readers_along() -> None:
    graph = graph_of(BRANCHES)
    remove_nodes(graph, lambda node: node.op == "If")
    assert [reader.op for reader in graph.nodes[0].outputs[0].outputs] == ["Abs"]
    assert graph.outputs[0].inputs == []


def test_all_readers_move_to_another_tensor() -> None:
    graph = graph_of("g (float[2] x) => (float[2] y) { a = Neg(x) b = Add(a, a) y = Mul(a, b) }")
    old, new = graph.nodes[0].outputs[0], graph.inputs[0]
    assert replace_uses(old, new) == 3
    assert old.outputs == [] and len(new.outputs) == 4
    assert [tensor.name for tensor in graph.nodes[2].inputs] == ["x", "b"]


def test_sorting_moves_only_what_must_move() -> None:
    graph = graph_of("g (float[2] x) => (float[2] y) { a = Neg(x) b = Exp(x) c = Add(a, b) y = Relu(c) }")
    graph.nodes = [graph.nodes[index] for index in (2, 1, 0, 3)]
    sort_nodes(graph)
    assert ops(graph) == ["Exp", "Neg", "Add", "Relu"]


def test_a_node_comes_after_what_its_subgraph_reads() -> None:
    graph = graph_of(BRANCHES)
    graph.nodes = list(reversed(graph.nodes))
    sort_nodes(graph)
    assert ops(graph) == ["Neg", "If", "Abs"]


def test_cycle_made_by_a_pass_is_an_internal_error() -> None:
    graph = graph_of("g (float[2] x) => (float[2] y) { a = Neg(x) y = Relu(a) }")
    graph.nodes[0].inputs[0] = graph.nodes[1].outputs[0]
    with pytest.raises(InternalError, match="has a cycle"):
        sort_nodes(graph)
