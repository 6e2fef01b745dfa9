from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from graph_models import parse, run, write

from trtforge.errors import InputError
from trtforge.graph.load import load_model
from trtforge.graph.normalise import normalise
from trtforge.limits import DEFAULT_LIMITS, Limits

RELU = "g (float[N, 4] x) => (float[N, 4] y) { y = Relu(x) }"
MATMUL = "g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}> { y = MatMul(x, w) }"


def refusal(path: Path, limits: Limits = DEFAULT_LIMITS) -> str:
    with pytest.raises(InputError) as caught:
        load_model(path, limits)
    assert caught.value.what and caught.value.fix
    return str(caught.value)


def test_a_model_loads_with_its_name_opset_and_digest(tmp_path: Path) -> None:
    path = write(parse(MATMUL, opset=17, ir=8), tmp_path, "tiny.onnx")
    model = load_model(path)
    assert (model.name, model.opset, model.ir_version) == ("tiny", 17, 8)
    assert model.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    weight = model.graph.nodes[0].inputs[1]
    assert isinstance(weight, gs.Constant)
    np.testing.assert_array_equal(weight.values, [[1, 2], [3, 4]])


def test_missing_file_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "no.onnx")


def test_directory_is_refused(tmp_path: Path) -> None:
    assert "is a directory" in refusal(tmp_path)


def test_device_file_is_refused() -> None:
    assert "not a regular file" in refusal(Path("/dev/null"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    path = write(parse(RELU), tmp_path)
    path.chmod(0)
    assert "cannot be read" in refusal(path)


def test_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"")
    assert "is empty" in refusal(tmp_path / "m.onnx")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "a PNG image"),
        (b"PK\x03\x04\x14\0\0\0", "a zip archive"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"this is a text file\n", "no ONNX model"),
    ],
)
def test_other_formats_are_refused_by_name(tmp_path: Path, content: bytes, named: str) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    message = refusal(tmp_path / "m.onnx")
    assert "is not an ONNX file" in message and named in message


@pytest.mark.parametrize("cut", [2, 10, 60])
def test_truncated_model_is_refused(tmp_path: Path, cut: int) -> None:
    path = write(parse(MATMUL), tmp_path)
    path.write_bytes(path.read_bytes()[:-cut])
    assert re.search("truncated|does not say which ONNX opset", refusal(path))


def test_model_without_nodes_is_refused(tmp_path: Path) -> None:
    model = parse(RELU)
    del model.graph.node[:]
    assert "holds no nodes" in refusal(write(model, tmp_path))
    model.ClearField("graph")
    assert "holds no graph" in refusal(write(model, tmp_path))


def test_model_without_outputs_is_refused(tmp_path: Path) -> None:
    model = parse(RELU)
    del model.graph.output[:]
    assert "has no outputs" in refusal(write(model, tmp_path))


def test_model_without_default_opset_is_refused(tmp_path: Path) -> None:
    model = parse(RELU)
    model.opset_import[0].domain = "com.example"
    assert "does not say which ONNX opset" in refusal(write(model, tmp_path))


def test_too_large_file_names_the_limit_to_raise(tmp_path: Path) -> None:
    path = write(parse(MATMUL), tmp_path)
    size = path.stat().st_size
    assert f"--limit model_bytes={size}" in refusal(path, Limits(model_bytes=size - 1))
    assert load_model(path, Limits(model_bytes=size)).name == "model"


def test_nodes_of_subgraphs_count_against_the_limit(tmp_path: Path) -> None:
    path = write(
        parse("""g (float[2] x, bool c) => (float[2] y) {
            y = If (c) <then_branch = a () => (float[2] t) { t = Relu(x) },
                        else_branch = b () => (float[2] e) { e = Neg(x) }> }"""),
        tmp_path,
    )
    assert "--limit model_nodes=3" in refusal(path, Limits(model_nodes=2))


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = write(parse(RELU), tmp_path)
    path.write_bytes(path.read_bytes().replace(b"Relu", b"Re\xffu"))
    message = refusal(path)
    assert "not UTF-8" in message and "op_type" in message


