from __future__ import annotations

import json

import numpy as np
import pytest
from equalize_cases import PLAIN, ignore, observe, plan, quantizer_of, recipe_with
from quant_cases import graph_from_text, normal, run

from trtforge.errors import InputError
from trtforge.graph.edit import copy_graph
from trtforge.quantization import equalize
from trtforge.quantization.equalize import Candidate, equalize_layers
from trtforge.quantization.matrix import find_layers
from trtforge.quantization.observation import Observation
from trtforge.quantization.table import load_table

LINEAR = "g (float[b,32] x) => (float[b,48] y) { [m] y = MatMul(x, w) }"
CONV = "g (float[b,32,6,6] x) => (float[b,48,h,w] y) {{ [c] y = Conv<{}>(x, w) }}"
AUTO = recipe_with(smooth="auto")
SHIFT = recipe_with(shift=True)
BOTH = recipe_with(smooth="auto", shift=True)
WEIGHT = normal(32, 48, seed=1, scale=0.2)


def uneven(rows=400, seed=0, spread=2.0):
    """Rows whose channels have very different sizes."""
    random = np.random.default_rng(seed)
    return (random.normal(size=(rows, 32)) * np.exp(spread * random.normal(size=32))).astype(np.float32)


def off_centre(rows=400, seed=0):
    """Rows whose channels have very different means."""
    random = np.random.default_rng(seed)
    return (random.normal(size=(rows, 32)) + 6.0 * random.normal(size=32)).astype(np.float32)


def search(recipe, x, text=LINEAR, weight=WEIGHT, **more):
    """The candidates that are found, by tensor."""
    graph = graph_from_text(text, w=weight, **more)
    placement = plan(graph, recipe)
    observation = observe(graph, placement, {"x": x})
    return equalize_layers(find_layers(graph, placement), observation, recipe, ignore)


def loss(candidate, x, weight=WEIGHT):
    """Squared error of the output, computed another way: in float64, from the definition."""
    m = candidate.multiplier.astype(np.float64)
    o = np.zeros(32) if candidate.offset is None else candidate.offset.astype(np.float64)
    scaled = weight / m[:, None]
    steps = np.abs(scaled).max(axis=0) / 127
    step = candidate.amax / 127
    inputs = np.clip(np.rint((x * m - o) / step), -127, 127) * step
    outputs = inputs @ (np.rint(scaled / steps) * steps) + o @ scaled
    return float(np.square(outputs - x.astype(np.float64) @ weight).sum())


def plain(x):
    return Candidate(None, np.ones(32, np.float32), None, float(np.abs(x).max()))


def smoothed(x, alpha, weight=WEIGHT):
    """SmoothQuant's formula (arXiv 2211.10438, equation 4)."""
    s = np.abs(x).max(axis=0) ** alpha / np.abs(weight).max(axis=1) ** (1 - alpha)
    return Candidate(alpha, 1 / s, None, float(np.abs(x / s).max()))


@pytest.mark.parametrize("seed", range(4))
def test_alpha_is_as_good_as_the_best_of_a_fine_grid(seed):
    x = uneven(1600, seed=seed)
    found = search(AUTO, x)["x"]
    best = min(loss(smoothed(x, alpha), x) for alpha in np.linspace(0, 1, 21))
    assert found.offset is None
    assert loss(found, x) < 1.1 * best
    assert loss(found, x) < 0.5 * loss(plain(x), x)


def test_given_alpha_is_used():
    x = uneven()
    found = search(AUTO.model_copy(update={"smooth": 0.3}), x)["x"]
    expected = smoothed(x, 0.3)
    assert found.alpha == 0.3
    ratio = found.multiplier / expected.multiplier
    assert ratio.max() / ratio.min() < 1.02  # bfloat16
    assert loss(found, x) == pytest.approx(loss(expected, x), rel=0.1)


def test_shift_centres_every_channel():
    x = off_centre()
    found = search(SHIFT, x)["x"]
    assert (found.alpha, found.multiplier.tolist()) == (None, [1.0] * 32)
    centred = found.transform(x)
    assert np.abs(centred.max(axis=0) + centred.min(axis=0)).max() < 2.1 * found.amax / 127
    assert loss(found, x) < 0.5 * loss(plain(x), x)


def test_offsets_are_whole_steps_but_for_float16():
    found = search(BOTH, off_centre())["x"]
    steps = found.offset / (found.amax / 127)
    assert np.abs(steps).max() > 5
    assert np.array_equal(found.offset.astype(np.float16).astype(np.float32), found.offset)


