"""Random operands of a block, by the names of `trtforge::AttentionFFN_*`; the same for the same case.

Values are rounded to T and kept as float32, so that every implementation starts from the same numbers. Weights of an
int8 block are int8 codes [columns, K] with a scale a column, as the kernels read them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from trtforge.benchmark.arrays import Host, round_on_host
from trtforge.benchmark.case import BlockCase

ROLES = ("qkv", "out", "up", "down")
EPSILON = 1e-5
_INT8_MAX = 127


@dataclasses.dataclass(frozen=True, slots=True)
class Operands:
    """What a block is computed from.

    Attributes:
        values: float32 by name, in T's grid; int8 codes for the weights of an int8 block; lengths as int32 [B].
        input_scales: of the input of each product, by role; empty unless int8.
    """

    values: Mapping[str, Host]
    input_scales: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def weight(self, role: str) -> Host:
        """The weight [K, columns] as float32; of int8 codes what they stand for."""
        weight = self.values[f"w_{role}"]
        if weight.dtype != np.int8:
            return weight
        return np.ascontiguousarray((weight * self.values[f"w_{role}_scale"][:, None]).T)


def softmax_scale(case: BlockCase) -> float:
    """1 / sqrt(D), as a float32 value."""
    return float(np.float32(1 / math.sqrt(case.head_size)))


def make_operands(case: BlockCase, seed: int = 0) -> Operands:
    """Operands whose products keep each tensor's spread near one. The scales of an int8 block's inputs are not set."""
    random = np.random.default_rng(seed)
    width, inner = case.width, case.inner_width

    def normal(shape: tuple[int, ...], spread: float = 1.0, centre: float = 0.0) -> Host:
        values = random.standard_normal(shape, np.float32) * np.float32(spread) + np.float32(centre)
        return round_on_host(values, case.element_type)

    values: dict[str, Any] = {"x": normal((case.batch, case.sequence, width))}
    has_bias = case.mask == "bias"
    values["attention_bias"] = normal(case.bias_dims) if has_bias else np.zeros(case.bias_dims, np.float32)
    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, inner), "down": (inner, width)}
    for role, shape in shapes.items():
        weight = normal(shape, shape[0] ** -0.5)
        if case.dtype == "int8":
            values[f"w_{role}"], values[f"w_{role}_scale"] = _quantize_weight(weight)
        else:
            values[f"w_{role}"] = weight
        values[f"b_{role}"] = normal((shape[1],), 0.2)
    for norm in ("ln1", "ln2"):
        values[f"{norm}_gamma"] = normal((width,), 0.2, 1.0)
        values[f"{norm}_beta"] = normal((width,), 0.2)
    if case.mask == "lengths":
        values["lengths"] = np.array(case.lengths, np.int32)
    return Operands(values)


def with_input_scales(operands: Operands, largest: Mapping[str, float]) -> Operands:
    """Operands whose products' inputs are quantized so that the largest magnitude of each just fits."""
    scales = {role: float(np.float16(value / _INT8_MAX)) for role, value in largest.items()}
    return dataclasses.replace(operands, input_scales=scales)


def _quantize_weight(weight: Host) -> tuple[Host, Host]:
    """[K, columns] as codes [columns, K] and a scale a column."""
    scale = (np.abs(weight).max(axis=0) / _INT8_MAX).astype(np.float16).astype(np.float32)
    codes = np.clip(np.rint(weight / scale), -_INT8_MAX, _INT8_MAX).astype(np.int8)
    return np.ascontiguousarray(codes.T), scale
