"""Calibration: amax and scale of every quantized activation on a logarithmic axis, in the manifest's order.

scale = amax / 127, so one curve serves both axes. The root mean square of a tensor lands on step 127 * rms / amax of
the 127: the longer the line from rms up to amax, the fewer steps ordinary values have left beside the outliers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from trtforge.manifest import Manifest
from trtforge.quantization.table import CalibrationTable
from trtforge.report import figures
from trtforge.report.markup import NOTHING, Column, Html, block, code, el, fold, join, note, section, table

STEPS = 127
# Fewer steps than this at the rms (3 bits) and the tensor is marked.
FEW_STEPS = 8.0

# The chart's geometry in SVG user units.
_WIDTH, _HEIGHT = 1000, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 66, 14, 40
_MIN_PITCH = 4.0
_MAX_PITCH = 40.0


@dataclasses.dataclass(frozen=True, slots=True)
class Activation:
    """A quantized activation; what calibration saw is None when only amax is known."""

    name: str
    amax: float
    rms: float | None = None
    low: float | None = None
    high: float | None = None
    non_finite: int = 0

    @property
    def steps(self) -> float | None:
        """INT8 steps that the rms reaches."""
        return STEPS * self.rms / self.amax if self.rms is not None and self.amax > 0 else None

    @property
    def has_few_steps(self) -> bool:
        """Outliers leave ordinary values too few steps."""
        return self.steps is not None and 0 < self.steps < FEW_STEPS


def calibration(manifest: Manifest, found: CalibrationTable | None) -> Html:
    """The section on activation ranges, or nothing for a build without calibration."""
    activations = _activations(manifest, found)
    if not activations and manifest.calibration is None:
        return NOTHING
    return section(
        "calibration",
        "Calibration",
        _method(manifest, found),
        block("amax and scale of each quantized activation", _chart(activations), _key(activations)),
        _ranges(activations),
    )


def _activations(manifest: Manifest, found: CalibrationTable | None) -> list[Activation]:
    """In the manifest's order; a table that was read from a file is sorted by name."""
    ranges = {} if found is None else found.tensors
    used = {} if manifest.calibration is None else manifest.calibration.amax
    result = []
    for name, amax in (used or {name: entry.amax for name, entry in ranges.items()}).items():
        entry = ranges.get(name)
        if entry is None:
            result.append(Activation(name, amax))
        else:
            result.append(Activation(name, amax, entry.rms, entry.min, entry.max, entry.non_finite))
    return result


def _method(manifest: Manifest, found: CalibrationTable | None) -> Html:
    info = manifest.calibration or found
    if info is None:
        return NOTHING
    percentile = f" {found.percentile:g}" if found is not None and found.percentile is not None else ""
    samples = figures.count(info.samples, "sample")
    return el("p", f"Method {info.method}{percentile} over {samples}. One scale per activation, amax / {STEPS}.")


def _key(activations: Sequence[Activation]) -> Html:
    if not activations:
        return NOTHING
    items = [el("li", el("i", class_="dot"), "amax (left), amax / 127 = scale (right)")]
    if any(activation.rms is not None for activation in activations):
        items.append(el("li", el("i", class_="tick"), "rms of the activation"))
        few = sum(activation.has_few_steps for activation in activations)
        if few:
            text = f"rms under step {FEW_STEPS:g} of {STEPS}: outliers stretch the scale ({few} of {len(activations)})"
            items.append(el("li", el("i", class_="dot few"), text))
    if any(activation.amax == 0 for activation in activations):
        items.append(el("li", el("i", class_="dot zero"), "amax is 0"))
    return el("ul", *items, class_="legend")


def _chart(activations: Sequence[Activation]) -> Html:
    if not activations:
        return NOTHING
    pitch = min(_MAX_PITCH, max(_MIN_PITCH, (_WIDTH - _LEFT - _RIGHT) / len(activations)))
    width = max(360.0, _LEFT + _RIGHT + pitch * len(activations))
    values = [v for a in activations for v in (a.amax, a.rms) if v is not None and v > 0] or [1.0]
    low, high = _axis(min(values), max(values))
    marks = join(_mark(index, a, pitch, low, high) for index, a in enumerate(activations))
    drawing = el(
        "svg",
        _grid(width, low, high),
        _positions(len(activations), pitch),
        marks,
        viewBox=f"0 0 {width:.0f} {_HEIGHT}",
        style=f"width:{width:.0f}px",
        role="img",
        aria_label=f"amax of {len(activations)} activations; the table below holds the same figures",
    )
    return el("div", drawing, class_="chart")


def _axis(smallest: float, largest: float) -> tuple[float, float]:
    """log10 of the axis' ends: the data with a margin of a tenth, at least one decade."""
    low, high = math.log10(smallest), math.log10(largest)
    margin = max(0.1 * (high - low), (1.0 - (high - low)) / 2, 0.05)
    return low - margin, high + margin


def _y(value: float, low: float, high: float) -> float:
    return _TOP + (high - math.log10(value)) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)


