"""Codes of the weights, and corrections of the biases, from sampled rows of the quantized activations.

Range        mse: each output channel's amax is shrunk to what gives the least squared error of its weights, each
             weighted by the mean square of the activation channel that it multiplies.
Rounding     nearest, or learned: input channels are rounded one after the other, and the error that each leaves is
             made up for by the channels that are still to come, as the correlations of the activation tell
             (GPTQ, arXiv 2210.17323, with the Gram matrix of the activation as it is after quantization).
Bias         the mean of what quantization changes at a layer's output is taken off its bias
             (arXiv 1906.04721, section 4.2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from trtforge.progress import Note
from trtforge.quantization.formats import INT8, Floats, QuantizedWeight
from trtforge.quantization.matrix import MatrixView, find_layers
from trtforge.quantization.sites import Placement
from trtforge.recipe import QuantRecipe

_RANGE_FACTORS = tuple(np.float32(1.0 - 0.02 * step) for step in range(21))
# Share of the mean diagonal that is added to the Gram matrix's, as in GPTQ.
_DAMPING = 0.01
# Channels whose errors reach the ones behind them in one product.
_BLOCK = 128
# The Gram matrix is factorised, which takes the cube of its size.
MAX_LEARNED_CHANNELS = 8192


@dataclasses.dataclass(frozen=True, slots=True)
class RoundedWeights:
    """What was decided for the weights.

    Attributes:
        weights: codes and scales by node name; nodes that are missing are rounded to nearest.
        biases: `[output channels]` to add at a node's output, by node name.
        learned: nodes whose rounding was learned.
    """

    weights: Mapping[str, QuantizedWeight]
    biases: Mapping[str, npt.NDArray[np.float64]]
    learned: tuple[str, ...]


def round_weights(
    graph: gs.Graph,
    placement: Placement,
    amax: Mapping[str, float],
    rows: Mapping[str, Floats],
    recipe: QuantRecipe,
    scale_dtype: npt.DTypeLike,
    note: Note,
) -> RoundedWeights:
    """Decide on the weights of every layer that has rows.

    Args:
        graph: equalized; not changed.
        placement: of that graph.
        amax: by activation of that graph.
        rows: of the equalized activations, `[R, C]` by tensor.
        recipe: range, rounding, bias correction.
        scale_dtype: the type whose values the scales take.
        note: takes progress.
    """
    layers = [layer for layer in find_layers(graph, placement) if amax[layer.tensor] > 0.0]
    rounder = _Rounder(recipe, scale_dtype)
    for index, layer in enumerate(layers):
        note(f"weights of {index + 1} of {len(layers)} layers", index + 1, len(layers))
        exact = rows.get(layer.tensor, np.zeros((0, layer.num_channels), np.float32))
        step = INT8.scale_from_amax(np.asarray(amax[layer.tensor], np.float32), scale_dtype)
        rounder.add(layer.views, exact, INT8.nearest(exact / step) * step)
    return RoundedWeights(rounder.weights, rounder.biases, tuple(rounder.learned))


class _Rounder:
    """Collects the decisions layer by layer."""

    def __init__(self, recipe: QuantRecipe, scale_dtype: npt.DTypeLike) -> None:
        self.recipe = recipe
        self.scale_dtype = scale_dtype
        self.weights: dict[str, QuantizedWeight] = {}
        self.biases: dict[str, npt.NDArray[np.float64]] = {}
        self.learned: list[str] = []

    def add(self, views: Sequence[MatrixView], exact: Floats, seen: Floats) -> None:
        """Decide on what is multiplied with one activation.

        Args:
            views: the weights.
            exact: rows of the activation.
            seen: the same after quantization.
        """
        can_learn = self.recipe.rounding == "learned" and len(exact) > 0 and exact.shape[1] <= MAX_LEARNED_CHANNELS
        feedback = feedback_of(seen) if can_learn and any(view.taps == 1 for view in views) else None
        importance = _mean_square(exact)
        for view in views:
            if INT8.is_too_small(float(np.abs(view.matrix).max()), self.scale_dtype):
                continue  # insert_qdq leaves the node float
            scales = _scales(view, importance, self.recipe, self.scale_dtype)
            by_column = np.repeat(scales, view.taps)
            if feedback is not None and view.taps == 1:
                codes = learned_codes(view.matrix, scales, feedback)
                self.learned.append(view.node)
            else:
                codes = INT8.encode(view.matrix / by_column)
            stored = scales.max() if self.recipe.weights == "per_tensor" else scales
            self.weights[view.node] = QuantizedWeight(view.to_weight(codes), np.asarray(stored))
            if self.recipe.bias_correction and len(exact):
                error = exact.mean(axis=0, dtype=np.float64) @ view.matrix.astype(np.float64)
                error -= seen.mean(axis=0, dtype=np.float64) @ (codes * by_column).astype(np.float64)
                self.biases[view.node] = error.reshape(-1, view.taps).sum(axis=1)


@dataclasses.dataclass(frozen=True, slots=True)
class Feedback:
    """How the error of one channel's weights is made up for by the channels after it.

    With the Gram matrix of the activation as L^T L, L lower triangular, the squared error of the outputs is |L e|^2 for
    the weights' errors e. Channel i can bring row i of L e to zero by aiming at

        w_i + (sum over j < i of L_ij e_j) / L_ii

    which gives the same codes as GPTQ's updates by the inverse, and needs no inverse.

    Attributes:
        order: of the channels, `[C]`: what matters most comes first, while all others can still make up for it.
        factor: `[C, C]` strictly lower triangular, L_ij / L_ii in that order.
    """

    order: npt.NDArray[np.intp]
    factor: Floats


def feedback_of(rows: Floats) -> Feedback | None:
    """The feedback for an activation's rows `[R, C]`; None where they are all zero."""
    gram = rows.T @ rows / np.float32(len(rows))
    diagonal = np.diag(gram)
    mean = float(diagonal.mean())
    if not mean > 0.0:
        return None
    order = np.argsort(-diagonal, kind="stable")
    # Both axes reversed, the Cholesky factor of the matrix becomes the transpose of L.
    turned = order[::-1]
    damped = gram[np.ix_(turned, turned)].astype(np.float64)
    damped[np.diag_indices(len(damped))] += _DAMPING * mean
    lower = np.linalg.cholesky(damped)[::-1, ::-1].T
    factor = np.tril(lower / np.diag(lower)[:, None], -1)
    return Feedback(order, factor.astype(np.float32))


