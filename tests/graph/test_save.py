from __future__ import annotations

import errno
from pathlib import Path
from typing import IO

import ml_dtypes
import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from graph_models import graph_of, model_of, parse, run, write

from trtforge.errors import InputError, UnavailableError
from trtforge.graph import save
from trtforge.graph.load import load_model
from trtforge.graph.save import save_model, skeleton_from_graph

MATMUL = "g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}> { y = MatMul(x, w) }"
BRANCHES = """g (float[2] x, bool c) => (float[2] y) <float[2] k = {3, 4}> {
    y = If (c) <then_branch = a () => (float[2] t) { t = Add(x, k) },
                else_branch = b () => (float[2] e) { e = Mul(x, k) }> }"""


def test_equal_graphs_give_equal_bytes(tmp_path: Path) -> None:
    domains = ', "com.b": 1, "com.a": 2'
    body = "g (float[2] x) => (float[2] y) { a = com.a.F(x) b = com.b.G(a) y = Relu(b) }"
    save_model(graph_of(body, domains=domains), tmp_path / "1.onnx")
    save_model(graph_of(body, domains=domains), tmp_path / "2.onnx")
    assert (tmp_path / "1.onnx").read_bytes() == (tmp_path / "2.onnx").read_bytes()
    imports = [(entry.domain, entry.version) for entry in onnx.load(tmp_path / "1.onnx").opset_import]
    assert imports == [("", 23), ("com.a", 2), ("com.b", 1)]


def test_a_domain_without_an_import_gets_one() -> None:
    graph = graph_of("g (float[2] x) => (float[2] y) { y = Relu(x) }")
    graph.nodes[0].domain = "com.z"
    assert [entry.domain for entry in model_of(graph).opset_import] == ["", "com.z"]


def test_saving_twice_through_a_file_changes_nothing(tmp_path: Path) -> None:
    path = write(parse(BRANCHES), tmp_path)
    save_model(load_model(path).graph, tmp_path / "1.onnx")
    save_model(load_model(tmp_path / "1.onnx").graph, tmp_path / "2.onnx")
    assert (tmp_path / "1.onnx").read_bytes() == (tmp_path / "2.onnx").read_bytes()


def test_producer_and_ir_version_are_ours(tmp_path: Path) -> None:
    model = parse(MATMUL, ir=8)
    model.producer_name, model.producer_version = "pytorch", "2.9"
    save_model(load_model(write(model, tmp_path)).graph, tmp_path / "out.onnx")
    saved = onnx.load(tmp_path / "out.onnx")
    assert (saved.producer_name, saved.producer_version, saved.ir_version) == ("trtforge", "", 10)


@pytest.mark.parametrize("embed_bytes", [save.EMBED_BYTES, 0])
def test_metadata_is_written_whether_or_not_the_weights_are_embedded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embed_bytes: int
) -> None:
    monkeypatch.setattr(save, "EMBED_BYTES", embed_bytes)
    entries = (("b", "2"), ("a", "1"), ("b", "3"))
    written = save_model(graph_of(MATMUL), tmp_path / "m.onnx", entries)
    assert len(written) == (1 if embed_bytes else 2)
    assert load_model(tmp_path / "m.onnx").metadata == entries


def test_local_functions_survive() -> None:
    graph = graph_of(
        """g (float[2] x) => (float[2] y) { y = trtforge.f(x) }
        <domain: "trtforge", opset_import: ["": 23]> f (a) => (b) {
            c = Constant<value = float {2}>() b = Mul(a, c) }""",
        domains=', "trtforge": 1',
    )
    saved = model_of(graph)
    assert [(function.domain, function.name) for function in saved.functions] == [("trtforge", "f")]
    np.testing.assert_array_equal(run(saved, {"x": np.array([1, 2], np.float32)})[0], [2, 4])


