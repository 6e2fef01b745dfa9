from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

from trtforge.graph.cut import Scissors, ShapeTable
from trtforge.graph.load import load_model
from trtforge.graph.normalise import normalise
from trtforge.graph.save import save_model
from trtforge.graph.shapes import infer_shapes_at
from trtforge.profile import ShapeRange

TEXT = """<ir_version: 10, opset_import: ["" : 23]>
g (float[b,8] x, float[b,8] z) => (float[b,n] y, float[b,8] side) {
    [first] a = Relu(x)
    [side] side = Neg(a)
    [product] p = MatMul(a, w)
    [join] j = Add(p, z)
    [shape] s = Shape(j)
    [head] h = Gather(s, zero)
    [target] t = Concat<axis = 0>(h, rest)
    [reshape] r = Reshape(j, t)
    [last] y = ReduceMax<keepdims = 0>(r, axis)
}"""
SIZES = [{"x": (batch, 8), "z": (batch, 8)} for batch in (1, 4, 8)]


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    model = onnx.parser.parse_model(TEXT)
    constants = {
        "w": np.eye(8, dtype=np.float32),
        "zero": np.array([0]),
        "rest": np.array([4, 2]),
        "axis": np.array([2]),
    }
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in constants.items())
    path = tmp_path_factory.mktemp("cut") / "m.onnx"
    onnx.save(model, path)
    return normalise(load_model(path).graph)[0]


@pytest.fixture(scope="module")
def scissors(graph):
    table = ShapeTable(("p",), (tuple(infer_shapes_at(graph, sizes) for sizes in SIZES),), ({},))
    return Scissors(graph, table)


def places(graph, *names):
    return [index for index, node in enumerate(graph.nodes) if node.name in names]


def names_at(graph, indices):
    return [graph.nodes[index].name for index in indices]


def test_a_part_has_the_inputs_outputs_and_ranges_of_its_place(graph, scissors):
    part = scissors.cut(places(graph, "product", "join"))
    assert [(tensor.name, tensor.shape) for tensor in part.graph.inputs] == [("a", [None, 8]), ("z", ["b", 8])]
    assert [tensor.name for tensor in part.graph.outputs] == ["j"]
    assert part.profiles.first.inputs == {
        "a": ShapeRange((1, 8), (4, 8), (8, 8)),
        "z": ShapeRange((1, 8), (4, 8), (8, 8)),
    }
    assert [node.name for node in graph.nodes][:3] == ["first", "side", "product"], "the graph itself is left alone"


def test_a_part_computes_what_the_whole_computes_there(graph, scissors, tmp_path):
    x, z = np.random.default_rng(0).normal(size=(2, 4, 8)).astype(np.float32)
    a = np.maximum(x, 0)
    save_model(scissors.cut(places(graph, "product", "join")).graph, tmp_path / "part.onnx")
    onnx.checker.check_model(tmp_path / "part.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "part.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(None, {"a": a, "z": z})[0], a + z)


def test_what_the_whole_gives_stays_an_output(graph, scissors):
    part = scissors.cut(places(graph, "first", "side"))
    assert [tensor.name for tensor in part.graph.outputs] == ["a", "side"]


def test_the_makers_of_shapes_come_along(graph, scissors):
    closed = scissors.close(places(graph, "reshape"))
    assert set(names_at(graph, closed)) == {"shape", "head", "target", "reshape"}
    assert names_at(graph, scissors.close(places(graph, "join"))) == ["join"]


def test_neighbours_make_or_read_what_a_node_reads_or_makes(graph, scissors):
    found = scissors.neighbours(places(graph, "product"))
    assert set(names_at(graph, sorted(found))) == {"first", "product", "join"}


def test_a_tensor_of_unknown_shape_is_no_input(graph):
    shapes = tuple({"x": (1, 8), "z": (1, 8)} for _ in range(3))
    scissors = Scissors(graph, ShapeTable(("p",), (shapes,), ({},)))
    assert names_at(graph, scissors.close(places(graph, "join"))) == ["first", "product", "join"]


def test_sizes_that_shrink_as_the_input_grows_are_no_range():
    table = ShapeTable(("p",), (({"t": (9,)}, {"t": (5,)}, {"t": (2,)}),), ({},))
    assert table.ranges("t") is None


def test_a_node_with_a_subgraph_reads_what_its_branches_read(tmp_path):
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 23]>
        g (float[b,8] x, bool c) => (float[b,8] y) {
            [made] a = Relu(x) [other] o = Neg(x)
            [pick] y = If(c) <then_branch = t () => (float[b,8] u) { [inside] u = Add(a, o) },
                              else_branch = e () => (float[b,8] v) { v = Neg(a) }>
        }""")
    onnx.save(model, tmp_path / "m.onnx")
    graph, _ = normalise(load_model(tmp_path / "m.onnx").graph)
    sizes = [infer_shapes_at(graph, {"x": (batch, 8), "c": ()}) for batch in (1, 4, 8)]
    scissors = Scissors(graph, ShapeTable(("p",), (tuple(sizes),), ({},)))
    part = scissors.cut(places(graph, "pick"))
    assert {tensor.name for tensor in part.graph.inputs} == {"a", "o", "c"}
    save_model(part.graph, tmp_path / "part.onnx")
    onnx.checker.check_model(tmp_path / "part.onnx", full_check=True)
