"""Percentiles, noise, and the number of samples."""

from __future__ import annotations

import dataclasses

import pytest

from trtforge.benchmark.samples import Summary, is_slower, summarize
from trtforge.benchmark.timing import MAX_SAMPLES, MIN_SAMPLES, num_samples


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([7.0], Summary(7.0, 7.0, 7.0)),
        ([4.0, 2.0], Summary(3.0, 2.2, 3.8)),
        ([float(value) for value in range(100, -1, -1)], Summary(50.0, 10.0, 90.0)),
    ],
)
def test_a_summary_is_the_median_and_the_10th_and_90th_percentile(samples: list[float], expected: Summary) -> None:
    found = summarize(samples)
    assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(expected))


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")], [float("inf")]])
def test_no_figure_is_made_of_nothing(samples: list[float]) -> None:
    with pytest.raises(ValueError, match="finite samples"):
        summarize(samples)


@pytest.mark.parametrize(
    ("now", "before", "slower"),
    [
        (Summary(120, 118, 125), Summary(100, 98, 104), True),
        (Summary(120, 99, 150), Summary(100, 98, 104), False),  # the spreads overlap
        (Summary(102, 101.5, 103), Summary(100, 99.8, 100.2), False),  # apart, but as much as two runs are
        (Summary(104, 103.5, 105), Summary(100, 99.8, 100.2), True),
        (Summary(80, 78, 85), Summary(100, 98, 104), False),
        (Summary(100, 98, 104), Summary(100, 98, 104), False),
    ],
)
def test_slower_is_beyond_the_noise(now: Summary, before: Summary, slower: bool) -> None:
    assert is_slower(now, before) is slower


def test_samples_fill_the_time_within_bounds() -> None:
    assert num_samples(0.2, 2000.0) == 100
    assert num_samples(0.2, 1.0) == MAX_SAMPLES
    assert num_samples(0.2, 1e6) == MIN_SAMPLES
    assert num_samples(0.2, 0.0) == MAX_SAMPLES