def test_attention_of_opset_23_runs_with_the_saved_ir_version() -> None:
    graph = graph_of("""g (float[1, 2, 4, 8] q, float[1, 2, 4, 8] k, float[1, 2, 4, 8] v) => (float[1, 2, 4, 8] y) {
        y = Attention(q, k, v) }""")
    zeros = np.zeros((1, 2, 4, 8), np.float32)
    assert run(graph, {"q": zeros, "k": zeros, "v": zeros + 2})[0].min() == 2


@pytest.mark.parametrize(
    "dtype", ["int4", "uint4", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float16", "bool"]
)
def test_constant_of_any_type_comes_back_as_it_was(tmp_path: Path, dtype: str) -> None:
    array = np.array([1, 0, 3], np.float32).astype(np.dtype(dtype))
    tensor = gs.Constant("w", array)
    port = gs.Variable("x", np.float32, [1])
    result = gs.Variable("y", np.float32, [3])
    cast = gs.Node("Cast", attrs={"to": 1}, inputs=[tensor], outputs=[wide := gs.Variable("wide")])
    add = gs.Node("Add", inputs=[port, wide], outputs=[result])
    save_model(gs.Graph([cast, add], [port], [result], opset=23), tmp_path / "m.onnx")
    loaded = load_model(tmp_path / "m.onnx").graph.nodes[0].inputs[0].values
    assert loaded.dtype == array.dtype
    np.testing.assert_array_equal(loaded.astype(np.float32), array.astype(np.float32))
    (stored,) = onnx.load(tmp_path / "m.onnx").graph.initializer
    assert stored.data_type == onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    assert len(stored.raw_data) == (2 if "int4" in dtype else 3 * np.dtype(dtype).itemsize)


def test_outer_constant_is_stored_once_whatever_reads_it() -> None:
    saved = model_of(graph_of(BRANCHES))
    assert [tensor.name for tensor in saved.graph.initializer] == ["k"]
    branches = [attribute.g for attribute in saved.graph.node[0].attribute]
    assert [list(branch.initializer) for branch in branches] == [[], []]
    x = np.array([1, 2], np.float32)
    np.testing.assert_array_equal(run(saved, {"x": x, "c": np.array(True)})[0], [4, 6])
    np.testing.assert_array_equal(run(saved, {"x": x, "c": np.array(False)})[0], [3, 8])


def test_inner_constants_of_one_name_stay_apart() -> None:
    graph = graph_of("""g (float[2] x, bool c) => (float[2] y) {
        y = If (c) <then_branch = a () => (float[2] t) <float[2] k = {3, 4}> { t = Add(x, k) },
                    else_branch = b () => (float[2] e) <float[2] k = {5, 6}> { e = Mul(x, k) }> }""")
    x = np.array([1, 2], np.float32)
    np.testing.assert_array_equal(run(graph, {"x": x, "c": np.array(True)})[0], [4, 6])
    np.testing.assert_array_equal(run(graph, {"x": x, "c": np.array(False)})[0], [5, 12])


def test_large_weights_go_to_one_aligned_data_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "EMBED_BYTES", 1)
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 30, 30)).astype(np.float32)
    small = np.ones(30, np.float32)
    graph = graph_of("g (float[N, 30] x) => (float[N, 30] y) { a = MatMul(x, x) b = MatMul(a, a) y = Add(b, b) }")
    for node, name, array in zip(graph.nodes, ("w1", "w2", "bias"), (first, second, small), strict=True):
        node.inputs[1] = gs.Constant(name, array)
    files = save_model(graph, tmp_path / "big.onnx")
    assert [file.name for file in files] == ["big.onnx", "big.onnx.data"]
    proto = onnx.load(tmp_path / "big.onnx", load_external_data=False)
    offsets = {t.name: {e.key: e.value for e in t.external_data}.get("offset") for t in proto.graph.initializer}
    assert offsets == {"w1": "0", "w2": "4096", "bias": None}
    loaded = load_model(tmp_path / "big.onnx").graph
    for node, array in zip(loaded.nodes, (first, second, small), strict=True):
        np.testing.assert_array_equal(node.inputs[1].values, array)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["big.onnx", "big.onnx.data"]


