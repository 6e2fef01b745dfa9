from __future__ import annotations

import numpy as np
import pytest
from quant_cases import graph_from_text, model_of, node_of, normal, ops, run

from trtforge.quantization.conv_scales import move_channel_scales
from trtforge.quantization.op_types import BFLOAT16
from trtforge.quantization.placement import plan_placement
from trtforge.quantization.qdq import insert_qdq
from trtforge.recipe import QuantRecipe


def quantized(text="Conv<pads=[1, 1, 1, 1]>(x, w, b)", amax=4.0, x="float[2, 32, 8, 8] x", recipe=None, **weights):
    """One convolution with Q/DQ."""
    constants = {"w": normal(32, 32, 3, 3), "b": normal(32)} | weights
    used = {name: array for name, array in constants.items() if f"{name})" in text or f"{name}," in text}
    graph = graph_from_text(f"g ({x}) => (y) {{ [c] y = {text} }}", **used)
    placement = plan_placement(graph, {}, recipe or QuantRecipe())
    insert_qdq(graph, placement, dict.fromkeys(placement.tensors, amax), np.float16)
    return graph


def weight_of(graph):
    """Codes, the scale in the graph, and the factors behind the convolution."""
    dequantize = node_of(graph, "c").inputs[1].inputs[0]
    (multiply,) = (node for node in graph.nodes if node.op == "Mul")
    return dequantize.inputs[0].values, dequantize.inputs[1].values, multiply.inputs[1].values


@pytest.mark.parametrize(
    ("text", "x", "shape"),
    [
        ("Conv<pads=[1, 1, 1, 1]>(x, w, b)", "float[2, 32, 8, 8] x", (32, 32, 3, 3)),
        ("Conv(x, w)", "float[2, 32, 8, 8] x", (32, 32, 3, 3)),
        ("Conv(x, w, b)", "float[2, 32, 8] x", (32, 32, 3)),
        ("Conv<group=2>(x, w, b)", "float[2, 64, 8, 8] x", (32, 32, 3, 3)),
    ],
    ids=["bias", "no-bias", "1d", "grouped"],
)
def test_the_graph_computes_the_same(text, x, shape):
    graph = quantized(text, x=x, w=normal(*shape))
    feed = normal(*graph.inputs[0].shape, seed=9)
    before = run(graph, x=feed)[0]
    assert move_channel_scales(graph, np.float16) == ("c",)
    after = run(graph, x=feed)[0]
    assert after.shape == before.shape
    # float32 rounding of sums of 288 products, before and after.
    assert np.abs(after - before).max() <= 288 * np.finfo(np.float32).eps * np.abs(before).max()
    assert ops(graph)[-1] == ("Add" if ", b)" in text else "Mul")
    assert graph.nodes[-1].outputs[0] is graph.outputs[0]


def test_no_bit_of_a_scale_is_lost():
    graph = quantized()
    scales = node_of(graph, "c").inputs[1].inputs[0].inputs[1].values.copy()
    move_channel_scales(graph, np.float16)
    _, common, factors = weight_of(graph)
    assert common.shape == ()
    assert factors.shape == (32, 1, 1)
    assert np.log2(common) == np.round(np.log2(common))
    assert np.array_equal(factors.ravel() * common, scales)
    assert np.array_equal(factors.astype(np.float16).astype(np.float32), factors)


@pytest.mark.parametrize("amax", [4.0, 400.0, 4e4])
def test_the_largest_possible_result_stays_in_range(amax):
    graph = quantized(amax=amax)
    assert move_channel_scales(graph, np.float16) == ("c",)
    codes, common, _ = weight_of(graph)
    activation = node_of(graph, "c").inputs[0].inputs[0].inputs[1].values
    reach = 127 * float(activation) * np.abs(codes.astype(np.int64)).sum(axis=(1, 2, 3)).max() * float(common)
    assert reach <= 65504


def test_bfloat16_has_the_range_for_any():
    assert move_channel_scales(quantized(amax=4e4), BFLOAT16) == ("c",)


def test_channels_too_far_apart_keep_their_scales():
    weight = normal(32, 32, 3, 3)
    weight[0] *= 1e6
    graph = quantized(amax=0.01, w=weight)
    before = ops(graph)
    assert move_channel_scales(graph, np.float16) == ()
    assert ops(graph) == before


def test_one_scale_per_tensor_is_left_alone():
    assert move_channel_scales(quantized(recipe=QuantRecipe(weights="per_tensor")), np.float16) == ()


@pytest.mark.parametrize(
    "text",
    [
        "Conv<pads=[1, 1, 1, 1]>(x, w)",
        "Conv<group=32>(x, v)",
    ],
    ids=["excluded", "depthwise"],
)
def test_a_float_convolution_is_left_alone(text):
    recipe = QuantRecipe(exclude=("c",))
    graph = quantized(text, recipe=recipe, v=normal(32, 1, 3, 3))
    assert move_channel_scales(graph, np.float16) == ()


def test_a_weight_that_two_convolutions_share_keeps_its_scales():
    graph = graph_from_text(
        "g (float[2, 32, 8, 8] x) => (y) { h = Conv(x, w) r = Relu(h) y = Conv(r, w) }", w=normal(32, 32, 3, 3)
    )
    for index, node in enumerate(graph.nodes):
        node.name = f"n{index}"
    placement = plan_placement(graph, {}, QuantRecipe())
    insert_qdq(graph, placement, dict.fromkeys(placement.tensors, 4.0), np.float16)
    assert move_channel_scales(graph, np.float16) == ()


def test_a_bias_that_is_computed_is_reshaped():
    graph = quantized("Conv(x, w, c)", x="float[2, 32, 8, 8] x, float[32] c")
    feeds = {"x": normal(2, 32, 8, 8), "c": normal(32)}
    before = run(graph, **feeds)[0]
    assert move_channel_scales(graph, np.float16) == ("c",)
    assert np.allclose(run(graph, **feeds)[0], before, atol=1e-3)
    model_of(graph)
