"""Store the weights of a weight-only build: a DequantizeLinear in front of each, a Mul where channels are scaled.

    x -> Mul(1 / s) -> MatMul <- DequantizeLinear <- codes of s W

Scales are written as float32 with values that are exact in `scale_dtype`, as in qdq.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from trtforge.graph.cost import GEMM_OPS
from trtforge.graph.edit import InputEdits
from trtforge.graph.names import UniqueNames
from trtforge.progress import Note
from trtforge.quantization.formats import INT4, Floats, NumberFormat, QuantizedWeight, check_finite, smallest_scale
from trtforge.quantization.qdq import QdqReport
from trtforge.quantization.rows import Rows
from trtforge.quantization.sites import Placement, WeightSite
from trtforge.quantization.weight_only import INT4_BLOCK
from trtforge.quantization.weight_only_codes import WeightLayout, store_matrices

_Key = tuple[str, int]
"""A weight's name and the axis of its output channels: nodes that use it alike share its codes."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoredWeights:
    """Codes and scales of every weight of a weight-only build; the same graph gives the same result every time.

    Attributes:
        placement: which weights; those without codes are in `kept_float`.
        layout: how they are stored.
        weights: codes in the weight's own shape; scales `[N]`, or `[K / B, N]` laid out as the weight is.
        factors: `[K]` by activation, by which it is multiplied for these weights.
        notes: sentences on how it was done.
    """

    placement: Placement
    layout: WeightLayout
    weights: Mapping[_Key, QuantizedWeight]
    factors: Mapping[str, Floats]
    notes: tuple[str, ...]

    def insert(self, graph: gs.Graph) -> QdqReport:
        """Store the weights in a graph, in place.

        Args:
            graph: the one that they were chosen for, or a copy.
        """
        writer = _Writer(graph, self)
        writer.run()
        names = tuple(dict.fromkeys(site.tensor for site in self.placement.weights))
        return QdqReport(self.placement.nodes, {}, names, self.placement.kept_float, self.notes)


def choose_weights(
    graph: gs.Graph,
    placement: Placement,
    number_format: NumberFormat,
    rows: Mapping[str, Rows],
    scale_dtype: npt.DTypeLike,
    note: Note,
) -> StoredWeights:
    """Choose the codes of a weight-only build.

    Args:
        graph: float32; not changed.
        placement: of `plan_weight_only`.
        number_format: INT8 or INT4.
        rows: `[R, K]` of the placement's activations, by name; weights are rounded to nearest where there are none.
        scale_dtype: the type that the scales will have after the cast stage.
        note: takes progress.

    Raises:
        InputError: a weight holds NaN or infinity.
    """
    layout = weight_layout(number_format, scale_dtype)
    values = {node.name: node.inputs[1].values for node in graph.nodes if node.op in GEMM_OPS and _has_weight(node)}
    reasons = {site.node: _reason_to_keep(site, values[site.node], layout) for site in placement.weights}
    placement = placement.without({node: reason for node, reason in reasons.items() if reason is not None})
    weights: dict[_Key, QuantizedWeight] = {}
    factors: dict[str, Floats] = {}
    groups = _groups(placement)
    for index, (activation, sites, may_scale) in enumerate(groups):
        matrices = [_matrix_of(values[site.node], site.axis or 0) for site in sites]
        stored = store_matrices(matrices, layout, rows.get(activation or ""), may_scale=may_scale)
        for site, weight in zip(sites, stored.weights, strict=True):
            weights[_key(site)] = _as_stored(weight, values[site.node].shape, site.axis or 0, layout)
        if activation is not None and stored.factors is not None:
            factors[activation] = stored.factors
        note(f"{index + 1} of {len(groups)} groups of weights", index + 1, len(groups))
    has_rows = any(len(found) for found in rows.values())
    return StoredWeights(placement, layout, weights, factors, _notes(number_format, has_rows, len(factors)))


def weight_layout(number_format: NumberFormat, scale_dtype: npt.DTypeLike) -> WeightLayout:
    """How the weights of a format are stored: INT4 in blocks, INT8 by output channel."""
    return WeightLayout(number_format, INT4_BLOCK if number_format is INT4 else None, np.dtype(scale_dtype))


def _has_weight(node: gs.Node) -> bool:
    return len(node.inputs) > 1 and isinstance(node.inputs[1], gs.Constant)


def _key(site: WeightSite) -> _Key:
    return site.tensor, site.axis or 0


def _reason_to_keep(site: WeightSite, values: Floats, layout: WeightLayout) -> str | None:
    check_finite(values, site.tensor, site.node)
    reached = max(float(np.max(values, initial=0.0)), -float(np.min(values, initial=0.0)))
    if not layout.number_format.is_too_small(reached, layout.scale_dtype):
        return None
    start = smallest_scale(layout.scale_dtype)
    return f"its weight reaches only {reached:.4g}; {layout.scale_dtype} scales start at {start:.4g}"


