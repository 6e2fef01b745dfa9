"""Method percentile: the rarest large values are clipped so that the common ones get finer steps.

amax = the smallest histogram edge that `recipe.percentile` percent of all |x| do not exceed; 100 is minmax.
"""

from __future__ import annotations

from trtforge.quantization.observers import StreamingObserver
from trtforge.recipe import QuantRecipe


def choose_amax(observer: StreamingObserver, recipe: QuantRecipe) -> float:
    """The absolute value that `recipe.percentile` percent of the finite values do not exceed."""
    return observer.abs_quantile(recipe.percentile / 100.0)
