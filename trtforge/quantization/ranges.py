"""From what a calibration pass saw to a calibration table: equalize, keep inputs exact, choose ranges."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from trtforge.progress import Note
from trtforge.quantization.calibrate import table_from_observers
from trtforge.quantization.equalize import equalize_layers
from trtforge.quantization.grid import grid_amax
from trtforge.quantization.matrix import find_layers
from trtforge.quantization.observation import Observation
from trtforge.quantization.rounding import decides_weights
from trtforge.quantization.sites import Placement
from trtforge.quantization.table import CalibrationTable
from trtforge.recipe import QuantRecipe


def equalizes(recipe: QuantRecipe) -> bool:
    """Whether activations are smoothed or shifted."""
    return recipe.smooth != "none" or recipe.shift


def samples_rows(recipe: QuantRecipe) -> bool:
    """Whether the recipe asks for anything that only rows of the activations give."""
    return equalizes(recipe) or decides_weights(recipe)


def choose_ranges(
    graph: gs.Graph,
    placement: Placement,
    observation: Observation,
    recipe: QuantRecipe,
    *,
    model_sha256: str,
    data_sha256: str,
    is_int8: bool,
    note: Note,
) -> CalibrationTable:
    """The table of a pass.

    Args:
        graph: float.
        placement: of that graph.
        observation: of its tensors, with rows where `samples_rows`.
        recipe: smoothing, shift, method.
        model_sha256: of the source model.
        data_sha256: of the calibration data.
        is_int8: False for FP8, whose steps grow with the values: it has no grid, and gains nothing from equal channels.
        note: takes progress.
    """
    layers = find_layers(graph, placement) if is_int8 and equalizes(recipe) else []
    exact: dict[str, float] = {}
    for tensor in graph.inputs if is_int8 else ():
        if tensor.name in observation.rows:
            amax = grid_amax(observation.rows[tensor.name].rows(), observation.observers[tensor.name].amax)
            exact |= {} if amax is None else {tensor.name: amax}
    layers = [layer for layer in layers if layer.tensor not in exact]
    return table_from_observers(
        observation.observers,
        recipe,
        samples=observation.samples,
        model_sha256=model_sha256,
        data_sha256=data_sha256,
        equalized=equalize_layers(layers, observation, recipe, note),
        exact=exact,
    )