@pytest.mark.parametrize("name", ["a\nb", "a\x1fb", "\u2028"])
def test_port_with_control_characters_is_refused(tmp_path: Path, name: str) -> None:
    model = parse(RELU)
    model.graph.input[0].name = model.graph.node[0].input[0] = name
    assert "rename the input" in refusal(write(model, tmp_path))
    model = parse(RELU)
    model.graph.output[0].name = model.graph.node[0].output[0] = name
    assert "rename the output" in refusal(write(model, tmp_path))


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("g (seq(float[N]) x) => (float[N] y) { i = Constant<value_int = 0>() y = SequenceAt(x, i) }", "sequence"),
        ("g (float[N] x) => (seq(float[N]) y) { y = SequenceConstruct(x) }", "sequence"),
        ("g (optional(float[N]) x) => (float[N] y) { y = OptionalGetElement(x) }", "optional"),
    ],
)
def test_port_that_is_no_tensor_is_named(tmp_path: Path, body: str, named: str) -> None:
    message = refusal(write(parse(body), tmp_path))
    assert "is not a tensor" in message and named in message


def test_input_without_element_type_is_refused(tmp_path: Path) -> None:
    model = parse(RELU)
    model.graph.input[0].type.tensor_type.elem_type = 0
    assert "'x' has no element type" in refusal(write(model, tmp_path))


def test_negative_size_is_an_open_one(tmp_path: Path) -> None:
    model = parse(RELU)
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = -1
    assert load_model(write(model, tmp_path)).graph.inputs[0].shape == ["N", None]


def test_two_inputs_of_one_name_are_refused(tmp_path: Path) -> None:
    model = parse(RELU)
    model.graph.input.append(model.graph.input[0])
    assert "two inputs named 'x'" in refusal(write(model, tmp_path))


def test_tensor_that_nothing_produces_is_named_with_its_reader(tmp_path: Path) -> None:
    model = parse(RELU)
    model.graph.node[0].name = "act"
    model.graph.node[0].input[0] = "ghost"
    message = refusal(write(model, tmp_path))
    assert "'act' (Relu)" in message and "'ghost'" in message


def test_dangling_read_in_a_subgraph_is_named(tmp_path: Path) -> None:
    model = parse("""g (float[2] x, bool c) => (float[2] y) {
        y = If (c) <then_branch = a () => (float[2] t) { t = Relu(ghost) },
                    else_branch = b () => (float[2] e) { e = Neg(x) }> }""")
    assert "'ghost'" in refusal(write(model, tmp_path))


def test_output_that_nothing_produces_is_named(tmp_path: Path) -> None:
    model = parse(RELU)
    model.graph.output[0].name = "z"
    assert "output 'z'" in refusal(write(model, tmp_path))


def test_tensor_with_two_producers_is_named(tmp_path: Path) -> None:
    model = parse("g (float[2] x) => (float[2] y) { a = Relu(x) a = Neg(x) y = Exp(a) }")
    assert "tensor 'a' is produced twice" in refusal(write(model, tmp_path))


def test_cycle_is_named(tmp_path: Path) -> None:
    model = parse("g (float[2] x) => (float[2] y) { y = Exp(b) c = Neg(b) a = Add(x, c) b = Relu(a) }")
    for node, name in zip(model.graph.node, "ynab", strict=True):
        node.name = name
    message = refusal(write(model, tmp_path))
    assert "the graph has a cycle: 'n' (Neg) -> 'a' (Add) -> 'b' (Relu) -> 'n' (Neg)" in message


def test_node_that_needs_itself_is_named(tmp_path: Path) -> None:
    model = parse("g (float[2] x) => (float[2] y) { a = Add(x, a) y = Exp(a) }")
    assert "the graph has a cycle: '' (Add) -> '' (Add)" in refusal(write(model, tmp_path))


def test_long_cycle_is_shortened(tmp_path: Path) -> None:
    nodes = " ".join(f"t{i + 1} = Relu(t{i})" for i in range(1, 20))
    model = parse(f"g (float[2] x) => (float[2] y) {{ t1 = Add(x, t20) {nodes} y = Exp(t20) }}")
    message = refusal(write(model, tmp_path))
    assert "(14 more nodes) -> '' (Add)" in message and message.count("Relu") == 5


def test_domain_that_is_not_imported_is_named(tmp_path: Path) -> None:
    model = parse("g (float[2] x) => (float[2] y) { y = com.example.F(x) }")
    model.graph.node[0].name = "odd"
    message = refusal(write(model, tmp_path))
    assert "node 'odd' is a com.example.F, which nothing defines" in message


