from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs
from graph_models import graph_of, ops, run

from trtforge.graph.edit import all_nodes
from trtforge.graph.passes.cleanup import move_constants, remove_identities


def test_every_kind_of_constant_node_becomes_an_initializer() -> None:
    graph = graph_of("""g (float[2] x) => (float[2] y) {
        a = Constant<value = float[2] {1, 2}>() b = Constant<value_float = 3.0>()
        c = Constant<value_floats = [4.0, 5.0]>() d = Constant<value_int = 6>() e = Constant<value_ints = [7]>()
        f = Cast<to = 1>(d) h = Cast<to = 1>(e) y = Sum(x, a, b, c, f, h) }""")
    assert move_constants(graph) == 5
    found = [t.values.tolist() for node in graph.nodes for t in node.inputs if isinstance(t, gs.Constant)]
    assert found == [6, [7], [1, 2], 3, [4, 5]]
    assert run(graph, {"x": np.zeros(2, np.float32)})[0].tolist() == [21, 23]


def test_constant_node_that_gives_an_output_stays() -> None:
    graph = graph_of("""g (float[1] x, bool c) => (float[1] y) {
        y = If (c) <then_branch = tb () => (float[1] t) { t = Constant<value = float[1] {1}>() },
                    else_branch = eb () => (float[1] e) { k = Constant<value = float[1] {1}>() e = Add(x, k) }> }""")
    assert move_constants(graph) == 1
    assert [node.op for node in all_nodes(graph)] == ["If", "Constant", "Add"]


def test_text_constant_stays() -> None:
    graph = graph_of('g (string[1] x) => (bool[1] y) { k = Constant<value_string = "a">() y = Equal(x, k) }')
    assert move_constants(graph) == 0


def test_identity_between_nodes_goes() -> None:
    """Case 1."""
    graph = graph_of("g (float[2] x) => (float[2] y) { a = Neg(x) b = Identity(a) c = Identity(b) y = Exp(c) }")
    assert remove_identities(graph) == 2
    assert ops(graph) == ["Neg", "Exp"] and graph.nodes[1].inputs[0] is graph.nodes[0].outputs[0]


def test_identity_before_an_output_gives_its_name_to_the_producer() -> None:
    """Case 2; other readers follow."""
    graph = graph_of("g (float[2] x) => (float[2] y, float[2] z) { a = Neg(x) y = Identity(a) z = Exp(a) }")
    assert remove_identities(graph) == 1
    assert ops(graph) == ["Neg", "Exp"] and [tensor.name for tensor in graph.outputs] == ["y", "z"]
    x = np.array([0, 1], np.float32)
    assert run(graph, {"x": x})[0].tolist() == [0, -1]


def test_dropout_that_drops_nothing_goes() -> None:
    graph = graph_of("""g (float[2] x) => (float[2] y) <float r = {0.5}, bool off = {0}> {
        a = Neg(x) b = Dropout(a, r) c, unread = Dropout(b, r, off) y = Exp(c) }""")
    assert remove_identities(graph) == 2
    assert ops(graph) == ["Neg", "Exp"] and graph.nodes[1].inputs[0] is graph.nodes[0].outputs[0]


def test_dropout_that_trains_or_whose_mask_is_read_stays() -> None:
    graph = graph_of("""g (float[2] x, bool t) => (float[2] y, bool[2] m) <float r = {0.5}, bool on = {1}> {
        a = Dropout(x, r, on) b = Dropout(a, r, t) c, m = Dropout(b, r) d, n = Dropout(c, r) e = Not(n)
        y = Where(e, d, c) }""")
    assert remove_identities(graph) == 0
    assert ops(graph) == ["Dropout"] * 4 + ["Not", "Where"]


def test_identity_that_connects_a_port_or_two_outputs_stays() -> None:
    graph = graph_of("""g (float[2] x) => (float[2] y, float[2] z, float[2] a, float[2] k) <float[2] w = {1, 2}> {
        y = Identity(x) a = Neg(x) z = Identity(a) k = Identity(w) }""")
    assert remove_identities(graph) == 0
    assert ops(graph) == ["Identity", "Neg", "Identity", "Identity"]


def test_identity_that_gives_back_an_outer_tensor_stays() -> None:
    body = """g (float[2] x, bool c) => (float[2] y) { a = Neg(x)
        y = If (c) <then_branch = tb () => (float[2] t) { t = Identity(a) },
                    else_branch = eb () => (float[2] e) { n = Identity(a) e = Exp(n) }> }"""
    graph = graph_of(body)
    assert remove_identities(graph) == 1
    assert [node.op for node in all_nodes(graph)] == ["Neg", "If", "Identity", "Exp"]
    x = np.array([0, 1], np.float32)
    assert run(graph, {"x": x, "c": np.array(True)})[0].tolist() == [0, -1]


def test_two_outputs_from_one_tensor_keep_one_identity() -> None:
    graph = graph_of("g (float[2] x) => (float[2] y, float[2] z) { a = Neg(x) y = Identity(a) z = Identity(a) }")
    assert remove_identities(graph) == 1
    x = np.array([0, 1], np.float32)
    assert [out.tolist() for out in run(graph, {"x": x})] == [[0, -1], [0, -1]]
