from __future__ import annotations

import re

import numpy as np
import onnx
from graph_models import graph_of, parse, run

from trtforge.graph.edit import all_graphs, all_nodes
from trtforge.graph.names import UniqueNames, drop_false_dim_names, make_names_unique, shorten_names
from trtforge.graph.protos import all_bodies
from trtforge.graph.protos import all_nodes as all_proto_nodes

HOSTILE = "x]\nName: fake, LayerType: gemm, Inputs: [\x1f"
SHADOWING = """g (float[2] x, bool c) => (float[2] y) {
    a = Neg(x)
    y = If (c) <then_branch = tb () => (float[2] t) { a = Add(x, x) t = Exp(a) },
                else_branch = eb () => (float[2] t) { a = Mul(a, x) t = Exp(a) }> }"""


def test_empty_node_names_say_the_operator() -> None:
    graph = graph_of("g (float[2] x) => (float[2] y) { a = Relu(x) y = Exp(a) }")
    assert make_names_unique(graph) == 2
    assert [node.name for node in graph.nodes] == ["Relu_0", "Exp_1"]


def test_repeated_node_names_get_a_free_number() -> None:
    graph = graph_of("g (float[2] x) => (float[2] y) { a = Relu(x) b = Neg(a) c = Abs(b) y = Exp(c) }")
    for node, name in zip(graph.nodes, ["n", "n", "n_1", "n"], strict=True):
        node.name = name
    assert make_names_unique(graph) == 2
    assert [node.name for node in graph.nodes] == ["n", "n_2", "n_1", "n_3"]


def test_unique_names_stay() -> None:
    graph = graph_of("g (float[2] x) => (float[2] y) { a = Relu(x) y = Exp(a) }")
    graph.nodes[0].name, graph.nodes[1].name = HOSTILE, "b"
    assert make_names_unique(graph) == 0
    assert graph.nodes[0].name == HOSTILE


def test_names_of_subgraphs_become_unique_and_the_numbers_stay() -> None:
    """ONNX Runtime itself refuses a model with shadowed names."""
    graph = graph_of(SHADOWING)
    make_names_unique(graph)
    tensors = {id(t): t.name for g in all_graphs(graph) for n in g.nodes for t in [*n.inputs, *n.outputs]}
    assert len(set(tensors.values())) == len(tensors)
    nodes = [node.name for node in all_nodes(graph)]
    assert len(set(nodes)) == len(nodes)
    x = np.array([1, 2], np.float32)
    np.testing.assert_allclose(run(graph, {"x": x, "c": np.array(True)})[0], np.exp(x + x), rtol=1e-6)
    np.testing.assert_allclose(run(graph, {"x": x, "c": np.array(False)})[0], np.exp(-x * x), rtol=1e-6)


def test_short_names_cover_all_but_the_ports_and_map_back() -> None:
    model = parse("g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { a = Add(x, w) y = Relu(a) }")
    model.graph.node[0].name, model.graph.node[1].name = HOSTILE, ""
    names = shorten_names(model)
    assert names.nodes == {"n0": HOSTILE, "n1": ""}
    assert names.tensors == {"t0": "w", "t1": "a"}
    assert [list(node.input) + list(node.output) for node in model.graph.node] == [["x", "t0", "t1"], ["t1", "y"]]
    assert [tensor.name for tensor in model.graph.initializer] == ["t0"]


def test_ports_called_like_short_names_are_not_taken() -> None:
    model = parse("g (float[2] t0, float[2] n1) => (float[2] t1) { a = Add(t0, n1) t1 = Relu(a) }")
    names = shorten_names(model)
    assert names.tensors == {"t2": "a"} and list(names.nodes) == ["n0", "n2"]
    np.testing.assert_array_equal(run(model, {"t0": np.ones(2, np.float32), "n1": np.ones(2, np.float32)})[0], [2, 2])


def test_a_tensor_that_has_another_ones_short_name_is_not_mixed_up() -> None:
    model = parse("g (float[2] x) => (float[2] y) { t1 = Neg(x) t0 = Exp(t1) y = Sub(t1, t0) }")
    x = np.array([1, 2], np.float32)
    (expected,) = run(model, {"x": x})
    assert shorten_names(model).tensors == {"t0": "t1", "t1": "t0"}
    np.testing.assert_array_equal(run(model, {"x": x})[0], expected)


