"""The channel scales of a quantized convolution as a Mul behind it, where the builder then writes half the bytes.

    conv(x, q * s[c]) + b   =   conv(x, q * t) * (s[c] / t) + b          q int8, t one power of two

With one scale per channel TensorRT-RTX 1.7.1 writes the convolution's result in float32 and rescales it in a second
kernel; with one scale it writes float16, and the second kernel takes the Mul along. A chain of Conv and Relu then moves
31 % fewer bytes, EfficientNet-lite0 26 %; the number of kernels stays. No number changes: t is a power of two, so s / t
is as exact as s, and both products are. t is chosen so that the largest possible result stays within the type:

    |conv(x, q * t)| <= 127 * scale of x * t * max over c of sum |q|
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from trtforge.graph.edit import InputEdits
from trtforge.graph.names import UniqueNames
from trtforge.quantization.arrived import operands_of
from trtforge.quantization.formats import smallest_scale


def move_channel_scales(graph: gs.Graph, dtype: npt.DTypeLike) -> tuple[str, ...]:
    """Move the scales of every convolution whose weight has one per channel; in place.

    Args:
        graph: float32, with Q/DQ, topologically sorted.
        dtype: float16 or bfloat16: the type that the graph will be cast to.

    Returns:
        The names of the convolutions that changed.
    """
    mover = _Mover(graph, np.dtype(dtype))
    nodes: list[gs.Node] = []
    moved = []
    for node in list(graph.nodes):
        nodes.append(node)
        common = mover.common_scale(node)
        if common is not None:
            nodes.extend(mover.move(node, common))
            moved.append(node.name)
    mover.edits.apply()
    graph.nodes = nodes
    return tuple(moved)


class _Mover:
    def __init__(self, graph: gs.Graph, dtype: np.dtype[np.generic]) -> None:
        self.names = UniqueNames(graph)
        self.edits = InputEdits()
        self._smallest = smallest_scale(dtype)
        self._largest = float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]

    def common_scale(self, node: gs.Node) -> float | None:
        """The power of two that takes the place of the channel scales; None where they have to stay."""
        if node.op != "Conv" or not node.inputs[1].inputs:
            return None
        activation, weight = operands_of(node).first, node.inputs[1].inputs[0]
        if activation is None or weight.op != "DequantizeLinear" or len(weight.outputs[0].outputs) != 1:
            return None
        if not all(isinstance(tensor, gs.Constant) for tensor in (*weight.inputs[:2], activation.inputs[1])):
            return None
        codes, scales = weight.inputs[0].values, weight.inputs[1].values
        if codes.dtype != np.int8 or scales.ndim != 1 or weight.attrs.get("axis", 1) != 0:
            return None
        channel_sums = np.abs(codes.astype(np.int32)).sum(axis=tuple(range(1, codes.ndim)))
        reach = 127.0 * float(np.max(activation.inputs[1].values)) * float(channel_sums.max(initial=1))
        common = float(2.0 ** min(math.ceil(math.log2(scales.max())), math.floor(math.log2(self._largest / reach))))
        factors = scales / common
        is_exact = factors.min() >= self._smallest and factors.max() <= self._largest
        return common if common >= self._smallest and is_exact else None

    def move(self, conv: gs.Node, common: float) -> list[gs.Node]:
        """Rewrite the convolution; the nodes to put behind it."""
        weight = conv.inputs[1].inputs[0]
        scales = weight.inputs[1].values
        shape = (-1,) + (1,) * (weight.inputs[0].values.ndim - 2)
        zero_point = gs.Constant(self.names.tensor(f"{weight.name}_zero_point"), np.zeros((), np.int8))
        self.edits.replace(weight, 1, self._constant(f"{weight.name}_scale", np.float32(common)))
        self.edits.replace(weight, 2, zero_point)
        weight.attrs.pop("axis", None)
        result = conv.outputs[0]
        product = self._variable(f"{conv.name}_unscaled", result)
        conv.outputs[0] = product
        has_bias = len(conv.inputs) > 2 and bool(conv.inputs[2].name)
        scaled = self._variable(f"{conv.name}_scaled", result) if has_bias else result
        factors = self._constant(f"{conv.name}_channel_scales", (scales / np.float32(common)).reshape(shape))
        nodes = [gs.Node("Mul", self.names.node(f"{conv.name}_Mul"), inputs=[product, factors], outputs=[scaled])]
        if has_bias:
            bias = self._reshaped(conv.inputs[2], shape, nodes)
            conv.inputs = conv.inputs[:2]
            nodes.append(gs.Node("Add", self.names.node(f"{conv.name}_Add"), inputs=[scaled, bias], outputs=[result]))
        return nodes

    def _reshaped(self, bias: gs.Tensor, shape: tuple[int, ...], nodes: list[gs.Node]) -> gs.Tensor:
        """A bias `[M]` as `[M, 1, ...]`."""
        if isinstance(bias, gs.Constant):
            return self._constant(f"{bias.name}_reshaped", bias.values.reshape(shape))
        target = gs.Constant(self.names.tensor(f"{bias.name}_shape"), np.array(shape, np.int64))
        reshaped = gs.Variable(self.names.tensor(f"{bias.name}_reshaped"), np.float32)
        nodes.append(
            gs.Node("Reshape", self.names.node(f"{bias.name}_Reshape"), inputs=[bias, target], outputs=[reshaped])
        )
        return reshaped

    def _constant(self, name: str, values: npt.NDArray[np.float32] | np.float32) -> gs.Constant:
        return gs.Constant(self.names.tensor(name), np.asarray(values))

    def _variable(self, name: str, like: gs.Tensor) -> gs.Variable:
        return gs.Variable(self.names.tensor(name), np.float32, like.shape)
