"""Some samples as named arrays, and whether what a user gives fits the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trtforge.data_checks import (
    LABELS,
    check_array,
    check_counts,
    check_labels,
    check_names,
    data_error,
    has_sample_axis,
)
from trtforge.tensor import TensorSpec


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Arrays of some samples.

    Attributes:
        feeds: one array per model input, first axis = samples.
        labels: [N] class indices, or None.
        is_whole: the arrays have no axis of samples; they are one sample.
    """

    feeds: dict[str, np.ndarray]
    labels: np.ndarray | None
    is_whole: bool = False

    def __len__(self) -> int:
        return 1 if self.is_whole else len(next(iter(self.feeds.values())))

    def rows(self, start: int, stop: int) -> Batch:
        """Samples start to stop."""
        if self.is_whole:
            return self
        labels = None if self.labels is None else self.labels[start:stop]
        return Batch({name: feed[start:stop] for name, feed in self.feeds.items()}, labels)

    def is_like(self, other: Batch) -> bool:
        """Whether both can be one batch: samples of one shape, with or without labels alike."""
        if self.is_whole or other.is_whole:
            return False
        return (self.labels is None) == (other.labels is None) and all(
            feed.shape[1:] == other.feeds[name].shape[1:] for name, feed in self.feeds.items()
        )


def check_batch(feeds: Mapping[str, Any], specs: Sequence[TensorSpec], source: str) -> Batch:
    """One batch from the user, checked against the model's inputs.

    Raises:
        InputError: names, types or shapes that do not fit, NaN, or no samples.
    """
    try:
        arrays = {str(name): np.asarray(value) for name, value in feeds.items()}
    except Exception as err:
        raise data_error(source, f"it holds what is no array ({err})", "give numpy arrays") from err
    names = {spec.name for spec in specs}
    labels = arrays.pop(LABELS, None) if LABELS not in names else None
    check_names(arrays, names, source)
    is_whole = not has_sample_axis({name: arrays[name].shape for name in names}, specs)
    for spec in specs:
        check_array(spec, arrays[spec.name].dtype, arrays[spec.name].shape, source, is_whole)
        if arrays[spec.name].dtype.kind == "f" and np.isnan(arrays[spec.name]).any():
            raise data_error(source, f"input '{spec.name}' holds NaN", "remove those samples")
    feeds = {spec.name: arrays[spec.name] for spec in specs}
    if is_whole:
        check_labels(labels, 1, source)
    else:
        check_counts({name: len(array) for name, array in feeds.items()}, labels, source)
    return Batch(feeds, labels, is_whole)


def join_batches(batches: Sequence[Batch]) -> Batch:
    """Batches of one shape as one."""
    if len(batches) == 1:
        return batches[0]
    feeds = {name: np.concatenate([batch.feeds[name] for batch in batches]) for name in batches[0].feeds}
    labels = [batch.labels for batch in batches if batch.labels is not None]
    return Batch(feeds, np.concatenate(labels) if labels else None)
