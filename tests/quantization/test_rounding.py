from __future__ import annotations

import itertools

import numpy as np
import pytest
from equalize_cases import ignore, plan, recipe_with, table_of
from quant_cases import graph_from_text, normal

from trtforge.errors import InputError
from trtforge.quantization import rounding
from trtforge.quantization.formats import INT8
from trtforge.quantization.quantizer import Quantizer
from trtforge.quantization.rounding import decides_weights, feedback_of, learned_codes, needs_rows, round_weights

LINEAR = "g (float[b,32] x) => (float[b,48] y) { [m] y = MatMul(x, w) }"
TWO = "g (float[b,32] x) => (float[b,48] y, float[b,16] z) { [m] y = MatMul(x, w)  [k] z = MatMul(x, v) }"
LEARNED = recipe_with(rounding="learned")
MSE = recipe_with(weight_range="mse")
CORRECTED = recipe_with(bias_correction=True)
AMAX = 8.0


def correlated(rows, channels, rank, seed=0):
    random = np.random.default_rng(seed)
    return (random.normal(size=(rows, rank)) @ random.normal(size=(rank, channels)) / np.sqrt(rank)).astype(np.float32)


def decide(text, recipe, rows=None, dtype="float16", amax=AMAX, **weights):
    """The rounded weights of a graph whose activation `x` has these rows."""
    graph = graph_from_text(text, **weights)
    placement = plan(graph, recipe)
    seen = {} if rows is None else dict.fromkeys(placement.tensors, rows)
    return round_weights(graph, placement, dict.fromkeys(placement.tensors, amax), seen, recipe, dtype, ignore)


def seen_rows(rows, dtype="float16", amax=AMAX):
    """Rows after quantization."""
    step = INT8.scale_from_amax(np.float32(amax), dtype)
    return INT8.nearest(rows / step) * step


def values_of(weight):
    """The float weight `[C, N]` of a MatMul's codes."""
    return weight.codes.astype(np.float64) * weight.scales


def output_error(rows, weight, codes, scales):
    return float(np.square(rows.astype(np.float64) @ (codes.astype(np.float64) * scales - weight)).mean())


def nearest(weight, dtype="float16"):
    return INT8.quantize(weight, 1, dtype)


@pytest.mark.parametrize("rank", [4, 16])
def test_learned_codes_keep_the_output_of_correlated_rows_far_better(rank):
    rows, weight = correlated(500, 32, rank), normal(32, 48, scale=0.1)
    rounded = decide(LINEAR, LEARNED, rows, w=weight).weights["m"]
    plain = nearest(weight)
    assert np.array_equal(rounded.scales, plain.scales)
    seen = seen_rows(rows)
    learned_error = output_error(seen, weight, rounded.codes, rounded.scales)
    assert learned_error < 0.5 * output_error(seen, weight, plain.codes, plain.scales)


def test_learned_codes_are_the_nearest_where_channels_are_independent():
    weight = normal(32, 48, scale=0.1)
    rows = np.diag(np.linspace(1, 8, 32)).astype(np.float32)
    rounded = decide(LINEAR, LEARNED, rows, w=weight).weights["m"]
    assert np.array_equal(rounded.codes, nearest(weight).codes)


def test_feedback_is_that_of_gptq():
    """Channel by channel, with the inverse Gram matrix of the channels that are left (arXiv 2210.17323, equation 3)."""
    rows, weight = correlated(300, 32, 12), normal(32, 48, scale=0.1)
    scales = nearest(weight).scales
    gram = rows.astype(np.float64).T @ rows / len(rows)
    damped = gram + 0.01 * np.diag(gram).mean() * np.eye(32)
    order = np.argsort(-np.diag(gram), kind="stable")
    left, expected = weight.astype(np.float64), np.zeros((32, 48))
    for position, channel in enumerate(order):
        rest = order[position:]
        inverse = np.linalg.inv(damped[np.ix_(rest, rest)])
        expected[channel] = np.clip(np.rint(left[channel] / scales), -127, 127)
        error = left[channel] - expected[channel] * scales
        left[rest] -= np.outer(inverse[0] / inverse[0, 0], error)
    codes = learned_codes(weight, scales, feedback_of(rows))
    assert (codes != expected).mean() < 0.01


def test_blocks_do_not_change_the_codes(monkeypatch):
    rows, weight = correlated(300, 96, 24), normal(96, 48, scale=0.1)
    scales = nearest(weight).scales
    whole = learned_codes(weight, scales, feedback_of(rows))
    monkeypatch.setattr(rounding, "_BLOCK", 7)
    assert (learned_codes(weight, scales, feedback_of(rows)) != whole).mean() < 0.002