def test_both_together_are_no_worse_than_either():
    x = off_centre() * uneven(1, spread=1.0)
    both, scaled, shifted = (loss(search(recipe, x)["x"], x) for recipe in (BOTH, AUTO, SHIFT))
    assert both < min(scaled, shifted)


@pytest.mark.parametrize("recipe", [AUTO, SHIFT, BOTH])
def test_activation_that_gains_nothing_stays_as_it_is(recipe):
    x = np.clip(normal(400, 32), -2, 2)
    x[0], x[1] = 2.0, -2.0
    assert search(recipe, x, weight=np.sign(WEIGHT) * 0.1) == {}


def test_small_gain_is_not_worth_a_product(monkeypatch):
    assert set(search(BOTH, uneven())) == {"x"}
    monkeypatch.setattr(equalize, "_MIN_GAIN", 0.999)
    assert search(BOTH, uneven()) == {}
    assert set(search(BOTH.model_copy(update={"smooth": 0.5}), uneven())) == {"x"}


def test_recipe_without_smoothing_and_shift_has_no_candidates():
    assert search(PLAIN, uneven()) == {}


@pytest.mark.parametrize("recipe", [AUTO, SHIFT, BOTH])
@pytest.mark.parametrize("seed", range(3))
def test_nothing_that_was_seen_is_clipped(recipe, seed):
    x = (off_centre(seed=seed) * uneven(1, seed=seed)).astype(np.float32)
    found = search(recipe, x)["x"]
    assert np.abs(found.transform(x)).max() <= found.amax * (1 + 4 * np.finfo(np.float32).eps)


def test_values_outside_the_sample_count_too():
    """The rows are a sample; the extremes of the channels are not."""
    x = uneven()
    graph = graph_from_text(LINEAR, w=WEIGHT)
    observation = observe(graph, plan(graph), {"x": x})
    observation.observers["x"].update(10 * x)
    found = equalize_layers(find_layers(graph, plan(graph)), observation, AUTO, ignore)["x"]
    assert np.abs(found.transform(10 * x)).max() <= found.amax * (1 + 4 * np.finfo(np.float32).eps)


@pytest.mark.parametrize("method", ["percentile", "mse", "entropy"])
def test_other_methods_choose_amax_on_the_equalized_rows(method):
    x = uneven(4000)
    recipe = AUTO.model_copy(update={"method": method, "percentile": 99.0})
    found = search(recipe, x)["x"]
    seen = np.abs(found.transform(x))
    assert 0.1 * seen.max() < found.amax <= seen.max() * (1 + 1e-6)
    if method == "percentile":
        assert found.amax == pytest.approx(np.quantile(seen, 0.99), rel=0.02)


def awkward(kind):
    x = uneven(200)
    if kind == "dead channels":
        x[:, :20] = 0.0
    elif kind == "nearly dead channels":
        x[:, :20] *= 1e-12
    elif kind == "constant channels":
        x[:, :20] = normal(20)
    elif kind == "a constant input":
        x[:] = 3.0
    elif kind == "rows that are all equal":
        x[:] = x[0]
    elif kind == "one row":
        x = x[:1]
    elif kind == "fewer rows than channels":
        x = x[:5]
    elif kind == "zeros":
        x[:] = 0.0
    elif kind == "one value":
        x[:], x[7, 7] = 0.0, 1.0
    elif kind == "tiny values":
        x *= 1e-30
    elif kind == "huge values":
        x *= 1e25
    elif kind == "far from zero":
        x = (normal(200, 32) + np.where(np.arange(32) == 3, 1e6, 0)).astype(np.float32)
    return x


KINDS = (
    "dead channels",
    "nearly dead channels",
    "constant channels",
    "a constant input",
    "rows that are all equal",
    "one row",
    "fewer rows than channels",
    "zeros",
    "one value",
    "tiny values",
    "huge values",
    "far from zero",
)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("recipe", [AUTO, SHIFT, BOTH, BOTH.model_copy(update={"smooth": 0.5, "method": "percentile"})])
@pytest.mark.parametrize("kind", KINDS)
def test_awkward_activations_give_finite_candidates_that_float16_holds(kind, recipe):
    x = awkward(kind)
    for found in search(recipe, x).values():
        assert np.isfinite(found.multiplier).all()
        assert (found.multiplier > 0).all()
        assert 0 < found.amax < 65504
        assert np.abs(x * found.multiplier).max() < 65504
        assert found.offset is None or np.isfinite(found.offset).all()
        if recipe.smooth != 0.5:
            assert loss(found, x) <= 1.05 * loss(plain(x), x)


