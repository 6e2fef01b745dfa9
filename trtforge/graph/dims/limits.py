"""Vary every dimension of a graph alone: what goes through and what does not are its step and its ends."""

from __future__ import annotations

import math
from collections.abc import Mapping

from trtforge.graph.dims.probe import Conflict
from trtforge.graph.dims.trial import Trial, TrialDim, place_of

# Sizes that a dimension is tried at, besides those near the one that works.
_TRIALS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 31, 32, 33, 48, 64, 96, 128, 160, 256, 257, 384, 512, 513, 768, 1024)
_LARGE_TRIALS = (1025, 2048, 4096, 8192, 12288)
# Steps to look for: powers of two, which strides make, then others.
_STEPS = (1, 2, 4, 8, 16, 32, 64, 128, *(n for n in range(3, 64) if n & (n - 1)))


def find_limits(trial: Trial) -> None:
    """Vary every dim alone: what goes through are its limits."""
    for dim in trial.open_dims():
        near = (dim.size - 1, dim.size, dim.size + 1, 2 * dim.size, 3 * dim.size)
        trials = sorted({size for size in (*_TRIALS, *_LARGE_TRIALS, *near) if size > 0})
        found = {size: trial.run({id(dim): size}) for size in trials}
        taken = [size for size, conflict in found.items() if conflict is None]
        refused = {size: conflict for size, conflict in found.items() if conflict is not None}
        if refused and taken:
            _limit(trial, dim, taken, refused)


def _limit(trial: Trial, dim: TrialDim, taken: list[int], refused: Mapping[int, Conflict]) -> None:
    """Turn what goes through and what does not into a step and two ends."""
    if taken[0] == 1 and 2 in refused and len(taken) > 1:
        # A 1 that is broadcast fits anything.
        taken = taken[1:]
    step, taken = _step(trial, dim, taken, refused)
    dim.multiple = step
    inside = [size for size in refused if taken[0] < size < taken[-1]]
    below = [size for size in refused if size < taken[0] and size % step == 0]
    above = [size for size in refused if size > taken[-1] and size % step == 0]
    dim.low = _edge(trial, dim, max(below), taken[0]) if below else max(step, taken[0])
    dim.high = _edge(trial, dim, min(above), taken[-1]) if above else None
    reasons = [refused[size] for size in (*inside[:1], *below[-1:], *above[:1])]
    dim.reason = "; ".join(dict.fromkeys(f"{place_of(conflict)}: {conflict.why}" for conflict in reasons[:2]))
    if dim.high is not None and dim.high < 2 * dim.low:
        # One size, or sizes that strides make equal.
        dim.suggestion = dim.low
        if dim.high == dim.low and not dim.is_alike:
            dim.kind = "fixed"


def _step(trial: Trial, dim: TrialDim, taken: list[int], refused: Mapping[int, Conflict]) -> tuple[int, list[int]]:
    """The smallest step whose multiples go through, without a gap; else 1, and the sizes around the one that works.

    With strides that round up, some other sizes go through as well.
    """
    for step in _STEPS:
        mine = [size for size in taken if size % step == 0]
        gaps = [size for size in refused if mine and size % step == 0 and mine[0] < size < mine[-1]]
        if gaps or not mine or (step > 1 and len(mine) < 3):
            continue
        start = math.ceil(mine[0] / step)
        if step == 1 or all(trial.run({id(dim): n * step}) is None for n in range(start, start + 5)):
            return step, mine
    low = max((size for size in refused if size < dim.size), default=0)
    high = min((size for size in refused if size > dim.size), default=2**62)
    return 1, [size for size in taken if low < size < high] or [dim.size]


def _edge(trial: Trial, dim: TrialDim, bad: int, good: int) -> int:
    """The last size that goes through on the way from one that does to one that does not."""
    bad, good = bad // dim.multiple, good // dim.multiple
    while abs(good - bad) > 1:
        middle = (good + bad) // 2
        if trial.run({id(dim): middle * dim.multiple}) is None:
            good = middle
        else:
            bad = middle
    return good * dim.multiple