def test_function_that_the_model_does_not_define_is_named(tmp_path: Path) -> None:
    body = """g (float[2] x) => (float[2] y) { a = local.f(x) y = local.h(a) }
        <domain: "local", opset_import: ["": 23]> f (a) => (b) { b = Neg(a) }"""
    assert "is a local.h, which nothing defines" in refusal(write(parse(body, domains=', "local": 1'), tmp_path))


def test_unsorted_nodes_are_sorted(tmp_path: Path) -> None:
    model = parse("g (float[2] x) => (float[2] y) { y = Exp(b) b = Relu(a) a = Neg(x) }")
    graph = load_model(write(model, tmp_path)).graph
    assert [node.op for node in graph.nodes] == ["Neg", "Relu", "Exp"]


def test_attribute_of_an_unsupported_kind_is_refused(tmp_path: Path) -> None:
    model = parse(RELU)
    attribute = model.graph.node[0].attribute.add(name="kind", type=onnx.AttributeProto.TYPE_PROTO)
    attribute.tp.tensor_type.elem_type = 1
    assert "attribute 'kind'" in refusal(write(model, tmp_path))


def test_repeated_attribute_is_refused(tmp_path: Path) -> None:
    model = parse(RELU)
    for _ in range(2):
        model.graph.node[0].attribute.add(name="alpha", type=onnx.AttributeProto.FLOAT, f=1.0)
    assert "two attributes 'alpha'" in refusal(write(model, tmp_path))


def test_attribute_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    model = parse(RELU)
    model.graph.node[0].attribute.add(name="mode", type=onnx.AttributeProto.STRING, s=b"\xff")
    assert "attribute 'mode'" in refusal(write(model, tmp_path))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dims": [2, 3]}, "holds 16 bytes where its shape needs 24"),
        ({"dims": [-1, 2]}, "negative size"),
        ({"dims": [1] * 40}, "--limit tensor_dims=40"),
        ({"dims": [2**40, 2**40]}, "declares"),
        ({"data_type": 99}, "unknown element type 99"),
        ({"data_type": 0}, "unknown element type 0"),
    ],
)
def test_inline_tensor_that_contradicts_itself_is_refused(tmp_path: Path, change: dict, named: str) -> None:
    model = parse(MATMUL)
    tensor = onnx.numpy_helper.from_array(np.ones((2, 2), np.float32), "w")
    for field, value in change.items():
        if field == "dims":
            tensor.dims[:] = value
        else:
            setattr(tensor, field, value)
    model.graph.initializer[0].CopyFrom(tensor)
    message = refusal(write(model, tmp_path))
    assert "initializer 'w'" in message and named in message


def test_typed_values_of_wrong_number_are_refused(tmp_path: Path) -> None:
    model = parse(MATMUL)
    del model.graph.initializer[0].float_data[3:]
    assert "holds 3 values where its shape needs 4" in refusal(write(model, tmp_path))


def test_tensor_in_an_attribute_is_checked(tmp_path: Path) -> None:
    model = parse("g (float[2] x) => (float[2] y) { c = Constant<value = float[2] {1, 2}>() y = Add(x, c) }")
    model.graph.node[0].attribute[0].t.dims[0] = 5
    assert "attribute 'value' of node" in refusal(write(model, tmp_path))


def test_tensor_in_a_function_is_checked(tmp_path: Path) -> None:
    model = parse(
        """g (float[2] x) => (float[2] y) { y = f.add(x) }
        <domain: "f", opset_import: ["": 23]> add (a) => (b) {
            c = Constant<value = float[2] {1, 2}>() b = Add(a, c) }""",
        domains=', "f": 1',
    )
    model.functions[0].node[0].attribute[0].t.dims[0] = 5
    assert "attribute 'value' of node" in refusal(write(model, tmp_path))


def test_initializer_that_is_listed_as_input_is_no_input(tmp_path: Path) -> None:
    model = parse(MATMUL, opset=8, ir=3)
    model.graph.input.append(onnx.helper.make_tensor_value_info("w", 1, [2, 2]))
    assert [tensor.name for tensor in load_model(write(model, tmp_path)).graph.inputs] == ["x"]


