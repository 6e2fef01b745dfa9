"""A bounded sample of an activation's rows, for searches that need real values after calibration.

A row is a vector along the channel axis: one position of `[..., C]`, one pixel of `[N, C, H, W]`. Rows are numbered in
the order in which they come. Number n is kept where

    (n * 0x9E3779B1 mod 2**32) < threshold

and the threshold is halved whenever the sample is full. The multiplier is 2**32 over the golden ratio: its multiples
are spread so evenly that about every k-th row is kept, and that no position of a sequence or column of an image, which
come back at a fixed period, is preferred. The choice depends on the rows' order alone, not on the size of the batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.uint32]

# Bytes of rows that are kept of one tensor.
ROW_BYTES = 24 * 2**20
# Rows that are enough for every search, unless there are more channels: correlations of C channels take about 2 C rows.
MAX_ROWS = 2048
_MULTIPLIER = 0x9E3779B1
_PERIOD = 1 << 32


class RowSampler:
    """A sample of the rows of one tensor.

    Args:
        max_bytes: memory that the sample may take.
    """

    __slots__ = ("_max_bytes", "_num_channels", "_num_seen", "_numbers", "_parts", "_threshold")

    def __init__(self, max_bytes: int = ROW_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_channels: int | None = None
        self._num_seen = 0
        self._threshold = _PERIOD
        self._numbers: Numbers = np.zeros(0, np.uint32)
        self._parts: list[Rows] = []

    def update(self, array: npt.NDArray[Any], channel_axis: int) -> None:
        """Offer the rows of one batch; rows with NaN or infinities are never kept.

        An array whose number of channels differs from that of those before, or that has no such axis, ends the sample:
        it is empty from then on.

        Args:
            array: floating point of any width and any shape, empty ones included.
            channel_axis: along which a row lies.
        """
        if array.size == 0 or self._num_channels == 0:
            return
        has_axis = -array.ndim <= channel_axis < array.ndim
        num_channels = array.shape[channel_axis] if has_axis else 0
        if self._num_channels not in {None, num_channels} or num_channels * 4 > self._max_bytes or not has_axis:
            self._num_channels, self._numbers, self._parts = 0, self._numbers[:0], []
            return
        self._num_channels = num_channels
        rows = np.moveaxis(array, channel_axis, -1)
        num_rows = array.size // num_channels
        offered = (np.arange(self._num_seen, self._num_seen + num_rows, dtype=np.uint64) * _MULTIPLIER).astype(
            np.uint32
        )
        self._num_seen += num_rows
        self._make_room(offered)
        chosen = np.flatnonzero(offered < self._threshold)
        if chosen.size == 0:
            return
        with np.errstate(over="ignore"):
            picked = rows[np.unravel_index(chosen, rows.shape[:-1])].astype(np.float32).reshape(-1, num_channels)
        finite = np.isfinite(picked).all(axis=1)
        self._parts.append(picked if finite.all() else picked[finite])
        self._numbers = np.concatenate([self._numbers, offered[chosen][finite]])

    def rows(self) -> Rows:
        """The rows that were kept, float32 `[n, C]`, in the order in which they came; `[0, 0]` where there are none."""
        if len(self._parts) > 1:
            self._parts = [np.concatenate(self._parts)]
        return self._parts[0] if self._parts else np.zeros((0, 0), np.float32)

    def _make_room(self, offered: Numbers) -> None:
        """Halve the threshold until what is kept and what is offered fit, and drop what is above it."""
        num_channels = self._num_channels or 1
        capacity = min(self._max_bytes // (4 * num_channels), max(MAX_ROWS, 2 * num_channels))
        threshold = self._threshold
        while np.count_nonzero(self._numbers < threshold) + np.count_nonzero(offered < threshold) > capacity:
            threshold >>= 1
        if threshold != self._threshold:
            self._threshold = threshold
            kept = self._numbers < threshold
            if not kept.all():
                self._parts, self._numbers = [self.rows()[kept]], self._numbers[kept]

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """The sample and how it was chosen, as arrays."""
        num_channels = -1 if self._num_channels is None else self._num_channels
        counts = np.array([num_channels, self._num_seen, self._threshold], np.int64)
        return {"counts": counts, "numbers": self._numbers, "rows": self.rows()}

    def restore(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Put what another sampler's `state` gave in the place of the sample here.

        Raises:
            KeyError, ValueError: not the state of such a sampler.
        """
        counts, numbers, rows = arrays["counts"], arrays["numbers"], arrays["rows"]
        if [array.dtype.name for array in (counts, numbers, rows)] != ["int64", "uint32", "float32"]:
            raise ValueError("types of a row sample")
        if counts.shape != (3,) or rows.ndim != 2 or numbers.shape != rows.shape[:1] or rows.nbytes > self._max_bytes:
            raise ValueError("shapes of a row sample")
        num_channels, num_seen, threshold = (int(value) for value in counts)
        is_sound = min(num_channels + 1, num_seen, threshold) >= 0 and bool(np.isfinite(rows).all())
        if not is_sound or (len(rows) and rows.shape[1] != num_channels):
            raise ValueError("values of a row sample")
        self._num_channels = None if num_channels < 0 else num_channels
        self._num_seen, self._threshold, self._numbers = num_seen, threshold, numbers
        self._parts = [rows] if len(rows) else []
