"""What calibration remembers of one activation tensor, in memory that does not grow with the data.

The state is a histogram of |x| over `[0, limit)` with `NUM_BINS` equal bins, plus exact counts and extremes. `limit` is
a power of two above the largest |x| seen, and NUM_BINS is one too, so that

    bin(x) = floor(|x| * NUM_BINS / limit)      multiplies by a power of two, which rounds nothing;
    limit -> 2 limit                            merges bins 2k and 2k + 1 exactly.

Hence the state depends only on the multiset of values: neither batch size, order nor shape changes a single count.
NaN and infinities are counted and otherwise ignored: a masked attention score is -inf by design.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

# Bins of the histogram. The largest value lies in the upper half, so a bin is at most amax / 2048 wide, a sixteenth of
# an INT8 step at that amax.
NUM_BINS = 4096
# Values per chunk: its three temporaries (float32, float32, int64) stay in a 2 MB cache.
_CHUNK = 1 << 17
# Below 2**-100 the scale NUM_BINS / limit would leave float32; such values all count in the first bin.
_MIN_EXPONENT = -100


class StreamingObserver:
    """Histogram, extremes and counts of the values of one tensor.

    Attributes:
        count: finite values seen.
        num_non_finite: NaN and infinities seen and ignored.
        minimum: smallest finite value, 0.0 before the first.
        maximum: largest finite value, 0.0 before the first.
        histogram: counts of |x|, int64 `[NUM_BINS]`, over `[0, limit)`.
        limit: upper end of the histogram, a power of two.
    """

    __slots__ = ("_exponent", "count", "histogram", "maximum", "minimum", "num_non_finite")

    def __init__(self) -> None:
        self.count = 0
        self.num_non_finite = 0
        self.minimum = 0.0
        self.maximum = 0.0
        self.histogram: npt.NDArray[np.int64] = np.zeros(NUM_BINS, dtype=np.int64)
        self._exponent = _MIN_EXPONENT

    @property
    def limit(self) -> float:
        """Upper end of the histogram, exclusive."""
        return 2.0**self._exponent

    @property
    def amax(self) -> float:
        """Largest finite absolute value seen, 0.0 before the first."""
        return max(-self.minimum, self.maximum)

    @property
    def rms(self) -> float:
        """Root mean square of the finite values, from the bins' centres; 0.0 where all are zero."""
        if self.count == 0:
            return 0.0
        centres = (np.arange(NUM_BINS) + 0.5) * (self.limit / NUM_BINS)
        return min(math.sqrt(float(self.histogram @ (centres * centres)) / self.count), self.amax)

    def update(self, array: npt.NDArray[Any]) -> None:
        """Add the values of one batch.

        Args:
            array: floating point of any width and any shape, empty ones included.
        """
        flat = array.reshape(-1)
        for start in range(0, flat.size, _CHUNK):
            chunk = flat[start : start + _CHUNK]
            if chunk.dtype != np.float32:
                with np.errstate(over="ignore"):
                    chunk = chunk.astype(np.float32)
            self._add(chunk)

    def abs_quantile(self, fraction: float) -> float:
        """The value that at least `fraction` of all |x| do not exceed, rounded up to a bin's end.

        Args:
            fraction: in (0, 1].

        Returns:
            At most `amax`; 0.0 where nothing finite was seen.
        """
        index = int(np.searchsorted(np.cumsum(self.histogram), math.ceil(fraction * self.count)))
        return min((index + 1) * (self.limit / NUM_BINS), self.amax)

    def _add(self, chunk: npt.NDArray[np.float32]) -> None:
        low, high = float(chunk.min()), float(chunk.max())
        if not (math.isfinite(low) and math.isfinite(high)):
            finite = chunk[np.isfinite(chunk)]
            self.num_non_finite += chunk.size - finite.size
            if finite.size == 0:
                return
            chunk = finite
            low, high = float(chunk.min()), float(chunk.max())
        self.minimum = low if self.count == 0 else min(self.minimum, low)
        self.maximum = high if self.count == 0 else max(self.maximum, high)
        self.count += chunk.size
        self._grow(max(-low, high))
        bins = np.abs(chunk)
        bins *= np.float32(NUM_BINS / self.limit)
        self.histogram += np.bincount(bins.astype(np.int64), minlength=NUM_BINS)

    def _grow(self, amax: float) -> None:
        """Raise `limit` above `amax`, merging pairs of bins once per doubling."""
        exponent = math.frexp(amax)[1] if amax > 0.0 else _MIN_EXPONENT
        if exponent <= self._exponent:
            return
        shift = exponent - self._exponent
        merged = np.zeros_like(self.histogram)
        width = min(1 << min(shift, 63), NUM_BINS)
        merged[: NUM_BINS // width] = self.histogram.reshape(-1, width).sum(axis=1)
        self.histogram = merged
        self._exponent = exponent
