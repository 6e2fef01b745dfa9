"""What a block should give, and how far a correct low-precision result may be from it.

The exact result is computed in float64. The plain path is the same computation with every tensor between two steps
rounded to T, as a correct program of one kernel a step has it. A result is right when its error is not much larger:

    rms(result - exact) <= K_RMS x rms(plain - exact)      max |result - exact| <= K_MAX x max |plain - exact|

The first says that it rounds no more than the plain path; the second finds a few wrong rows among many right ones.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from trtforge.benchmark.arrays import Arrays
from trtforge.benchmark.case import BlockCase
from trtforge.benchmark.operands import EPSILON, ROLES, Operands, softmax_scale, with_input_scales

# The same roundings in another order differ by less than a third; a sum in fp16, or a tensor rounded once more, by
# more.
K_RMS = 4 / 3
# Libraries may split a sum and add its parts in T.
K_RMS_OF_PEERS = 3.0
K_MAX = 4.0
_HIDDEN = -1e300


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """How a result compares.

    Attributes:
        rms_ratio: its error over that of the plain path; None where the result holds NaN or infinity.
        max_ratio: the same of the largest error.
        is_right: within the tolerance.
    """

    rms_ratio: float | None
    max_ratio: float | None
    is_right: bool

    def describe(self) -> str:
        """For a message."""
        if self.rms_ratio is None or self.max_ratio is None:
            return "NaN or infinity in the output"
        return f"error {self.rms_ratio:.2f} x (largest {self.max_ratio:.2f} x) that of rounding each step"


class Reference:
    """The exact result of a case and the plain path's error.

    Args:
        case: the block.
        operands: of it.
        arrays: where to compute.
        is_quantized: False leaves the inputs of an int8 block's products in T: the reference of a peer that takes the
            same weights in T.
    """

    def __init__(self, case: BlockCase, operands: Operands, arrays: Arrays, is_quantized: bool = True) -> None:
        self.case = case
        self.arrays = arrays
        self.exact = _Block(case, operands, arrays, is_quantized, is_rounded=False).run()
        plain = _Block(case, operands, arrays, is_quantized, is_rounded=True).run()
        self.plain_rms, self.plain_max = self._errors(plain)

    def judge(self, y: Any, rms_limit: float = K_RMS) -> Verdict:
        """Compare what a kernel wrote, [B, S, H] in T's bits."""
        result = self.arrays.from_kernel(y, self.case.element_type).reshape(self.exact.shape)
        rms, largest = self._errors(result)
        if not (math.isfinite(rms) and math.isfinite(largest)):
            return Verdict(None, None, False)
        ratios = rms / self.plain_rms, largest / self.plain_max
        return Verdict(*ratios, ratios[0] <= rms_limit and ratios[1] <= K_MAX)

    def _errors(self, y: Any) -> tuple[float, float]:
        error = abs(y - self.exact)
        return math.sqrt(float((error**2).mean())), float(error.max())


def calibrated(case: BlockCase, operands: Operands, arrays: Arrays) -> Operands:
    """The operands of an int8 block with the scales of its inputs; of others as they are."""
    if case.dtype != "int8":
        return operands
    block = _Block(case, operands, arrays, is_quantized=False, is_rounded=False)
    block.run()
    return with_input_scales(operands, block.largest)


class _Block:
    """One computation of a block, sample by sample: scores of all samples at once may not fit."""

    def __init__(
        self, case: BlockCase, operands: Operands, arrays: Arrays, is_quantized: bool, is_rounded: bool
    ) -> None:
        self.case = case
        self.arrays = arrays
        self.library = arrays.library
        self.is_rounded = is_rounded
        self.scales = operands.input_scales if is_quantized else {}
        self.largest = dict.fromkeys(ROLES, 0.0)
        names = [name for name in operands.values if not name.startswith("w_") and name != "lengths"]
        self.values = {name: arrays.from_host(operands.values[name]) for name in names}
        self.weights = {role: arrays.from_host(operands.weight(role)) for role in ROLES}

    def run(self) -> Any:
        """Y [B, S, H]; rows of padding are zero."""
        y = self.library.zeros_like(self.values["x"])
        for sample, length in enumerate(self.case.lengths):
            y[sample, :length] = self._sample(self.values["x"][sample, :length])
        return y

    def _sample(self, x: Any) -> Any:
        if self.case.order == "pre":
            h = self._rounded(x + self._attention(self._norm(x, "ln1")))
            return self._rounded(h + self._ffn(self._norm(h, "ln2")))
        h = self._norm(self._rounded(x + self._attention(x)), "ln1")
        return self._norm(self._rounded(h + self._ffn(h)), "ln2")

    def _rounded(self, values: Any) -> Any:
        return self.arrays.round(values, self.case.element_type) if self.is_rounded else values

    def _linear(self, x: Any, role: str) -> Any:
        if self.case.dtype == "int8":
            self.largest[role] = max(self.largest[role], float(abs(x).max()))
        if (scale := self.scales.get(role)) is not None:
            x = self.library.clip(self.library.round(x / scale), -128, 127) * scale
        return x @ self.weights[role] + self.values[f"b_{role}"]

    def _norm(self, x: Any, name: str) -> Any:
        centred = x - x.mean(-1)[:, None]
        deviation = self.library.sqrt((centred**2).mean(-1)[:, None] + EPSILON)
        return self._rounded(centred / deviation * self.values[f"{name}_gamma"] + self.values[f"{name}_beta"])

    def _attention(self, x: Any) -> Any:
        num_rows, case = x.shape[0], self.case
        packed = self._rounded(self._linear(x, "qkv")).reshape(num_rows, 3, case.num_heads, case.head_size)
        q, k, v = self.library.moveaxis(packed, 0, 2)
        scores = q @ self.library.moveaxis(k, 1, 2) * softmax_scale(case)
        bias = self.values["attention_bias"][0]
        scores = scores + bias[:, : min(num_rows, bias.shape[1]), : min(num_rows, bias.shape[2])]
        if case.mask == "causal":
            scores = self.library.where(self.arrays.from_host(np.tri(num_rows)) > 0, scores, _HIDDEN)
        weights = self.library.exp(scores - self.library.amax(scores, -1)[:, :, None])
        weights = self._rounded(weights / weights.sum(-1)[:, :, None])
        context = self._rounded(weights @ v)
        return self._linear(self.library.moveaxis(context, 0, 1).reshape(num_rows, case.width), "out")

    def _ffn(self, x: Any) -> Any:
        return self._linear(self._rounded(self._activation(self._linear(x, "up"))), "down")

    def _activation(self, x: Any) -> Any:
        library = self.library
        if self.case.activation == "gelu":
            return 0.5 * x * (1 + self.arrays.erf(x / math.sqrt(2)))
        if self.case.activation == "gelu_tanh":
            return 0.5 * x * (1 + library.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return library.where(x < 0, 0.0, x) if self.case.activation == "relu" else x / (1 + library.exp(-x))
