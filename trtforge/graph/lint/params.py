"""The parameters of a QuantizeLinear or DequantizeLinear, and the arithmetic that ONNX gives them.

q = saturate(round_half_even(x / scale) + zero_point)        y = (q - zero_point) * scale
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.graph.edit import is_array
from trtforge.graph.signature import tensor_dtype
from trtforge.graph.storage import numpy_dtype

Array = np.ndarray[Any, Any]

_INTEGERS = (np.int8, np.uint8, np.int16, np.uint16)
RANGES: dict[np.dtype[Any], tuple[int, int]] = {
    np.dtype(kind): (int(np.iinfo(kind).min), int(np.iinfo(kind).max)) for kind in _INTEGERS
}
"""Smallest and largest code of the quantized types that the fixer computes with."""
INT8, UINT8 = np.dtype(np.int8), np.dtype(np.uint8)
INT8_MIN, INT8_MAX = RANGES[INT8]
_SCALE_TYPES = frozenset(["bfloat16", "float16", "float32"])
# Scale of a channel that is all zeros: any positive number does; this is the smallest normal one of float16.
ZERO_CHANNEL_SCALE = 2.0**-14


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class QuantParams:
    """Constant parameters of one node.

    Attributes:
        scale: `[]`, or `[C]` along `axis`, or one per block; in its stored type.
        zero_point: int32 of the scale's shape.
        dtype: type of the quantized tensor.
        axis: the axis of the scales, as the node states it; None for one scale.
        block_size: elements per scale along the axis; 0 without blocks.
    """

    scale: Array
    zero_point: Array
    dtype: np.dtype[Any]
    axis: int | None
    block_size: int

    @property
    def is_symmetric_int8(self) -> bool:
        """True for int8 with zero-points of 0: what TensorRT computes with."""
        return self.dtype == INT8 and not self.zero_point.any()

    @property
    def rounding(self) -> float:
        """Relative difference of two scales that moves no value by more than half a step: one is a rounded copy."""
        low, high = RANGES.get(self.dtype, RANGES[INT8])
        return 0.5 / (high - low)

    @property
    def is_valid(self) -> bool:
        """True when every scale is finite and above 0."""
        scale = self.scale.astype(np.float64)
        return bool(np.all(np.isfinite(scale) & (scale > 0)))

    def is_same_as(self, other: QuantParams, tolerance: float = 0.0) -> bool:
        """True when both give the same numbers; `tolerance` is the relative difference that scales may have."""
        layout = (self.dtype, self.axis, self.block_size, self.scale.shape)
        if layout != (other.dtype, other.axis, other.block_size, other.scale.shape):
            return False
        first, second = self.scale.astype(np.float64), other.scale.astype(np.float64)
        with np.errstate(invalid="ignore"):
            close = np.abs(first - second) <= tolerance * np.abs(first)
        return bool(np.all(close) and np.array_equal(self.zero_point, other.zero_point))

    def fits(self, shape: tuple[int, ...]) -> bool:
        """True when the scales have one entry for each index (or block) of the axis."""
        if self.axis is None:
            return True
        if not -len(shape) <= self.axis < len(shape):
            return False
        if not self.block_size:
            return bool(self.scale.shape == (shape[self.axis],))
        blocks = list(shape)
        blocks[self.axis] = -(-shape[self.axis] // self.block_size)
        return bool(self.scale.shape == tuple(blocks))

    def spread(self, values: Array, shape: tuple[int, ...]) -> Array:
        """Scales or zero-points in a form that broadcasts against a tensor of this shape; `fits` must hold."""
        if self.axis is None:
            return values.reshape(())
        axis = self.axis % len(shape)
        if self.block_size:
            return np.repeat(values, self.block_size, axis)[tuple(slice(size) for size in shape)]
        return values.reshape([-1 if index == axis else 1 for index in range(len(shape))])

    def quantize(self, values: Array) -> Array:
        """Codes of float values, as ONNX Runtime computes them."""
        low, high = RANGES[self.dtype]
        scale = self.spread(self.scale, values.shape).astype(np.float32)
        with np.errstate(all="ignore"):
            rounded = np.rint(values.astype(np.float32) / scale) + self.spread(self.zero_point, values.shape)
        return np.asarray(np.clip(rounded, low, high).astype(self.dtype))

    def dequantize(self, codes: Array) -> Array:
        """float32 values of codes, as ONNX Runtime computes them."""
        shifted = (codes.astype(np.int64) - self.spread(self.zero_point, codes.shape)).astype(np.float32)
        return np.asarray(shifted * self.spread(self.scale, codes.shape).astype(np.float32))


def read_params(node: gs.Node) -> QuantParams | None:
    """The parameters of a QuantizeLinear or DequantizeLinear; None when they are not constants of known type."""
    scale = constant_input(node, 1)
    dtype = quantized_dtype(node)
    if scale is None or dtype is None or scale.size == 0 or scale.dtype.name not in _SCALE_TYPES:
        return None
    zero_point = np.zeros(scale.shape, np.int32)
    if has_input(node, 2):
        stored = constant_input(node, 2)
        if stored is None or stored.size not in (1, scale.size):
            return None
        with np.errstate(invalid="ignore"):
            zeros = stored.astype(np.int32).reshape(-1)
        zero_point = np.broadcast_to(zeros, (scale.size,)).reshape(scale.shape)
    if scale.size == 1:
        return QuantParams(scale.reshape(()), zero_point.reshape(()), dtype, None, 0)
    axis, block_size = int_attribute(node, "axis", 1), int_attribute(node, "block_size", 0)
    if axis is None or block_size is None:
        return None
    return QuantParams(scale, zero_point, dtype, axis, block_size)


def quantized_dtype(node: gs.Node) -> np.dtype[Any] | None:
    """The type of the codes that a QuantizeLinear gives or a DequantizeLinear takes; None when it is not known."""
    if has_input(node, 2):
        return tensor_dtype(node.inputs[2].dtype)
    if node.op == "DequantizeLinear":
        return tensor_dtype(node.inputs[0].dtype)
    code = int_attribute(node, "output_dtype", 0)
    if code is None:
        return None
    return numpy_dtype(code) if code else UINT8


def int_attribute(node: gs.Node, name: str, default: int) -> int | None:
    """An integer attribute; None when the model gives it another type."""
    value = node.attrs.get(name, default)
    return value if isinstance(value, int) else None


def constant_input(node: gs.Node, index: int) -> Array | None:
    """The values of a node's input when it is a constant of numbers."""
    tensor = node.inputs[index] if index < len(node.inputs) else None
    return tensor.values if tensor is not None and is_array(tensor) else None


