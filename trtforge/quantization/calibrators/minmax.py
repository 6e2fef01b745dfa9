"""Method minmax: nothing that calibration saw is clipped.

amax = max |x|
"""

from __future__ import annotations

from trtforge.quantization.observers import StreamingObserver
from trtforge.recipe import QuantRecipe


def choose_amax(observer: StreamingObserver, _recipe: QuantRecipe) -> float:
    """The largest finite absolute value seen."""
    return observer.amax
