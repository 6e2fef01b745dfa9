"""Codes and scales of weights that are multiplied in a float type: rounded to nearest, or by the layers' outputs.

A weight is a matrix W [K, N] with one column per output channel, X [R, K] are rows of the activation. B rows of a
column share one scale: B = K for one scale per channel, B = 128 for the blocks of INT4.

    Range      A block's largest value maps to the largest code, times a factor of 1 or less with the least squared
               error of the weight: clipping a few values makes all steps finer.
    Feedback   The error of each row of W is made up for by the rows that are not rounded yet, so that X W stays:
               with H = X'X + d I and U'U = inverse(H), row k's error e gives W[j] -= U[k, j] / U[k, k] * e for j > k
               (GPTQ, arXiv 2210.17323).
    Factors    Channels where the activation is large matter more. Their rows of W are multiplied by s > 1 and the
               activation's channel by 1 / s, which shrinks their error: s = mean|x|^a, normalised to
               sqrt(max s * min s) = 1, with the a that gives the least output error (AWQ, arXiv 2306.00978).

Every eighth row is held out. Feedback is used where it lowers the output error on those rows, factors where they lower
it by a further 10 %, as they cost a multiplication of the activation. MiniLM in INT4, mean cosine of the pooled
embeddings of 96 texts: 0.939 rounded to nearest, 0.959 with ranges, 0.961 with ranges and factors, 0.980 with ranges
and feedback, and no more with all three.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trtforge.quantization.formats import Floats, NumberFormat, QuantizedWeight
from trtforge.quantization.rows import Rows

# Rows of W between two updates of all the rest; a multiple of no more than a block.
CHUNK = 128
_RANGE_FACTORS = tuple(np.float32(1.0 - 0.05 * step) for step in range(11))
_EXPONENTS = tuple(step / 10 for step in range(1, 11))
_MIN_GAIN = 0.1
# d, as a share of the mean of H's diagonal: steadies H where there are fewer rows than channels.
_DAMPING = 0.05
# H takes K * K doubles and its inverse K^3 operations: about 0.4 GB and 10 s at this K on two cores.
_MAX_DEPTH = 4096
_MIN_ROWS = 16
_HELD_OUT = 8
# Rows that candidates are judged by; AWQ takes 512 as well.
_MAX_JUDGING_ROWS = 512
# Smallest mean magnitude of a channel, against the largest: dead channels would get a factor of 0.
_SMALLEST_MEAN = 1e-4
# Half of float16's 65504: other data may reach further than the rows seen.
_MAX_SCALED = 3e4


@dataclasses.dataclass(frozen=True, slots=True)
class WeightLayout:
    """How a matrix [K, N] is stored.

    Attributes:
        number_format: of the codes.
        block: rows that share one scale; K is a multiple. None for all of a column.
        scale_dtype: the type whose values the scales take.
    """

    number_format: NumberFormat
    block: int | None
    scale_dtype: np.dtype[Any]

    def full_scales(self, block: Floats) -> Floats:
        """Scales `[N]` of one block `[B, N]` of which nothing is clipped."""
        return self.number_format.scale_from_amax(np.max(np.abs(block), axis=0, initial=0.0), self.scale_dtype)

    def best_scales(self, block: Floats, importance: Floats) -> Floats:
        """Scales `[N]` of one block `[B, N]` with the least squared error, weighted by the importance `[B]` of rows."""
        amax = np.max(np.abs(block), axis=0, initial=0.0)
        least = np.full(block.shape[1], np.inf, np.float32)
        best = np.empty(block.shape[1], np.float32)
        for factor in _RANGE_FACTORS:
            scales = self.number_format.scale_from_amax(amax * factor, self.scale_dtype)
            difference = self.number_format.nearest(block / scales) * scales - block
            error = np.einsum("k,kn,kn->n", importance, difference, difference)
            is_better = error < least
            least[is_better], best[is_better] = error[is_better], scales[is_better]
        return best


@dataclasses.dataclass(frozen=True, slots=True)
class StoredMatrices:
    """The weights of all nodes that read one activation.

    Attributes:
        weights: codes `[K, N]` and scales `[K / B, N]` each.
        factors: 1 / s, float32 `[K]` and exact in the scales' type, by which the activation has to be multiplied; None
            for no multiplication.
    """

    weights: tuple[QuantizedWeight, ...]
    factors: Floats | None = None

    def output_error(self, matrices: Sequence[Floats], block: int | None, rows: Rows) -> float:
        """|X W - (X * factors) Q(W / factors)|^2, summed over the weights."""
        total = 0.0
        for matrix, stored in zip(matrices, self.weights, strict=True):
            rounded = stored.codes.astype(np.float32) * np.repeat(stored.scales, block or max(1, len(matrix)), axis=0)
            if self.factors is not None:
                rounded *= self.factors[:, None]
            total += _sum_of_squares(rows @ (rounded - matrix))
        return total


def store_matrices(
    matrices: Sequence[Floats], layout: WeightLayout, rows: Rows | None, *, may_scale: bool
) -> StoredMatrices:
    """Choose codes and scales.

    Args:
        matrices: `[K, N]` each, of one K: the weights of all nodes that read one activation.
        layout: how they are stored.
        rows: of the activation, `[R, K]`; None or too few of them: rounded to nearest.
        may_scale: the activation's channels may be scaled, as nothing else reads these weights.
    """
    plain = StoredMatrices(tuple(_round(m, layout, None, np.ones(len(m), np.float32)) for m in matrices))
    if rows is None or len(rows) < _MIN_ROWS or not rows.any():
        return plain
    is_held_out = np.arange(len(rows)) % _HELD_OUT == 0
    seen, held_out = rows[~is_held_out], _few(rows[is_held_out])
    candidates = [plain, _store(matrices, layout, seen, None)]
    errors = [candidate.output_error(matrices, layout.block, held_out) for candidate in candidates]
    best = candidates[int(np.argmin(errors))]
    factors = _search_factors(matrices, layout, _few(seen)) if may_scale else None
    if factors is not None:
        scaled = _store(matrices, layout, seen, factors)
        if scaled.output_error(matrices, layout.block, held_out) < (1.0 - _MIN_GAIN) * min(errors):
            best = scaled
    return best


def _store(matrices: Sequence[Floats], layout: WeightLayout, rows: Rows, factors: Floats | None) -> StoredMatrices:
    """The matrices with feedback, unless K is too large for it, and with the factors."""
    if factors is not None:
        matrices, rows = [matrix / factors[:, None] for matrix in matrices], rows * factors
    feedback = _feedback(rows) if rows.shape[1] <= _MAX_DEPTH else None
    importance = np.einsum("rk,rk->k", rows, rows) / np.float32(len(rows))
    return StoredMatrices(tuple(_round(matrix, layout, feedback, importance) for matrix in matrices), factors)


def _feedback(rows: Rows) -> Floats:
    """U, upper triangular `[K, K]`, with U'U = inverse(H)."""
    hessian = (rows.T @ rows).astype(np.float64)
    hessian[np.diag_indices_from(hessian)] += _DAMPING * np.mean(np.diag(hessian))
    lower: npt.NDArray[np.float64] = np.linalg.cholesky(np.linalg.inv(hessian))
    return lower.T.astype(np.float32)