@pytest.mark.parametrize("indices", [np.array([1, 2]), np.array([[0, 1], [1, 0]])])
def test_sparse_initializer_becomes_dense(tmp_path: Path, indices: np.ndarray) -> None:
    model = parse(MATMUL)
    del model.graph.initializer[:]
    sparse = model.graph.sparse_initializer.add(dims=[2, 2])
    sparse.values.CopyFrom(onnx.numpy_helper.from_array(np.array([5, 7], np.float32), "w"))
    sparse.indices.CopyFrom(onnx.numpy_helper.from_array(indices.astype(np.int64), "w_indices"))
    graph = load_model(write(model, tmp_path)).graph
    np.testing.assert_array_equal(graph.nodes[0].inputs[1].values, [[0, 5], [7, 0]])


def test_sparse_index_outside_the_shape_is_refused(tmp_path: Path) -> None:
    model = parse(MATMUL)
    del model.graph.initializer[:]
    sparse = model.graph.sparse_initializer.add(dims=[2, 2])
    sparse.values.CopyFrom(onnx.numpy_helper.from_array(np.array([5], np.float32), "w"))
    sparse.indices.CopyFrom(onnx.numpy_helper.from_array(np.array([4]), "w_indices"))
    assert "do not fit its shape [2, 2]" in refusal(write(model, tmp_path))


def test_graph_keeps_its_numbers(tmp_path: Path) -> None:
    model = parse(MATMUL)
    x = np.array([[1, 2], [3, 4]], np.float32)
    (expected,), (found,) = run(model, {"x": x}), run(load_model(write(model, tmp_path)).graph, {"x": x})
    np.testing.assert_array_equal(found, expected)


def test_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = parse("g (bfloat16[2] x) => (bfloat16[2] y) { y = Identity(x) }")
    load_model(write(model, tmp_path))
    assert capfd.readouterr() == ("", "")


def test_file_that_protobuf_cannot_hold_is_refused_whatever_the_limit(tmp_path: Path) -> None:
    with (tmp_path / "m.onnx").open("wb") as file:
        file.truncate(2**31)
    assert "external data" in refusal(tmp_path / "m.onnx", Limits(model_bytes=2**40))


def test_dangling_read_in_a_function_is_named(tmp_path: Path) -> None:
    model = parse(
        """g (float[2] x) => (float[2] y) { y = f.add(x) }
        <domain: "f", opset_import: ["": 23]> add (a) => (b) { b = Add(a, ghost) }""",
        domains=', "f": 1',
    )
    assert "'ghost'" in refusal(write(model, tmp_path))


def test_external_sparse_initializer_is_refused(tmp_path: Path) -> None:
    model = parse(MATMUL)
    del model.graph.initializer[:]
    sparse = model.graph.sparse_initializer.add(dims=[2, 2])
    sparse.values.CopyFrom(onnx.TensorProto(name="w", data_type=1, dims=[1], data_location=1))
    sparse.values.external_data.add(key="location", value="w.bin")
    sparse.indices.CopyFrom(onnx.numpy_helper.from_array(np.array([0]), "w_indices"))
    (tmp_path / "w.bin").write_bytes(bytes(4))
    assert "stored outside the ONNX file" in refusal(write(model, tmp_path))


def test_element_type_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    model = parse(RELU)
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("extra", 1, [2]))
    model.graph.value_info[0].type.tensor_type.elem_type = 77
    assert "cannot be read as a graph" in refusal(write(model, tmp_path))


WEIGHT = np.linspace(-1, 1, 1024, dtype=np.float32).reshape(32, 32)
BRANCHES = """g (float[N, 32] x, bool c) => (float[N, 32] y, float[N, 32] z) {
    y = MatMul(x, w)
    z = If(c) <then_branch = t () => (float[N, 32] p) { p = MatMul(x, w) },
               else_branch = e () => (float[N, 32] q) { q = Neg(x) }> }"""


def stored(array: np.ndarray, name: str = "w") -> onnx.TensorProto:
    return onnx.numpy_helper.from_array(array, name)


def constants(graph: gs.Graph) -> list[np.ndarray]:
    held = [value for node in graph.nodes for value in (*node.inputs, *node.attrs.values())]
    return [value.values for value in held if isinstance(value, gs.Constant)]


