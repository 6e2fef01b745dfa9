from __future__ import annotations

import typing

import numpy as np
import pytest
from quant_cases import normal

from trtforge.quantization.calibrators import CALIBRATORS, choose_all, choose_amax
from trtforge.quantization.observers import NUM_BINS, StreamingObserver
from trtforge.recipe import QuantRecipe


def observer_of(values):
    observer = StreamingObserver()
    observer.update(values)
    return observer


def amax_of(method, values, **options):
    return choose_amax(observer_of(values), QuantRecipe(method=method, **options))


def gelu_with_outliers():
    x = normal(60_000)
    values = 0.5 * x * (1 + np.tanh(0.7979 * (x + 0.0447 * x**3)))
    values[::997] *= 9
    return values


# What activations look like: name -> values.
KINDS = {
    "gaussian": normal(60_000),
    "laplace": np.random.default_rng(1).laplace(size=60_000).astype(np.float32),
    "relu": np.maximum(normal(60_000), 0),
    "gelu": gelu_with_outliers(),
    "uniform": np.random.default_rng(2).uniform(-3, 3, 60_000).astype(np.float32),
    "heavy tail": np.random.default_rng(3).standard_t(3, 60_000).astype(np.float32),
    "few values": np.array([0.1, -0.5, 2.0, 7.0], np.float32),
    "half zeros": np.where(np.arange(60_000) % 2, normal(60_000), 0).astype(np.float32),
    "bias": normal(60_000, scale=0.1) + np.float32(40.0),
}


@pytest.fixture
def with_outlier():
    """99,999 values within 5 and one of 1000."""
    return observer_of(np.append(np.clip(normal(99_999), -5, 5), np.float32(1000.0)))


def test_minmax_keeps_the_outlier(with_outlier):
    assert choose_amax(with_outlier, QuantRecipe(method="minmax")) == 1000.0


def test_percentile_clips_the_outlier(with_outlier):
    assert choose_amax(with_outlier, QuantRecipe(method="percentile", percentile=99.99)) < 6.0


def test_entropy_clips_the_outlier(with_outlier):
    assert choose_amax(with_outlier, QuantRecipe(method="entropy")) < 40.0


def test_percentile_100_is_minmax(with_outlier):
    assert choose_amax(with_outlier, QuantRecipe(method="percentile", percentile=100.0)) == 1000.0


def test_higher_percentile_never_gives_a_smaller_amax(with_outlier):
    chosen = [
        choose_amax(with_outlier, QuantRecipe(method="percentile", percentile=p))
        for p in (90.0, 99.0, 99.9, 99.999, 100.0)
    ]
    assert chosen == sorted(chosen)


@pytest.mark.parametrize("method", CALIBRATORS)
@pytest.mark.parametrize(
    "values",
    [np.zeros(0), np.zeros(50), np.full(9, -np.inf), np.full(9, np.nan)],
    ids=["unobserved", "zeros", "infinite", "nan"],
)
def test_tensor_without_a_finite_non_zero_value_has_amax_zero(method, values):
    assert amax_of(method, values.astype(np.float32)) == 0.0


@pytest.mark.parametrize("method", CALIBRATORS)
@pytest.mark.parametrize("value", [3.7, -3.7, 1.0, 1e-6, 1e-35, 3e38])
@pytest.mark.parametrize("zeros", [0, 90])
def test_constant_is_its_own_amax(method, value, zeros):
    values = np.append(np.zeros(zeros), np.full(100, value)).astype(np.float32)
    assert amax_of(method, values) == pytest.approx(abs(value), rel=1e-6)


@pytest.mark.parametrize("method", CALIBRATORS)
@pytest.mark.parametrize("kind", KINDS)
def test_amax_lies_within_what_was_seen(method, kind):
    assert 0.0 < amax_of(method, KINDS[kind]) <= np.abs(KINDS[kind]).max()


@pytest.mark.parametrize("method", CALIBRATORS)
def test_amax_does_not_depend_on_sign_or_on_masked_scores(method):
    values = KINDS["gelu"]
    masked = np.append(-values, np.full(5000, -np.inf, np.float32)).astype(np.float32)
    assert amax_of(method, masked) == amax_of(method, values)


