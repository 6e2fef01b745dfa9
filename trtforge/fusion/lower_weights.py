"""The weight of a linear layer as values: floats, or int8 codes with scales, [K, W] whichever way it is stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.fusion.lower_nodes import Array
from trtforge.fusion.regions import Linear
from trtforge.fusion.view import StoppedError, op_name


@dataclasses.dataclass(frozen=True, slots=True)
class Weight:
    """A constant weight.

    Attributes:
        values: [K, W] floats, or int8 codes.
        scales: [W] of codes, in the type that they are stored in; None for floats.
    """

    values: Array
    scales: Array | None = None

    def columns(self, columns: Sequence[int]) -> Weight:
        """Some columns."""
        scales = None if self.scales is None else self.scales[list(columns)]
        return Weight(np.take(self.values, columns, axis=1), scales)


def read_weight(product: gs.Node, linear: Linear) -> Weight:
    """The weight that a product reads.

    Raises:
        StoppedError: it is no constant, or quantized in another way than int8 with a scale for each column.
    """
    weight = product.inputs[1]
    if isinstance(weight, gs.Constant):
        return Weight(weight.values.T if linear.is_transposed else weight.values)
    dequantize = weight.inputs[0] if weight.inputs else None
    if dequantize is None or op_name(dequantize) != "DequantizeLinear":
        raise StoppedError(product, "its weight is computed")
    codes, scales = dequantize.inputs[:2]
    if not isinstance(codes, gs.Constant) or codes.values.dtype != np.int8 or not isinstance(scales, gs.Constant):
        raise StoppedError(product, "its weight is no constant of int8 codes")
    zero = dequantize.inputs[2] if len(dequantize.inputs) > 2 and dequantize.inputs[2].name else None
    if zero is not None and (not isinstance(zero, gs.Constant) or bool(np.any(zero.values))):
        raise StoppedError(product, "its weight has a zero-point")
    is_by_column = int(dequantize.attrs.get("axis", 1)) % 2 == (0 if linear.is_transposed else 1)
    if scales.values.size != 1 and not (is_by_column and scales.values.shape == (linear.width,)):
        raise StoppedError(product, "its weight has scales that are not one for each column")
    values = codes.values.T if linear.is_transposed else codes.values
    return Weight(values, np.broadcast_to(scales.values.reshape(-1), (linear.width,)))


def join_weights(weights: Sequence[Weight]) -> Weight:
    """Weights of one x side by side; all are floats, or all codes."""
    scales = [weight.scales for weight in weights if weight.scales is not None]
    return Weight(
        np.concatenate([weight.values for weight in weights], axis=1), np.concatenate(scales) if scales else None
    )