def test_learned_codes_are_near_the_best_there_are():
    """Against every way to round up or down, for a few channels."""
    rows = correlated(200, 8, 3)
    weight = normal(8, 6, scale=0.1)
    scales = nearest(weight).scales
    codes = learned_codes(weight, scales, feedback_of(rows))
    below = np.floor(weight / scales)

    def column_error(column, up):
        rounded = below[:, [column]] + np.array(up)[:, None]
        return output_error(rows, weight[:, [column]], rounded, scales[column])

    ways = list(itertools.product((0, 1), repeat=8))
    best = np.mean([min(column_error(column, up) for up in ways) for column in range(6)])
    learned_error = output_error(rows, weight, codes, scales)
    assert learned_error < 4 * best
    assert learned_error < 0.25 * output_error(rows, weight, nearest(weight).codes, scales)


@pytest.mark.parametrize(
    "rows",
    [
        np.repeat(correlated(100, 16, 4), 2, axis=1),
        correlated(100, 32, 4) * (np.arange(32) % 3 > 0),
        correlated(3, 32, 4),
        correlated(1, 32, 4),
        np.full((50, 32), 3.0, np.float32),
        correlated(100, 32, 4) * np.where(np.arange(32) == 5, 1e4, 1e-4).astype(np.float32),
    ],
    ids=["duplicate channels", "zero channels", "fewer rows than channels", "one row", "constant", "one large channel"],
)
def test_any_gram_matrix_gives_codes_no_worse_than_nearest(rows):
    weight = normal(32, 48, scale=0.1)
    amax = float(np.abs(rows).max())
    rounded = decide(LINEAR, LEARNED, rows.astype(np.float32), amax=amax, w=weight).weights["m"]
    assert np.abs(rounded.codes.astype(int)).max() <= 127
    seen = seen_rows(rows.astype(np.float32), amax=amax)
    plain = nearest(weight)
    assert output_error(seen, weight, rounded.codes, rounded.scales) <= output_error(
        seen, weight, plain.codes, plain.scales
    )


def test_rows_that_quantize_to_zero_leave_the_nearest_codes():
    weight = normal(32, 48, scale=0.1)
    rounded = decide(LINEAR, LEARNED, np.full((10, 32), 1e-6, np.float32), w=weight)
    assert np.array_equal(rounded.weights["m"].codes, nearest(weight).codes)
    assert rounded.learned == ()


def test_too_many_channels_are_rounded_to_nearest(monkeypatch):
    monkeypatch.setattr(rounding, "MAX_LEARNED_CHANNELS", 31)
    weight = normal(32, 48, scale=0.1)
    rounded = decide(LINEAR, LEARNED, correlated(100, 32, 4), w=weight)
    assert np.array_equal(rounded.weights["m"].codes, nearest(weight).codes)
    assert rounded.learned == ()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("recipe", [LEARNED, MSE, MSE.model_copy(update={"rounding": "learned"})])
def test_scales_are_exact_in_their_type_and_codes_symmetric(dtype, recipe):
    rounded = decide(LINEAR, recipe, correlated(100, 32, 4), dtype, w=normal(32, 48, scale=3.0)).weights["m"]
    assert rounded.scales.dtype == np.float32
    assert rounded.scales.shape == (48,)
    assert np.array_equal(rounded.scales.astype(dtype).astype(np.float32), rounded.scales)
    assert np.abs(rounded.codes.astype(int)).max() == 127


@pytest.mark.parametrize("recipe", [LEARNED, MSE, CORRECTED])
def test_per_tensor_weights_get_one_scale(recipe):
    rounded = decide(
        TWO,
        recipe.model_copy(update={"weights": "per_tensor"}),
        correlated(100, 32, 4),
        w=normal(32, 48),
        v=normal(32, 16, scale=0.1),
    )
    assert {name: weight.scales.shape for name, weight in rounded.weights.items()} == {"m": (), "k": ()}
    assert rounded.weights["m"].scales > 5 * rounded.weights["k"].scales


def weight_error(weight, rounded, rows):
    importance = np.square(rows.astype(np.float64)).mean(axis=0)
    return (importance[:, None] * np.square(values_of(rounded) - weight)).sum(axis=0)


def outliers_in_quiet_channels(*shape):
    """Rows, and weights `[C, ...]` that are the largest where the rows are the smallest."""
    is_quiet = np.arange(32) < 2
    factors = np.where(is_quiet, 2.0, 1.0).astype(np.float32).reshape(-1, *[1] * (len(shape) - 1))
    return correlated(200, 32, 32) * np.where(is_quiet, 1e-3, 1.0).astype(np.float32), normal(*shape) * factors


