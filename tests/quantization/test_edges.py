from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from quant_cases import graph_from_text, normal, run

from trtforge.quantization.edges import InputEdits, UniqueNames, copy_graph, is_float32


def test_replaced_inputs_leave_both_consumer_lists_right():
    graph = graph_from_text("g (float[4] x) => (y, z) { y = Add(x, c) z = Mul(x, c) }", c=normal(4))
    add, mul = graph.nodes
    constant, other = add.inputs[1], gs.Constant("d", np.ones(4, np.float32))
    edits = InputEdits()
    edits.replace(add, 1, other)
    edits.apply()
    assert [node.op for node in constant.outputs] == ["Mul"]
    assert [node.op for node in other.outputs] == ["Add"]
    assert mul.inputs[1] is constant
    assert np.array_equal(run(graph, x=np.zeros(4, np.float32))[0], np.ones(4))


def test_one_of_two_equal_inputs_of_a_node_can_be_replaced():
    graph = graph_from_text("g (float[4] x) => (y) { y = Mul(x, x) }")
    edits = InputEdits()
    edits.replace(graph.nodes[0], 1, gs.Constant("two", np.full(4, 2, np.float32)))
    edits.apply()
    assert len(graph.inputs[0].outputs) == 1
    assert np.array_equal(run(graph, x=np.ones(4, np.float32))[0], np.full(4, 2))


def test_copy_keeps_sequences_and_leaves_the_original_alone():
    graph = graph_from_text(
        "g (float[2, 4] x) => (float[2, 4] y) { s = SplitToSequence(x) y = ConcatFromSequence<axis=0>(s) }"
    )
    copy = copy_graph(graph)
    copy.nodes[0].name = "changed"
    assert graph.nodes[0].name != "changed"
    assert run(copy, x=normal(2, 4))[0].shape == (2, 4)


def test_taken_names_get_a_number():
    graph = graph_from_text("g (float[4] x) => (y) { [n] y = Neg(x) }")
    names = UniqueNames(graph)
    assert [names.tensor("x"), names.tensor("x"), names.tensor("new"), names.node("n")] == ["x_1", "x_2", "new", "n_1"]


def test_names_inside_subgraphs_are_taken():
    graph = graph_from_text(
        """g (bool c, float[4] x) => (float[4] y) {
            y = If(c) <then_branch = t () => (float[4] a) { [inner] a = Neg(x) },
                       else_branch = e () => (float[4] d) { d = Abs(x) }>
        }"""
    )
    names = UniqueNames(graph)
    assert (names.tensor("a"), names.node("inner")) == ("a_1", "inner_1")


def test_float32_is_recognised_by_its_known_type_only():
    assert is_float32(gs.Variable("a", np.float32))
    assert is_float32(gs.Variable("a", np.dtype(np.float32)))
    for dtype in (None, np.float16, onnx.TensorProto.BFLOAT16):
        assert not is_float32(gs.Variable("a", dtype))
