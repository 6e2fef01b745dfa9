"""Extremes and moments of an activation's channels, kept exactly and in memory that does not grow with the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Block = npt.NDArray[np.float32]
Vector = npt.NDArray[np.float64]


class ChannelStats:
    """Minimum, maximum, sum and sum of squares of each channel, over finite values only.

    Sums are in float64, so that the order of the batches changes no more than their last bits.

    Args:
        num_channels: C.

    Attributes:
        count: finite values by channel, int64 `[C]`.
        minimum, maximum: float64 `[C]`, infinite before the first value.
        total, total_square: float64 `[C]`.
    """

    __slots__ = ("count", "maximum", "minimum", "total", "total_square")

    def __init__(self, num_channels: int) -> None:
        self.count: npt.NDArray[np.int64] = np.zeros(num_channels, np.int64)
        self.minimum: Vector = np.full(num_channels, np.inf)
        self.maximum: Vector = np.full(num_channels, -np.inf)
        self.total: Vector = np.zeros(num_channels)
        self.total_square: Vector = np.zeros(num_channels)

    def __len__(self) -> int:
        return len(self.count)

    def add(self, block: Block, first: int) -> tuple[float, float]:
        """Add values of some channels.

        Args:
            block: `[outer, channels, inner]`.
            first: the channel at index 0 of the block's axis 1.

        Returns:
            The smallest and the largest value, NaN where there is one; the block was added only if both are finite.
        """
        low, high = _over_channels(np.minimum, block), _over_channels(np.maximum, block)
        lowest, highest = float(low.min()), float(high.max())
        if not (np.isfinite(lowest) and np.isfinite(highest)):
            return lowest, highest
        self._merge(first, low, high, block.astype(np.float64), block.shape[0] * block.shape[2])
        return lowest, highest

    def add_finite(self, block: Block, finite: npt.NDArray[np.bool_], first: int) -> None:
        """Add the values of a block that are finite; arguments as in `add`.

        Args:
            finite: which values are, in the block's shape.
        """
        low = _over_channels(np.minimum, np.where(finite, block, np.float32(np.inf)))
        high = _over_channels(np.maximum, np.where(finite, block, np.float32(-np.inf)))
        values = np.where(finite, block, np.float32(0.0)).astype(np.float64)
        self._merge(first, low, high, values, finite.sum(axis=(0, 2)))

    def _merge(self, first: int, low: Block, high: Block, values: Vector, count: int | npt.NDArray[np.int64]) -> None:
        """Add a block's extremes by channel, its values and their number."""
        part = slice(first, first + len(low))
        np.minimum(self.minimum[part], low, out=self.minimum[part])
        np.maximum(self.maximum[part], high, out=self.maximum[part])
        self.count[part] += count
        self.total[part] += _over_channels(np.add, values)
        self.total_square[part] += np.einsum("oci,oci->c", values, values)

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Everything that was added, as arrays."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_state(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> ChannelStats:
        """What `state` gave.

        Raises:
            KeyError, ValueError: not such a state.
        """
        stats = cls(arrays["count"].size)
        for name in cls.__slots__:
            value, own = arrays[name], getattr(stats, name)
            if value.dtype != own.dtype or value.shape != own.shape or np.isnan(value).any():
                raise ValueError(f"channel {name}")
            setattr(stats, name, value.copy())
        if stats.count.min(initial=0) < 0:
            raise ValueError("channel count")
        return stats


def _over_channels(ufunc: np.ufunc, block: npt.NDArray[Any]) -> Any:
    """Reduce `[outer, channels, inner]` to `[channels]`."""
    return ufunc.reduce(block[:, :, 0] if block.shape[2] == 1 else ufunc.reduce(block, axis=2), axis=0)