def test_tensor_of_an_attribute_keeps_its_values_when_a_weight_has_its_name(tmp_path: Path) -> None:
    model = parse("g (float[N, 32] x) => (float[N, 32] y) { a = MatMul(x, w) c = Constant() y = MatMul(a, c) }")
    model.graph.initializer.append(stored(WEIGHT))
    model.graph.node[1].attribute.append(onnx.helper.make_attribute("value", stored(2 * WEIGHT)))
    found = constants(load_model(write(model, tmp_path)).graph)
    np.testing.assert_array_equal(found, [WEIGHT, 2 * WEIGHT])


def test_constant_of_an_inlined_function_keeps_its_values_when_a_weight_has_its_name(tmp_path: Path) -> None:
    body = """g (float[N, 32] x) => (float[N, 32] y) { a = MatMul(x, w) y = local.f(a) }
        <domain: "local", opset_import: ["": 23]> f (p) => (o) { w = Constant() o = MatMul(p, w) }"""
    model = parse(body, domains=', "local": 1')
    model.graph.initializer.append(stored(WEIGHT))
    model.functions[0].node[0].attribute.append(onnx.helper.make_attribute("value", stored(2 * WEIGHT)))
    graph, _ = normalise(load_model(write(model, tmp_path)).graph)
    np.testing.assert_array_equal(constants(graph), [WEIGHT, 2 * WEIGHT])


@pytest.mark.parametrize("hidden", ["w", "x"], ids=["another initializer", "an input"])
def test_initializer_of_a_subgraph_that_hides_another_tensor_is_refused(tmp_path: Path, hidden: str) -> None:
    model = parse(BRANCHES)
    model.graph.initializer.append(stored(WEIGHT))
    model.graph.node[1].attribute[0].g.initializer.append(stored(2 * WEIGHT, hidden))
    text = refusal(write(model, tmp_path))
    assert f"initializer '{hidden}' of subgraph 't' has the name of another tensor around it" in text


@pytest.mark.parametrize("outer", [WEIGHT, WEIGHT[:, :1]], ids=["cut out", "small"])
def test_copy_of_an_outer_initializer_in_a_subgraph_is_harmless(tmp_path: Path, outer: np.ndarray) -> None:
    model = parse(BRANCHES)
    model.graph.initializer.append(stored(outer))
    copy = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, outer.shape, outer.ravel())
    model.graph.node[1].attribute[0].g.initializer.append(copy)
    graph = load_model(write(model, tmp_path)).graph
    np.testing.assert_array_equal(constants(graph.nodes[1].attrs["then_branch"]), [outer])


def test_external_data_counts_where_raw_data_is_there_too(tmp_path: Path) -> None:
    model = parse("g (float[N, 32] x) => (float[N, 32] y) { y = MatMul(x, w) }")
    (tmp_path / "w.bin").write_bytes((2 * WEIGHT).tobytes())
    tensor = stored(WEIGHT)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="w.bin")
    model.graph.initializer.append(tensor)
    np.testing.assert_array_equal(constants(load_model(write(model, tmp_path)).graph), [2 * WEIGHT])


def test_raw_data_of_text_is_no_value(tmp_path: Path) -> None:
    model = parse("g (float[N] x) => (float[N] y, string[2] s) { y = Relu(x) s = Identity(t) }")
    tensor = onnx.helper.make_tensor("t", onnx.TensorProto.STRING, [2], [b"a", b"b"])
    tensor.raw_data = bytes(2048)
    model.graph.initializer.append(tensor)
    assert list(constants(load_model(write(model, tmp_path)).graph)[0].ravel()) == ["a", "b"]


@pytest.mark.parametrize("is_raw", [True, False])
def test_segment_of_a_tensor_is_refused(tmp_path: Path, is_raw: bool) -> None:
    model = parse("g (float[N, 32] x) => (float[N, 32] y) { y = MatMul(x, w) }")
    values = stored(WEIGHT) if is_raw else onnx.helper.make_tensor("w", 1, WEIGHT.shape, WEIGHT.ravel())
    values.segment.end = 1024
    model.graph.initializer.append(values)
    assert "initializer 'w' is one segment of a larger tensor" in refusal(write(model, tmp_path))
