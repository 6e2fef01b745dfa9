"""How far a candidate's outputs are from the reference's: streaming, numpy only.

Per sample, over the flattened output: cosine = <r, c> / (|r| |c|).
Over all samples: SQNR = 10 log10(sum r^2 / sum (r - c)^2).
Of an output with one element per sample (a probability) that cosine knows the sign alone. There a sample scores
1 - (r - c)^2 / (2 s^2), -1 at least, where s is the standard deviation of r over all samples, or a tenth of |mean of r|
where that is more: unit vectors at a distance d have the cosine 1 - d^2 / 2. The mean is of the squared errors.
Positions where `attention_mask` is 0 are left out of outputs shaped [batch, sequence, ...]. Integer and bool outputs
use the share of equal elements in the place of the cosine. Positions where the reference itself is not finite are
left out, whatever the candidate has there. A sample of which that leaves nothing counts for nothing; where none is
left, the cosine is 0: nothing was proven.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Annotated

import numpy as np
import pydantic

from trtforge.textfile import FileModel

MASK_INPUT = "attention_mask"
# Least spread of single values, as a share of their mean: data that hardly vary are no measure of an error.
_LEAST_SPREAD = 0.1


class OutputParity(FileModel):
    """Figures of one output.

    Attributes:
        cosine: mean over samples; the score of single values where every sample has one element.
        cosine_min: the worst sample's.
        sqnr_db: signal to quantization-noise ratio in dB; None when the outputs are equal or not floating point.
        max_abs_error: largest absolute difference.
        nan: the candidate has NaN or Inf where the reference has none.
        left_out: samples of which the reference has nothing but NaN and Inf.
        nan_reference: samples of which the reference has NaN, these included.
    """

    cosine: float
    cosine_min: float
    sqnr_db: float | None
    max_abs_error: float
    nan: bool
    left_out: Annotated[int, pydantic.Field(ge=0)] = 0
    nan_reference: Annotated[int, pydantic.Field(ge=0)] = 0


class _SingleValues:
    """Sums over pairs of single values; Welford's update of mean and variance."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.squares = 0.0
        self.noise = 0.0
        self.worst = 0.0

    def add(self, reference: float, candidate: float) -> None:
        self.count += 1
        step = reference - self.mean
        self.mean += step / self.count
        self.squares += step * (reference - self.mean)
        error = abs(reference - candidate)
        self.noise += error * error
        self.worst = max(self.worst, error)

    def scores(self) -> tuple[float, float]:
        """The mean and the worst sample's score, from -1 to 1; 0 where there is no spread to measure an error by."""
        if self.worst == 0:
            return 1.0, 1.0
        spread = max(math.sqrt(self.squares / self.count), _LEAST_SPREAD * abs(self.mean))
        if not 0 < spread < math.inf:
            return 0.0, 0.0
        mean_error = math.sqrt(self.noise / self.count)
        return _score(mean_error / spread), _score(self.worst / spread)


def _score(distance: float) -> float:
    """The cosine of two unit vectors at a distance."""
    return max(-1.0, 1.0 - min(distance, 2.0) ** 2 / 2.0)


class _OutputState:
    """Sums over the samples seen so far of one output."""

    def __init__(self) -> None:
        self.samples = 0
        self.cosine_sum = 0.0
        self.cosine_min = math.inf
        self.signal = 0.0
        self.noise = 0.0
        self.max_abs_error = 0.0
        self.nan = False
        self.left_out = 0
        self.nan_reference = 0
        self.singles: _SingleValues | None = _SingleValues()

    def add_sample(self, reference: np.ndarray, candidate: np.ndarray) -> None:
        """Add one sample; both flat and of one size."""
        if reference.size != 1 or reference.dtype.kind in "iub":
            self.singles = None
        if reference.dtype.kind in "iub":
            equal = float(np.mean(reference == candidate)) if reference.size else 1.0
            self._add_cosine(equal)
            wide = np.abs(reference.astype(np.float64) - candidate.astype(np.float64))
            self.max_abs_error = max(self.max_abs_error, float(wide.max(initial=0.0)))
            return
        r = reference.astype(np.float64)
        c = candidate.astype(np.float64)
        valid = np.isfinite(r)
        if not valid.all():
            self.nan_reference += bool(np.isnan(r).any())
            r, c = r[valid], c[valid]
            if not r.size:
                self.left_out += 1
                return
        finite = np.isfinite(c)
        if not finite.all():
            self.nan = True
            c = np.where(finite, c, 0.0)
        self._add_cosine(_cosine(r, c))
        if self.singles is not None:
            self.singles.add(float(r[0]), float(c[0]))
        self.signal += float(r @ r)
        self.noise += float((r - c) @ (r - c))
        self.max_abs_error = max(self.max_abs_error, float(np.abs(r - c).max(initial=0.0)))

    def _add_cosine(self, value: float) -> None:
        self.samples += 1
        self.cosine_sum += value
        self.cosine_min = min(self.cosine_min, value)

    def result(self) -> OutputParity:
        is_known = 0 < self.noise < math.inf and 0 < self.signal < math.inf
        mean, worst = (self.cosine_sum / self.samples, self.cosine_min) if self.samples else (0.0, 0.0)
        if self.samples and self.singles is not None:
            mean, worst = self.singles.scores()
        return OutputParity(
            cosine=mean,
            cosine_min=worst,
            sqnr_db=10.0 * math.log10(self.signal / self.noise) if is_known else None,
            max_abs_error=min(self.max_abs_error, sys.float_info.max),
            nan=self.nan,
            left_out=self.left_out,
            nan_reference=self.nan_reference,
        )


