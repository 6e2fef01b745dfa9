"""Method entropy: the range whose 128 levels lose the least information, by Kullback-Leibler divergence.

For each candidate of i bins, P is the histogram of |x| cut at i with everything above added to its last bin, and Q the
histogram below i merged into 128 levels, each spread evenly over those of its bins that hold values. amax is the end of
the candidate with the smallest KL(P || Q), the largest of equal ones. The first bin takes the count of the second, so
that exact zeros (padding, ReLU) do not decide. Where the last bin is empty below a tail, Q has `_SMOOTH` values there.

Source: S. Migacz, "8-bit inference with TensorRT", GTC 2017; zeros as in NVIDIA ModelOpt's histogram calibrator, and
the smoothing, without which a lone far outlier allows no other range than its own, as in ONNX Runtime's. All sums over
bins are differences of prefix sums, so that a candidate costs 128 steps, however many bins it has:

    KL = sum_j p_j log p_j - sum_k (S_k / T) log q_k - (tail / T) log q_last,    q_k = S_k / (n_k S)

with S_k and n_k the values and the non-empty bins of level k, S their sum, T all values.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trtforge.quantization.observers import NUM_BINS, StreamingObserver
from trtforge.recipe import QuantRecipe

# Levels of |x| in INT8, and the fewest bins of a candidate.
_LEVELS = 128
# Bins between candidates: a thousandth of the range, where one INT8 step of it is 32 bins.
_STRIDE = 4
_SMOOTH = 1e-4


def choose_amax(observer: StreamingObserver, _recipe: QuantRecipe) -> float:
    """The end of the range with the smallest divergence; the largest value where there is nothing to choose."""
    width = observer.limit / NUM_BINS
    used = int(np.flatnonzero(observer.histogram)[-1]) + 1 if observer.count else 0
    if used <= _LEVELS:
        return observer.amax
    candidates = np.arange(used, _LEVELS - 1, -_STRIDE)
    divergence = _divergences(observer.histogram[:used], candidates)
    return min(float(candidates[np.argmin(divergence)]) * width, observer.amax)


def _divergences(histogram: npt.NDArray[np.int64], candidates: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """KL(P || Q) of each candidate number of bins; infinite where no value lies inside."""
    counts = histogram.astype(np.float64)
    counts[0] = counts[1]
    total = counts.sum()
    values = _prefix_sums(counts)
    filled = _prefix_sums(counts > 0)
    plogp = _prefix_sums(_x_log_x(counts / total))
    # Bin j belongs to level floor(j * 128 / i): the levels of i bins begin at ceil(k * i / 128).
    edges = -(-candidates[:, None] * np.arange(_LEVELS + 1) // _LEVELS)
    in_level, bins_of_level = np.diff(values[edges]), np.diff(filled[edges])
    inside = values[candidates]
    tail = total - inside
    last = counts[candidates - 1]
    divisor = np.maximum(inside, 1.0)
    q = in_level / (np.maximum(bins_of_level, 1.0) * divisor[:, None])
    cross = (in_level * np.log(np.where(q > 0, q, 1.0))).sum(axis=1)
    cross += tail * np.log(np.where(last > 0, q[:, -1], _SMOOTH / divisor))
    own = plogp[candidates] - _x_log_x(last / total) + _x_log_x((last + tail) / total)
    result: npt.NDArray[np.float64] = np.where(inside > 0, own - cross / total, np.inf)
    return result


def _x_log_x(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    result: npt.NDArray[np.float64] = x * np.log(np.where(x > 0, x, 1.0))
    return result


def _prefix_sums(values: npt.NDArray[np.float64] | npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """Sums of the first 0, 1, ... values."""
    return np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