def test_mse_range_is_never_worse_by_its_criterion_and_clips_outliers():
    rows, weight = outliers_in_quiet_channels(32, 48)
    rounded = decide(LINEAR, MSE, rows, w=weight).weights["m"]
    plain = nearest(weight)
    assert (weight_error(weight, rounded, rows) <= weight_error(weight, plain, rows)).all()
    assert (rounded.scales <= plain.scales).all()
    assert weight_error(weight, rounded, rows).sum() < 0.95 * weight_error(weight, plain, rows).sum()


def test_mse_range_heeds_which_channels_are_large():
    weight = np.full((32, 48), 0.1, np.float32) + normal(32, 48, scale=0.01)
    weight[0] = 0.13
    used, unused = np.ones((20, 32), np.float32), np.ones((20, 32), np.float32)
    used[:, 0], unused[:, 0] = 8.0, 0.001
    with_outlier, without = (decide(LINEAR, MSE, rows, w=weight).weights["m"].scales for rows in (used, unused))
    assert without.mean() < 0.95 * with_outlier.mean()


def test_mse_range_per_tensor_is_never_worse():
    rows, weight = outliers_in_quiet_channels(32, 48)
    recipe = MSE.model_copy(update={"weights": "per_tensor"})
    rounded, plain = decide(LINEAR, recipe, rows, w=weight).weights["m"], INT8.quantize(weight, None, "float16")
    assert weight_error(weight, rounded, rows).sum() < weight_error(weight, plain, rows).sum()


def test_mse_range_of_a_convolution_has_one_scale_for_all_taps():
    text = "g (float[b,32,6,6] x) => (float[b,48,h,w] y) { [m] y = Conv(x, w) }"
    rows, weight = outliers_in_quiet_channels(32, 48, 3, 3)
    weight = np.ascontiguousarray(np.moveaxis(weight, 0, 1))
    rounded = decide(text, MSE, rows, w=weight).weights["m"]
    assert (rounded.codes.shape, rounded.scales.shape) == ((48, 32, 3, 3), (48,))
    importance = np.square(rows).mean(axis=0)[None, :, None, None]
    found, plain = (
        (importance * np.square(w.codes * w.scales[:, None, None, None] - weight)).sum(axis=(1, 2, 3))
        for w in (rounded, INT8.quantize(weight, 0, "float16"))
    )
    assert (found <= plain).all()
    assert found.sum() < 0.95 * plain.sum()


@pytest.mark.parametrize(
    "recipe", [CORRECTED, CORRECTED.model_copy(update={"rounding": "learned", "weight_range": "mse"})]
)
def test_corrected_outputs_have_no_mean_error(recipe):
    rows, weight = correlated(400, 32, 8) + 1.5, normal(32, 48, scale=0.1)
    rounded = decide(LINEAR, recipe, rows, w=weight)
    exact = rows.astype(np.float64) @ weight
    actual = seen_rows(rows).astype(np.float64) @ values_of(rounded.weights["m"])
    scale = np.abs(exact).max()
    assert np.abs((actual - exact).mean(axis=0)).max() > 1e-4 * scale
    assert np.abs((actual + rounded.biases["m"] - exact).mean(axis=0)).max() < 1e-7 * scale


def test_correction_before_a_convolution_sums_over_its_taps():
    text = "g (float[b,32,6,6] x) => (float[b,48,h,w] y) { [m] y = Conv(x, w) }"
    weight, rows = normal(48, 32, 3, 3, scale=0.1), np.tile(normal(1, 32), (50, 1))
    rounded = decide(text, CORRECTED, rows, w=weight)
    values = rounded.weights["m"].codes * rounded.weights["m"].scales[:, None, None, None]
    constant, seen = rows[0].astype(np.float64), seen_rows(rows)[0].astype(np.float64)
    error = np.einsum("c,ochw->o", constant, weight) - np.einsum("c,ochw->o", seen, values)
    assert np.allclose(rounded.biases["m"], error, atol=1e-5)


