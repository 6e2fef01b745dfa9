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
