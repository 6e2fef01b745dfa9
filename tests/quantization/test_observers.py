from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from quant_cases import normal

from trtforge.quantization.observers import NUM_BINS, StreamingObserver


def observer_of(*arrays):
    observer = StreamingObserver()
    for array in arrays:
        observer.update(array)
    return observer


def test_extremes_and_count_are_exact():
    values = normal(3, 70_000)
    observer = observer_of(values)
    assert observer.count == values.size
    assert (observer.minimum, observer.maximum) == (values.min(), values.max())
    assert observer.amax == np.abs(values).max()


def test_extremes_are_those_of_all_batches():
    observer = observer_of(*(np.array(pair, np.float32) for pair in ([-1, 2], [-5, 1], [0, 9], [3, 4])))
    assert (observer.minimum, observer.maximum) == (-5.0, 9.0)


def test_state_does_not_depend_on_batching_order_or_shape():
    values = np.concatenate([normal(200_000, scale=scale) for scale in (1e-3, 50.0, 1.0)])
    whole = observer_of(values)
    pieces = observer_of(*(piece.reshape(1, -1) for piece in np.array_split(values[::-1], 7)))
    assert np.array_equal(whole.histogram, pieces.histogram)
    assert (whole.limit, whole.count, whole.amax) == (pieces.limit, pieces.count, pieces.amax)


def test_histogram_counts_every_value_in_its_bin():
    values = np.array([0.0, 0.25, -0.25, 0.5, 0.75, -0.999], np.float32)
    observer = observer_of(values)
    assert observer.limit == 1.0
    expected = np.bincount((np.abs(values) * NUM_BINS).astype(int), minlength=NUM_BINS)
    assert np.array_equal(observer.histogram, expected)


def test_growing_the_range_merges_bins_and_loses_no_count():
    small, large = normal(5000, scale=0.01), np.array([1000.0], np.float32)
    grown = observer_of(small, large)
    assert np.array_equal(grown.histogram, observer_of(np.concatenate([large, small])).histogram)
    assert grown.histogram.sum() == 5001
    assert grown.limit == 1024.0


def test_state_size_is_the_same_after_any_number_of_batches():
    observer = StreamingObserver()
    for index in range(50):
        observer.update(normal(10, index + 1, seed=index))
    assert observer.histogram.shape == (NUM_BINS,)
    assert observer.count == sum(10 * (index + 1) for index in range(50))


def test_nan_and_infinity_are_counted_and_otherwise_ignored():
    observer = observer_of(np.array([1.0, -np.inf, np.nan, -2.0, np.inf], np.float32))
    assert (observer.count, observer.num_non_finite) == (2, 3)
    assert (observer.minimum, observer.maximum) == (-2.0, 1.0)


def test_tensor_without_a_finite_value_has_amax_zero():
    observer = observer_of(np.full((2, 2), -np.inf, np.float32))
    assert (observer.count, observer.num_non_finite) == (0, 4)
    assert (observer.amax, observer.rms, observer.abs_quantile(0.5)) == (0.0, 0.0, 0.0)


def test_zero_size_tensor_changes_nothing():
    observer = observer_of(np.zeros((0, 7), np.float32))
    assert (observer.count, observer.histogram.sum()) == (0, 0)


def test_all_zero_tensor_has_amax_zero():
    observer = observer_of(np.zeros((4, 4), np.float32))
    assert (observer.count, observer.amax, observer.rms, observer.abs_quantile(0.999)) == (16, 0.0, 0.0, 0.0)


def test_positive_only_tensor_has_its_own_minimum():
    assert observer_of(np.array([3.0, 5.0], np.float32)).minimum == 3.0


@pytest.mark.parametrize("value", [3.4e38, 1.2e-38, 1e-42])
def test_extreme_magnitudes_are_counted(value):
    observer = observer_of(np.array([value, -value, 0.0], np.float32))
    assert observer.histogram.sum() == 3
    assert observer.amax == np.float32(value)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.bfloat16])
def test_other_float_types_are_observed_as_float32(dtype):
    values = normal(1000).astype(dtype)
    observer = observer_of(values)
    assert observer.amax == float(np.abs(values.astype(np.float32)).max())


def test_float64_beyond_float32_counts_as_not_finite():
    assert observer_of(np.array([1e300, 1.0])).num_non_finite == 1


def test_observed_array_is_not_changed():
    values = normal(100)
    before = values.copy()
    observer_of(values)
    assert np.array_equal(values, before)


def test_quantile_is_rounded_up_by_at_most_one_bin():
    values = normal(100_000)
    observer = observer_of(values)
    for fraction in (0.5, 0.99, 0.9999):
        exact = np.quantile(np.abs(values), fraction, method="inverted_cdf")
        assert exact <= observer.abs_quantile(fraction) <= exact + observer.limit / NUM_BINS


def test_quantile_one_is_amax():
    observer = observer_of(normal(1000))
    assert observer.abs_quantile(1.0) == observer.amax


def test_rms_follows_the_values():
    values = normal(50_000, scale=3.0)
    assert observer_of(values).rms == pytest.approx(float(np.sqrt(np.mean(values**2))), rel=1e-3)