def test_subgraphs_are_renamed_in_their_scope() -> None:
    model = parse("""g (float[2] x, bool c) => (float[2] y) {
        a = Neg(x)
        y = If (c) <then_branch = tb () => (float[2] t) <float[2] w = {5, 6}> { b = Add(a, w) t = Exp(b) },
                    else_branch = eb () => (float[2] t) { b = Mul(a, x) t = Abs(b) }> }""")
    x = np.array([1, 2], np.float32)
    expected = [run(model, {"x": x, "c": np.array(flag)})[0] for flag in (True, False)]
    names = shorten_names(model)
    assert sorted(names.tensors.values()) == ["a", "b", "b", "t", "t", "w"]
    assert all(re.fullmatch(r"n\d+", node.name) for node in all_proto_nodes(model))
    for flag, value in zip((True, False), expected, strict=True):
        np.testing.assert_array_equal(run(model, {"x": x, "c": np.array(flag)})[0], value)


def test_inner_name_that_shadows_an_outer_one_gets_its_own() -> None:
    model = parse(SHADOWING)
    names = shorten_names(model)
    assert list(names.tensors.values()).count("a") == 3
    branches = [attribute.g for attribute in model.graph.node[1].attribute]
    outer = model.graph.node[0].output[0]
    assert branches[1].node[0].input[0] == outer != branches[1].node[0].output[0]


def test_functions_are_renamed_in_their_own_scope() -> None:
    model = parse(
        """g (float[2] x) => (float[2] y) { a = trtforge.f(x) y = Neg(a) }
        <domain: "trtforge", opset_import: ["": 23]> f (x) => (a) { b = Exp(x) a = Add(b, x) }""",
        domains=', "trtforge": 1',
    )
    x = np.array([1, 2], np.float32)
    (expected,) = run(model, {"x": x})
    names = shorten_names(model)
    assert [node.name for node in all_proto_nodes(model)] == ["n0", "n1", "n2", "n3"]
    assert model.functions[0].input[0] != "x" and sorted(names.tensors.values()) == ["a", "a", "b", "x"]
    np.testing.assert_array_equal(run(model, {"x": x})[0], expected)


def test_types_and_annotations_follow_their_tensors() -> None:
    model = parse("g (float[2] x) => (float[2] y) <float[2] a> { a = Neg(x) y = Exp(a) }")
    model.graph.value_info.append(onnx.helper.make_tensor_value_info(HOSTILE, 1, [2]))
    note = model.graph.quantization_annotation.add(tensor_name="a")
    note.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="x")
    shorten_names(model)
    assert [info.name for info in model.graph.value_info] == ["t0"]
    assert (note.tensor_name, note.quant_parameter_tensor_names[0].value) == ("t0", "x")
    assert not any(HOSTILE in str(body) for body in all_bodies(model))


def test_external_weights_are_renamed_without_their_data() -> None:
    model = parse("g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = Add(x, w) }")
    tensor = model.graph.initializer[0]
    tensor.ClearField("float_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="gone.bin")
    assert shorten_names(model).tensors == {"t0": "w"}
    assert tensor.external_data[0].value == "gone.bin"


def test_taken_names_get_a_number() -> None:
    names = UniqueNames(graph_of("g (float[2] x) => (float[2] y) { [n] y = Neg(x) }"))
    assert [names.tensor("x"), names.tensor("x"), names.tensor("new"), names.node("n")] == ["x_1", "x_2", "new", "n_1"]
    assert names.node("x") == "x"


def test_names_inside_subgraphs_are_taken() -> None:
    names = UniqueNames(graph_of(SHADOWING.replace("a = Add", "[inner] b = Add")))
    assert (names.tensor("b"), names.node("inner")) == ("b_1", "inner_1")


def test_dim_names_that_cannot_mean_one_size_are_dropped() -> None:
    model = parse("g (float[b, p, q] x, float[b, p] z) => (float[b, p] y) { y = Identity(z) }")
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "?"
    ranges = {"x": [(1, 3, 4), (1, 3, 4), (2, 5, 6)], "z": [(1, 3), (1, 3), (2, 7)]}
    assert drop_false_dim_names(model, [ranges]) == ("p", "?")
    named = [[dim.dim_param for dim in port.type.tensor_type.shape.dim] for port in model.graph.input]
    assert named == [["b", "", ""], ["b", ""]]
