"""A weighted node seen as a matrix product, for everything that searches scales or rounds weights.

    Y [R, N] = X [R, C] W [C, N]

X are rows of the activation along its channel axis. A convolution with a window of T taps has one matrix [C, M T]: each
tap multiplies a pixel, and the output is a sum over taps. Errors of different taps are taken for independent.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.quantization.formats import Floats, check_finite
from trtforge.quantization.sites import Placement


@dataclasses.dataclass(frozen=True, slots=True)
class MatrixView:
    """The weight of a MatMul, Gemm or Conv as a matrix.

    Attributes:
        node: name of the node.
        matrix: float32 `[C, N]`, N = output channels x taps.
        taps: columns that belong to one output channel; neighbours in the matrix.
        shape: of the weight as stored.
        is_transposed: output channels come first in it.
        takes_offset: an offset of the input is a constant at the output. Not with a window or padding: the zeros of
            padding get no offset.
    """

    node: str
    matrix: Floats
    taps: int
    shape: tuple[int, ...]
    is_transposed: bool
    takes_offset: bool = True

    @property
    def num_outputs(self) -> int:
        """Output channels."""
        return int(self.matrix.shape[1]) // self.taps

    def some_outputs(self, stride: int) -> Floats:
        """The columns of every `stride`-th output channel, `[C, n]`."""
        columns = self.matrix.reshape(len(self.matrix), self.num_outputs, self.taps)[:, ::stride]
        return columns.reshape(len(self.matrix), -1)

    def to_weight(self, matrix: np.ndarray) -> np.ndarray:
        """A matrix of the same shape in the layout of the weight."""
        if not self.is_transposed:
            return np.ascontiguousarray(matrix)
        outputs, channels = self.shape[:2]
        moved = np.moveaxis(matrix.reshape(channels, outputs, self.taps), 0, 1)
        return np.ascontiguousarray(moved.reshape(self.shape))


def matrix_view(node: gs.Node) -> MatrixView | None:
    """The view of a node, or None where it is no product with one matrix: grouped convolutions, batched weights."""
    weight = node.inputs[1] if len(node.inputs) > 1 else None
    if not isinstance(weight, gs.Constant) or weight.dtype != np.float32:
        return None
    shape = tuple(weight.shape)
    if node.op == "MatMul" and len(shape) == 2:
        return MatrixView(node.name, weight.values, 1, shape, False)
    if node.op == "Gemm" and len(shape) == 2 and not node.attrs.get("transA", 0) and node.attrs.get("alpha", 1.0) == 1:
        is_transposed = bool(node.attrs.get("transB", 0))
        return MatrixView(node.name, weight.values.T if is_transposed else weight.values, 1, shape, is_transposed)
    if node.op == "Conv" and node.attrs.get("group", 1) == 1 and len(shape) > 2:
        taps = int(np.prod(shape[2:]))
        matrix = np.moveaxis(weight.values.reshape(*shape[:2], taps), 1, 0).reshape(shape[1], -1)
        return MatrixView(node.name, matrix, taps, shape, True, taps == 1 and not any(node.attrs.get("pads", ())))
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """An activation and the matrices that it is multiplied with.

    Attributes:
        tensor: the activation.
        axis: its channel axis: -1 of a matrix product, 1 of a convolution.
        views: one per quantized product, in graph order.
        is_closed: nothing else reads the quantized activation, and its scale is its own: it can be equalized.
    """

    tensor: str
    axis: int
    views: tuple[MatrixView, ...]
    is_closed: bool

    @property
    def num_channels(self) -> int:
        """C."""
        return len(self.views[0].matrix)

    @property
    def matrix(self) -> Floats:
        """All matrices side by side, `[C, N]`."""
        return np.concatenate([view.matrix for view in self.views], axis=1)


def find_layers(graph: gs.Graph, placement: Placement) -> list[Layer]:
    """The activations whose quantized readers are matrix products with its channels, in graph order.

    Residual Adds may read them too. Activations of other products (grouped convolutions, attention) are left out.

    Raises:
        InputError: a weight holds NaN or infinity.
    """
    nodes = {node.name: node for node in graph.nodes}
    weighted = {site.node for site in placement.weights if site.input_index == 1}
    shared = {tensor for group in placement.shared for tensor in group}
    readers: dict[str, list[tuple[gs.Node, int]]] = {}
    for site in placement.activations:
        readers.setdefault(site.tensor, []).append((nodes[site.node], site.input_index))
    layers = []
    for tensor, sites in readers.items():
        products = [(node, index) for node, index in sites if node.op != "Add"]
        views = [matrix_view(node) for node, index in products if index == 0 and node.name in weighted]
        found = [view for view in views if view is not None]
        axes = {1 if node.op == "Conv" else -1 for node, _ in products}
        if len(found) < len(products) or len(axes) != 1 or len({len(view.matrix) for view in found}) != 1:
            continue
        for (node, _), view in zip(products, found, strict=True):
            check_finite(view.matrix, node.inputs[1].name, node.name)
        is_closed = len(products) == len(sites) and tensor not in shared
        layers.append(Layer(tensor, axes.pop(), tuple(found), is_closed))
    return layers
