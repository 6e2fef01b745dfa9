"""Carry out equalizations on the graph, so that it computes the same with other activations and weights.

    x -> x * m - o        W -> W / m        bias -> bias + o (W / m)

The product with m and the offset go into what makes the activation, where nothing else reads it: a LayerNormalization,
a linear layer or convolution (also across a Relu), a product with a constant. Elsewhere a Mul and a Sub are put on the
branch to the quantized nodes only; the builder fuses them into the kernel that quantizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.errors import InputError
from trtforge.graph.edit import InputEdits, pinned_names
from trtforge.graph.names import UniqueNames
from trtforge.quantization.formats import Floats
from trtforge.quantization.matrix import Layer, find_layers, matrix_view
from trtforge.quantization.output_bias import OutputBias, replace_constant
from trtforge.quantization.producers import Producer, find_producer
from trtforge.quantization.sites import ActivationSite, Placement
from trtforge.quantization.table import CalibrationTable, Equalization


@dataclasses.dataclass(frozen=True, slots=True)
class Equalized:
    """What was done.

    Attributes:
        placement: without the nodes kept float, and with equalized tensors in the place of the original ones.
        amax: by tensor of that placement.
        sources: the original tensor by equalized tensor.
        folded: tensors whose change went into what makes them.
        explicit: tensors that got nodes of their own.
    """

    placement: Placement
    amax: dict[str, float]
    sources: dict[str, str]
    folded: tuple[str, ...]
    explicit: tuple[str, ...]


def apply_equalization(
    graph: gs.Graph, placement: Placement, table: CalibrationTable, kept: Mapping[str, str] | None = None
) -> Equalized:
    """Equalize the activations for which the table says so.

    Nodes that are kept float change nothing for the others: what a tensor's maker can take in goes there whether or
    not all its readers are quantized, so that every weight that is quantized is the same with any of the others float.

    Args:
        graph: topologically sorted; modified in place.
        placement: planned on this graph.
        table: ranges of the placement's tensors.
        kept: nodes of the placement that stay float, and why.

    Raises:
        InputError: the table lacks tensors or holds an equalization that does not fit the graph, or a weight holds NaN
            or infinity.
    """
    amax = table.amax_of(placement.tensors)
    layers = {layer.tensor: layer for layer in find_layers(graph, placement) if layer.is_closed}
    remaining = placement.without(kept or {})
    editor = _Editor(graph, remaining)
    for tensor in placement.tensors:
        equalization = table.tensors[tensor].equalization
        if equalization is not None:
            editor.equalize(_fitting(layers.get(tensor), tensor, equalization), equalization)
    editor.finish()
    renamed = editor.renamed
    sites = tuple(
        ActivationSite(site.node, site.input_index, renamed.get(site.tensor, site.tensor))
        for site in remaining.activations
    )
    weights = tuple(
        dataclasses.replace(site, tensor=editor.weights.get(site.node, site.tensor)) for site in remaining.weights
    )
    return Equalized(
        dataclasses.replace(remaining, activations=sites, weights=weights),
        {renamed.get(name, name): amax[name] for name in remaining.tensors},
        {renamed.get(name, name): name for name in remaining.tensors},
        tuple(editor.folded),
        tuple(editor.renamed),
    )


def _fitting(layer: Layer | None, tensor: str, equalization: Equalization) -> Layer:
    """The layer that an equalization is for.

    Raises:
        InputError: it does not fit.
    """
    size, offset = len(equalization.multiplier), equalization.offset
    fits = layer is not None and layer.num_channels == size
    if offset is not None and layer is not None:
        fits = fits and len(offset) == size and all(view.takes_offset for view in layer.views)
    if layer is None or not fits:
        raise InputError(
            f"the calibration table's equalization of {tensor!r} does not fit this model",
            "its length is not the number of channels, or what reads the tensor is not what it was made for",
            "the table was edited, or the recipe is another one: calibrate again",
        )
    return layer


class _Editor:
    """Edits of one graph; new nodes go right before the first node that reads them.

    Args:
        graph: modified in place.
        placement: what is quantized in the end.
    """

    def __init__(self, graph: gs.Graph, placement: Placement) -> None:
        self.graph = graph
        self.names = UniqueNames(graph)
        self.biases = OutputBias(graph, self.names)
        self.pinned = pinned_names(graph)
        self.quantized = set(placement.nodes)
        self.nodes = {node.name: node for node in graph.nodes}
        self.renamed: dict[str, str] = {}
        self.weights: dict[str, str] = {}
        self.folded: list[str] = []
        self.edits = InputEdits()
        self.before: dict[str, list[gs.Node]] = {}

    def equalize(self, layer: Layer, equalization: Equalization) -> None:
        """Change an activation and what it is multiplied with."""
        multiplier = np.asarray(equalization.multiplier, np.float32)
        offset = None if equalization.offset is None else np.asarray(equalization.offset, np.float32)
        readers = [self.nodes[view.node] for view in layer.views]
        tensor = readers[0].inputs[0]
        producer = self._foldable(tensor, layer.axis, readers)
        if producer is not None and producer.fold(multiplier, offset, self._set_weight):
            self.folded.append(layer.tensor)
        else:
            readers = [node for node in readers if node.name in self.quantized]
            if readers:
                self.renamed[layer.tensor] = self._put_between(readers, layer.axis, multiplier, offset)
        for node in readers:
            view = matrix_view(node)  # again: an earlier layer may have changed its columns
            assert view is not None
            matrix = view.matrix / multiplier[:, None]
            self._set_weight(node, 1, view.to_weight(matrix))
            if offset is not None:
                self.biases.add(node, offset.astype(np.float64) @ matrix.astype(np.float64))

    def finish(self) -> None:
        """Connect everything and put the new nodes in their places."""
        self.edits.apply()
        nodes = [(*self.before.get(node.name, ()), node) for node in self.graph.nodes]
        self.graph.nodes = [entry for group in nodes for entry in group]
        self.biases.finish()

    def _foldable(self, tensor: gs.Variable, axis: int, readers: list[gs.Node]) -> Producer | None:
        """What makes a tensor that only these nodes read."""
        if tensor.name in self.pinned or len(tensor.outputs) != len(readers):
            return None
        return find_producer(tensor, axis, self.pinned)

    def _put_between(self, readers: list[gs.Node], axis: int, multiplier: Floats, offset: Floats | None) -> str:
        """Nodes of their own in front of the readers; the name of the tensor that they read then."""
        result = readers[0].inputs[0]
        shape = (-1,) if axis == -1 else (-1, *[1] * (len(readers[0].inputs[1].shape) - 2))
        steps = [("Mul", "scaled", multiplier)] if np.any(multiplier != 1.0) else []
        for op, word, values in [*steps, *([] if offset is None else [("Sub", "centred", offset)])]:
            name = f"{result.name}_{word}"
            output = gs.Variable(self.names.tensor(name), np.float32, result.shape)
            constant = gs.Constant(self.names.tensor(f"{name}_by"), values.reshape(shape))
            node = gs.Node(op, self.names.node(f"{name}_{op}"), inputs=[result, constant], outputs=[output])
            self.before.setdefault(readers[0].name, []).append(node)
            result = output
        for node in readers:
            self.edits.replace(node, 0, result)
        return str(result.name)

    def _set_weight(self, node: gs.Node, index: int, values: np.ndarray) -> None:
        """Give a node a constant of its own; others that read the old one keep it."""
        name = self.names.tensor(f"{node.inputs[index].name}_equalized")
        replace_constant(node, index, gs.Constant(name, np.ascontiguousarray(values, dtype=np.float32)))
        if index == 1:
            self.weights[node.name] = name
