"""Per-channel scales and offsets that make an activation easy to quantize, found by the layer's output.

An activation has one INT8 scale, so a few channels with large values leave the others few steps. Before it is quantized
each channel k is multiplied by m_k, and row k of the weights is divided by it; the product is the same:

    x W = (x * m - o) (W / m) + o (W / m)

    m_k = max|w_k|^(1 - alpha) / max|x_k|^alpha         (SmoothQuant, arXiv 2211.10438; m = 1 / s there)
    o_k   the middle of the channel's range, in whole quantization steps so that 0 stays exact; its product with the
          weights goes into the bias (Outlier Suppression+, arXiv 2304.09145)

alpha = 1 gives every channel the same range, alpha = 0 gives that to the weights. The best alpha differs from layer to
layer, so it is searched: the one that gives the least squared error of the layer's output on sampled rows, with the
activation and the weights both quantized. "Leave it as it is" is among the candidates.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import ml_dtypes
import numpy as np

from trtforge.progress import Note
from trtforge.quantization.calibrators import choose_amax
from trtforge.quantization.formats import INT8, Floats
from trtforge.quantization.matrix import Layer
from trtforge.quantization.observation import Observation
from trtforge.quantization.observers import StreamingObserver
from trtforge.quantization.table import Equalization
from trtforge.recipe import QuantRecipe

# The search starts with these, and goes on around the best by steps that get smaller.
_ALPHAS = (0.4, 0.6, 0.8, 1.0)
_REFINEMENTS = (0.1, 0.05)
# A scaling costs a multiplication of the activation: it has to take this much off the error.
_MIN_GAIN = 0.05
# A channel whose range is below this share of the largest one's is dead: nothing is known of its range.
_SMALLEST_RANGE = 1e-4
# Bounds of the multipliers and of what they make of an activation, so that float16 holds both.
_LARGEST_MULTIPLIER = 2.0**10
_MAX_SCALED = 3e4
# Columns of the weights that candidates are judged by, and multiply-accumulates that one may take, which sets the rows.
_MAX_COLUMNS = 256
_MAX_MACS = 5e7
# Fewer rows cannot judge anything.
_MIN_ROWS = 16
_ROWS = (64, 512)


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """One way to equalize an activation.

    Attributes:
        alpha: None for no scaling.
        multiplier: `[C]`; exact in float16 and bfloat16.
        offset: `[C]`, or None.
        amax: of the equalized activation.
    """

    alpha: float | None
    multiplier: Floats
    offset: Floats | None
    amax: float

    def transform(self, rows: Floats) -> Floats:
        """The equalized activation."""
        scaled = rows * self.multiplier
        return scaled if self.offset is None else scaled - self.offset

    @property
    def is_plain(self) -> bool:
        """Nothing is changed."""
        return self.alpha is None and self.offset is None

    def to_table(self) -> Equalization:
        """As the calibration table holds it."""
        offset = None if self.offset is None else tuple(float(value) for value in self.offset)
        return Equalization(alpha=self.alpha, multiplier=tuple(float(m) for m in self.multiplier), offset=offset)


def equalize_layers(
    layers: Sequence[Layer], observation: Observation, recipe: QuantRecipe, note: Note
) -> dict[str, Candidate]:
    """The best candidate by activation; activations that stay as they are, are left out.

    Args:
        layers: activations with their weights.
        observation: of a pass that kept rows.
        recipe: smoothing, shift, calibration method.
        note: takes progress.
    """
    found = {}
    # Errors of a window's taps add up in step where neighbouring pixels are alike: pixels alone cannot judge them.
    is_searched = recipe.smooth in {"auto", "none"}
    closed = [
        layer
        for layer in layers
        if layer.is_closed and not (is_searched and any(view.taps > 1 for view in layer.views))
    ]
    for index, layer in enumerate(closed):
        note(f"smoothing {index + 1} of {len(closed)}", index + 1, len(closed))
        sampler, observer = observation.rows.get(layer.tensor), observation.observers[layer.tensor]
        rows = sampler.rows() if sampler is not None else np.zeros((0, 0), np.float32)
        if len(rows) >= _MIN_ROWS and rows.shape[1] == layer.num_channels and observer.channel_min is not None:
            best = _Search(layer, rows, observer, recipe).best()
            if not best.is_plain:
                found[layer.tensor] = best
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class _Seen:
    """What the ranges of a candidate come from.

    Attributes:
        low, high: extremes by channel, `[C]`.
        rows: for methods that look at more than the extremes; None leaves it at these, as the search does.
    """

    low: np.ndarray
    high: np.ndarray
    rows: Floats | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Fold:
    """Rows that give the ranges, and others that judge them."""

    seen: _Seen
    rows: Floats
    exact: Floats


class _Search:
    """The candidates of one activation, and their errors on some rows and some columns of the weights.

    A range that fits every channel tightly clips what comes later, so each half of the rows judges ranges that come
    from the other half; what is chosen then gets the ranges of all data.
    """

    def __init__(self, layer: Layer, rows: Floats, observer: StreamingObserver, recipe: QuantRecipe) -> None:
        assert observer.channel_min is not None
        assert observer.channel_max is not None
        self.recipe = recipe
        self.observer = observer
        self.all = _Seen(observer.channel_min, observer.channel_max, rows)
        self.can_shift = recipe.shift and all(view.takes_offset for view in layer.views)
        self.weight_reach = np.max([np.abs(view.matrix).max(axis=1) for view in layer.views], axis=0)
        num_outputs = sum(view.num_outputs for view in layer.views)
        # One scale for a whole weight needs all of it.
        stride = 1 if recipe.weights == "per_tensor" else -(-num_outputs // _MAX_COLUMNS)
        parts = [view.some_outputs(stride) for view in layer.views]
        self.groups = [(view.taps, part.shape[1]) for view, part in zip(layer.views, parts, strict=True)]
        self.matrix = np.concatenate(parts, axis=1)
        wanted = int(np.clip(_MAX_MACS / self.matrix.size, *_ROWS)) // 2
        half = len(rows) // 2
        self.folds = [self._fold(rows[:half], rows[half:], wanted), self._fold(rows[half:], rows[:half], wanted)]

    def _fold(self, seen: Floats, rows: Floats, wanted: int) -> _Fold:
        few = rows[:: max(1, len(rows) // wanted)]
        return _Fold(_Seen(seen.min(axis=0), seen.max(axis=0), None), few, few @ self.matrix)

    def best(self) -> Candidate:
        """The candidate with the least error; plain unless another one gains enough."""
        plain = self._candidate(None, False, self.all)
        assert plain is not None
        if not plain.amax > 0.0:
            return plain
        scored = {option: self._loss(*option) for option in self._options()}
        for step in _REFINEMENTS if self.recipe.smooth == "auto" else ():
            alpha, has_offset = min(scored, key=lambda option: scored[option])
            if alpha is not None:
                near = [round(alpha - step, 4), round(alpha + step, 4)]
                scored |= {(a, has_offset): self._loss(a, has_offset) for a in near if 0.0 <= a <= 1.0}
        leader = min(scored, key=lambda option: scored[option])
        is_asked = self.recipe.smooth not in {"auto", "none"}
        if not is_asked and scored[leader] >= (1.0 - _MIN_GAIN) * scored[None, False]:
            return plain
        return self._candidate(*leader, self.all) or plain

    def _options(self) -> Iterator[tuple[float | None, bool]]:
        """(alpha, with an offset) of every candidate that the search starts from."""
        shifts = [False, True] if self.can_shift else [False]
        alphas: tuple[float | None, ...] = (None,)
        if self.recipe.smooth == "auto":
            alphas = (None, *_ALPHAS)
        elif self.recipe.smooth != "none":
            alphas = (self.recipe.smooth,)
        for alpha in alphas:
            yield from ((alpha, has_offset) for has_offset in shifts)

    def _candidate(self, alpha: float | None, has_offset: bool, seen: _Seen) -> Candidate | None:
        """A candidate with the ranges of what was seen; None where float16 could not hold it."""
        if alpha is None and not has_offset and seen is self.all:
            ones = np.ones(len(self.matrix), np.float32)
            return Candidate(None, ones, None, choose_amax(self.observer, self.recipe))
        reach = np.maximum(-seen.low, seen.high)
        span = (seen.high - seen.low) / 2 if has_offset else reach
        if not span.max() > 0.0:
            return None
        multiplier = _multipliers(span, self.weight_reach, alpha)
        if float(np.max(reach * multiplier)) > _MAX_SCALED:
            return None
        candidate = Candidate(alpha, multiplier, None, float(np.max(span * multiplier)))
        if has_offset:
            step = candidate.amax / INT8.max_code
            centre = np.rint((seen.low + seen.high) / 2 * multiplier / step) * step
            offset = np.asarray(centre.astype(np.float16).astype(np.float32))
            bound = np.maximum(seen.high * multiplier - offset, offset - seen.low * multiplier)
            candidate = dataclasses.replace(candidate, offset=offset, amax=float(np.max(bound)))
        if self.recipe.method == "minmax" or seen.rows is None:
            return candidate
        observer = StreamingObserver()
        observer.update(candidate.transform(seen.rows))
        return dataclasses.replace(candidate, amax=min(candidate.amax, choose_amax(observer, self.recipe)))

    def _loss(self, alpha: float | None, has_offset: bool) -> float:
        """Squared error of the layer's outputs on rows that the ranges do not come from."""
        total = 0.0
        for fold in self.folds:
            candidate = self._candidate(alpha, has_offset, fold.seen)
            total += math.inf if candidate is None else self._error(candidate, fold)
        return total

    def _error(self, candidate: Candidate, fold: _Fold) -> float:
        tiny = np.finfo(np.float32).tiny
        step = np.float32(max(candidate.amax / INT8.max_code, float(tiny)))
        codes = INT8.nearest(candidate.transform(fold.rows) / step)
        scaled = self.matrix * (1.0 / candidate.multiplier)[:, None]
        weight_steps = np.maximum(self._column_amax(scaled) / np.float32(INT8.max_code), tiny)
        weight_codes = np.rint(scaled / weight_steps)
        difference = codes @ weight_codes
        difference *= step * weight_steps
        difference -= fold.exact if candidate.offset is None else fold.exact - candidate.offset @ scaled
        return float(np.einsum("rn,rn->", difference, difference, dtype=np.float64))

    def _column_amax(self, matrix: Floats) -> Floats:
        """Largest absolute value that shares a column's scale, `[N]`; each view has its own scales."""
        amax = np.maximum(matrix.max(axis=0), -matrix.min(axis=0))
        parts = []
        start = 0
        for taps, width in self.groups:
            part = amax[start : start + width]
            start += width
            if self.recipe.weights == "per_tensor":
                part = np.full_like(part, part.max())
            elif taps > 1:
                part = np.repeat(part.reshape(-1, taps).max(axis=1), taps)
            parts.append(part)
        return np.concatenate(parts)


def _multipliers(reach: np.ndarray, weights: np.ndarray, alpha: float | None) -> Floats:
    """m `[C]` with a geometric mean near 1, exact in float16 and bfloat16.

    Args:
        reach: of the activation's channels; not all zero.
        weights: largest absolute value of their weights.
        alpha: None for no scaling.
    """
    if alpha is None:
        return np.ones(len(reach), np.float32)
    # Channels of which calibration saw nothing are scaled like a typical one, so that they may come alive later.
    is_live = reach > _SMALLEST_RANGE * reach.max()
    x = np.where(is_live, reach, np.median(reach[is_live]))
    w = np.maximum(weights.astype(np.float64), _SMALLEST_RANGE * max(float(weights.max()), 1e-30))
    logs = (1.0 - alpha) * np.log(w) - alpha * np.log(x)
    exact = np.exp(logs - logs.mean())
    bounded = np.clip(exact, 1.0 / _LARGEST_MULTIPLIER, _LARGEST_MULTIPLIER)
    return np.asarray(bounded.astype(ml_dtypes.bfloat16).astype(np.float32))
