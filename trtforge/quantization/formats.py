"""Number formats of quantized tensors: their codes, and scales that are exact in the type they will have.

    x ~ code * scale        scale = amax / largest code

    INT8        -127 .. 127, symmetric: -128 stays unused, so that a value and its negative quantize alike
    INT4        -8 .. 7; weights only, and 7 is what amax maps to: -8 serves weights whose range is clipped
    FP8 E4M3    4 exponent and 3 mantissa bits, largest number 448 (arXiv 2209.05433; ONNX FLOAT8E4M3FN)

No scale is smaller than the smallest normal number of its type (2**-14 for float16). Dead channels need some positive
scale, kernels may flush smaller ones to zero, and below 2**-16 the reciprocal overflows float16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trtforge.errors import InputError
from trtforge.recipe import Granularity

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class NumberFormat:
    """How numbers are stored.

    Attributes:
        name: as manifest and report call it.
        dtype: numpy or ml_dtypes type of the codes.
        min_code, max_code: the smallest and the largest code that is used.
        full_code: a tensor whose largest code is below this one loses precision to the floor on scales: the steps of
            integers are then too coarse; FP8 keeps its 3 bits over six powers of two below 1.
        is_integer: codes are whole numbers.
        opset: the ONNX opset from which QuantizeLinear and DequantizeLinear take it.
    """

    name: str
    dtype: np.dtype[Any]
    min_code: int
    max_code: int
    full_code: int
    is_integer: bool
    opset: int

    def encode(self, scaled: npt.NDArray[np.floating[Any]]) -> Codes:
        """The nearest codes of `x / scale`, half to even, clipped at the largest code."""
        codes: Codes = self.nearest(scaled).astype(self.dtype)
        return codes

    def nearest(self, scaled: npt.NDArray[np.floating[Any]]) -> Floats:
        """The same as float32 numbers."""
        clipped = np.clip(scaled, self.min_code, self.max_code)
        rounded: Floats = np.rint(clipped) if self.is_integer else clipped.astype(self.dtype)
        return rounded.astype(np.float32, copy=False)

    def scale_from_amax(self, amax: npt.NDArray[np.floating[Any]], scale_dtype: npt.DTypeLike) -> Floats:
        """amax / largest code as a value of `scale_dtype`, rounded up so that amax does not clip.

        Args:
            amax: any shape, non-negative.
            scale_dtype: float32, float16 or bfloat16.

        Returns:
            float32, the same shape; every value is exact in `scale_dtype`, at least its smallest normal number and at
            most its largest number.
        """
        dtype = np.dtype(scale_dtype)
        limits = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
        exact = amax.astype(np.float64) / self.max_code
        with np.errstate(over="ignore"):
            rounded = exact.astype(dtype)
        too_small = rounded.astype(np.float64) < exact
        rounded = np.where(too_small, np.nextafter(rounded, np.asarray(np.inf, dtype)), rounded)
        clipped = np.clip(rounded.astype(np.float32), np.float32(limits.smallest_normal), np.float32(limits.max))
        return np.asarray(clipped)

    def is_too_small(self, amax: float, scale_dtype: npt.DTypeLike) -> bool:
        """True when the floor on scales leaves a tensor that reaches `amax` too few steps."""
        return amax < self.full_code * smallest_scale(scale_dtype)

    def is_too_large(self, amax: float, scale_dtype: npt.DTypeLike) -> bool:
        """True when the largest scale of its type does not reach `amax`."""
        return float(amax) > self.max_code * float(ml_dtypes.finfo(np.dtype(scale_dtype)).max)  # type: ignore[no-untyped-call]

    def quantize(
        self, values: npt.NDArray[np.float32], axis: int | None, scale_dtype: npt.DTypeLike
    ) -> QuantizedWeight:
        """A weight whose largest values are not clipped.

        Args:
            values: any rank.
            axis: the axis that keeps its scales, or None.
            scale_dtype: the type whose values the scales take.

        Returns:
            Codes of the same shape; scales `[values.shape[axis]]`, or `[]` without an axis.
        """
        reduced = Granularity(axis).reduced_axes(values.ndim)
        amax = np.max(np.abs(values), axis=reduced, keepdims=True, initial=0.0)
        scale = self.scale_from_amax(amax, scale_dtype)
        return QuantizedWeight(self.encode(values / scale), scale.reshape(-1 if axis is not None else ()))


@dataclasses.dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight's codes and scales.

    Attributes:
        codes: of the weight's shape, in the format's type.
        scales: float32 `[channels]` along the weight's axis, or `[]`; values exact in the scale's final type.
    """

    codes: Codes
    scales: Floats


INT8 = NumberFormat("int8", np.dtype(np.int8), -127, 127, full_code=127, is_integer=True, opset=10)
INT4 = NumberFormat("int4", np.dtype(ml_dtypes.int4), -8, 7, full_code=7, is_integer=True, opset=21)
FP8 = NumberFormat("fp8", np.dtype(ml_dtypes.float8_e4m3fn), -448, 448, full_code=1, is_integer=False, opset=19)
FORMATS: Mapping[str, NumberFormat] = {"int8": INT8, "fp8": FP8, "int4": INT4, "int8-weights": INT8}
"""The format of the weights by the name of the quantization (spec.py)."""


def smallest_scale(scale_dtype: npt.DTypeLike) -> float:
    """The smallest scale that is written in this type: its smallest normal number."""
    return float(ml_dtypes.finfo(np.dtype(scale_dtype)).smallest_normal)  # type: ignore[no-untyped-call]


def check_finite(values: Floats, weight: str, node: str) -> None:
    """Refuse a weight that has no scale.

    Args:
        values: of the weight.
        weight, node: its name, and that of the node that reads it.

    Raises:
        InputError: it holds NaN or infinity.
    """
    if not np.isfinite(values).all():
        raise InputError(
            f"the weight {weight!r} of node {node!r} holds NaN or infinity",
            "it has no scale",
            "repair the model, or leave the node float with the recipe's exclude list",
        )
