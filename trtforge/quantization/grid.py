"""Inputs whose values already lie on an INT8 grid, as those of 8-bit images do: a scale that loses nothing.

An image of integers p in 0..255 that the model wants as (p - 127) / 128 takes 256 values, all multiples of 1 / 128. The
step amax / 127 of the usual ranges is a little smaller, and every pixel then lies up to half a step off; with a step of
1 / 128 every one is exact.
"""

from __future__ import annotations

import numpy as np

from trtforge.quantization.formats import INT8
from trtforge.quantization.rows import Rows

# Distinct values of an 8-bit image, and how far from a multiple rounding may have put them, in steps.
_MAX_LEVELS = 256
_TOLERANCE = 1e-3


def grid_amax(rows: Rows, amax: float) -> float | None:
    """The amax whose step makes all values exact; None where there is none.

    Args:
        rows: values seen, `[R, C]`.
        amax: the largest absolute value of all that calibration saw.
    """
    levels = np.unique(rows)
    if not 2 < len(levels) <= _MAX_LEVELS:
        return None
    step = float(np.diff(levels.astype(np.float64)).min())
    codes = levels / step
    # -128 is a code of QuantizeLinear, and 128 is clipped by one step.
    fits = amax <= (INT8.max_code + 1 + _TOLERANCE) * step
    return INT8.max_code * step if fits and np.abs(codes - np.rint(codes)).max() < _TOLERANCE else None
