"""The weights of a transformer block in the form of `trtforge::AttentionFFN_*`: four linear layers.

1. Weights of query, key and value become one [H, 3H], head by head; a bias that is missing is zeros.
2. Int8: all four products have a constant of int8 codes behind DequantizeLinear and a QuantizeLinear with one scale in
   front of x.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.fusion.lower_nodes import Array
from trtforge.fusion.lower_weights import Weight, join_weights, read_weight
from trtforge.fusion.regions import AttentionFfnBlock, Linear
from trtforge.fusion.view import StoppedError, op_name
from trtforge.graph.signature import tensor_dtype
from trtforge.ops.attention_ffn import INT8_K_MULTIPLE

_ROLES = ("qkv", "out", "up", "down")


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer as the operator takes it.

    Attributes:
        weight: [K, W].
        bias: [W].
        input_scale: of x; None for floats.
    """

    weight: Weight
    bias: Array
    input_scale: float | None = None

    @property
    def is_int8(self) -> bool:
        """Whether it is quantized."""
        return self.weight.scales is not None

    def columns(self, columns: list[int]) -> Layer:
        """Some columns of it."""
        return Layer(self.weight.columns(columns), self.bias[columns], self.input_scale)


class BlockWeights:
    """Reads the constants of the blocks of one graph.

    Args:
        nodes, tensors: of the graph, by name.
    """

    def __init__(self, nodes: Mapping[str, gs.Node], tensors: Mapping[str, gs.Tensor]) -> None:
        self._nodes = nodes
        self._tensors = tensors

    def layers(self, block: AttentionFfnBlock, dtype: np.dtype[Any]) -> dict[str, Layer]:
        """The four linear layers by role.

        Raises:
            StoppedError: weights that the operator cannot take.
        """
        attention = block.attention
        parts = [part.projection for part in (attention.query, attention.key, attention.value)]
        assert all(parts) and attention.output_projection is not None
        pieces = [self._layer(p.linear, None, dtype).columns(p.columns()) for p in parts if p is not None]
        first = self._nodes[block.attention.query.projection.linear.product]  # type: ignore[union-attr]
        if len({(piece.input_scale, piece.is_int8) for piece in pieces}) > 1:
            raise StoppedError(first, "query, key and value are not quantized alike")
        found = {
            "qkv": _joined(pieces),
            "out": self._layer(attention.output_projection, block.out_bias, dtype),
            "up": self._layer(block.ffn.up, None, dtype),
            "down": self._layer(block.ffn.down, block.down_bias, dtype),
        }
        quantized = [role for role in _ROLES if found[role].is_int8]
        if quantized and len(quantized) < len(_ROLES):
            rest = ", ".join(role for role in _ROLES if role not in quantized)
            raise StoppedError(first, f"some of its products are quantized, but not {rest}")
        for role in quantized:
            depth = found[role].weight.values.shape[0]
            if depth % INT8_K_MULTIPLE:
                raise StoppedError(first, f"{role} has K = {depth}; int8 takes multiples of {INT8_K_MULTIPLE}")
        return found

    def _layer(self, linear: Linear, late_bias: str | None, dtype: np.dtype[Any]) -> Layer:
        """A linear layer; `late_bias` is added behind the residual.

        Raises:
            StoppedError: its weight or bias has another form.
        """
        product = self._nodes[linear.product]
        bias = np.zeros(linear.width, dtype)
        for name in (linear.bias, late_bias):
            if name is not None:
                bias = (bias + self.constant(product, name, dtype).reshape(-1)).astype(dtype)
        weight = read_weight(product, linear)
        if weight.scales is not None:
            return Layer(weight, bias, self._input_scale(product))
        self.constant(product, str(product.inputs[1].name), dtype)
        return Layer(weight, bias)

    def _input_scale(self, product: gs.Node) -> float:
        """The scale of what an int8 product reads.

        Raises:
            StoppedError: it is not quantized with one constant scale.
        """
        tensor = product.inputs[0]
        while tensor.inputs and op_name(tensor.inputs[0]) == "Reshape":
            tensor = tensor.inputs[0].inputs[0]
        node = tensor.inputs[0] if tensor.inputs else None
        if op_name(node) == "DequantizeLinear" and node is not None and isinstance(node.inputs[1], gs.Constant):
            scale = np.asarray(node.inputs[1].values, np.float32)
            if scale.size == 1:
                return float(scale.reshape(()))
        raise StoppedError(product, "its weight is quantized and what it reads is not, or not with one scale")

    def constant(self, node: gs.Node, name: str, dtype: np.dtype[Any]) -> Array:
        """A constant of the block's type.

        Raises:
            StoppedError: it is computed, or of another type.
        """
        tensor = self._tensors[name]
        if not isinstance(tensor, gs.Constant):
            raise StoppedError(node, f"its constant {name!r} is quantized or computed")
        if tensor_dtype(tensor.dtype) != dtype:
            raise StoppedError(node, f"its constant {name!r} is {tensor_dtype(tensor.dtype)} in a block of {dtype}")
        values: Array = np.asarray(tensor.values)
        return values


def _joined(layers: list[Layer]) -> Layer:
    """Layers of one x side by side."""
    weight = join_weights([layer.weight for layer in layers])
    return Layer(weight, np.concatenate([layer.bias for layer in layers]), layers[0].input_scale)
