from __future__ import annotations

import re

import numpy as np
import pytest
from quant_cases import graph_from_text, model_of, node_of, normal, ops, run

from trtforge.errors import InputError
from trtforge.quantization.formats import FP8, INT8, QuantizedWeight
from trtforge.quantization.placement import KeptFloat, plan_placement
from trtforge.quantization.qdq import insert_qdq
from trtforge.recipe import QuantRecipe
from trtforge.target import BackendName

MLP = """g (float[b, 32] x) => (float[b, 64] y, float[b, 32] also) {
    [up] h = MatMul(x, w1)
    [act] r = Relu(h)
    [down] y = MatMul(r, w2)
    [side] also = Neg(x)
}"""


def mlp():
    return graph_from_text(MLP, w1=normal(32, 128), w2=normal(128, 64, seed=1))


def insert(graph, amax, dtype=np.float32, recipe=None, backend=BackendName.TENSORRT_RTX):
    return insert_qdq(graph, plan_placement(graph, {}, recipe or QuantRecipe(), backend), amax, dtype)


def dequantized(node):
    """The float weight that a node sees."""
    dq = node.inputs[1].inputs[0]
    values, scale = dq.inputs[0].values, dq.inputs[1].values
    shape = [1] * values.ndim
    if scale.ndim:
        shape[dq.attrs["axis"]] = -1
    return values.astype(np.float32) * scale.reshape(shape)


def test_activation_gets_quantize_and_dequantize_with_written_zero_zero_points():
    graph = mlp()
    insert(graph, {"x": 127 / 64, "r": 4.0})
    dq = node_of(graph, "up").inputs[0].inputs[0]
    q = dq.inputs[0].inputs[0]
    assert (q.op, dq.op, q.inputs[0].name) == ("QuantizeLinear", "DequantizeLinear", "x")
    for node in (q, dq):
        assert node.inputs[1].values.shape == ()
        assert node.inputs[2].values.dtype == np.int8
        assert node.inputs[2].values.tolist() == 0
    assert q.inputs[1].values == 1 / 64


def test_weight_becomes_int8_with_an_axis_and_zero_points_per_channel():
    graph = mlp()
    insert(graph, {"x": 2.0, "r": 4.0})
    dq = node_of(graph, "up").inputs[1].inputs[0]
    assert dq.attrs == {"axis": 1}
    assert (dq.inputs[0].values.dtype, dq.inputs[0].values.shape) == (np.int8, (32, 128))
    assert (dq.inputs[1].values.shape, dq.inputs[2].values.dtype, dq.inputs[2].values.shape) == (
        (128,),
        np.int8,
        (128,),
    )
    assert not dq.inputs[2].values.any()


def test_graph_with_qdq_is_valid_and_close_to_the_float_graph():
    graph, x = mlp(), normal(16, 32, seed=2)
    expected = run(mlp(), x=x)
    hidden = np.maximum(x @ normal(32, 128), 0)
    insert(graph, {"x": np.abs(x).max(), "r": hidden.max()})
    actual = run(graph, x=x)
    assert np.abs(actual[0] - expected[0]).max() < 0.02 * np.abs(expected[0]).max()
    assert np.array_equal(actual[1], expected[1])


def test_other_consumers_keep_the_float_tensor():
    graph = mlp()
    insert(graph, {"x": 2.0, "r": 4.0})
    assert node_of(graph, "side").inputs[0].name == "x"


def test_consumers_of_one_tensor_share_one_pair():
    graph = graph_from_text(
        "g (float[b, 32] x) => (q, k) { [q] q = MatMul(x, wq) [k] k = MatMul(x, wk) }",
        wq=normal(32, 32),
        wk=normal(32, 32),
    )
    report = insert(graph, {"x": 2.0})
    assert ops(graph).count("QuantizeLinear") == 1
    assert node_of(graph, "q").inputs[0] is node_of(graph, "k").inputs[0]
    assert list(report.activation_scales) == ["x"]


def test_shared_weight_is_quantized_once():
    graph = graph_from_text("g (float[b, 32] x) => (y) { [a] h = MatMul(x, w) [b] y = MatMul(h, w) }", w=normal(32, 32))
    assert insert(graph, {"x": 2.0, "h": 9.0}).weights == ("w",)
    assert node_of(graph, "a").inputs[1] is node_of(graph, "b").inputs[1]


def test_weight_used_along_two_axes_is_quantized_for_each():
    graph = graph_from_text(
        "g (float[b, 32] x) => (y) { [a] h = MatMul(x, w) [b] y = Gemm<transB=1>(h, w) }", w=normal(32, 32)
    )
    insert(graph, {"x": 2.0, "h": 9.0})
    axes = [node_of(graph, name).inputs[1].inputs[0].attrs["axis"] for name in ("a", "b")]
    assert axes == [1, 0]
    model_of(graph)


