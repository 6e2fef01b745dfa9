"""Method mse: the range with the smallest expected squared error of rounding and clipping.

    amax = argmin_a E[(|x| - Q(|x|))^2],    Q(x) = min(round(x / s), 127) s,    s = a / 127

The values of a bin are taken as spread evenly over it, which holds for steps of any size, also below a bin's width.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trtforge.quantization.observers import NUM_BINS, StreamingObserver
from trtforge.recipe import QuantRecipe

_STEPS = 127
# Candidates of the first search, whose neighbours differ by a constant factor, and of the second, between the
# neighbours of its best.
_COARSE, _FINE = 96, 48

Vector = npt.NDArray[np.float64]


def choose_amax(observer: StreamingObserver, _recipe: QuantRecipe) -> float:
    """The end of a bin, at most the largest value, with the smallest error."""
    if observer.amax == 0.0:
        return 0.0
    used = int(np.flatnonzero(observer.histogram)[-1]) + 1
    counts = observer.histogram[:used].astype(np.float64)
    coarse = np.unique(np.geomspace(1, used, _COARSE).round().astype(np.int64))
    best = int(np.argmin(_errors(counts, coarse)))
    low, high = coarse[max(best - 1, 0)], coarse[min(best + 1, len(coarse) - 1)]
    fine = np.unique(np.linspace(low, high, _FINE).round().astype(np.int64))
    chosen = fine[np.argmin(_errors(counts, fine))]
    return min(float(chosen) * (observer.limit / NUM_BINS), observer.amax)


def _errors(counts: Vector, candidates: npt.NDArray[np.int64]) -> Vector:
    """Sum of squared errors over all values for each candidate amax; lengths in bins."""
    rounding = np.array([_rounding_error(counts, int(candidate)) for candidate in candidates])
    return rounding + _clipping_errors(counts, candidates)


def _rounding_error(counts: Vector, amax: int) -> float:
    """Sum of squared distances to the nearest step, over the bins below amax.

    The squared distance integrates from 0 to x = (n + r) s, with n the nearest step, to s^3 (n / 12 + r^3 / 3).
    """
    step = amax / _STEPS
    position = np.arange(amax + 1) / step
    nearest = np.rint(position)
    rest = position - nearest
    integral = nearest / 12.0 + rest * rest * rest / 3.0
    return float((counts[:amax] * np.diff(integral)).sum()) * step**3


def _clipping_errors(counts: Vector, candidates: npt.NDArray[np.int64]) -> Vector:
    """Sum of (x - a)^2 over the bins above each candidate a: moments of the tail, as suffix sums."""
    centres = np.arange(len(counts)) + 0.5
    moments = (counts, counts * centres, counts * (centres**2 + 1.0 / 12.0))
    tails = [np.append(np.cumsum(moment[::-1])[::-1], 0.0)[candidates] for moment in moments]
    a = candidates.astype(np.float64)
    result: Vector = tails[2] - 2.0 * a * tails[1] + a * a * tails[0]
    return result
