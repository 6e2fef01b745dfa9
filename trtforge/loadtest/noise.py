"""How far two measurements of the same thing lie apart by chance, from repeats of both.

Positive figures (times, throughput) are compared by the ratio of their geometric means, since their spread grows with
them. The band is t * s * sqrt(1/n1 + 1/n2) in logarithms: s is the standard deviation of the repeats of both runs
together, t the 99 % point of Student's distribution with n1 + n2 - 2 degrees of freedom. A change outside it would come
up once in a hundred comparisons of equal servers.

Where the repeats of both took turns, each is compared with its neighbour instead: what slows the machine for a while
slows both of a pair, and cancels. The band is t * s / sqrt(n), of n ratios with n - 1 degrees of freedom.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

# Repeats of each run from which a spread can be told.
MIN_REPEATS = 3
# Student's t, two-sided 99 %, by degrees of freedom (any table of it); what lies between takes the next lower entry.
_T_99 = {1: 63.66, 2: 9.92, 3: 5.84, 4: 4.60, 5: 4.03, 6: 3.71, 7: 3.50, 8: 3.36, 9: 3.25, 10: 3.17, 15: 2.95, 30: 2.75}


@dataclasses.dataclass(frozen=True, slots=True)
class Band:
    """The changes that chance explains, as shares: from `low`, which is below 0, to `high`."""

    low: float
    high: float

    def holds(self, change: float) -> bool:
        """Whether a change is no more than noise."""
        return self.low <= change <= self.high

    def __str__(self) -> str:
        return f"{100 * self.low:.1f} to {100 * self.high:+.1f} %"


def symmetric_band(width: float) -> Band:
    """From -width to +width."""
    return Band(-width, width)


def center(values: Sequence[float]) -> float:
    """The geometric mean of positive values, the mean where one is zero."""
    return statistics.geometric_mean(values) if min(values) > 0 else statistics.fmean(values)


def log_spread(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The standard deviation of the logarithms of two groups, each about its own mean.

    Returns:
        None where a group has too few values to tell, or one is not positive.
    """
    if not _have_ratios(first, second):
        return None
    return _pooled_deviation([math.log(value) for value in first], [math.log(value) for value in second])


def band(spread: float, num_first: int, num_second: int, least: float) -> Band:
    """The band of a ratio; in logarithms it is as wide on both sides, so a share reaches further up than down.

    Args:
        spread: of the logarithms of single values.
        num_first, num_second: values of each group.
        least: that the band holds whatever the spread, as a share.
    """
    return _ratio_band(_t(num_first + num_second - 2) * spread * math.sqrt(1 / num_first + 1 / num_second), least)


def paired_band(first: Sequence[float], second: Sequence[float], least: float) -> Band | None:
    """The band of the ratio of two groups of which the i-th values were measured one after the other.

    Returns:
        None where there are too few pairs to tell, or a value is not positive.
    """
    if not _have_ratios(first, second):
        return None
    ratios = [math.log(after / before) for before, after in zip(first, second, strict=True)]
    return _ratio_band(_t(len(ratios) - 1) * statistics.stdev(ratios) / math.sqrt(len(ratios)), least)


def plain_band(first: Sequence[float], second: Sequence[float]) -> float:
    """The half width of the band of a difference of two means; 0 where a group has too few values to tell."""
    if min(len(first), len(second)) < MIN_REPEATS:
        return 0.0
    spread = _pooled_deviation(first, second)
    return _t(len(first) + len(second) - 2) * spread * math.sqrt(1 / len(first) + 1 / len(second))


def rate_band(num_failed: int, num_first: int, num_second: int) -> float:
    """The half width of the band of a difference of two error rates, as far as counting alone explains it.

    Args:
        num_failed: requests of both groups that failed; one more is assumed, so that none is no certainty.
        num_first, num_second: requests of each group.
    """
    total = num_first + num_second
    share = min((num_failed + 1) / total, 1.0)
    return _t(30) * math.sqrt(share * (1 - share) * (1 / num_first + 1 / num_second))


def _have_ratios(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether there are enough values to tell a spread, and all of them are positive."""
    return min(len(first), len(second)) >= MIN_REPEATS and min(*first, *second) > 0


def _pooled_deviation(first: Sequence[float], second: Sequence[float]) -> float:
    """The standard deviation of two groups, each about its own mean."""
    means = ((group, statistics.fmean(group)) for group in (first, second))
    squares = sum((value - mean) ** 2 for group, mean in means for value in group)
    return math.sqrt(squares / (len(first) + len(second) - 2))


def _ratio_band(width: float, least: float) -> Band:
    """The band of a ratio whose logarithm lies within `width` of 0."""
    return Band(min(math.expm1(-width), -least), max(math.expm1(width), least))


def _t(freedom: int) -> float:
    return _T_99[max(known for known in _T_99 if known <= freedom)]