def channels_of(observer):
    return observer.channel_min, observer.channel_max, observer.channel_mean, observer.channel_mean_square


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((2, 50, 96), -1),
        ((2, 50, 96), 2),
        ((40, 7), -1),
        ((3, 20, 9, 11), 1),
        ((1, 3, 400, 500), 1),
        ((1, 300, 40, 40), 1),
        ((96, 50), -2),
        ((5,), -1),
        ((4, 8, 1), 1),
        ((1000, 700), -1),
    ],
)
def test_channel_statistics_are_exact(shape, axis):
    values = normal(*shape) + np.float32(0.5)
    observer = StreamingObserver(axis)
    observer.update(values)
    others = tuple(a for a in range(len(shape)) if a != axis % len(shape))
    exact = values.astype(np.float64)
    assert np.array_equal(observer.channel_min, values.min(axis=others))
    assert np.array_equal(observer.channel_max, values.max(axis=others))
    np.testing.assert_allclose(observer.channel_mean, exact.mean(axis=others), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(observer.channel_mean_square, (exact**2).mean(axis=others), rtol=1e-12)
    assert all(array.dtype == np.float64 for array in channels_of(observer))


@pytest.mark.parametrize("axis", [None, -1, 1])
def test_everything_else_is_the_same_with_and_without_channels(axis):
    values = normal(3, 40, 300, scale=7.0)
    values[0, 0, 0] = np.nan
    plain, observer = observer_of(values), StreamingObserver(axis)
    observer.update(values)
    assert np.array_equal(plain.histogram, observer.histogram)
    for name in ("count", "num_non_finite", "minimum", "maximum", "limit"):
        assert getattr(plain, name) == getattr(observer, name)


def test_channel_statistics_do_not_depend_on_batching_or_order():
    values = normal(64, 10, 32)
    whole, pieces = StreamingObserver(-1), StreamingObserver(-1)
    whole.update(values)
    for piece in np.array_split(values[::-1], 7):
        pieces.update(piece)
    for one, other in zip(channels_of(whole), channels_of(pieces), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)


def test_values_that_are_not_finite_are_left_out_of_their_channel():
    values = np.array([[1.0, -np.inf, np.nan], [3.0, 5.0, np.inf]], np.float32)
    observer = StreamingObserver(-1)
    observer.update(values)
    assert (observer.count, observer.num_non_finite, observer.amax) == (3, 3, 5.0)
    assert observer.channel_min.tolist() == [1.0, 5.0, 0.0]
    assert observer.channel_max.tolist() == [3.0, 5.0, 0.0]
    assert observer.channel_mean.tolist() == [2.0, 5.0, 0.0]
    assert observer.channel_mean_square.tolist() == [5.0, 25.0, 0.0]


@pytest.mark.parametrize("later", [(2, 6), (), (7,)])
def test_changed_number_of_channels_ends_their_statistics_and_nothing_else(later):
    observer = StreamingObserver(1)
    observer.update(normal(4, 5))
    assert len(observer.channel_min) == 5
    observer.update(np.ones(later, np.float32))
    observer.update(normal(4, 5))
    assert channels_of(observer) == (None,) * 4
    assert observer.count == 40 + np.ones(later).size


def test_without_an_axis_or_before_the_first_value_there_are_no_channels():
    assert channels_of(observer_of(normal(3, 4))) == (None,) * 4
    observer = StreamingObserver(-1)
    observer.update(np.zeros((0, 7), np.float32))
    assert channels_of(observer) == (None,) * 4
    observer.update(normal(2, 4))
    assert len(observer.channel_mean) == 4


def test_large_values_do_not_overflow_the_mean_square():
    observer = StreamingObserver(-1)
    observer.update(np.full((3, 2), 1e30, np.float32))
    np.testing.assert_allclose(observer.channel_mean_square, np.float64(np.float32(1e30)) ** 2)


@pytest.mark.parametrize("axis", [None, -1])
def test_restored_observer_goes_on_as_if_nothing_had_happened(axis):
    first, second = normal(5, 6, scale=3.0), normal(7, 6, seed=1, scale=90.0)
    whole, begun, resumed = (StreamingObserver(axis) for _ in range(3))
    for array in (first, second):
        whole.update(array)
    begun.update(first)
    resumed.restore(begun.state())
    resumed.update(second)
    expected, actual = whole.state(), resumed.state()
    assert expected.keys() == actual.keys()
    assert all(np.array_equal(expected[name], actual[name]) for name in expected)
    assert begun.count == 30


def test_restored_observer_shares_nothing_with_the_state():
    observer, resumed = StreamingObserver(-1), StreamingObserver(-1)
    observer.update(normal(5, 6))
    before = {name: array.copy() for name, array in observer.state().items()}
    resumed.restore(observer.state())
    resumed.update(normal(5, 6))
    assert all(np.array_equal(before[name], array) for name, array in observer.state().items())


def test_ended_channel_statistics_stay_ended_after_restoring():
    observer, resumed = StreamingObserver(-1), StreamingObserver(-1)
    observer.update(normal(2, 3))
    observer.update(normal(2, 4))
    resumed.restore(observer.state())
    resumed.update(normal(2, 4))
    assert resumed.channel_min is None


@pytest.mark.parametrize(
    "damage",
    [
        {"counts": np.zeros(4, np.int32)},
        {"counts": np.zeros(3, np.int64)},
        {"counts": np.array([-1, 0, 0, 1])},
        {"counts": np.array([18, 0, 2000, 1])},
        {"histogram": np.zeros(NUM_BINS, np.int64)},
        {"histogram": np.zeros(5, np.int64)},
        {"extremes": np.array([np.nan, 1.0])},
        {"channel_total": np.zeros(4)},
        {"channel_count": np.full(6, -1)},
        {"channel_minimum": np.full(6, np.nan)},
    ],
)
def test_a_state_that_cannot_be_is_refused(damage):
    observer = StreamingObserver(-1)
    observer.update(normal(3, 6))
    with pytest.raises(ValueError, match=r"\w"):
        StreamingObserver(-1).restore(observer.state() | damage)
