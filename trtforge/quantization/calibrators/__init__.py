"""Calibrators: each chooses an activation's amax from what one observer saw. One line per method."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trtforge.quantization.calibrators import minmax, percentile
from trtforge.quantization.observers import StreamingObserver
from trtforge.recipe import QuantRecipe

ChooseAmax = Callable[[StreamingObserver, QuantRecipe], float]

CALIBRATORS: Mapping[str, ChooseAmax] = {
    "minmax": minmax.choose_amax,
    "percentile": percentile.choose_amax,
}


def choose_amax(observer: StreamingObserver, recipe: QuantRecipe) -> float:
    """The amax that `recipe.method` chooses; 0.0 for a tensor without a finite non-zero value."""
    return CALIBRATORS[recipe.method](observer, recipe)
