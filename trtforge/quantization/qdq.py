"""Insert Q/DQ pairs: symmetric INT8 or FP8, with every zero-point written and zero.

    q = round(clip(x / scale))          scale = amax / largest code          (formats.py)

Activations get QuantizeLinear and DequantizeLinear once per tensor; all quantized consumers share them, other consumers
keep the float tensor. Weights become initializers in the low format with one DequantizeLinear each; a weight that is
also used elsewhere keeps its float copy.

Scales are written as float32 so that the graph stays a valid float32 graph, but their *values* are already those of
`scale_dtype`, rounded up so that amax itself does not clip; the weights are computed with the rounded values. The
cast stage can therefore change the scales' type without changing a number. A tensor that would need a smaller scale
than that type has loses most of its steps, so its node stays float.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from trtforge.graph.edit import InputEdits
from trtforge.graph.names import UniqueNames
from trtforge.quantization.formats import INT8, NumberFormat, QuantizedWeight, check_finite, smallest_scale
from trtforge.quantization.sites import KeptFloat, KeptQuantized, Placement, WeightSite


@dataclasses.dataclass(frozen=True, slots=True)
class QdqReport:
    """What was inserted.

    Attributes:
        nodes: the nodes that now have quantized inputs.
        activation_scales: scale by activation tensor.
        weights: the weights that were quantized, each once per axis.
        kept_float: every candidate that stays float: the placement's, and those with an activation or weight that is
            zero or too small for a scale.
        notes: sentences on how it was done.
        kept_quantized: nodes that came with Q/DQ, and what was made of it.
    """

    nodes: tuple[str, ...]
    activation_scales: Mapping[str, float]
    weights: tuple[str, ...]
    kept_float: tuple[KeptFloat, ...]
    notes: tuple[str, ...] = ()
    kept_quantized: tuple[KeptQuantized, ...] = ()


def insert_qdq(
    graph: gs.Graph,
    placement: Placement,
    amax: Mapping[str, float],
    scale_dtype: npt.DTypeLike = np.float32,
    weights: Mapping[str, QuantizedWeight] | None = None,
    number_format: NumberFormat = INT8,
) -> QdqReport:
    """Insert the placement's Q/DQ pairs into the graph.

    Args:
        graph: float32, topologically sorted; modified in place.
        placement: planned on this graph.
        amax: by activation tensor, from a calibration table.
        scale_dtype: the type that the quantized tensors will have after the cast stage.
        weights: codes and scales by node name, which take the place of round-to-nearest ones.
        number_format: of activations and weights, INT8 or FP8.

    Raises:
        InputError: a weight holds NaN or infinity.
    """
    dtype = np.dtype(scale_dtype)
    given = weights or {}
    placement = placement.without(_reasons_to_keep(graph, placement, amax, dtype, number_format, given))
    inserter = _Inserter(graph, dtype, number_format, given)
    inserter.run(placement, amax)
    return QdqReport(
        placement.nodes, inserter.activation_scales, tuple(inserter.weight_names), tuple(placement.kept_float)
    )


def _reasons_to_keep(
    graph: gs.Graph,
    placement: Placement,
    amax: Mapping[str, float],
    scale_dtype: np.dtype[np.generic],
    number_format: NumberFormat,
    given: Mapping[str, QuantizedWeight],
) -> dict[str, str]:
    """Why nodes stay float whose ranges have no scale, by node name."""
    start = f"{scale_dtype} scales start at {smallest_scale(scale_dtype):.4g}"
    operands = {node.name: node.inputs for node in graph.nodes}
    reasons = {}
    for site in placement.weights:
        values = operands[site.node][site.input_index].values
        reached = max(float(np.max(values, initial=0.0)), -float(np.min(values, initial=0.0)))
        if site.node not in given and number_format.is_too_small(reached, scale_dtype):
            reasons[site.node] = f"its weight reaches only {reached:.4g}; {start}"
    for entry in placement.activations:
        reached = amax[entry.tensor]
        if not reached > 0.0:
            reasons[entry.node] = f"calibration saw no non-zero value of its input {entry.tensor!r}"
        elif number_format.is_too_small(reached, scale_dtype):
            reasons[entry.node] = f"its input {entry.tensor!r} reaches only {reached:.4g}; {start}"
        elif number_format.is_too_large(reached, scale_dtype):
            reasons[entry.node] = f"its input {entry.tensor!r} reaches {reached:.4g}, beyond every {scale_dtype} scale"
    return reasons


class _Inserter:
    """Builds the new node list: each Q or DQ goes right before its first consumer."""

    def __init__(
        self,
        graph: gs.Graph,
        scale_dtype: np.dtype[np.generic],
        number_format: NumberFormat,
        given: Mapping[str, QuantizedWeight],
    ) -> None:
        self.graph = graph
        self.scale_dtype = scale_dtype
        self.format = number_format
        self.given = given
        self.names = UniqueNames(graph)
        self.activation_scales: dict[str, float] = {}
        self.weight_names: list[str] = []
        zero_name = self.names.tensor(f"zero_point_{number_format.name}")
        self._zero_point = gs.Constant(zero_name, np.zeros((), number_format.dtype))
        self._dequantized: dict[tuple[str, int | None, str], gs.Variable] = {}

    def run(self, placement: Placement, amax: Mapping[str, float]) -> None:
        activations = {(site.node, site.input_index): site for site in placement.activations}
        weights = {(site.node, site.input_index): site for site in placement.weights}
        edits = InputEdits()
        nodes: list[gs.Node] = []
        for node in list(self.graph.nodes):
            for index, tensor in enumerate(node.inputs):
                place = (node.name, index)
                if place in activations:
                    edits.replace(node, index, self._activation(tensor, amax[tensor.name], nodes))
                elif place in weights:
                    edits.replace(node, index, self._weight(tensor, weights[place], nodes))
            nodes.append(node)
        edits.apply()
        self.graph.nodes = nodes

    def _activation(self, tensor: gs.Variable, amax: float, nodes: list[gs.Node]) -> gs.Variable:
        key = (tensor.name, None, "")
        if key not in self._dequantized:
            value = self.format.scale_from_amax(np.asarray(amax, np.float32), self.scale_dtype)
            self.activation_scales[tensor.name] = float(value)
            scale = gs.Constant(self.names.tensor(f"{tensor.name}_scale"), value)
            quantized = gs.Variable(self.names.tensor(f"{tensor.name}_quantized"), self.format.dtype, tensor.shape)
            nodes.append(
                gs.Node(
                    "QuantizeLinear",
                    self.names.node(f"{tensor.name}_QuantizeLinear"),
                    inputs=[tensor, scale, self._zero_point],
                    outputs=[quantized],
                )
            )
            self._dequantized[key] = self._dequantize(quantized, tensor, scale, self._zero_point, None, nodes)
        return self._dequantized[key]

    def _weight(self, weight: gs.Constant, site: WeightSite, nodes: list[gs.Node]) -> gs.Variable:
        # Nodes that share a weight share its codes, unless somebody chose them per node.
        given = self.given.get(site.node)
        key = (weight.name, site.axis, "" if given is None else site.node)
        if key not in self._dequantized:
            values = weight.values
            check_finite(values, weight.name, site.node)
            quantized = given or self.format.quantize(values, site.axis, self.scale_dtype)
            self.weight_names.append(weight.name)
            zero_point = self._zero_point
            if site.axis is not None:
                zero_name = self.names.tensor(f"{weight.name}_zero_point")
                zero_point = gs.Constant(zero_name, np.zeros(quantized.scales.shape, self.format.dtype))
            constant = gs.Constant(self.names.tensor(f"{weight.name}_quantized"), quantized.codes)
            scale = gs.Constant(self.names.tensor(f"{weight.name}_scale"), quantized.scales)
            self._dequantized[key] = self._dequantize(constant, weight, scale, zero_point, site.axis, nodes)
        return self._dequantized[key]

    def _dequantize(
        self,
        quantized: gs.Tensor,
        source: gs.Tensor,
        scale: gs.Constant,
        zero_point: gs.Constant,
        axis: int | None,
        nodes: list[gs.Node],
    ) -> gs.Variable:
        output = gs.Variable(self.names.tensor(f"{source.name}_dequantized"), np.float32, source.shape)
        nodes.append(
            gs.Node(
                "DequantizeLinear",
                self.names.node(f"{source.name}_DequantizeLinear"),
                attrs={} if axis is None else {"axis": axis},
                inputs=[quantized, scale, zero_point],
                outputs=[output],
            )
        )
        return output
