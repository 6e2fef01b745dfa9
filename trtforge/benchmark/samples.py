"""Statistics of timed samples. All samples are kept; a figure is a median with the 10th and 90th percentile.

The mean is not shown: one sample during which the card changed its clock moves it, and no median.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

# Two runs of one program differ by this share from day to day, however narrow each run's samples are: clocks,
# temperature and memory placement.
RUN_TO_RUN_SHARE = 0.03


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """Of samples, in microseconds."""

    median_us: float
    p10_us: float
    p90_us: float


def summarize(samples_us: Sequence[float]) -> Summary:
    """The summary of at least one sample."""
    return Summary(quantile(samples_us, 0.5), quantile(samples_us, 0.1), quantile(samples_us, 0.9))


def quantile(samples: Sequence[float], share: float) -> float:
    """The value below which `share` of the samples lie, interpolated between neighbours.

    Raises:
        ValueError: there is no sample, or one is not a finite number.
    """
    if not samples or not all(map(math.isfinite, samples)):
        raise ValueError("a quantile is of finite samples")
    ordered = sorted(samples)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def is_slower(now: Summary, before: Summary) -> bool:
    """True where `now` is slower beyond the noise: the middle 80 % of the two do not overlap, and the medians differ
    by more than two runs of the same program do.
    """
    is_apart = now.p10_us > before.p90_us
    return is_apart and now.median_us > before.median_us * (1 + RUN_TO_RUN_SHARE)
