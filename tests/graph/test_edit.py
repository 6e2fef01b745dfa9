from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs
import pytest
from graph_models import graph_of, ops, run

from trtforge.errors import InternalError
from trtforge.graph.edit import (
    InputEdits,
    all_nodes,
    copy_graph,
    is_onnx_op,
    pinned_names,
    reads_of,
    remove_dead_nodes,
    remove_nodes,
    replace_uses,
    sort_nodes,
    subgraphs_of,
)

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


def test_replaced_inputs_leave_both_lists_of_readers_right() -> None:
    graph = graph_of("g (float[2] x) => (float[2] y, float[2] z) <float[2] c = {1, 2}> { y = Add(x, c) z = Mul(x, c) }")
    add, mul = graph.nodes
    constant, other = add.inputs[1], gs.Constant("d", np.ones(2, np.float32))
    edits = InputEdits()
    edits.replace(add, 1, other)
    edits.apply()
    assert [node.op for node in constant.outputs] == ["Mul"]
    assert [node.op for node in other.outputs] == ["Add"]
    assert mul.inputs[1] is constant
    assert np.array_equal(run(graph, {"x": np.zeros(2, np.float32)})[0], np.ones(2))


def test_one_of_two_equal_inputs_of_a_node_can_be_replaced() -> None:
    graph = graph_of("g (float[2] x) => (float[2] y) { y = Mul(x, x) }")
    edits = InputEdits()
    edits.replace(graph.nodes[0], 1, gs.Constant("two", np.full(2, 2, np.float32)))
    edits.apply()
    assert len(graph.inputs[0].outputs) == 1
    assert np.array_equal(run(graph, {"x": np.ones(2, np.float32)})[0], np.full(2, 2))


def test_copy_keeps_sequences_and_leaves_the_original_alone() -> None:
    graph = graph_of(
        "g (float[2, 4] x) => (float[2, 4] y) { s = SplitToSequence(x) y = ConcatFromSequence<axis=0>(s) }"
    )
    copy = copy_graph(graph)
    copy.nodes[0].name = "changed"
    assert graph.nodes[0].name != "changed"
    assert run(copy, {"x": np.ones((2, 4), np.float32)})[0].shape == (2, 4)


def test_outputs_and_what_subgraphs_read_or_return_are_pinned() -> None:
    assert pinned_names(graph_of(BRANCHES)) == {"y", "a", "x", "t", "e"}


def test_only_the_default_domain_counts_as_onnx() -> None:
    graph = graph_of("g (float[2] x) => (float[2] y) { a = Neg(x) y = com.z.Neg(a) }", domains=', "com.z": 1')
    assert [is_onnx_op(node) for node in graph.nodes] == [True, False]
    graph.nodes[1].domain = "ai.onnx"
    assert is_onnx_op(graph.nodes[1])


def test_a_node_reads_what_its_bodies_read_and_return() -> None:
    graph = graph_of("""g (float[2] x, bool c) => (float[2] y) {
        a = Neg(x)
        b = Exp(x)
        y = If (c) <then_branch = tb () => (float[2] t) { t = If (c) <then_branch = td () => (float[2] u)
            { u = Add(a, x) }, else_branch = ed () => (float[2] v) { v = Abs(x) }> },
            else_branch = eb () => (float[2] e) { e = Abs(x) }> }""")
    node = graph.nodes[2]
    assert [tensor.name for tensor in reads_of(node)] == ["c", "t", "c", "u", "a", "x", "v", "x", "e", "x"]
    # A branch that gives an outer tensor as it is.
    branch = subgraphs_of(node)[1]
    branch.nodes.clear()
    branch.outputs = [graph.nodes[1].outputs[0]]
    graph.nodes = [graph.nodes[2], graph.nodes[0], graph.nodes[1]]
    sort_nodes(graph)
    assert ops(graph) == ["Neg", "Exp", "If"]