@pytest.mark.parametrize("method", ["entropy", "mse", "minmax"])
@pytest.mark.parametrize("factor", [2.0**-20, 2.0**9])
def test_amax_scales_with_the_values(method, factor):
    values = KINDS["laplace"]
    assert amax_of(method, values * np.float32(factor)) == amax_of(method, values) * factor


def quantization_error(values, amax):
    """Mean squared error of INT8 with this amax."""
    step = amax / 127
    return np.mean((values - np.clip(np.rint(values / step), -127, 127) * step) ** 2, dtype=np.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_mse_is_as_good_as_trying_every_range(kind):
    values = KINDS[kind].astype(np.float64)
    best = min(quantization_error(values, a) for a in np.linspace(0.005, 1, 600) * np.abs(values).max())
    chosen = quantization_error(values, amax_of("mse", KINDS[kind]))
    assert chosen <= 1.02 * best + (observer_of(KINDS[kind]).limit / NUM_BINS) ** 2 / 12


def test_mse_needs_no_bin_to_be_finer_than_a_step():
    """One value in a million far away: the best range is a hundredth of it, where a step is a fifth of a bin."""
    observer = observer_of(np.array([1000.0], np.float32))
    for seed in range(10):
        observer.update(np.random.default_rng(seed).uniform(-1, 1, 1_000_000).astype(np.float32) * 10)
    expected = min(
        np.geomspace(5, 1000, 400), key=lambda a: max(a, 10) ** 2 / 12 / 127**2 + (1000 - a) ** 2 / 1e7 + (a < 10) * 9
    )
    assert choose_amax(observer, QuantRecipe(method="mse")) == pytest.approx(expected, rel=0.1)


def divergence(bins, i):
    """KL divergence of candidate i as in NVIDIA ModelOpt's histogram calibrator, with an empty last bin smoothed."""
    bins = bins.astype(np.float64)
    bins[0] = bins[1]
    level = np.digitize(np.arange(i), np.linspace(0, i, num=129)) - 1
    level[bins[:i] == 0] = -1
    density = np.zeros(128)
    for index, k in enumerate(level):
        if k != -1:
            density[k] += bins[index]
    for k in range(128):
        if (level == k).any():
            density[k] /= np.count_nonzero(level == k)
    q = np.array([0.0 if k == -1 else density[k] for k in level])
    p = bins[:i].copy()
    p[-1] += bins[i:].sum()
    p, q = p / p.sum(), q / q.sum()
    if q[-1] == 0 and p[-1] > 0:
        q[-1] = 1e-4 / bins[:i].sum()
    used = p > 0
    return float(np.sum(p[used] * np.log(p[used] / q[used])))


@pytest.mark.parametrize("kind", ["gaussian", "laplace", "relu", "gelu", "uniform", "heavy tail", "half zeros"])
def test_entropy_is_the_range_that_the_definition_gives(kind):
    observer = observer_of(KINDS[kind])
    used = int(np.flatnonzero(observer.histogram)[-1]) + 1
    chosen = choose_amax(observer, QuantRecipe(method="entropy"))
    chosen_bins = min(round(chosen * NUM_BINS / observer.limit + 0.499), used)
    tried = np.arange(used, 127, -4)[:: max(1, used // 800)]
    others = [divergence(observer.histogram, i) for i in tried]
    assert divergence(observer.histogram, chosen_bins) <= min(others) * (1 + 1e-9) + 1e-12


def test_entropy_of_a_gaussian_with_a_far_tail_is_near_the_body():
    values = np.append(normal(1_000_000), np.linspace(20, 30, 5)).astype(np.float32)
    assert 3.0 < amax_of("entropy", values) < 8.0


def test_every_method_of_the_recipe_has_a_calibrator():
    assert set(CALIBRATORS) == set(typing.get_args(QuantRecipe.model_fields["method"].annotation))


def test_all_methods_come_from_one_observer(with_outlier):
    recipe = QuantRecipe(percentile=99.9)
    assert choose_all(with_outlier, recipe) == {
        method: choose_amax(with_outlier, QuantRecipe(method=method, percentile=99.9)) for method in CALIBRATORS
    }