@pytest.mark.parametrize("is_embedded", [True, False])
def test_large_packed_weight_keeps_its_values(
    is_embedded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save, "EMBED_BYTES", 2**20 if is_embedded else 1)
    array = (np.arange(4096) % 8 - 4).astype(ml_dtypes.int4)
    graph = graph_of("g (float[1] x) => (float[4096] y) <float[1] s = {1}> { w = Cast<to = 1>(x) y = Add(x, w) }")
    graph.nodes[0].inputs[0] = gs.Constant("w4", array)
    files = save_model(graph, tmp_path / "m.onnx")
    assert 2048 <= files[-1].stat().st_size < 2048 + (500 if is_embedded else 1)
    loaded = load_model(tmp_path / "m.onnx").graph.nodes[0].inputs[0].values
    np.testing.assert_array_equal(loaded.astype(int), array.astype(int))


def test_model_can_be_saved_over_the_data_it_was_mapped_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "EMBED_BYTES", 1)
    weight = np.random.default_rng(0).normal(size=(30, 30)).astype(np.float32)
    graph = graph_of("g (float[N, 30] x) => (float[N, 30] y) { y = MatMul(x, x) }")
    graph.nodes[0].inputs[1] = gs.Constant("w", weight)
    save_model(graph, tmp_path / "m.onnx")
    for _ in range(2):
        save_model(load_model(tmp_path / "m.onnx").graph, tmp_path / "m.onnx")
    np.testing.assert_array_equal(load_model(tmp_path / "m.onnx").graph.nodes[0].inputs[1].values, weight)


def test_skeleton_has_types_but_no_weights() -> None:
    weight = np.ones((30, 30), np.float32)
    graph = graph_of("g (float[N, 30] x) => (float[N, 30] y) { y = MatMul(x, x) }")
    graph.nodes[0].inputs[1] = gs.Constant("w", weight)
    skeleton = skeleton_from_graph(graph)
    (stub,) = skeleton.model.graph.initializer
    assert (list(stub.dims), stub.data_type, stub.raw_data) == ([30, 30], 1, b"")
    assert skeleton.weights["w"] is weight
    assert graph.nodes[0].inputs[1].values is weight


def test_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="cannot be written") as caught:
        save_model(graph_of(MATMUL), tmp_path / "no" / "m.onnx")
    assert caught.value.why == "No such file or directory"


def test_full_disk_leaves_the_old_file_and_no_partial_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.onnx").write_bytes(b"old")

    def fail(model: onnx.ModelProto, weights: object, file: IO[bytes]) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("trtforge.graph.save.write_model", fail)
    with pytest.raises(UnavailableError) as caught:
        save_model(graph_of(MATMUL), tmp_path / "m.onnx")
    assert caught.value.why == "No space left on device" and caught.value.fix
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("m.onnx", b"old")]


def test_graph_that_onnx_cannot_hold_is_refused(tmp_path: Path) -> None:
    graph = graph_of(MATMUL)
    graph.nodes[0].attrs["what"] = object()
    with pytest.raises(InputError, match="cannot be written as ONNX"):
        save_model(graph, tmp_path / "m.onnx")
    assert graph.nodes[0].inputs[1].values.shape == (2, 2)


def test_two_weights_of_one_name_keep_their_own_values() -> None:
    graph = graph_of("""g (float[1] x, bool c) => (float[300] y) {
        y = If (c) <then_branch = a () => (float[300] t) { t = Add(x, x) },
                    else_branch = b () => (float[300] e) { e = Mul(x, x) }> }""")
    for number, branch in enumerate(graph.nodes[0].attrs.values(), start=2):
        branch.nodes[0].inputs[1] = gs.Constant("w", np.full(300, number, np.float32))
    x = np.array([5], np.float32)
    assert run(graph, {"x": x, "c": np.array(True)})[0][0] == 7
    assert run(graph, {"x": x, "c": np.array(False)})[0][0] == 15
