"""Which loads a trial tries, one after the other: the next one depends on what the former ones gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from trtforge.loadtest.results import Load
from trtforge.loadtest.tuning.trial import Probe

LoadKind = Literal["closed", "open"]
Plan = Callable[[Sequence[Probe]], Load | None]
# More users that bring less than this share of throughput are only waiting: the closed loop is saturated.
_LEAST_GAIN = 0.03
# Around a load that is thought to be the limit: near enough for a straight line, wide enough to hold the noise.
_BELOW, _ABOVE = 0.85, 1.18
# Further loads where the limit is not among those; down in larger steps, as nothing is known there.
_MAX_EXTRA = 3
_DOWN = 1.5


def load_of(kind: LoadKind, value: float) -> Load:
    """A load without a ramp: users are whole, rates have four digits."""
    value = max(1.0, round(value)) if kind == "closed" else float(f"{value:.4g}")
    return Load(kind=kind, start=value, end=value)


def climb(kind: LoadKind, start: float, ratio: float, max_probes: int, *, may_descend: bool = False) -> Plan:
    """Rising loads until one misses the objectives, or brings no more throughput.

    Args:
        kind: of the load.
        start: the first one.
        ratio: of each to the one before; users rise by one at least.
        max_probes: after which it ends anyway.
        may_descend: where the first load misses already, lower ones follow until one meets them.
    """

    def next_load(probes: Sequence[Probe]) -> Load | None:
        if not probes:
            return load_of(kind, start)
        if len(probes) >= max_probes:
            return None
        if not any(probe.is_met for probe in probes):
            return _below(kind, probes[-1]) if may_descend else None
        is_over = not all(probe.is_met for probe in probes) or _is_saturated(kind, probes)
        return None if is_over else _above(kind, probes[-1], ratio)

    return next_load


def around(kind: LoadKind, center: float, others: Sequence[float] = ()) -> Plan:
    """Loads about one that is thought to be the limit; further ones above or below where it is not among them.

    Args:
        kind: of the load.
        center: the load.
        others: that are wanted as well.
    """
    values = [_BELOW * center, center, _ABOVE * center, *others]
    if kind == "closed":
        values += [center - 1, center + 1]
    fixed = [load_of(kind, value) for value in sorted({load_of(kind, value).end for value in values})]

    def next_load(probes: Sequence[Probe]) -> Load | None:
        if len(probes) < len(fixed):
            return fixed[len(probes)]
        if len(probes) >= len(fixed) + _MAX_EXTRA:
            return None
        if not any(probe.is_met for probe in probes):
            return _below(kind, min(probes, key=lambda probe: probe.load.end))
        has_limit = not all(probe.is_met for probe in probes) or _is_saturated(kind, probes)
        return None if has_limit else _above(kind, probes[-1], _ABOVE)

    return next_load


def only(load: Load) -> Plan:
    """One load."""
    return lambda probes: None if probes else load


def _above(kind: LoadKind, probe: Probe, ratio: float) -> Load:
    value = probe.load.end * ratio
    return load_of(kind, max(probe.load.end + 1, value) if kind == "closed" else value)


def _below(kind: LoadKind, probe: Probe) -> Load | None:
    return None if kind == "closed" and probe.load.end <= 1 else load_of(kind, probe.load.end / _DOWN)


def _is_saturated(kind: LoadKind, probes: Sequence[Probe]) -> bool:
    """Whether the last number of users brought no more throughput than the best before it."""
    if kind == "open" or len(probes) < 2:
        return False
    return probes[-1].throughput < (1 + _LEAST_GAIN) * max(probe.throughput for probe in probes[:-1])
