"""Everything that one pass over the calibration data remembers: an observer per tensor, and samples of rows.

It sees only arrays, so it serves any executor, and its size does not depend on the number of samples. Its state can be
taken out as plain arrays and put back, which is how a pass moves between processes and goes on after an interruption.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from trtforge.quantization.observers import StreamingObserver
from trtforge.quantization.rows import ROW_BYTES, Rows, RowSampler

Arrays = Mapping[str, npt.NDArray[Any]]

# Bytes of rows of all tensors together; with many tensors each keeps fewer than ROW_BYTES.
MAX_ROW_BYTES = 512 * 2**20


class Observation:
    """What was seen of some tensors.

    Args:
        channel_axes: by tensor name, the axis whose indices are channels, or None. An axis counted from the end (below
            0) says that the axes before it are positions, which a mask can hide.
        mask: name of the model input [batch, sequence] whose zeros mark padding; None takes every position.
        keep_rows: sample rows of the tensors that have a channel axis.

    Attributes:
        samples: how many were seen.
        batches: in how many batches.
        masked_tensors: names of the tensors that had positions of the mask's shape.
        observers: by tensor name.
        rows: by tensor name; empty unless `keep_rows`.
    """

    def __init__(
        self, channel_axes: Mapping[str, int | None], *, mask: str | None = None, keep_rows: bool = False
    ) -> None:
        self.channel_axes = dict(channel_axes)
        self.mask = mask
        self.samples = 0
        self.batches = 0
        self.masked_tensors: set[str] = set()
        self.observers = {name: StreamingObserver(axis) for name, axis in self.channel_axes.items()}
        row_bytes = min(ROW_BYTES, MAX_ROW_BYTES // max(1, len(self.observers)))
        sampled = [name for name, axis in self.channel_axes.items() if keep_rows and axis is not None]
        self.rows = {name: RowSampler(row_bytes) for name in sampled}

    def update(self, feeds: Arrays, taps: Arrays, samples: int | None = None) -> None:
        """Observe one batch.

        Args:
            feeds: the model's inputs by name.
            taps: the tapped activations by tensor name; shapes may differ between batches.
            samples: in this batch; by default as many as the first input has rows.
        """
        mask = None if self.mask is None else feeds[self.mask] != 0
        for name, axis in self.channel_axes.items():
            array = taps[name]
            if mask is not None and (lead := _mask_axes(mask, array, axis)):
                array = array[mask if lead == 2 else mask.reshape(-1)]
                self.masked_tensors.add(name)
            self.observers[name].update(array)
            if axis is not None and name in self.rows:
                self.rows[name].update(array, axis)
        self.samples += len(next(iter(feeds.values()))) if samples is None else samples
        self.batches += 1

    def sampled_rows(self) -> dict[str, Rows]:
        """The rows that were kept, `[R, C]` by tensor name."""
        return {name: sampler.rows() for name, sampler in self.rows.items()}

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Everything as arrays, by names that do not depend on the tensors' names."""
        names = list(self.channel_axes)
        arrays: dict[str, npt.NDArray[Any]] = {
            "progress": np.array([self.samples, self.batches], np.int64),
            "masked": np.array([name in self.masked_tensors for name in names], np.bool_),
        }
        for index, name in enumerate(names):
            arrays |= {f"{index}.{key}": value for key, value in self.observers[name].state().items()}
            if name in self.rows:
                arrays |= {f"{index}.rows.{key}": value for key, value in self.rows[name].state().items()}
        return arrays

    def restore(self, arrays: Arrays) -> None:
        """Put what another observation's `state` gave in the place of what was observed here.

        Raises:
            KeyError, ValueError: not the state of an observation of these tensors; this one is not to be used then.
        """
        names = list(self.channel_axes)
        progress, masked = arrays["progress"], arrays["masked"]
        if progress.dtype != np.int64 or progress.shape != (2,) or progress.min() < 0 or masked.shape != (len(names),):
            raise ValueError("an observation's progress")
        parts: dict[str, dict[str, npt.NDArray[Any]]] = {}
        for key, value in arrays.items():
            prefix, _, field = key.partition(".")
            parts.setdefault(prefix, {})[field] = value
        for index, name in enumerate(names):
            fields = parts[str(index)]
            rows = {key.removeprefix("rows."): value for key, value in fields.items() if key.startswith("rows.")}
            self.observers[name].restore({key: v for key, v in fields.items() if not key.startswith("rows.")})
            if name in self.rows:
                self.rows[name].restore(rows)
        self.samples, self.batches = (int(value) for value in progress)
        self.masked_tensors = {name for name, hidden in zip(names, masked, strict=True) if hidden}


def _mask_axes(mask: npt.NDArray[np.bool_], array: npt.NDArray[Any], axis: int | None) -> int:
    """How many leading axes of an array are the mask's positions: 2, 1 where they are flattened, or 0.

    Only axes before the channels count, so that a mask never cuts channels away.
    """
    if axis is not None and axis >= 0:
        return 0
    num_position_axes = array.ndim + (-1 if axis is None else axis)
    if num_position_axes >= 2 and array.shape[:2] == mask.shape:
        return 2
    return int(num_position_axes >= 1 and array.shape[0] == mask.size)