def has_input(node: gs.Node, index: int) -> bool:
    """True when the node has this input and it is not left out."""
    return index < len(node.inputs) and bool(node.inputs[index].name)


def float_type_of(tensor: gs.Tensor, scale: Array) -> np.dtype[Any] | None:
    """The type that arithmetic on a quantized tensor has, the scale's where it is not known; None for integers."""
    dtype = tensor_dtype(tensor.dtype) or scale.dtype
    return dtype if dtype.name in _SCALE_TYPES else None


def producer_of(tensor: gs.Tensor) -> gs.Node | None:
    """The node that computes a tensor; None for constants and graph inputs."""
    return tensor.inputs[0] if tensor.inputs else None


def quantize_symmetric(values: Array, axis: int | None) -> tuple[Array, Array]:
    """Codes in [-127, 127] and scales of a float weight.

    Args:
        values: float32, finite, any shape.
        axis: the axis that keeps its scales; None for one scale.

    Returns:
        int8 codes of the same shape; float32 scales `[values.shape[axis]]` or `[]`.
    """
    others = tuple(index for index in range(values.ndim) if axis is None or index != axis % values.ndim)
    amax = np.max(np.abs(values), axis=others, keepdims=True, initial=0.0).astype(np.float32)
    smallest = np.finfo(np.float32).smallest_normal
    scale = np.where(amax > 0, np.maximum(amax / np.float32(INT8_MAX), smallest), np.float32(ZERO_CHANNEL_SCALE))
    codes = np.clip(np.rint(values / scale), -INT8_MAX, INT8_MAX).astype(np.int8)
    return codes, scale.reshape(-1 if axis is not None else ())
