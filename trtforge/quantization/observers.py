"""What calibration remembers of one activation tensor, in memory that does not grow with the data.

The state is a histogram of |x| over `[0, limit)` with `NUM_BINS` equal bins, plus exact counts and extremes. `limit` is
a power of two above the largest |x| seen, and NUM_BINS is one too, so that

    bin(x) = floor(|x| * NUM_BINS / limit)      multiplies by a power of two, which rounds nothing;
    limit -> 2 limit                            merges bins 2k and 2k + 1 exactly.

Hence the state depends only on the multiset of values: neither batch size, order nor shape changes a single count.
Where the tensor has a channel axis, extremes and moments of each channel are kept too (see `channels.py`).
NaN and infinities are counted and otherwise ignored: a masked attention score is -inf by design.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from trtforge.quantization.channels import Block, ChannelStats, Vector

# Bins of the histogram. The largest value lies in the upper half, so a bin is at most amax / 2048 wide, a sixteenth of
# an INT8 step at that amax.
NUM_BINS = 4096
# Values per block: its temporaries stay in a 2 MB cache.
_BLOCK = 1 << 17
# Reductions over rows shorter than this are slow: such an array is transposed first.
_FEW_CHANNELS = 64
# Below 2**-100 the scale NUM_BINS / limit would leave float32; such values all count in the first bin.
_MIN_EXPONENT = -100
_MAX_EXPONENT = 128


class StreamingObserver:
    """Histogram, extremes and counts of the values of one tensor.

    Args:
        channel_axis: the axis whose indices are channels; None keeps nothing by channel.

    Attributes:
        count: finite values seen.
        num_non_finite: NaN and infinities seen and ignored.
        minimum: smallest finite value, 0.0 before the first.
        maximum: largest finite value, 0.0 before the first.
        histogram: counts of |x|, int64 `[NUM_BINS]`, over `[0, limit)`.
        limit: upper end of the histogram, a power of two.
        channels: by channel; None without an axis, before the first value, and for good once the number of channels
            has changed.
    """

    __slots__ = (
        "_exponent",
        "_keeps_channels",
        "channel_axis",
        "channels",
        "count",
        "histogram",
        "maximum",
        "minimum",
        "num_non_finite",
    )

    def __init__(self, channel_axis: int | None = None) -> None:
        self.channel_axis = channel_axis
        self.channels: ChannelStats | None = None
        self._keeps_channels = channel_axis is not None
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

    @property
    def channel_min(self) -> Vector | None:
        """Smallest finite value of each channel `[C]`, 0.0 where there is none; None as `channels`."""
        return None if self.channels is None else np.where(self.channels.count > 0, self.channels.minimum, 0.0)

    @property
    def channel_max(self) -> Vector | None:
        """Largest finite value of each channel `[C]`, 0.0 where there is none; None as `channels`."""
        return None if self.channels is None else np.where(self.channels.count > 0, self.channels.maximum, 0.0)

    @property
    def channel_mean(self) -> Vector | None:
        """Mean of the finite values of each channel `[C]`, 0.0 where there is none; None as `channels`."""
        return None if self.channels is None else self.channels.total / np.maximum(self.channels.count, 1)

    @property
    def channel_mean_square(self) -> Vector | None:
        """Mean square of the finite values of each channel `[C]`, 0.0 where there is none; None as `channels`."""
        return None if self.channels is None else self.channels.total_square / np.maximum(self.channels.count, 1)

    def update(self, array: npt.NDArray[Any]) -> None:
        """Add the values of one batch.

        Args:
            array: floating point of any width and any shape, empty ones included.
        """
        if array.size == 0:
            return
        if self._keeps_channels:
            self._meet_channels(array.shape)
        if self.channels is None:
            array = array.reshape(1, 1, -1)
        else:
            array = _channels_in_the_middle(array, self.channel_axis or 0)
        for block, first in _blocks(array):
            self._add(block, first)

    def abs_quantile(self, fraction: float) -> float:
        """The value that at least `fraction` of all |x| do not exceed, rounded up to a bin's end.

        Args:
            fraction: in (0, 1].

        Returns:
            At most `amax`; 0.0 where nothing finite was seen.
        """
        index = int(np.searchsorted(np.cumsum(self.histogram), math.ceil(fraction * self.count)))
        return min((index + 1) * (self.limit / NUM_BINS), self.amax)

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Everything that was observed, as arrays; its size does not depend on how much that was."""
        counts = [self.count, self.num_non_finite, self._exponent, int(self._keeps_channels)]
        arrays = {
            "counts": np.array(counts, np.int64),
            "extremes": np.array([self.minimum, self.maximum]),
            "histogram": self.histogram,
        }
        channels = {} if self.channels is None else self.channels.state()
        return arrays | {f"channel_{name}": value for name, value in channels.items()}

    def restore(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Put what another observer's `state` gave in the place of what was observed here.

        Raises:
            KeyError, ValueError: not the state of such an observer.
        """
        counts, extremes, histogram = arrays["counts"], arrays["extremes"], arrays["histogram"]
        if (counts.shape, extremes.shape, histogram.shape) != ((4,), (2,), (NUM_BINS,)):
            raise ValueError("shapes of an observer's state")
        if [array.dtype.name for array in (counts, extremes, histogram)] != ["int64", "float64", "int64"]:
            raise ValueError("types of an observer's state")
        count, num_non_finite, exponent, keeps_channels = (int(value) for value in counts)
        is_sound = min(count, num_non_finite, int(histogram.min())) >= 0 and int(histogram.sum()) == count
        if not (is_sound and _MIN_EXPONENT <= exponent <= _MAX_EXPONENT and np.isfinite(extremes).all()):
            raise ValueError("values of an observer's state")
        channels = {name.removeprefix("channel_"): a for name, a in arrays.items() if name.startswith("channel_")}
        self.channels = ChannelStats.from_state(channels) if channels else None
        self._keeps_channels = bool(keeps_channels) and self.channel_axis is not None
        self.count, self.num_non_finite, self._exponent = count, num_non_finite, exponent
        self.minimum, self.maximum = (float(value) for value in extremes)
        self.histogram = histogram.copy()

    def _meet_channels(self, shape: tuple[int, ...]) -> None:
        """Start the statistics by channel at the first values; end them where the number of channels changes."""
        size = channel_count(shape, self.channel_axis)
        if self.channels is None and size is not None:
            self.channels = ChannelStats(size)
        elif self.channels is None or size != len(self.channels):
            self.channels, self._keeps_channels = None, False

    def _add(self, block: Block, first: int) -> None:
        """Add a block `[outer, channels, inner]` whose channels start at `first`."""
        if self.channels is None:
            low, high = float(block.min()), float(block.max())
        else:
            low, high = self.channels.add(block, first)
        values = block.reshape(-1)
        if not (math.isfinite(low) and math.isfinite(high)):
            finite = np.isfinite(block)
            if self.channels is not None:
                self.channels.add_finite(block, finite, first)
            values = block[finite]
            self.num_non_finite += block.size - values.size
            if values.size == 0:
                return
            low, high = float(values.min()), float(values.max())
        self.minimum = low if self.count == 0 else min(self.minimum, low)
        self.maximum = high if self.count == 0 else max(self.maximum, high)
        self.count += values.size
        self._grow(max(-low, high))
        bins = np.abs(values)
        bins *= np.float32(NUM_BINS / self.limit)
        # Casting to uint16 first is vectorised; the direct way to the int64 that bincount needs is not.
        self.histogram += np.bincount(bins.astype(np.uint16), minlength=NUM_BINS)

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


def channel_count(shape: tuple[int, ...], axis: int | None) -> int | None:
    """Size of the channel axis, None where the shape has no such axis."""
    return shape[axis] if axis is not None and -len(shape) <= axis < len(shape) else None


def _channels_in_the_middle(array: npt.NDArray[Any], axis: int) -> npt.NDArray[Any]:
    """An array as `[outer, channels, inner]`."""
    axis %= array.ndim
    outer, channels, inner = math.prod(array.shape[:axis]), array.shape[axis], math.prod(array.shape[axis + 1 :])
    if inner == 1 and channels < _FEW_CHANNELS:
        return np.ascontiguousarray(array.reshape(outer, channels).T)[np.newaxis]
    return array.reshape(outer, channels, inner)


def _blocks(array: npt.NDArray[Any]) -> Iterator[tuple[Block, int]]:
    """A non-empty array `[outer, channels, inner]` in float32 blocks of at most `_BLOCK` values, with first channels.

    Each block lies in one piece in the array's memory.
    """
    num_outer, num_channels, num_inner = array.shape
    inner = min(num_inner, _BLOCK)
    channels = min(num_channels, max(1, _BLOCK // num_inner)) if inner == num_inner else 1
    outer = max(1, _BLOCK // (channels * inner)) if channels == num_channels and inner == num_inner else 1
    for o in range(0, num_outer, outer):
        for c in range(0, num_channels, channels):
            for i in range(0, num_inner, inner):
                block = array[o : o + outer, c : c + channels, i : i + inner]
                if block.dtype != np.float32:
                    with np.errstate(over="ignore"):
                        block = block.astype(np.float32)
                yield block, c