def test_readers_with_and_without_a_window_are_each_rounded():
    text = """g (float[b,32,6,6] x) => (float[b,48,h,w] y, float[b,16,i,j] z) {
        [one] y = Conv(x, k1)  [wide] z = Conv(x, k3) }"""
    weights = {"k1": normal(48, 32, 1, 1), "k3": normal(16, 32, 3, 3, seed=1)}
    rounded = decide(text, LEARNED, correlated(100, 32, 4), **weights)
    assert rounded.learned == ("one",)
    assert {name: weight.codes.shape for name, weight in rounded.weights.items()} == {
        "one": (48, 32, 1, 1),
        "wide": (16, 32, 3, 3),
    }
    assert np.array_equal(rounded.weights["wide"].codes, INT8.quantize(weights["k3"], 0, "float16").codes)


def test_readers_of_one_activation_are_rounded_as_if_alone():
    rows, weights = correlated(200, 32, 8), {"w": normal(32, 48), "v": normal(32, 16, seed=1)}
    both = decide(TWO, LEARNED, rows, **weights)
    alone = decide(LINEAR, LEARNED, rows, w=weights["w"])
    assert np.array_equal(both.weights["m"].codes, alone.weights["m"].codes)
    assert both.learned == ("m", "k")


def test_activation_beside_a_residual_add_is_rounded_too():
    text = """g (float[b,32,4,4] x) => (float[b,32,4,4] y) {
        r = Relu(x)  [one] c = Conv(r, w)  s = Relu(c)  [two] d = Conv(s, w)  [skip] y = Add(d, r) }"""
    rounded = decide(text, LEARNED, correlated(200, 32, 8), w=normal(32, 32, 1, 1))
    assert rounded.learned == ("one", "two")


@pytest.mark.parametrize("recipe", [LEARNED, MSE, CORRECTED])
def test_weight_too_small_for_a_scale_is_left_to_qdq_which_keeps_its_node_float(recipe):
    weights = {"w": normal(32, 48, scale=1e-4), "v": normal(32, 16)}
    rounded = decide(TWO, recipe, correlated(100, 32, 4), **weights)
    assert (set(rounded.weights), set(rounded.biases) <= {"k"}) == ({"k"}, True)
    graph = graph_from_text(TWO, **weights)
    report = Quantizer(plan(graph), table_of({"x": None}), INT8, "float16", rounded).quantize(graph)
    assert report.nodes == ("k",)
    assert [(entry.node, "its weight reaches only" in entry.reason) for entry in report.kept_float] == [("m", True)]


def test_small_weights_are_rounded_where_their_type_has_scales_for_them():
    weight = normal(32, 48, scale=1e-4)
    assert set(decide(LINEAR, LEARNED, correlated(100, 32, 4), "bfloat16", w=weight).weights) == {"m"}


@pytest.mark.parametrize("recipe", [LEARNED, MSE, CORRECTED])
def test_huge_weights_stay_finite(recipe):
    rounded = decide(LINEAR, recipe, correlated(100, 32, 4), w=normal(32, 48, scale=1e9)).weights["m"]
    assert np.isfinite(rounded.scales).all()
    assert rounded.scales.max() == 65504


@pytest.mark.parametrize("recipe", [LEARNED, MSE, CORRECTED])
def test_nan_weights_are_refused(recipe):
    with pytest.raises(InputError, match="the weight 'w' of node 'm' holds NaN or infinity"):
        decide(LINEAR, recipe, correlated(100, 32, 4), w=np.full((32, 48), np.nan, np.float32))


def test_activations_without_a_value_are_passed_over():
    assert decide(LINEAR, LEARNED, correlated(100, 32, 4), amax=0.0, w=normal(32, 48)).weights == {}


def test_dead_output_channels_get_codes_of_zero():
    weight = normal(32, 48)
    weight[:, 5] = 0.0
    recipe = LEARNED.model_copy(update={"weight_range": "mse"})
    rounded = decide(LINEAR, recipe, correlated(100, 32, 4), w=weight).weights["m"]
    assert not rounded.codes[:, 5].any()
    assert rounded.scales[5] > 0


def test_same_rows_give_the_same_codes():
    weight, rows = normal(32, 48), correlated(100, 32, 4)
    first, second = (decide(LINEAR, LEARNED, rows, w=weight).weights["m"] for _ in range(2))
    assert np.array_equal(first.codes, second.codes)


@pytest.mark.parametrize(
    ("changes", "weights", "rows"),
    [
        ({}, False, False),
        ({"smooth": "auto", "shift": True}, False, False),
        ({"weight_range": "mse"}, True, False),
        ({"rounding": "learned"}, True, True),
        ({"bias_correction": True}, True, True),
    ],
)
def test_what_a_recipe_needs(changes, weights, rows):
    recipe = recipe_with(**changes)
    assert (decides_weights(recipe), needs_rows(recipe)) == (weights, rows)
