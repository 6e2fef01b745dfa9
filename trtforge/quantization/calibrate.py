"""Calibration: stream tapped activations through observers, then choose amax per tensor.

It sees only arrays, so it serves any executor, and keeps one observer per tensor, so that memory does not depend on the
number of samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trtforge.quantization.calibrators import choose_amax
from trtforge.quantization.observers import StreamingObserver
from trtforge.quantization.table import CalibrationTable, TensorRange
from trtforge.recipe import QuantRecipe


def observe(batches: Iterable[Mapping[str, npt.NDArray[Any]]], tensors: Sequence[str]) -> dict[str, StreamingObserver]:
    """Observe the named tensors over all batches.

    Args:
        batches: per batch, the tapped activations by tensor name; shapes may differ between batches.
        tensors: the names to observe; every batch holds all of them.

    Returns:
        One observer per tensor, in the order of `tensors`.
    """
    observers = {name: StreamingObserver() for name in tensors}
    for batch in batches:
        for name, observer in observers.items():
            observer.update(batch[name])
    return observers


def table_from_observers(
    observers: Mapping[str, StreamingObserver],
    recipe: QuantRecipe,
    *,
    samples: int,
    model_sha256: str,
    data_sha256: str,
) -> CalibrationTable:
    """The calibration table that `recipe.method` gives for what was observed.

    Args:
        observers: by tensor name.
        recipe: chooses the method.
        samples: number of calibration samples that were run.
        model_sha256: of the source model.
        data_sha256: of the calibration data.
    """
    ranges = {
        name: TensorRange(
            amax=float(np.float32(choose_amax(observer, recipe))),
            min=observer.minimum,
            max=observer.maximum,
            rms=float(np.float32(observer.rms)),
            non_finite=observer.num_non_finite,
        )
        for name, observer in observers.items()
    }
    return CalibrationTable(
        method=recipe.method,
        percentile=recipe.percentile if recipe.method == "percentile" else None,
        samples=samples,
        model_sha256=model_sha256,
        data_sha256=data_sha256,
        recipe_sha256=recipe.fingerprint(),
        tensors=ranges,
    )
