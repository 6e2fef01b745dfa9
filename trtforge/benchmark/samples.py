"""Statistics of timed samples. All samples are kept; a figure is a median with the 10th and 90th percentile.

The mean is not shown: one sample during which the card changed its clock moves it, and no median.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

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
    """The summary of samples; a percentile between two of them is interpolated.

    Raises:
        ValueError: there is no sample, or one is not a finite number.
    """
    if not samples_us or not np.isfinite(samples_us).all():
        raise ValueError("a summary is of finite samples")
    return Summary(*np.quantile(samples_us, (0.5, 0.1, 0.9)).tolist())


def is_slower(now: Summary, before: Summary) -> bool:
    """True where `now` is slower beyond the noise: the middle 80 % of the two do not overlap, and the medians differ
    by more than two runs of the same program do.
    """
    is_apart = now.p10_us > before.p90_us
    return is_apart and now.median_us > before.median_us * (1 + RUN_TO_RUN_SHARE)
