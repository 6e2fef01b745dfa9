"""What makes an activation, where a scale and an offset per channel can go into it at no cost.

LayerNormalization    gamma * m, beta * m - o
RMSNormalization      gamma * m
MatMul + Add, Gemm    W * m by column, bias * m - o
Conv                  W * m by output channel, bias * m - o
Mul by a constant     constant * m
Relu                  m only, and what makes its input is scaled: Relu(x) * m = Relu(x * m) for m > 0
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.quantization.formats import Floats
from trtforge.quantization.output_bias import is_row

SetConstant = Callable[[gs.Node, int, np.ndarray], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Producer:
    """The constants that decide an activation's channels.

    Attributes:
        node: whose constant is multiplied.
        index: of that constant among its inputs.
        axis: of the channels in it.
        bias: (node, input index) of the constant that is multiplied too and takes the offset; None where there is none.
        takes_offset: nothing lies between the bias and the activation.
    """

    node: gs.Node
    index: int
    axis: int
    bias: tuple[gs.Node, int] | None
    takes_offset: bool

    def fold(self, multiplier: Floats, offset: Floats | None, set_constant: SetConstant) -> bool:
        """Change the constants; False, with nothing changed, where they cannot take it.

        Args:
            multiplier: `[C]`.
            offset: `[C]`, subtracted after the product; None for none.
            set_constant: gives a node new values for an input.
        """
        scale = self.node.inputs[self.index].values
        bias = None if self.bias is None else self.bias[0].inputs[self.bias[1]].values
        if offset is not None and (bias is None or not self.takes_offset):
            return False
        if scale.shape[self.axis] != len(multiplier) or (bias is not None and bias.shape[-1] != len(multiplier)):
            return False
        shape = [1] * scale.ndim
        shape[self.axis] = -1
        set_constant(self.node, self.index, scale * multiplier.reshape(shape))
        if self.bias is not None and bias is not None:
            set_constant(*self.bias, bias * multiplier if offset is None else bias * multiplier - offset)
        return True


def find_producer(tensor: gs.Variable, axis: int, pinned: Collection[str]) -> Producer | None:
    """What makes a tensor, or None where nothing can take a scale.

    Args:
        tensor: all of whose readers want the scale.
        axis: of its channels, 1 for what convolutions read, else -1.
        pinned: names of tensors that must keep their values.
    """
    takes_offset = True
    while len(tensor.inputs) == 1 and tensor.inputs[0].op == "Relu":
        takes_offset = False
        tensor = tensor.inputs[0].inputs[0]
        if not _is_private(tensor, pinned):
            return None
    if len(tensor.inputs) != 1:
        return None
    node = tensor.inputs[0]
    if (node.op == "Conv") != (axis == 1):
        return None
    if node.op in {"LayerNormalization", "RMSNormalization"}:
        is_alone = len(node.outputs) == 1 and is_row(node.inputs[1])
        return _producer(node, 1, -1, (node, 2), takes_offset) if is_alone else None
    if node.op == "Conv":
        return _producer(node, 1, 0, (node, 2), takes_offset)
    if node.op == "Gemm" and node.attrs.get("beta", 1.0) == 1:
        return _producer(node, 1, 0 if node.attrs.get("transB", 0) else 1, (node, 2), takes_offset)
    if node.op == "MatMul":
        return _producer(node, 1, -1, None, takes_offset)
    if node.op == "Mul":
        index = 0 if isinstance(node.inputs[0], gs.Constant) else 1
        return _producer(node, index, -1, None, takes_offset) if is_row(node.inputs[index]) else None
    if node.op == "Add":
        index = 0 if isinstance(node.inputs[0], gs.Constant) else 1
        product = node.inputs[1 - index]
        is_biased = len(product.inputs) == 1 and product.inputs[0].op == "MatMul" and _is_private(product, pinned)
        return _producer(product.inputs[0], 1, -1, (node, index), takes_offset) if is_biased else None
    return None


def _producer(
    node: gs.Node, index: int, axis: int, bias: tuple[gs.Node, int] | None, takes_offset: bool
) -> Producer | None:
    """A producer, unless what would be multiplied is no constant; a bias that is missing has no part in it."""
    scale = node.inputs[index]
    if not isinstance(scale, gs.Constant) or scale.dtype != np.float32:
        return None
    if node.op == "MatMul" and len(scale.shape) < 2:
        return None  # the product of a vector has no axis of channels
    if bias is not None and (len(bias[0].inputs) <= bias[1] or not bias[0].inputs[bias[1]].name):
        bias = None
    if bias is not None and not is_row(bias[0].inputs[bias[1]]):
        return None
    return Producer(node, index, axis, bias, takes_offset)


def _is_private(tensor: gs.Tensor, pinned: Collection[str]) -> bool:
    """Read by one node only, and no output."""
    return len(tensor.outputs) == 1 and tensor.name not in pinned
