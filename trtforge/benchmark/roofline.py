"""The least time that a card needs for a block: what its tensor cores can multiply, and its memory can move.

    bound = max(products / peak of their type + attention / peak of fp16,  bytes / bandwidth)

A block computed kernel by kernel moves more bytes than `min_bytes`, so it may stay below the roofline without waste.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from trtforge.benchmark.case import BlockCase


@dataclasses.dataclass(frozen=True, slots=True)
class Peaks:
    """What a card can do at most.

    Attributes:
        fp16_tflops: dense tensor-core products of fp16 or bf16 with fp32 sums, 10^12 FLOP/s.
        int8_tops: the same of int8; None where it is not known.
        bandwidth_gbps: of its memory, 10^9 bytes/s.
        source: where the figures are from, or "measured".
    """

    fp16_tflops: float
    int8_tops: float | None
    bandwidth_gbps: float
    source: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """The least time, and what sets it."""

    time_us: float
    limited_by: Literal["compute", "memory"]


_HOPPER = "NVIDIA H100 data sheet; without sparsity"
_AMPERE = "NVIDIA A100 data sheet; without sparsity"
# By the driver's name of the card: variants of one chip differ. Data sheets give Hopper's and Ada's data center figures
# with sparsity, which is half of it without.
_KNOWN = {
    "NVIDIA H200": Peaks(989.5, 1979, 4800, "NVIDIA H200 data sheet (SXM); without sparsity"),
    "NVIDIA H100 80GB HBM3": Peaks(989.5, 1979, 3350, _HOPPER + " (SXM)"),
    "NVIDIA H100 PCIe": Peaks(756, 1513, 2000, _HOPPER + " (PCIe)"),
    "NVIDIA A100-SXM4-80GB": Peaks(312, 624, 2039, _AMPERE),
    "NVIDIA A100-SXM4-40GB": Peaks(312, 624, 1555, _AMPERE),
    "NVIDIA A100 80GB PCIe": Peaks(312, 624, 1935, _AMPERE),
    "NVIDIA A100-PCIE-40GB": Peaks(312, 624, 1555, _AMPERE),
    "NVIDIA A10": Peaks(125, 250, 600, "NVIDIA A10 data sheet; without sparsity"),
    "NVIDIA A30": Peaks(165, 330, 933, "NVIDIA A30 data sheet; without sparsity"),
    "NVIDIA L4": Peaks(121, 242.5, 300, "NVIDIA L4 data sheet; without sparsity"),
    "NVIDIA GeForce RTX 3090": Peaks(71, 284, 936, "NVIDIA Ampere GA102 white paper; fp32 sums, without sparsity"),
    "NVIDIA GeForce RTX 4090": Peaks(165.2, 660.6, 1008, "NVIDIA Ada white paper; fp32 sums, without sparsity"),
}


def known_peaks(name: str) -> Peaks | None:
    """The data sheet of a card, by the name that its driver gives; None where it is not in the table."""
    return _KNOWN.get(name)


def bound(case: BlockCase, peaks: Peaks) -> Bound | None:
    """The roofline of a block; None where the peak of its type is not known."""
    product_peak = peaks.int8_tops if case.dtype == "int8" else peaks.fp16_tflops
    if product_peak is None:
        return None
    # 10^12 per second is 10^6 per microsecond, 10^9 bytes per second 10^3.
    compute_us = case.product_flops / (product_peak * 1e6) + case.attention_flops / (peaks.fp16_tflops * 1e6)
    memory_us = case.min_bytes / (peaks.bandwidth_gbps * 1e3)
    return Bound(compute_us, "compute") if compute_us >= memory_us else Bound(memory_us, "memory")


def tflops(case: BlockCase, time_us: float) -> float:
    """10^12 FLOP/s."""
    return case.flops / time_us / 1e6


def gbps(case: BlockCase, time_us: float) -> float:
    """10^9 of the bytes that must be moved, per second."""
    return case.min_bytes / time_us / 1e3
