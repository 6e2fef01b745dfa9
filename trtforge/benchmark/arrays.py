"""One reference for two array libraries: numpy on the host, torch on the device, both in float64.

The reference is written with what the two have in common (`@`, reshape, `amax`, `where` ...); here is what differs.
bf16 is kept as its 16 bits in an int16 array, because numpy and cupy have no such type.
"""

from __future__ import annotations

import math
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

ElementType = Literal["fp16", "bf16"]
Host = npt.NDArray[Any]
_BF16_DROPPED_BITS = 16  # of float32's mantissa

_erf = np.vectorize(math.erf, otypes=[np.float64])


def round_on_host(values: Host, dtype: ElementType) -> Host:
    """Values rounded to T, half to even, as float32; NaN stays NaN."""
    if dtype == "fp16":
        return values.astype(np.float16).astype(np.float32)
    return values_from_bits(bits_from_values(values, "bf16"), "bf16")


def bits_from_values(values: Host, dtype: ElementType) -> Host:
    """Values as a kernel reads them: float16, or int16 that holds bf16."""
    if dtype == "fp16":
        return values.astype(np.float16)
    wide = np.ascontiguousarray(values, np.float32)
    bits = wide.view(np.uint32)
    half = np.uint32((1 << (_BF16_DROPPED_BITS - 1)) - 1) + ((bits >> np.uint32(_BF16_DROPPED_BITS)) & np.uint32(1))
    rounded = ((bits + half) >> np.uint32(_BF16_DROPPED_BITS)).astype(np.uint16)
    return np.where(np.isnan(wide), np.uint16(0x7FC0), rounded).view(np.int16)


def values_from_bits(bits: Host, dtype: ElementType) -> Host:
    """float32 from what a kernel wrote."""
    if dtype == "fp16":
        return bits.astype(np.float32)
    return (np.ascontiguousarray(bits).view(np.uint16).astype(np.uint32) << np.uint32(_BF16_DROPPED_BITS)).view(
        np.float32
    )


class Arrays(Protocol):
    """What the reference needs of an array library beyond the functions of `library`."""

    library: Any

    def from_host(self, values: Host) -> Any:
        """The values in float64."""

    def from_kernel(self, bits: Any, dtype: ElementType) -> Any:
        """What a kernel wrote, in float64."""

    def round(self, values: Any, dtype: ElementType) -> Any:
        """Rounded to T, in float64 again."""

    def erf(self, values: Any) -> Any:
        """The error function."""


class HostArrays:
    """numpy."""

    library: Any = np

    def from_host(self, values: Host) -> Any:
        """The values in float64."""
        return values.astype(np.float64)

    def from_kernel(self, bits: Any, dtype: ElementType) -> Any:
        """What a kernel wrote, in float64."""
        return values_from_bits(np.asarray(bits), dtype).astype(np.float64)

    def round(self, values: Any, dtype: ElementType) -> Any:
        """Rounded to T, in float64 again."""
        return round_on_host(values, dtype).astype(np.float64)

    def erf(self, values: Any) -> Any:
        """The error function."""
        return _erf(values)


class TorchArrays:
    """torch, on a device."""

    def __init__(self, device: str) -> None:
        import torch

        self.library: Any = torch
        self.device = device
        self._types = {"fp16": torch.float16, "bf16": torch.bfloat16}

    def from_host(self, values: Host) -> Any:
        """The values in float64."""
        return self.library.as_tensor(values, device=self.device).to(self.library.float64)

    def from_kernel(self, bits: Any, dtype: ElementType) -> Any:
        """What a kernel wrote, in float64."""
        tensor = self.library.as_tensor(bits, device=self.device)
        is_typed = tensor.dtype == self._types[dtype]
        return (tensor if is_typed else tensor.view(self._types[dtype])).to(self.library.float64)

    def round(self, values: Any, dtype: ElementType) -> Any:
        """Rounded to T, in float64 again."""
        return values.to(self._types[dtype]).to(self.library.float64)

    def erf(self, values: Any) -> Any:
        """The error function."""
        return self.library.erf(values)