@pytest.mark.parametrize("kind", KINDS)
def test_awkward_activations_give_a_table_that_reads_back_equal(kind, tmp_path):
    graph = graph_from_text(LINEAR, w=WEIGHT)
    table = quantizer_of(graph, {"x": awkward(kind)}, BOTH).table
    path = tmp_path / "calibration.json"
    path.write_text(table.to_json())
    assert load_table(path) == table
    assert load_table(path).to_json() == table.to_json()


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"multiplier": [0.0] * 32}, "multiplier.0"),
        ({"multiplier": [1.0, -1.0]}, "multiplier.1"),
        ({"multiplier": [1e-30]}, "multiplier.0"),
        ({"multiplier": [1e30]}, "multiplier.0"),
        ({"multiplier": None}, "multiplier"),
        ({"offset": [1e9]}, "offset.0"),
        ({"offset": ["a"]}, "offset.0"),
        ({"alpha": 1.5}, "alpha"),
        ({"beta": 1}, "beta"),
    ],
)
def test_table_with_an_impossible_equalization_is_refused(changes, place, tmp_path):
    table = json.loads(quantizer_of(graph_from_text(LINEAR, w=WEIGHT), {"x": uneven()}, BOTH).table.to_json())
    table["tensors"]["x"]["equalization"].update(changes)
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(table))
    with pytest.raises(InputError) as error:
        load_table(path)
    assert f"tensors.x.equalization.{place}" in f"{error.value.what} {error.value.why}"


def test_dead_channels_do_not_make_the_others_small():
    """float16 scales start at 2**-14: an activation that reaches less than 127 of them would stay float."""
    x = uneven(200, spread=0.5) * (np.arange(32) < 3)
    found = search(AUTO.model_copy(update={"smooth": 1.0}), x.astype(np.float32))["x"]
    assert found.amax > 0.3


def test_channel_that_calibration_never_saw_is_scaled_like_a_typical_one():
    x = uneven(200)
    x[:, 4] = 0.0
    found = search(AUTO.model_copy(update={"smooth": 1.0}), x)["x"]
    assert np.isclose(found.multiplier[4], np.median(np.delete(found.multiplier, 4)), rtol=0.3)


def test_multipliers_are_exact_in_half_precision_and_bounded():
    found = search(AUTO.model_copy(update={"smooth": 1.0}), uneven(spread=5.0))["x"]
    assert np.array_equal(found.multiplier.astype(np.float16).astype(np.float32), found.multiplier)
    assert found.multiplier.max() / found.multiplier.min() <= 2.0**20


def test_scaling_that_float16_cannot_hold_is_no_candidate(monkeypatch):
    monkeypatch.setattr(equalize, "_MAX_SCALED", 1e-3)
    assert search(BOTH, uneven()) == {}


def test_scaling_that_float16_can_hold_is_found_beside_others(monkeypatch):
    x = uneven()
    monkeypatch.setattr(equalize, "_MAX_SCALED", 6.0)
    assert np.abs(search(AUTO, x)["x"].transform(x)).max() < 6.0
    assert smoothed(x, 0.4).amax > 6.0


def test_ranges_are_judged_by_rows_that_they_do_not_come_from():
    """Where channels grow in the later samples, ranges that fit each channel tightly would clip."""
    grows = uneven(800)
    quiet = np.abs(grows).max(axis=0) < np.median(np.abs(grows).max(axis=0))
    grows[400:, quiet] *= 8.0
    shuffled = np.random.default_rng(0).permutation(grows)
    assert search(AUTO, grows)["x"].alpha < search(AUTO, shuffled)["x"].alpha


def test_layer_without_rows_or_channels_is_passed_over():
    graph = graph_from_text(LINEAR, w=WEIGHT)
    layers = find_layers(graph, plan(graph))
    assert equalize_layers(layers, Observation({"x": -1}, keep_rows=True), AUTO, ignore) == {}
    changing = Observation({"x": -1}, keep_rows=True)
    for size in (32, 31):
        changing.update({"x": np.zeros(3)}, {"x": normal(3, size)})
    assert equalize_layers(layers, changing, AUTO, ignore) == {}
    assert equalize_layers(layers, Observation({"x": -1}), AUTO, ignore) == {}


def test_layer_whose_channels_do_not_fit_is_passed_over():
    graph = graph_from_text(LINEAR, w=WEIGHT)
    other = Observation({"x": -1}, keep_rows=True)
    other.update({"x": np.zeros(3)}, {"x": normal(3, 33)})
    assert equalize_layers(find_layers(graph, plan(graph)), other, AUTO, ignore) == {}