class ParityAccumulator:
    """Compares batches of outputs as they come; memory does not grow with their number."""

    def __init__(self) -> None:
        self._states: dict[str, _OutputState] = {}

    def add(
        self,
        reference: Mapping[str, np.ndarray],
        candidate: Mapping[str, np.ndarray],
        feeds: Mapping[str, np.ndarray],
    ) -> None:
        """Add one batch.

        Args:
            reference: outputs of the reference; an output whose first axis is the batch is compared per sample,
                any other as one sample.
            candidate: outputs of the candidate, same names and shapes.
            feeds: the inputs, for `attention_mask` and the batch size.

        Raises:
            ValueError: an output's shapes differ.
        """
        batch = next((len(feed) for feed in feeds.values() if feed.ndim), 1)
        for name, expected in reference.items():
            actual = candidate[name]
            if actual.shape != expected.shape:
                raise ValueError(f"output '{name}' has shape {actual.shape}; the reference has {expected.shape}")
            state = self._states.setdefault(name, _OutputState())
            if not expected.ndim or len(expected) != batch:
                state.add_sample(expected.reshape(-1), actual.reshape(-1))
                continue
            mask = feeds.get(MASK_INPUT)
            if mask is not None and (mask.ndim != 2 or mask.shape != expected.shape[:2]):
                mask = None
            for index in range(batch):
                r, c = expected[index], actual[index]
                if mask is not None:
                    keep = mask[index] != 0
                    if not keep.any():
                        continue
                    r, c = r[keep], c[keep]
                state.add_sample(r.reshape(-1), c.reshape(-1))

    def result(self) -> dict[str, OutputParity]:
        """Figures of every output seen."""
        return {name: state.result() for name, state in self._states.items()}

    def unproven(self) -> tuple[str, ...]:
        """The outputs of which the reference has nothing but NaN and Inf in every sample."""
        return tuple(name for name, state in self._states.items() if state.left_out and not state.samples)


def misses_budget(output: OutputParity, budget: float) -> bool:
    """Whether an output alone fails: it is not finite, or its mean cosine is below the budget."""
    return output.nan or output.cosine < budget


def meets_budget(outputs: Mapping[str, OutputParity], budget: float) -> bool:
    """Whether every output is finite and its mean cosine reaches the budget; False when nothing was compared."""
    return bool(outputs) and not any(misses_budget(output, budget) for output in outputs.values())


def left_out_note(outputs: Mapping[str, OutputParity]) -> str | None:
    """What the comparison leaves out because the reference itself is not finite; None where that is nothing."""
    parts = []
    for name, output in outputs.items():
        if output.nan_reference:
            parts.append(f"NaN in {_samples(output.nan_reference)} of output '{name}'")
        if output.left_out and not output.nan_reference:
            parts.append(f"nothing but Inf in {_samples(output.left_out)} of output '{name}'")
    found = "; ".join(parts[:4]) + (f"; and {len(parts) - 4} more" if len(parts) > 4 else "")
    return f"The source model itself gives {found}; its NaN and Inf are left out of the comparison." if parts else None


def _samples(count: int) -> str:
    return f"{count} sample" if count == 1 else f"{count} samples"


def top1(scores: np.ndarray, labels: np.ndarray) -> float:
    """Share of samples whose highest score is the label's.

    Args:
        scores: [N, C].
        labels: [N], integers.
    """
    return float(np.mean(scores.astype(np.float64).argmax(axis=1) == labels))


def sqnr_db(reference: np.ndarray, candidate: np.ndarray) -> float:
    """Signal to quantization-noise ratio in dB; inf when equal, -inf when the candidate is not finite."""
    r = reference.astype(np.float64).reshape(-1)
    c = candidate.astype(np.float64).reshape(-1)
    valid = np.isfinite(r)
    r, c = r[valid], c[valid]
    if not np.isfinite(c).all():
        return -math.inf
    noise = float((r - c) @ (r - c))
    signal = float(r @ r)
    if noise == 0:
        return math.inf
    return 10.0 * math.log10(signal / noise) if signal else -math.inf


def _cosine(r: np.ndarray, c: np.ndarray) -> float:
    """Cosine of two vectors; exactly 1 when they are equal, 0 when one of them is zero."""
    if np.array_equal(r, c):
        return 1.0
    r_max, c_max = float(np.abs(r).max(initial=0.0)), float(np.abs(c).max(initial=0.0))
    if r_max == 0 or c_max == 0:
        return 0.0
    # Squares of fp64 values may overflow or vanish.
    r, c = r / r_max, c / c_max
    r_norm, c_norm = float(np.linalg.norm(r)), float(np.linalg.norm(c))
    return min(1.0, max(-1.0, float((r / r_norm) @ (c / c_norm))))