def test_weight_used_elsewhere_keeps_its_float_copy():
    graph = graph_from_text(
        "g (float[b, 32] x, int64[n] i) => (y, e) { [mm] y = MatMul(x, w) [look] e = Gather(w, i) }", w=normal(32, 32)
    )
    insert(graph, {"x": 2.0})
    assert np.array_equal(node_of(graph, "look").inputs[0].values, normal(32, 32))


@pytest.mark.parametrize(
    ("text", "shape", "x"),
    [
        ("[n] y = Gemm<transB=1, alpha=0.5>(x, w, b)", (64, 32), "float[n, 32] x"),
        ("[n] y = Gemm(x, w, b)", (32, 64), "float[n, 32] x"),
        ("[n] y = Conv(x, w, b)", (64, 32, 3, 3), "float[n, 32, 5, 5] x"),
        ("[n] h = ConvTranspose(x, w) y = Identity(h)", (32, 64, 2, 2), "float[n, 32, 5, 5] x"),
    ],
)
def test_weight_error_is_half_a_step_and_the_bias_stays_float(text, shape, x):
    weight = normal(*shape) * np.geomspace(0.01, 10, shape[0]).reshape(-1, *[1] * (len(shape) - 1)).astype(np.float32)
    graph = graph_from_text(f"g ({x}) => (y) {{ {text} }}", w=weight, b=normal(64))
    insert(graph, {"x": 3.0}, backend=BackendName.TENSORRT)
    node = node_of(graph, "n")
    scale = node.inputs[1].inputs[0].inputs[1].values
    axis = node.inputs[1].inputs[0].attrs.get("axis")
    step = scale if axis is None else scale.reshape([-1 if i == axis else 1 for i in range(weight.ndim)])
    assert (np.abs(dequantized(node) - weight) <= step * 0.5001).all()
    assert len(node.inputs) < 3 or node.inputs[2].name == "b"
    model_of(graph)


def test_per_tensor_weights_have_a_scalar_scale():
    graph = mlp()
    insert(graph, {"x": 2.0, "r": 4.0}, recipe=QuantRecipe(weights="per_tensor"))
    dq = node_of(graph, "up").inputs[1].inputs[0]
    assert dq.attrs == {}
    assert dq.inputs[1].values.shape == dq.inputs[2].values.shape == ()


def test_activation_seen_only_as_zeros_leaves_its_consumer_float():
    graph = mlp()
    report = insert(graph, {"x": 2.0, "r": 0.0})
    assert report.nodes == ("up",)
    assert report.kept_float == (KeptFloat("down", "calibration saw no non-zero value of its input 'r'"),)
    assert node_of(graph, "down").inputs[0].name == "r"


def test_range_too_small_for_a_scale_leaves_its_node_float():
    graph = graph_from_text(MLP, w1=normal(32, 128) * np.float32(1e-4), w2=normal(128, 64, seed=1))
    report = insert(graph, {"x": 2.0, "r": 0.004}, np.float16)
    assert report.nodes == ()
    assert [kept.node for kept in report.kept_float] == ["up", "down"]
    assert re.fullmatch(
        r"its weight reaches only 0\.000\d+; float16 scales start at 6\.104e-05", report.kept_float[0].reason
    )
    assert report.kept_float[1].reason == "its input 'r' reaches only 0.004; float16 scales start at 6.104e-05"
    graph = graph_from_text(MLP, w1=normal(32, 128) * np.float32(1e-4), w2=normal(128, 64, seed=1))
    assert insert(graph, {"x": 2.0, "r": 0.004}, np.float32).nodes == ("up", "down")


def test_weight_with_nan_is_refused():
    weight = normal(32, 32)
    weight[0, 0] = np.nan
    graph = graph_from_text("g (float[b, 32] x) => (y) { [mm] y = MatMul(x, w) }", w=weight)
    with pytest.raises(InputError) as error:
        insert(graph, {"x": 1.0})
    assert error.value.what == "the weight 'w' of node 'mm' holds NaN or infinity"


def test_codes_that_are_given_take_the_place_of_rounded_ones():
    graph = mlp()
    codes = np.full((32, 128), 3, np.int8)
    scales = np.full(128, 0.25, np.float32)
    insert_qdq(
        graph,
        plan_placement(graph, {}, QuantRecipe()),
        {"x": 2.0, "r": 4.0},
        np.float16,
        {"up": QuantizedWeight(codes, scales)},
    )
    assert np.array_equal(dequantized(node_of(graph, "up")), np.full((32, 128), 0.75, np.float32))
    expected = INT8.quantize(normal(128, 64, seed=1), 1, np.float16)
    assert np.array_equal(node_of(graph, "down").inputs[1].inputs[0].inputs[0].values, expected.codes)


