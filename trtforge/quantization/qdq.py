"""Insert Q/DQ pairs: symmetric INT8 with every zero-point written and zero.

    q = clip(round(x / scale), -127, 127)          scale = amax / 127

Activations get QuantizeLinear and DequantizeLinear once per tensor; all quantized consumers share them, other consumers
keep the float tensor. Weights become int8 initializers with one DequantizeLinear each; a weight that is also used
elsewhere keeps its float copy.

Scales are written as float32 so that the graph stays a valid float32 graph, but their *values* are already those of
`scale_dtype`, rounded up so that amax itself does not clip; the int8 weights are computed with the rounded values. The
cast stage can therefore change the scales' type without changing a number.

No scale is smaller than the smallest normal number of `scale_dtype` (2**-14 for float16). Dead channels need some
positive scale, kernels may flush smaller ones to zero, and below 2**-16 the reciprocal overflows float16. A tensor that
would need a smaller scale as a whole would lose most of its steps, so its node stays float.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from trtforge.errors import InputError
from trtforge.graph.edit import InputEdits
from trtforge.graph.names import UniqueNames
from trtforge.quantization.placement import KeptFloat, Placement, WeightSite
from trtforge.recipe import Granularity

# Symmetric INT8 leaves -128 unused, so that a value and its negative quantize alike.
INT8_MAX = 127


@dataclasses.dataclass(frozen=True, slots=True)
class QdqReport:
    """What was inserted.

    Attributes:
        nodes: the nodes that now have quantized inputs.
        activation_scales: scale by activation tensor.
        weights: the weights that became int8, each once per axis.
        kept_float: every candidate that stays float: the placement's, and those with an activation or weight that is
            zero or too small for a scale.
    """

    nodes: tuple[str, ...]
    activation_scales: Mapping[str, float]
    weights: tuple[str, ...]
    kept_float: tuple[KeptFloat, ...]


def insert_qdq(
    graph: gs.Graph, placement: Placement, amax: Mapping[str, float], scale_dtype: npt.DTypeLike = np.float32
) -> QdqReport:
    """Insert the placement's Q/DQ pairs into the graph.

    Args:
        graph: float32, topologically sorted; modified in place.
        placement: planned on this graph.
        amax: by activation tensor, from a calibration table.
        scale_dtype: the type that the quantized tensors will have after the cast stage.

    Raises:
        InputError: a weight holds NaN or infinity.
    """
    placement = placement.without(_reasons_to_keep(graph, placement, amax, np.dtype(scale_dtype)))
    inserter = _Inserter(graph, np.dtype(scale_dtype))
    inserter.run(placement, amax)
    return QdqReport(
        placement.nodes, inserter.activation_scales, tuple(inserter.weight_names), tuple(placement.kept_float)
    )


def _reasons_to_keep(
    graph: gs.Graph, placement: Placement, amax: Mapping[str, float], scale_dtype: np.dtype[np.generic]
) -> dict[str, str]:
    """Why nodes stay float whose ranges have no scale, by node name."""
    smallest = float(ml_dtypes.finfo(scale_dtype).smallest_normal)  # type: ignore[no-untyped-call]
    operands = {node.name: node.inputs for node in graph.nodes}
    reasons = {}
    for site in placement.weights:
        values = operands[site.node][site.input_index].values
        reached = max(float(np.max(values, initial=0.0)), -float(np.min(values, initial=0.0)))
        if reached < INT8_MAX * smallest:
            reasons[site.node] = f"its weight reaches only {reached:.4g}; {scale_dtype} scales start at {smallest:.4g}"
    for entry in placement.activations:
        reached = amax[entry.tensor]
        if not reached > 0.0:
            reasons[entry.node] = f"calibration saw no non-zero value of its input {entry.tensor!r}"
        elif reached < INT8_MAX * smallest:
            reasons[entry.node] = (
                f"its input {entry.tensor!r} reaches only {reached:.4g}; {scale_dtype} scales start at {smallest:.4g}"
            )
    return reasons


def scale_from_amax(amax: npt.NDArray[np.float32], scale_dtype: npt.DTypeLike) -> npt.NDArray[np.float32]:
    """amax / 127 as a value of `scale_dtype`: rounded up, at least its smallest normal and at most its largest number.

    Args:
        amax: any shape, non-negative.

    Returns:
        float32, the same shape; every value is exact in `scale_dtype`.
    """
    dtype = np.dtype(scale_dtype)
    limits = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    exact = amax.astype(np.float64) / INT8_MAX
    with np.errstate(over="ignore"):
        rounded = exact.astype(dtype)
    too_small = rounded.astype(np.float64) < exact
    rounded = np.where(too_small, np.nextafter(rounded, np.asarray(np.inf, dtype)), rounded)
    clipped = np.clip(rounded.astype(np.float32), np.float32(limits.smallest_normal), np.float32(limits.max))
    return np.asarray(clipped)


def quantize_weight(
    values: npt.NDArray[np.float32], axis: int | None, scale_dtype: npt.DTypeLike
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """A weight in INT8 and its scales.

    Args:
        values: any rank.
        axis: the axis that keeps its scales, or None.
        scale_dtype: the type whose values the scales take.

    Returns:
        int8 of the same shape, and scales `[values.shape[axis]]`, or `[]` without an axis.
    """
    reduced = Granularity(axis).reduced_axes(values.ndim)
    amax = np.max(np.abs(values), axis=reduced, keepdims=True, initial=0.0)
    scale = scale_from_amax(amax, scale_dtype)
    quantized = np.clip(np.rint(values / scale), -INT8_MAX, INT8_MAX).astype(np.int8)
    return quantized, scale.reshape(-1) if axis is not None else scale.reshape(())


class _Inserter:
    """Builds the new node list: each Q or DQ goes right before its first consumer."""

    def __init__(self, graph: gs.Graph, scale_dtype: np.dtype[np.generic]) -> None:
        self.graph = graph
        self.scale_dtype = scale_dtype
        self.names = UniqueNames(graph)
        self.activation_scales: dict[str, float] = {}
        self.weight_names: list[str] = []
        self._zero_point = gs.Constant(self.names.tensor("zero_point_int8"), np.zeros((), np.int8))
        self._dequantized: dict[tuple[str, int | None], gs.Variable] = {}

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
        key = (tensor.name, None)
        if key not in self._dequantized:
            value = scale_from_amax(np.asarray(amax, np.float32), self.scale_dtype)
            self.activation_scales[tensor.name] = float(value)
            scale = gs.Constant(self.names.tensor(f"{tensor.name}_scale"), value)
            quantized = gs.Variable(self.names.tensor(f"{tensor.name}_quantized"), np.int8, tensor.shape)
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
        key = (weight.name, site.axis)
        if key not in self._dequantized:
            values = weight.values
            if not np.isfinite(values).all():
                raise InputError(
                    f"the weight {weight.name!r} of node {site.node!r} holds NaN or infinity",
                    "it has no INT8 scale",
                    "repair the model, or leave the node float with the recipe's exclude list",
                )
            quantized, scales = quantize_weight(values, site.axis, self.scale_dtype)
            self.weight_names.append(weight.name)
            zero_point = self._zero_point
            if site.axis is not None:
                zero_name = self.names.tensor(f"{weight.name}_zero_point")
                zero_point = gs.Constant(zero_name, np.zeros(scales.shape, np.int8))
            constant = gs.Constant(self.names.tensor(f"{weight.name}_quantized"), quantized)
            scale = gs.Constant(self.names.tensor(f"{weight.name}_scale"), scales)
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
