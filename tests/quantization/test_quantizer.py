from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from equalize_cases import PLAIN, any_table, ignore, plan, quantizer_of, recipe_with, table_of
from quant_cases import graph_from_text, model_of, node_of, normal, ops, run

from trtforge.errors import InputError
from trtforge.graph.edit import copy_graph
from trtforge.quantization.formats import INT8
from trtforge.quantization.quantizer import Quantizer, with_rounded_weights
from trtforge.quantization.rounding import RoundedWeights
from trtforge.recipe import QuantRecipe

FULL = QuantRecipe(
    method="minmax", smooth="auto", shift=True, rounding="learned", bias_correction=True, weight_range="mse"
)
MLP = """g (float[b,32] x) => (float[b,32] y, float[b,48] z) {
    n = LayerNormalization(x, g, b)
    [up] p = MatMul(n, w1)  [bias] h = Add(p, b1)  r = Relu(h)  [down] d = MatMul(r, w2)  [skip] y = Add(d, n)
    [side] z = MatMul(n, w3) }"""
CHAIN = """g (float[b,32] x) => (float[b,48] z) {
    n = LayerNormalization(x, g, b)
    [up] p = MatMul(n, w1)  [bias] h = Add(p, b1)  r = Relu(h)  [down] d = MatMul(r, w2)  [last] z = MatMul(d, w3) }"""
BLOCK = """g (float[b,32,8,8] x) => (float[b,32,h,w] y, float[b,16,i,j] s) {
    [stem] c0 = Conv<pads=[1,1,1,1]>(x, k0, b0)  r0 = Relu(c0)
    [one] c1 = Conv<pads=[1,1,1,1]>(r0, k1)  r1 = Relu(c1)  [two] c2 = Conv(r1, k2)
    [skip] a = Add(c2, r0)  r2 = Relu(a)
    [three] y = Conv(r2, k3)  p = MaxPool<kernel_shape=[2,2]>(r2)  [four] s = Conv(p, k4) }"""


def outliers(*shape, seed=0):
    """Correlated channels of very different sizes and middles."""
    random = np.random.default_rng(seed)
    size = shape[-1]
    mixed = random.normal(size=shape) @ random.normal(size=(size, size)) / np.sqrt(size)
    return (mixed * np.exp(random.normal(size=size)) + random.normal(size=size)).astype(np.float32)


def mlp_like(text):
    graph = graph_from_text(
        text, w1=normal(32, 48, scale=0.2), w2=normal(48, 32, seed=1, scale=0.2), w3=normal(32, 48, seed=2, scale=0.2),
        b1=normal(48, seed=3), g=np.exp(normal(32, seed=4)), b=normal(32, seed=5),
    )  # fmt: skip
    return graph, {"x": outliers(600, 32)}


def block():
    images = np.moveaxis(outliers(8, 8, 8, 32, seed=3), -1, 1)
    kernels = {
        "k0": (32, 32, 3, 3),
        "k1": (32, 32, 3, 3),
        "k2": (32, 32, 1, 1),
        "k3": (32, 32, 1, 1),
        "k4": (16, 32, 1, 1),
    }
    weights = {name: normal(*shape, seed=i, scale=0.1) for i, (name, shape) in enumerate(kernels.items())}
    return graph_from_text(BLOCK, b0=normal(32, seed=7), **weights), {"x": images}


def relative_error(graph, expected, feeds):
    """Of the worst output."""
    pairs = zip(run(graph, **feeds), expected, strict=True)
    return max(float(np.sqrt(np.square(after - before).mean() / np.square(before).mean())) for after, before in pairs)


def quantized(quantizer, graph, kept=None):
    copy = copy_graph(graph)
    return copy, quantizer.quantize(copy, kept)


@pytest.mark.parametrize("make", [lambda: mlp_like(MLP), lambda: mlp_like(CHAIN), block], ids=["mlp", "chain", "block"])
def test_any_set_of_nodes_left_float_is_as_good_as_a_quantizer_planned_without_them(make):
    graph, feeds = make()
    recipe = FULL.model_copy(update={"smooth": 0.5}) if make is block else FULL  # no search for windows
    expected = run(graph, **feeds)
    whole = quantizer_of(graph, feeds, recipe)
    nodes = [node for node in whole.placement.nodes if node != "skip"]
    for count in range(len(nodes) + 1):
        for kept in itertools.combinations(nodes, count):
            reasons = dict.fromkeys(kept, "no")
            model, report = quantized(whole, graph, reasons)
            placement = whole.placement.without(reasons)
            alone = quantizer_of(graph, feeds, recipe, placement=placement, table=whole.table)
            fresh, _ = quantized(alone, graph)
            assert set(report.nodes) == set(placement.nodes)
            assert {entry.node for entry in report.kept_float} >= set(kept)
            error, own = relative_error(model, expected, feeds), relative_error(fresh, expected, feeds)
            assert 0.9 * own - 1e-5 <= error <= 1.1 * own + 1e-5
            assert own < 0.03


