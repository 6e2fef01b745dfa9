"""Constants in float16 or bfloat16: which fit, which are masks to clamp, and which must stay float32.

A finite value beyond the range would become an infinity. Two kinds of such constants can be replaced without changing
what the model computes:

    bounds  (Clip, Min, Max)                     the largest finite number takes their place;
    fills   (-1e9, finfo.min: added to scores)   a quarter of the range takes their place: exp() of it is still 0, and
                                                 three masks and a score still add up to a finite number.

An infinity stays one: a row masked with -inf gives NaN in the reference too, and models guard against exactly that.
Any other value beyond the range, and a tensor whose largest magnitude is below the smallest normal number (an epsilon
that would vanish), keeps its node in float32.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

_BOUND_OPS = frozenset(("Clip", "Max", "Min"))
_FILL_OPS = frozenset(("Add", "ConstantOfShape", "Mul", "ScatterND", "Sub", "Where")) | frozenset(
    ("Concat", "Expand", "Gather", "Reshape", "Slice", "Tile", "Trilu", "Unsqueeze")
)
# A positive constant from here on is a mask that is subtracted (1e9, 1e10, finfo.max); below it may be a real factor.
_MIN_POSITIVE_FILL = 1e8


def is_bound(op: str) -> bool:
    """True for an operator whose constants limit a range."""
    return op in _BOUND_OPS


def refuse_constant(values: npt.NDArray[Any], op: str, dtype: np.dtype[Any]) -> str | None:
    """Why a float32 constant keeps a node of this operator in float32, or None when it can be converted."""
    limits = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    low, high = _finite_extremes(values)
    amax = max(-low, high)
    if amax > float(limits.max):
        is_fill = op in _FILL_OPS and (high <= float(limits.max) or high >= _MIN_POSITIVE_FILL)
        if op not in _BOUND_OPS and not is_fill:
            return f"a constant reaches {amax:.4g}, beyond {dtype.name}'s {float(limits.max):.6g}"
    elif 0.0 < amax < float(limits.smallest_normal):
        return f"a constant is at most {amax:.4g}, below {dtype.name}'s {float(limits.smallest_normal):.4g}"
    return None


def convert_constant(values: npt.NDArray[Any], op: str, dtype: np.dtype[Any]) -> tuple[npt.NDArray[Any], bool]:
    """A float32 constant in `dtype`, and whether values beyond the range were replaced.

    Args:
        values: any shape; not refused by `refuse_constant`.
        op: the operator that consumes it.
        dtype: float16 or bfloat16.
    """
    limits = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    low, high = _finite_extremes(values)
    if max(-low, high) <= float(limits.max):
        return values.astype(dtype), False
    substitute = np.float32(limits.max) if op in _BOUND_OPS else np.float32(limits.max) / 4
    is_beyond = np.isfinite(values) & (np.abs(values) > np.float32(limits.max))
    return np.where(is_beyond, np.copysign(substitute, values), values).astype(dtype), True


def _finite_extremes(values: npt.NDArray[Any]) -> tuple[float, float]:
    """Smallest and largest finite value, both 0.0 where there is none."""
    if values.size == 0:
        return 0.0, 0.0
    low, high = float(values.min()), float(values.max())
    if not (np.isfinite(low) and np.isfinite(high)):
        finite = values[np.isfinite(values)]
        return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    return low, high