def _groups(placement: Placement) -> list[tuple[str | None, list[WeightSite], bool]]:
    """Weights that are chosen together, each once: all that read one activation; and whether it may be scaled.

    It may where nothing else reads these weights: another reader would need them without the factors.
    """
    activation_of = {site.node: site.tensor for site in placement.activations}
    readers: dict[_Key, set[str | None]] = {}
    groups: dict[str | None, dict[_Key, WeightSite]] = {}
    for site in placement.weights:
        activation = activation_of.get(site.node)
        if _key(site) not in readers:
            groups.setdefault(activation, {})[_key(site)] = site
        readers.setdefault(_key(site), set()).add(activation)
    used_elsewhere = {name for found in readers.values() if len(found) > 1 for name in found}
    result: list[tuple[str | None, list[WeightSite], bool]] = []
    for activation, sites in groups.items():
        if activation is None:
            result += [(None, [site], False) for site in sites.values()]
        else:
            result.append((activation, list(sites.values()), activation not in used_elsewhere))
    return result


def _notes(number_format: NumberFormat, has_rows: bool, num_scaled: int) -> tuple[str, ...]:
    if not has_rows:
        return (
            f"{number_format.name} weights are rounded to nearest, because there is no calibration data; with it, "
            "they are chosen by the layers' outputs",
        )
    scaled = f"; the channels of {num_scaled} activations are scaled for it" if num_scaled else ""
    return (f"{number_format.name} weights are chosen by the layers' outputs on rows of the calibration data{scaled}",)


def _matrix_of(values: Floats, axis: int) -> Floats:
    """A weight as `[K, N]`, its output channels last."""
    moved = np.moveaxis(values, axis, -1)
    return np.ascontiguousarray(moved.reshape(-1, moved.shape[-1]))


def _as_stored(weight: QuantizedWeight, shape: Sequence[int], axis: int, layout: WeightLayout) -> QuantizedWeight:
    """Codes and scales of a matrix, laid out as the weight is."""
    moved = [size for index, size in enumerate(shape) if index != axis] + [shape[axis]]
    codes = np.moveaxis(weight.codes.reshape(moved), -1, axis)
    scales = weight.scales.reshape(-1) if layout.block is None else np.moveaxis(weight.scales, -1, axis)
    return QuantizedWeight(np.ascontiguousarray(codes), np.ascontiguousarray(scales))


class _Writer:
    """Builds the new node list: each DequantizeLinear and each Mul goes right before its first reader."""

    def __init__(self, graph: gs.Graph, stored: StoredWeights) -> None:
        self.graph = graph
        self.stored = stored
        self.names = UniqueNames(graph)
        self._dequantized: dict[_Key, gs.Variable] = {}
        self._products: dict[str, gs.Variable] = {}

    def run(self) -> None:
        sites = {site.node: site for site in self.stored.placement.weights}
        multiplied = {site.node for site in self.stored.placement.activations if site.tensor in self.stored.factors}
        edits = InputEdits()
        nodes: list[gs.Node] = []
        for node in list(self.graph.nodes):
            if node.name in multiplied:
                edits.replace(node, 0, self._multiply(node.inputs[0], nodes))
            if node.name in sites:
                edits.replace(node, 1, self._store(node.inputs[1], sites[node.name], nodes))
            nodes.append(node)
        edits.apply()
        self.graph.nodes = nodes

    def _multiply(self, tensor: gs.Variable, nodes: list[gs.Node]) -> gs.Variable:
        """The activation with its channels divided by what its weights are multiplied by."""
        if tensor.name not in self._products:
            factors = gs.Constant(self.names.tensor(f"{tensor.name}_factors"), self.stored.factors[tensor.name])
            output = gs.Variable(self.names.tensor(f"{tensor.name}_scaled"), np.float32, tensor.shape)
            name = self.names.node(f"{tensor.name}_Mul")
            nodes.append(gs.Node("Mul", name, inputs=[tensor, factors], outputs=[output]))
            self._products[tensor.name] = output
        return self._products[tensor.name]

    def _store(self, weight: gs.Constant, site: WeightSite, nodes: list[gs.Node]) -> gs.Variable:
        """The weight as its node sees it."""
        key, layout = _key(site), self.stored.layout
        if key not in self._dequantized:
            found = self.stored.weights[key]
            attrs = {"axis": key[1]}
            if layout.block is not None:
                attrs = {"axis": 1 - key[1], "block_size": layout.block}
            codes = gs.Constant(self.names.tensor(f"{weight.name}_{layout.number_format.name}"), found.codes)
            scales = gs.Constant(self.names.tensor(f"{weight.name}_scale"), found.scales)
            output = gs.Variable(self.names.tensor(f"{weight.name}_dequantized"), np.float32, weight.shape)
            name = self.names.node(f"{weight.name}_DequantizeLinear")
            nodes.append(gs.Node("DequantizeLinear", name, attrs, [codes, scales], [output]))
            self._dequantized[key] = output
        return self._dequantized[key]