def learned_codes(matrix: Floats, scales: Floats, feedback: Feedback) -> npt.NDArray[np.int8]:
    """Codes `[C, N]` that keep the product of the feedback's rows with the matrix.

    Args:
        matrix: `[C, N]`.
        scales: `[N]`.
        feedback: of the activation.
    """
    weights = matrix[feedback.order]
    codes = np.empty(matrix.shape, np.int8)
    errors = np.empty_like(weights)
    for start in range(0, len(matrix), _BLOCK):
        stop = min(start + _BLOCK, len(matrix))
        targets = weights[start:stop] + feedback.factor[start:stop, :start] @ errors[:start]
        for channel in range(start, stop):
            target = targets[channel - start]
            target += feedback.factor[channel, start:channel] @ errors[start:channel]
            code = INT8.nearest(target / scales)
            errors[channel] = weights[channel] - code * scales
            codes[feedback.order[channel]] = code
    return codes


def _mean_square(rows: Floats) -> Floats:
    """By channel, `[C]`; ones where there are no rows."""
    if not len(rows):
        return np.ones(rows.shape[1], np.float32)
    return np.asarray(np.einsum("rc,rc->c", rows, rows) / np.float32(len(rows)))


def _scales(view: MatrixView, importance: Floats, recipe: QuantRecipe, scale_dtype: npt.DTypeLike) -> Floats:
    """One scale per output channel, `[outputs]`; all equal where the recipe wants one per tensor."""
    columns = np.moveaxis(view.matrix.reshape(len(view.matrix), view.num_outputs, view.taps), 1, -1)
    amax = np.abs(columns).max(axis=(0, 1))
    if recipe.weights == "per_tensor":
        columns, amax = columns.reshape(len(view.matrix), -1, 1), amax.max(keepdims=True)
    factors = np.ones(len(amax), np.float32)
    if recipe.weight_range == "mse":
        least = np.full(len(amax), np.inf)
        for factor in _RANGE_FACTORS:
            scale = INT8.scale_from_amax(amax * factor, scale_dtype)
            difference = columns - INT8.encode(columns / scale) * scale
            error = np.einsum("cto,cto,c->o", difference, difference, importance, dtype=np.float64)
            is_better = error < least
            least[is_better], factors[is_better] = error[is_better], factor
    scales = INT8.scale_from_amax(amax * factors, scale_dtype)
    return np.broadcast_to(scales, (view.num_outputs,)).copy()


def needs_rows(recipe: QuantRecipe) -> bool:
    """Whether the recipe asks for what only rows of activations give."""
    return recipe.rounding == "learned" or recipe.bias_correction


def decides_weights(recipe: QuantRecipe) -> bool:
    """Whether the recipe asks for more than rounding to nearest."""
    return needs_rows(recipe) or recipe.weight_range != "minmax"
