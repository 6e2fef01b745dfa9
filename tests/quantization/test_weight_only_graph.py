from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import onnxruntime
import pytest
from quant_cases import graph_from_text, node_of, normal, ops

from trtforge.errors import InputError
from trtforge.graph.edit import copy_graph
from trtforge.graph.save import save_model
from trtforge.manifest import WeightStorage
from trtforge.quantization.cast import cast_graph
from trtforge.quantization.emulation import emulate_bfloat16
from trtforge.quantization.formats import INT4, INT8
from trtforge.quantization.op_types import BFLOAT16
from trtforge.quantization.weight_only import plan_weight_only
from trtforge.quantization.weight_only_graph import choose_weights
from trtforge.quantization.weight_storage import weight_storage
from trtforge.recipe import QuantRecipe

MLP = """g (float[b, 128] x) => (float[b, 32] y) {
    [up] h = MatMul(x, w1)
    [act] r = Relu(h)
    [down] y = Gemm<transB=1>(r, w2, bias)
}"""


def model_of(graph):
    """The checked model as trtforge writes it: onnx-graphsurgeon's own export cannot pack 4-bit constants."""
    with TemporaryDirectory() as folder:
        save_model(graph, Path(folder) / "model.onnx")
        model = onnx.load(Path(folder) / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    return model


def run(graph, **feeds):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model_of(graph).SerializeToString(), options).run(None, feeds)


def mlp():
    return graph_from_text(MLP, w1=normal(128, 256), w2=normal(32, 256, seed=1), bias=normal(32, seed=2))


def store(graph, number_format=INT4, rows=None, dtype=np.float32):
    placement = plan_weight_only(graph, QuantRecipe(), number_format)
    progress = []
    stored = choose_weights(graph, placement, number_format, rows or {}, dtype, lambda *note: progress.append(note))
    return stored, stored.insert(graph), progress


def spiky(count, width):
    """Rows with a channel in 64 that is 300 times as large."""
    return (normal(count, width, seed=5) * np.where(np.arange(width) % 64 == 7, 300.0, 1.0)).astype(np.float32)


def test_int4_blocks_lie_along_k_in_either_layout():
    graph = mlp()
    store(graph)
    up, down = (node_of(graph, name).inputs[1].inputs[0] for name in ("up", "down"))
    assert (up.op, up.attrs) == ("DequantizeLinear", {"axis": 0, "block_size": 128})
    assert (up.inputs[0].dtype, up.inputs[0].shape, up.inputs[1].shape) == (INT4.dtype, (128, 256), (1, 256))
    assert down.attrs == {"axis": 1, "block_size": 128}
    assert (down.inputs[0].shape, down.inputs[1].shape) == ((32, 256), (32, 2))
    assert ops(graph) == ["DequantizeLinear", "MatMul", "Relu", "DequantizeLinear", "Gemm"]
    model_of(graph)


@pytest.mark.parametrize(
    ("text", "shape", "axis"),
    [
        ("y = MatMul(x, w)", (128, 64), 1),
        ("y = Gemm<transB=1>(x, w)", (64, 128), 0),
        ("r = Reshape(x, image) y = Conv(r, w)", (64, 32, 2, 2), 0),
        ("r = Reshape(x, image) y = ConvTranspose(r, w)", (32, 64, 2, 2), 1),
    ],
)
def test_int8_error_is_half_a_step_of_each_channel_unless_it_is_clipped(text, shape, axis):
    weight = normal(*shape) * np.geomspace(0.01, 10, shape[axis]).reshape(
        [-1 if i == axis else 1 for i in range(len(shape))]
    )
    weight = weight.astype(np.float32)
    graph = graph_from_text(f"g (float[b, 128] x) => (y) {{ {text} }}", w=weight, image=np.array([0, 32, 2, 2]))
    for index, node in enumerate(graph.nodes):
        node.name = f"n{index}"
    _, report, _ = store(graph, INT8, dtype=np.float16)
    dq = next(node for node in graph.nodes if node.op == "DequantizeLinear")
    assert dq.attrs == {"axis": axis}
    scale = dq.inputs[1].values.reshape([-1 if i == axis else 1 for i in range(weight.ndim)])
    error = np.abs(dq.inputs[0].values.astype(np.float32) * scale - weight)
    assert (error <= np.maximum(0.5001 * scale, np.abs(weight) - 126.99 * scale)).all()
    assert report.weights == ("w",)
    model_of(graph)


def test_stored_graph_computes_the_product_with_the_stored_weight():
    graph, x = mlp(), normal(16, 128, seed=3)
    stored, _, _ = store(graph)
    w1 = stored.weights["w1", 1].codes.astype(np.float32) * stored.weights["w1", 1].scales
    scales = np.repeat(stored.weights["w2", 0].scales, 128, axis=1)
    w2 = stored.weights["w2", 0].codes.astype(np.float32) * scales
    expected = np.maximum(x @ w1, 0) @ w2.T + normal(32, seed=2)
    assert np.allclose(run(graph, x=x)[0], expected, rtol=1e-4, atol=1e-3)
    # 4 bits: 15 steps over about 5 standard deviations.
    exact = run(mlp(), x=x)[0]
    assert np.abs(expected - exact).max() < 0.25 * np.abs(exact).max()


