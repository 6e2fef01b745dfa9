"""Collect times in HDR histograms: constant memory for any number of values, and an error of at most 0.1 %."""

from __future__ import annotations

from typing import Any

from trtforge.loadtest.results import Latency

PERCENTILES = (50.0, 75.0, 90.0, 95.0, 99.0, 99.9)
# A percentile with fewer values above it is decided by chance.
_MIN_ABOVE = 10
# Microseconds: one, and an hour, which is longer than any timeout.
_LOWEST_US, _HIGHEST_US = 1, 3_600_000_000
_DIGITS = 3


class Distribution:
    """Times in seconds, counted in microseconds."""

    def __init__(self) -> None:
        from hdrh.histogram import HdrHistogram

        self._histogram: Any = HdrHistogram(_LOWEST_US, _HIGHEST_US, _DIGITS)

    def record(self, seconds: float) -> None:
        """Add a value; what is out of range is held at its end."""
        self._histogram.record_value(min(max(round(seconds * 1e6), _LOWEST_US), _HIGHEST_US))

    def summarize(self) -> Latency:
        """What `run.json` keeps of it."""
        histogram = self._histogram
        count = int(histogram.get_total_count())
        names = {percentile: f"p{percentile:g}" for percentile in PERCENTILES}
        values = {name: histogram.get_value_at_percentile(p) / 1000 for p, name in names.items()} if count else {}
        return Latency(
            count=count,
            mean_ms=histogram.get_mean_value() / 1000 if count else None,
            min_ms=histogram.get_min_value() / 1000 if count else None,
            max_ms=histogram.get_max_value() / 1000 if count else None,
            percentiles_ms=values,
            too_few=tuple(name for p, name in names.items() if count * round(1000 - 10 * p) < 1000 * _MIN_ABOVE),
            hdr=histogram.encode().decode("ascii"),
        )