def test_convolution_with_a_window_is_scaled_by_a_given_alpha_only_and_never_shifted():
    images = np.moveaxis(off_centre(8 * 36).reshape(8, 6, 6, 32) * uneven(1), -1, 1).astype(np.float32)
    kernel = normal(48, 32, 3, 3, scale=0.1)
    given = search(BOTH.model_copy(update={"smooth": 0.5}), images, CONV.format("pads=[1,1,1,1]"), kernel)["x"]
    assert given.offset is None
    assert np.ptp(np.log(given.multiplier)) > 1
    for recipe in (AUTO, SHIFT, BOTH):
        assert search(recipe, images, CONV.format("pads=[1,1,1,1]"), kernel) == {}


def test_too_few_rows_judge_nothing():
    x = uneven(400)
    assert set(search(AUTO, x)) == {"x"}
    assert search(AUTO, x[:15]) == {}


@pytest.mark.parametrize(("attributes", "is_shifted"), [("group=1", True), ("pads=[1,1,1,1]", False)])
def test_1x1_convolution_is_shifted_without_padding_only(attributes, is_shifted):
    images = np.moveaxis(off_centre(8 * 36).reshape(8, 6, 6, 32), -1, 1)
    found = search(BOTH, images, CONV.format(attributes), normal(48, 32, 1, 1, scale=0.1))
    assert any(candidate.offset is not None for candidate in found.values()) == is_shifted


def test_activation_that_is_also_read_in_int8_elsewhere_stays_as_it_is():
    text = """g (float[b,32,6,6] x) => (float[b,32,6,6] y) {
        r = Tanh(x)  [one] c = Conv(r, w)  s = Relu(c)  [two] d = Conv(s, w)  [skip] y = Add(d, r) }"""
    images = np.moveaxis(uneven(8 * 36).reshape(8, 6, 6, 32), -1, 1)
    assert "r" not in search(AUTO, images, text, normal(32, 32, 1, 1, scale=0.1))


def test_weights_with_one_scale_are_judged_with_one_scale():
    """Smoothing that moves an outlier into one column costs all others, where they share its scale."""
    x = uneven(spread=1.5)
    weight = WEIGHT * np.where(np.arange(48) == 7, 20.0, 1.0).astype(np.float32)
    per_tensor = search(AUTO.model_copy(update={"weights": "per_tensor"}), x, weight=weight)
    per_channel = search(AUTO, x, weight=weight)
    alphas = [found["x"].alpha if found else 0.0 for found in (per_tensor, per_channel)]
    assert alphas[0] < alphas[1]


def test_sampled_columns_and_rows_find_the_same_alpha(monkeypatch):
    x = uneven(2000)
    weight = normal(32, 640, seed=2, scale=0.2)
    text = LINEAR.replace("48", "640")
    few = search(AUTO, x, text, weight)["x"]
    monkeypatch.setattr(equalize, "_MAX_COLUMNS", 10**6)
    monkeypatch.setattr(equalize, "_MAX_MACS", 10**12)
    monkeypatch.setattr(equalize, "_ROWS", (1, 10**6))
    assert abs(few.alpha - search(AUTO, x, text, weight)["x"].alpha) <= 0.1


def test_search_is_deterministic():
    x = uneven()
    first, second = (search(BOTH, x)["x"].to_table() for _ in range(2))
    assert first == second


def test_quantized_graph_is_better_with_equalization_than_without():
    text = "g (float[b,32] x) => (float[b,32] y) { [up] h = MatMul(x, w)  r = Relu(h)  [down] y = MatMul(r, v) }"
    graph = graph_from_text(text, w=WEIGHT, v=normal(48, 32, seed=2))
    feeds = {"x": (off_centre() * uneven(1, spread=1.0)).astype(np.float32)}
    (expected,) = run(graph, **feeds)
    errors = []
    for recipe in (PLAIN, AUTO, BOTH):
        copy = copy_graph(graph)
        quantizer_of(graph, feeds, recipe).quantize(copy)
        errors.append(float(np.square(run(copy, **feeds)[0] - expected).mean()))
    assert errors[1] < 0.5 * errors[0]
    assert errors[2] < 0.5 * errors[1]


def test_progress_counts_layers():
    notes = []
    graph = graph_from_text(LINEAR, w=WEIGHT)
    observation = observe(graph, plan(graph), {"x": uneven()})
    equalize_layers(find_layers(graph, plan(graph)), observation, AUTO, lambda *note: notes.append(note))
    assert notes == [("smoothing 1 of 1", 1, 1)]