def _round(matrix: Floats, layout: WeightLayout, feedback: Floats | None, importance: Floats) -> QuantizedWeight:
    """Codes `[K, N]` and scales `[K / B, N]`, with or without feedback; the importance `[K]` of rows decides ranges."""
    depth = len(matrix)
    block = layout.block or max(1, depth)
    rest = matrix if feedback is None else matrix.copy()
    codes = np.empty(matrix.shape, layout.number_format.dtype)
    scales: list[Floats] = []
    for start in range(0, max(1, depth), min(block, CHUNK)):
        if start % block == 0:
            scales.append(layout.best_scales(rest[start : start + block], importance[start : start + block]))
        part = slice(start, min(start + min(block, CHUNK), depth))
        if feedback is None:
            codes[part] = layout.number_format.encode(rest[part] / scales[-1])
        else:
            errors = _round_chunk(rest, part, scales[-1], layout, feedback, codes)
            rest[part.stop :] -= feedback[part, part.stop :].T @ errors
    return QuantizedWeight(codes, np.stack(scales))


def _round_chunk(
    rest: Floats, part: slice, scales: Floats, layout: WeightLayout, feedback: Floats, codes: npt.NDArray[Any]
) -> Floats:
    """Round the rows of one chunk, each with what those before it left over.

    Returns:
        Errors divided by U's diagonal, `[rows, N]`, for the rows after the chunk.
    """
    chunk, upper = rest[part], feedback[part, part]
    nearest = np.empty_like(chunk)
    errors = np.empty_like(chunk)
    for index, row in enumerate(chunk):
        nearest[index] = layout.number_format.nearest(row / scales)
        errors[index] = (row - nearest[index] * scales) / upper[index, index]
        chunk[index + 1 :] -= np.outer(upper[index, index + 1 :], errors[index])
    codes[part] = nearest.astype(codes.dtype)
    return errors


def _search_factors(matrices: Sequence[Floats], layout: WeightLayout, rows: Rows) -> Floats | None:
    """1 / s as float32 `[K]` of the least output error with codes rounded to nearest, or None."""
    magnitudes = np.abs(rows)
    mean, amax = magnitudes.mean(axis=0), magnitudes.max(axis=0)
    plain = _nearest_error(matrices, layout, rows, np.ones(len(mean), np.float32))
    least, best = (1.0 - _MIN_GAIN) * plain, None
    for exponent in _EXPONENTS:
        factors = _factors(mean, exponent, layout.scale_dtype)
        if float(np.max(amax * factors)) > _MAX_SCALED:
            continue
        error = _nearest_error(matrices, layout, rows, factors)
        if error < least:
            least, best = error, factors
    return best


def _factors(mean: Floats, exponent: float, scale_dtype: np.dtype[Any]) -> Floats:
    """1 / s of one exponent."""
    means = np.maximum(mean.astype(np.float64), _SMALLEST_MEAN * float(mean.max()))
    scales = means**exponent
    scales /= np.sqrt(scales.max() * scales.min())
    factors: Floats = (1.0 / scales).astype(scale_dtype).astype(np.float32)
    return factors


def _nearest_error(matrices: Sequence[Floats], layout: WeightLayout, rows: Rows, factors: Floats) -> float:
    """|X W - (X * factors) Q(W / factors)|^2 with codes rounded to nearest and nothing clipped."""
    total = 0.0
    for matrix in matrices:
        size = layout.block or len(matrix)
        difference = matrix / factors[:, None]
        for start in range(0, len(matrix), size):
            block = difference[start : start + size]
            scales = layout.full_scales(block)
            block[...] = layout.number_format.nearest(block / scales) * scales
        difference *= factors[:, None]
        difference -= matrix
        total += _sum_of_squares(rows @ difference)
    return total


def _sum_of_squares(values: Floats) -> float:
    return float(np.einsum("rn,rn->", values, values, dtype=np.float64))


def _few(rows: Rows) -> Rows:
    """Evenly spaced rows, few enough to judge by."""
    return rows[:: max(1, -(-len(rows) // _MAX_JUDGING_ROWS))]