def _ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 within a few decades, else whole decades, thinned to about eight."""
    decades = range(math.floor(low) - 1, math.ceil(high) + 1)
    if high - low <= 3:
        every = [factor * 10.0**decade for decade in decades for factor in (1.0, 2.0, 5.0)]
    else:
        every = [10.0**decade for decade in decades if decade % max(1, round((high - low) / 8)) == 0]
    return [tick for tick in every if low <= math.log10(tick) <= high]


def _grid(width: float, low: float, high: float) -> Html:
    right = width - _RIGHT
    parts = []
    for tick in _ticks(low, high):
        y = _y(tick, low, high)
        parts.append(el("line", x1=_LEFT, x2=f"{right:.1f}", y1=f"{y:.1f}", y2=f"{y:.1f}", class_="grid"))
        parts.append(el("text", f"{tick:g}", x=_LEFT - 8, y=f"{y + 4:.1f}", text_anchor="end"))
        parts.append(el("text", f"{tick / STEPS:.2g}", x=f"{right + 8:.1f}", y=f"{y + 4:.1f}"))
    parts.append(el("text", "amax", x=4, y=_HEIGHT - 8, class_="axis"))
    parts.append(el("text", "scale", x=f"{width - 4:.1f}", y=_HEIGHT - 8, text_anchor="end", class_="axis"))
    return join(parts)


def _positions(number: int, pitch: float) -> Html:
    """Row numbers of the table under the chart."""
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, number) if step * pitch >= 28)
    shown = [1, *range(step, number + 1, step)] if step > 2 else range(step, number + 1, step)
    y = _HEIGHT - _BOTTOM + 18
    return join(el("text", str(n), x=f"{_LEFT + (n - 0.5) * pitch:.1f}", y=y, text_anchor="middle") for n in shown)


def _mark(index: int, activation: Activation, pitch: float, low: float, high: float) -> Html:
    x = f"{_LEFT + (index + 0.5) * pitch:.1f}"
    bottom = _HEIGHT - _BOTTOM
    area = el(
        "rect", x=f"{_LEFT + index * pitch:.1f}", y=_TOP, width=f"{pitch:.1f}", height=bottom - _TOP, class_="area"
    )
    parts = [el("title", _describe(index, activation)), area]
    radius = f"{min(4.0, 0.42 * pitch):.1f}"
    if activation.amax == 0:
        parts.append(el("circle", cx=x, cy=bottom, r=radius))
        return el("g", *parts, class_="mark zero")
    y = _y(activation.amax, low, high)
    if activation.rms:
        y_rms = f"{_y(activation.rms, low, high):.1f}"
        half = min(5.0, 0.45 * pitch)
        parts.append(el("line", x1=x, x2=x, y1=y_rms, y2=f"{y:.1f}"))
        parts.append(el("line", x1=f"{float(x) - half:.1f}", x2=f"{float(x) + half:.1f}", y1=y_rms, y2=y_rms))
    parts.append(el("circle", cx=x, cy=f"{y:.1f}", r=radius))
    return el("g", *parts, class_="mark few" if activation.has_few_steps else "mark")


def _describe(index: int, activation: Activation) -> str:
    parts = [
        f"{index + 1}. {activation.name}",
        f"amax {figures.significant(activation.amax)}",
        f"scale {figures.significant(activation.amax / STEPS)}",
    ]
    if activation.rms is not None:
        parts.append(f"rms {figures.significant(activation.rms)}")
    if activation.steps is not None:
        parts.append(f"rms at step {activation.steps:.1f} of {STEPS}")
    if activation.non_finite:
        parts.append(f"{activation.non_finite:,} NaN or Inf")
    return " - ".join(parts)


def _ranges(activations: Sequence[Activation]) -> Html:
    is_measured = any(activation.rms is not None for activation in activations)
    columns = [Column("#", "number"), Column("Activation", "name"), Column("amax", "number"), Column("Scale", "number")]
    if is_measured:
        titles = ("rms", "rms at step", "Smallest", "Largest", "NaN or Inf")
        columns += [Column(title, "number") for title in titles]
    rows = [_range_row(index, activation, is_measured) for index, activation in enumerate(activations)]
    if not rows:
        return NOTHING
    clipped = note(
        "Values beyond amax are clipped; percentile, entropy and mse do so on purpose. amax is that of the smoothed "
        "and shifted activation, where there is one, the other columns are those of the model's own."
    )
    content = join([table(columns, rows, filterable=True), clipped if is_measured else NOTHING])
    return fold(f"Ranges of {figures.count(len(rows), 'activation')} as a table", content)


def _range_row(index: int, activation: Activation, is_measured: bool) -> list[str]:
    row = [
        str(index + 1),
        code(activation.name),
        figures.significant(activation.amax),
        figures.significant(activation.amax / STEPS),
    ]
    if not is_measured:
        return row
    steps = "-" if activation.steps is None else f"{activation.steps:.1f}"
    seen = ["-" if v is None else figures.significant(v) for v in (activation.rms, activation.low, activation.high)]
    marked = el("span", steps, class_="mark bad") if activation.has_few_steps else steps
    return [*row, seen[0], marked, *seen[1:], f"{activation.non_finite:,}" if activation.non_finite else "-"]
