from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from quant_cases import normal

from trtforge.quantization.rows import RowSampler


def numbered(count, channels=4, start=0):
    """Rows that each hold their own number."""
    return np.repeat(np.arange(start, start + count, dtype=np.float32)[:, None], channels, axis=1)


def sample(array, max_bytes=2**20, batches=1, axis=-1):
    sampler = RowSampler(max_bytes)
    for batch in np.array_split(array, batches):
        sampler.update(batch, axis)
    return sampler.rows()


def test_everything_is_kept_while_it_fits():
    values = normal(3, 5, 6)
    assert np.array_equal(sample(values), values.reshape(15, 6))


def test_a_row_of_an_image_is_one_pixel():
    values = normal(2, 3, 4, 5)
    assert np.array_equal(sample(values, axis=1), np.moveaxis(values, 1, -1).reshape(-1, 3))


@pytest.mark.parametrize("batches", [1, 3, 50])
def test_the_choice_does_not_depend_on_the_size_of_batches(batches):
    values = normal(1000, 8)
    expected = sample(values, max_bytes=100 * 32)
    assert 40 <= len(expected) <= 100
    assert np.array_equal(sample(values, max_bytes=100 * 32, batches=batches), expected)


def test_the_sample_never_takes_more_than_its_bytes():
    sampler = RowSampler(5000)
    for index in range(200):
        sampler.update(numbered(97, start=97 * index), -1)
        assert sampler.rows().nbytes <= 5000
    assert sampler.rows().nbytes >= 2000


def test_kept_rows_are_spread_over_the_whole_data_in_order():
    kept = sample(numbered(100_000), max_bytes=16 * 1000)[:, 0]
    assert np.all(np.diff(kept) > 0)
    per_tenth = np.histogram(kept, bins=10, range=(0, 100_000))[0]
    assert per_tenth.min() >= 0.9 * per_tenth.max()


@pytest.mark.parametrize("period", [2, 64, 100, 128, 384, 1024])
def test_no_position_of_a_sequence_is_preferred(period):
    kept = sample(numbered(400_000), max_bytes=16 * 4000)[:, 0].astype(int)
    per_quarter = np.histogram(kept % period, bins=min(period, 4), range=(0, period))[0]
    assert per_quarter.min() >= 0.9 * per_quarter.max()


def test_rows_that_are_not_finite_are_left_out():
    values = normal(4, 3)
    values[1, 2], values[3, 0] = np.nan, -np.inf
    assert np.array_equal(sample(values), values[[0, 2]])


def test_rows_of_other_types_become_float32():
    values = normal(4, 3).astype(ml_dtypes.bfloat16)
    assert sample(values).dtype == np.float32
    assert np.array_equal(sample(values), values.astype(np.float32))


def test_empty_arrays_change_nothing():
    assert sample(np.zeros((0, 5), np.float32)).shape == (0, 0)
    sampler = RowSampler()
    sampler.update(np.zeros((3, 0), np.float32), -1)
    sampler.update(normal(2, 4), -1)
    assert sampler.rows().shape == (2, 4)


@pytest.mark.parametrize("other", [normal(2, 5), np.float32(1.0), normal(7)])
def test_changed_number_of_channels_ends_the_sample(other):
    sampler = RowSampler()
    for array in (normal(2, 4), np.asarray(other), normal(2, 4)):
        sampler.update(array, -1 if array.ndim else 1)
    assert sampler.rows().shape == (0, 0)


def test_rows_longer_than_the_memory_are_not_kept():
    assert sample(normal(3, 100), max_bytes=399).shape == (0, 0)
    assert sample(normal(3, 100), max_bytes=400).shape == (1, 100)


def test_kept_rows_are_a_copy():
    values = normal(2, 3)
    sampler = RowSampler()
    sampler.update(values, -1)
    values[:] = 0
    assert not np.array_equal(sampler.rows(), values)


def test_restored_sampler_goes_on_as_if_nothing_had_happened():
    first, second = normal(300, 4), normal(500, 4, seed=1)
    whole, begun, resumed = (RowSampler(1600) for _ in range(3))
    for array in (first, second):
        whole.update(array, -1)
    begun.update(first, -1)
    resumed.restore(begun.state())
    resumed.update(second, -1)
    assert all(np.array_equal(whole.state()[name], array) for name, array in resumed.state().items())


@pytest.mark.parametrize(
    "damage",
    [
        {"counts": np.array([4, 300], np.int64)},
        {"counts": np.array([5, 300, 2**32], np.int64)},
        {"counts": np.array([4, -1, 2**32], np.int64)},
        {"numbers": np.zeros(3, np.uint32)},
        {"rows": np.full((300, 4), np.nan, np.float32)},
        {"rows": np.zeros((300, 4))},
        {"rows": np.zeros((300, 40), np.float32)},
    ],
)
def test_a_state_that_cannot_be_is_refused(damage):
    sampler = RowSampler(300 * 16)
    sampler.update(normal(300, 4), -1)
    with pytest.raises(ValueError, match="row sample"):
        RowSampler(300 * 16).restore(sampler.state() | damage)