@pytest.mark.parametrize(("dtype", "type_name"), [(np.float16, "float16"), (BFLOAT16, "bfloat16")])
@pytest.mark.parametrize("number_format", [INT4, INT8], ids=["int4", "int8"])
def test_cast_changes_no_scale(number_format, dtype, type_name):
    graph, x = mlp(), normal(16, 128, seed=3)
    store(graph, number_format, dtype=dtype)
    expected = run(copy_graph(graph), x=x)[0]
    before = [node.inputs[1].values for node in graph.nodes if node.op == "DequantizeLinear"]
    cast_graph(graph, type_name)
    after = [node.inputs[1].values for node in graph.nodes if node.op == "DequantizeLinear"]
    assert [values.dtype for values in after] == [np.dtype(dtype)] * 2
    assert all(np.array_equal(old, new.astype(np.float32)) for old, new in zip(before, after, strict=True))
    twin = emulate_bfloat16(graph) if dtype is BFLOAT16 else graph
    assert np.abs(run(twin, x=x)[0] - expected).max() < 0.02 * np.abs(expected).max()


def test_scaled_channels_are_divided_out_by_one_mul_for_all_readers():
    text = "g (float[b, 256] x) => (q, k, side) { [q] q = MatMul(x, wq) [k] k = MatMul(x, wk) [side] side = Neg(x) }"
    graph = graph_from_text(text, wq=normal(256, 64), wk=normal(256, 64, seed=1))
    stored, report, _ = store(graph, rows={"x": spiky(600, 256)}, dtype=np.float16)
    assert list(stored.factors) == ["x"]
    assert ops(graph).count("Mul") == 1
    mul = node_of(graph, "q").inputs[0].inputs[0]
    assert (mul.op, mul.inputs[0].name, node_of(graph, "k").inputs[0].inputs[0]) == ("Mul", "x", mul)
    assert node_of(graph, "side").inputs[0].name == "x"
    assert report.notes == (
        "int4 weights are chosen by the layers' outputs on rows of the calibration data; the channels of 1 activations "
        "are scaled for it",
    )
    x = spiky(650, 256)[600:]
    exact = x @ normal(256, 64)
    plain = graph_from_text(text, wq=normal(256, 64), wk=normal(256, 64, seed=1))
    store(plain, dtype=np.float16)
    errors = [np.square(run(found, x=x)[0] - exact).sum() for found in (graph, plain)]
    assert errors[0] < 0.25 * errors[1]


def test_weight_that_two_activations_multiply_is_stored_once_and_unscaled():
    text = "g (float[b, 256] x) => (y) { [a] h = MatMul(x, w) [b] y = MatMul(h, w) }"
    graph = graph_from_text(text, w=normal(256, 256, scale=0.05))
    stored, report, _ = store(graph, rows={"x": spiky(600, 256), "h": spiky(600, 256)})
    assert (stored.factors, report.weights, list(stored.weights)) == ({}, ("w",), [("w", 1)])
    assert node_of(graph, "a").inputs[1] is node_of(graph, "b").inputs[1]


def test_weight_used_elsewhere_keeps_its_float_copy():
    graph = graph_from_text(
        "g (float[b, 128] x, int64[n] i) => (y, e) { [mm] y = MatMul(x, w) [look] e = Gather(w, i) }",
        w=normal(128, 64),
    )
    store(graph)
    assert np.array_equal(node_of(graph, "look").inputs[0].values, normal(128, 64))


def test_without_data_it_says_so_and_what_data_would_do():
    _, report, _ = store(mlp())
    assert report.notes == (
        "int4 weights are rounded to nearest, because there is no calibration data; with it, they are chosen by the "
        "layers' outputs",
    )


def test_with_rows_that_ask_for_no_scaling_it_says_how_weights_were_chosen():
    stored, report, _ = store(mlp(), rows={"x": normal(64, 128), "r": np.abs(normal(64, 256))})
    assert stored.factors == {}
    assert report.notes == ("int4 weights are chosen by the layers' outputs on rows of the calibration data",)


def test_progress_counts_groups_of_weights():
    _, _, progress = store(mlp())
    assert progress == [("1 of 2 groups of weights", 1, 2), ("2 of 2 groups of weights", 2, 2)]


def test_weight_too_small_for_a_scale_stays_float():
    graph = graph_from_text(MLP, w1=normal(128, 256) * np.float32(1e-5), w2=normal(32, 256), bias=normal(32))
    _, report, _ = store(graph, dtype=np.float16)
    assert report.nodes == ("down",)
    assert report.kept_float[0].node == "up"
    assert "float16 scales start at 6.104e-05" in report.kept_float[0].reason


def test_weight_with_nan_is_refused():
    weight = normal(128, 256)
    weight[3, 4] = np.nan
    with pytest.raises(InputError, match="the weight 'w1' of node 'up' holds NaN or infinity"):
        store(graph_from_text(MLP, w1=weight, w2=normal(32, 256), bias=normal(32)))


def test_one_choice_can_be_stored_in_several_copies_of_the_graph():
    graph = mlp()
    placement = plan_weight_only(graph, QuantRecipe(), INT4)
    stored = choose_weights(graph, placement, INT4, {"x": normal(64, 128)}, np.float16, lambda *_: None)
    copies = [copy_graph(graph) for _ in range(2)]
    for copy in copies:
        stored.insert(copy)
    first, second = (model_of(copy).SerializeToString(deterministic=True) for copy in copies)
    assert first == second
    assert ops(graph) == ["MatMul", "Relu", "Gemm"]


def test_storage_counts_codes_and_scales_against_the_float_type():
    graph = mlp()
    store(graph, dtype=np.float16)
    cast_graph(graph, "float16")
    numbers, blocks = 128 * 256 + 32 * 256, 256 + 32 * 2
    expected = WeightStorage(count=2, bytes=numbers // 2 + 2 * blocks, float_bytes=2 * numbers)
    assert weight_storage(graph) == {"int4": expected}
    assert weight_storage(mlp()) == {}
