"""From a calibration table to a quantized graph: equalize, insert Q/DQ, correct biases."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from trtforge.graph.edit import copy_graph
from trtforge.graph.names import UniqueNames
from trtforge.progress import Note
from trtforge.quantization.arrived import connect_reused
from trtforge.quantization.equalize_graph import Equalized, apply_equalization
from trtforge.quantization.formats import NumberFormat
from trtforge.quantization.output_bias import OutputBias
from trtforge.quantization.qdq import QdqReport, insert_qdq
from trtforge.quantization.rounding import RoundedWeights, decides_weights, round_weights
from trtforge.quantization.rows import Rows
from trtforge.quantization.sites import Placement, share_amax
from trtforge.quantization.table import CalibrationTable
from trtforge.recipe import QuantRecipe


@dataclasses.dataclass(frozen=True, slots=True)
class Quantizer:
    """Everything that turns a float graph into a quantized one; the same graph gives the same result every time.

    Attributes:
        placement: where Q/DQ goes.
        table: ranges and equalizations of the activations.
        number_format: INT8 or FP8.
        scale_dtype: the type that the quantized tensors will have after the cast stage.
        rounded: codes of the weights and corrections of the biases; empty for round-to-nearest.
    """

    placement: Placement
    table: CalibrationTable
    number_format: NumberFormat
    scale_dtype: npt.DTypeLike
    rounded: RoundedWeights = dataclasses.field(default_factory=lambda: RoundedWeights({}, {}, ()))

    def quantize(self, graph: gs.Graph, kept: Mapping[str, str] | None = None) -> QdqReport:
        """Quantize a graph in place.

        Args:
            graph: the one that the placement was planned on, or a copy.
            kept: nodes to leave float, and why.

        Raises:
            InputError: the table does not fit, or a weight holds NaN or infinity.
        """
        equalized = apply_equalization(graph, self.placement, self.table, kept)
        placement = equalized.placement
        amax = share_amax(placement, equalized.amax)
        report = insert_qdq(graph, placement, amax, self.scale_dtype, self.rounded.weights, self.number_format)
        connect_reused(graph, placement.reused, report.nodes)
        nodes = {node.name: node for node in graph.nodes}
        biases = OutputBias(graph, UniqueNames(graph))
        for name in report.nodes:
            if name in self.rounded.biases:
                biases.add(nodes[name], self.rounded.biases[name])
        biases.finish()
        notes = (*report.notes, *_notes(equalized, self.rounded.learned, report.nodes))
        return dataclasses.replace(report, notes=notes, kept_quantized=placement.kept_quantized)


def _notes(equalized: Equalized, learned: Sequence[str], nodes: Collection[str]) -> Iterator[str]:
    """What was done before quantization, in sentences."""
    folded, explicit = len(equalized.folded), len(equalized.explicit)
    if folded or explicit:
        yield (
            f"channels of {folded + explicit} activations were scaled or centred before quantization: {folded} in what "
            f"makes them, {explicit} by nodes in front of the quantized products"
        )
    count = sum(node in nodes for node in learned)
    if count:
        yield f"the rounding of {count} weights was learned from the layer's output"


def with_rounded_weights(
    quantizer: Quantizer, graph: gs.Graph, rows: Mapping[str, Rows], recipe: QuantRecipe, note: Note
) -> Quantizer:
    """The quantizer with the weights decided as the recipe says.

    Args:
        quantizer: placement and table count.
        graph: the float graph; not changed.
        rows: of the activations before equalization, `[R, C]` by tensor; without them only the range of the weights
            can be searched.
        recipe: range, rounding, bias correction.
        note: takes progress.
    """
    if not decides_weights(recipe):
        return quantizer
    copy = copy_graph(graph)
    equalized = apply_equalization(copy, quantizer.placement, quantizer.table)
    changed = {}
    for name, source in equalized.sources.items():
        if source in rows and len(rows[source]):
            equalization = quantizer.table.tensors[source].equalization
            changed[name] = rows[source] if equalization is None else equalization.apply(rows[source])
    amax = share_amax(equalized.placement, equalized.amax)
    rounded = round_weights(copy, equalized.placement, amax, changed, recipe, np.dtype(quantizer.scale_dtype), note)
    return dataclasses.replace(quantizer, rounded=rounded)