def test_given_codes_of_a_shared_weight_are_those_of_their_node_only():
    graph = graph_from_text("g (float[b, 32] x) => (y) { [a] h = MatMul(x, w) [b] y = MatMul(h, w) }", w=normal(32, 32))
    given = {"b": QuantizedWeight(np.ones((32, 32), np.int8), np.ones(32, np.float32))}
    insert_qdq(graph, plan_placement(graph, {}, QuantRecipe()), {"x": 2.0, "h": 9.0}, np.float32, given)
    assert (dequantized(node_of(graph, "b")) == 1).all()
    assert np.abs(dequantized(node_of(graph, "a")) - normal(32, 32)).max() < 0.03


def test_given_codes_need_no_scale_of_the_weights_own():
    graph = graph_from_text(MLP, w1=normal(32, 128) * np.float32(1e-4), w2=normal(128, 64, seed=1))
    given = {"up": QuantizedWeight(np.ones((32, 128), np.int8), np.full(128, 2.0**-14, np.float32))}
    placement = plan_placement(graph, {}, QuantRecipe())
    report = insert_qdq(graph, placement, {"x": 2.0, "r": 4.0}, np.float16, given)
    assert report.nodes == ("up", "down")


def test_fp8_pairs_are_valid_and_close_to_the_float_graph():
    graph, x = mlp(), normal(16, 32, seed=2)
    expected = run(mlp(), x=x)
    hidden = np.maximum(x @ normal(32, 128), 0)
    placement = plan_placement(graph, {}, QuantRecipe())
    amax = {"x": float(np.abs(x).max()), "r": float(hidden.max())}
    report = insert_qdq(graph, placement, amax, np.float16, number_format=FP8)
    assert report.nodes == ("up", "down")
    assert report.activation_scales["r"] == float(FP8.scale_from_amax(np.float32(amax["r"]), np.float16))
    for dq in (node.inputs[0].inputs[0] for node in graph.nodes if node.op == "MatMul"):
        q = dq.inputs[0].inputs[0]
        assert (q.op, dq.op, q.inputs[2].dtype, q.outputs[0].dtype) == (
            "QuantizeLinear",
            "DequantizeLinear",
            FP8.dtype,
            FP8.dtype,
        )
    weight = node_of(graph, "up").inputs[1].inputs[0]
    assert (weight.inputs[0].values.dtype, weight.inputs[2].values.dtype) == (FP8.dtype, FP8.dtype)
    actual = run(graph, x=x)
    # Operands are off by up to 2**-4 of themselves, and sums of 32 and 128 such errors grow with the square root.
    assert np.abs(actual[0] - expected[0]).max() < 0.05 * np.abs(expected[0]).max()


def test_report_names_nodes_scales_and_weights():
    report = insert(mlp(), {"x": 2.0, "r": 4.0}, np.float16)
    assert report.nodes == ("up", "down")
    assert report.weights == ("w1", "w2")
    assert report.activation_scales["r"] == float(INT8.scale_from_amax(np.float32(4.0), np.float16))


def test_new_names_do_not_collide_with_the_graphs_own():
    graph = graph_from_text(
        "g (float[b, 32] x) => (y_scale) { [y_QuantizeLinear] y = Relu(x) [mm] y_scale = MatMul(y, w) }",
        w=normal(32, 32),
    )
    insert(graph, {"y": 1.0})
    names = [node.name for node in graph.nodes]
    assert len(names) == len(set(names))
    assert graph.outputs[0].name == "y_scale"
    model_of(graph)


def test_same_graph_gives_the_same_bytes():
    first, second = mlp(), mlp()
    for graph in (first, second):
        insert(graph, {"x": 2.0, "r": 4.0}, np.float16)
    assert model_of(first).SerializeToString(deterministic=True) == model_of(second).SerializeToString(
        deterministic=True
    )


def test_range_beyond_every_scale_leaves_its_node_float():
    graph = mlp()
    report = insert(graph, {"x": 2.0, "r": 1e30}, np.float16)
    assert report.nodes == ("up",)
    assert report.kept_float == (KeptFloat("down", "its input 'r' reaches 1e+30, beyond every float16 scale"),)
    assert insert(mlp(), {"x": 2.0, "r": 8e6}, np.float16).nodes == ("up", "down")