def test_tensors_that_share_a_scale_get_the_largest_range():
    graph, feeds = block()
    quantizer = quantizer_of(graph, feeds, FULL)
    entries = quantizer.table.tensors
    smaller = {name: entry.model_copy(update={"amax": 1.0} if name == "p" else {}) for name, entry in entries.items()}
    table = quantizer.table.model_copy(update={"tensors": smaller})
    _, report = quantized(dataclasses.replace(quantizer, table=table), graph)
    assert report.activation_scales["p"] == report.activation_scales["r2"] > 1.0 / 127
    _, report = quantized(dataclasses.replace(quantizer, table=table), graph, {"three": "no"})
    assert report.activation_scales["p"] < 1.01 / 127


def test_full_recipe_loses_less_than_plain_rounding():
    graph, feeds = mlp_like(MLP)
    expected = run(graph, **feeds)
    full, plain = (
        relative_error(quantized(quantizer_of(graph, feeds, recipe), graph)[0], expected, feeds)
        for recipe in (FULL, PLAIN)
    )
    assert full < 0.5 * plain


def test_weights_keep_their_meaning_when_a_later_node_stays_float():
    """The scale of a later activation lies in the codes of the node before it."""
    graph, feeds = mlp_like(CHAIN)
    quantizer = quantizer_of(graph, feeds, FULL)
    whole, _ = quantized(quantizer, graph)
    part, _ = quantized(quantizer, graph, {"down": "", "last": ""})
    assert np.array_equal(
        node_of(whole, "up").inputs[1].inputs[0].inputs[0].values,
        node_of(part, "up").inputs[1].inputs[0].inputs[0].values,
    )


def test_same_quantizer_gives_the_same_bytes_every_time():
    graph, feeds = mlp_like(MLP)
    models = []
    for _ in range(2):
        quantizer = quantizer_of(graph, feeds, FULL)
        models += [model_of(quantized(quantizer, graph)[0]).SerializeToString() for _ in range(2)]
    assert len(set(models)) == 1


def test_nodes_without_a_range_get_no_correction_of_their_bias():
    graph, feeds = mlp_like(MLP)
    quantizer = quantizer_of(graph, feeds, FULL.model_copy(update={"shift": False, "smooth": "none"}))
    assert set(quantizer.rounded.biases) == {"up", "down", "side"}
    tensors = {
        name: entry.model_copy(update={"amax": 0.0} if name == "r" else {})
        for name, entry in quantizer.table.tensors.items()
    }
    silent = dataclasses.replace(quantizer, table=quantizer.table.model_copy(update={"tensors": tensors}))
    model, report = quantized(silent, graph)
    assert report.nodes == ("up", "side")
    assert [entry.node for entry in report.kept_float if "no non-zero value" in entry.reason] == ["down"]
    assert node_of(model, "down").outputs[0].outputs[0].name == "skip"
    assert node_of(model, "up").outputs[0].outputs[0].name == "bias"


def test_correction_of_a_bias_goes_into_the_bias_that_is_there():
    graph, feeds = mlp_like(MLP)
    recipe = recipe_with(bias_correction=True)
    quantizer = quantizer_of(graph, feeds, recipe)
    model, _ = quantized(quantizer, graph)
    bias = node_of(model, "bias").inputs[1].values
    assert np.array_equal(
        bias, (normal(48, seed=3).astype(np.float64) + quantizer.rounded.biases["up"]).astype(np.float32)
    )
    # `down` and `side` have none, and each gets one.
    assert ops(model).count("Add") == ops(graph).count("Add") + 2


def test_recipe_that_decides_no_weights_changes_nothing():
    graph, _ = mlp_like(MLP)
    quantizer = Quantizer(plan(graph), any_table(graph, shift=True), INT8, "float16")
    recipe = recipe_with(smooth="auto", shift=True)
    assert with_rounded_weights(quantizer, graph, {}, recipe, ignore) is quantizer


def test_without_rows_only_ranges_of_weights_are_searched():
    graph, _ = mlp_like(MLP)
    quantizer = Quantizer(plan(graph), any_table(graph, shift=True), INT8, "float16")
    rounded = with_rounded_weights(quantizer, graph, {}, FULL, ignore).rounded
    assert (set(rounded.weights), rounded.biases, rounded.learned) == ({"up", "down", "side"}, {}, ())
    model, report = quantized(dataclasses.replace(quantizer, rounded=rounded), graph)
    assert len(report.nodes) == 3
    model_of(model)


def test_rounding_leaves_the_graph_alone():
    graph, feeds = mlp_like(MLP)
    before = model_of(graph).SerializeToString()
    quantizer_of(graph, feeds, FULL)
    assert model_of(graph).SerializeToString() == before


def test_table_that_does_not_fit_is_refused():
    graph, _ = mlp_like(MLP)
    quantizer = Quantizer(plan(graph), table_of({"n": None}), INT8, "float16", RoundedWeights({}, {}, ()))
    with pytest.raises(InputError, match="lacks 1 of the 2 tensors"):
        quantizer.quantize(graph)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_scales_are_those_of_the_type_after_the_cast(dtype):
    graph, feeds = mlp_like(MLP)
    model, _ = quantized(quantizer_of(graph, feeds, FULL, scale_dtype=dtype), graph)
    scales = [node.inputs[1].values for node in model.nodes if node.op == "DequantizeLinear"]
    assert len(scales) >= 5
    for scale in scales:
        assert np.array_equal(scale.astype(dtype).astype(np.float32), scale)
