"""Calibrators: each chooses an activation's amax from what one observer saw. One line per method."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trtforge.quantization.calibrators import entropy, minmax, mse, percentile
from trtforge.quantization.observers import StreamingObserver
from trtforge.recipe import CalibrationMethod, QuantRecipe

ChooseAmax = Callable[[StreamingObserver, QuantRecipe], float]

CALIBRATORS: Mapping[CalibrationMethod, ChooseAmax] = {
    "minmax": minmax.choose_amax,
    "percentile": percentile.choose_amax,
    "entropy": entropy.choose_amax,
    "mse": mse.choose_amax,
}


def choose_amax(observer: StreamingObserver, recipe: QuantRecipe) -> float:
    """The amax that `recipe.method` chooses; 0.0 for a tensor without a finite non-zero value."""
    return CALIBRATORS[recipe.method](observer, recipe)


def choose_all(observer: StreamingObserver, recipe: QuantRecipe) -> dict[CalibrationMethod, float]:
    """The amax of every method; the recipe gives the percentile."""
    return {method: choose(observer, recipe) for method, choose in CALIBRATORS.items()}
