"""Charts of a run as SVG inside the page: latency by case, and the roofline with every case of the plugin on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from trtforge.benchmark.implementations import Mode
from trtforge.benchmark.results import PLUGIN, CaseResult
from trtforge.benchmark.roofline import Peaks, tflops
from trtforge.report.markup import NOTHING, Html, el, join

_NUM_COLOURS = 8
_BAR = 13  # height of a bar, pixels
_GAP = 12  # between cases
_LABEL = 150
_PLOT = 640
_VALUE = 110
_ROOF_WIDTH, _ROOF_HEIGHT = 760, 340
_MARGIN = 56


def legend(names: Sequence[str]) -> Html:
    """Implementations in their colours."""
    items = (el("li", el("i", class_=_colour(names, name)), name) for name in names)
    return el("ul", *items, class_="legend")


def latency_chart(results: Sequence[CaseResult], names: Sequence[str], mode: Mode) -> Html:
    """Bars of median latency, a group a case, with the 10th to 90th percentile as a line; nothing without times.

    Each case has a scale of its own, from zero to its slowest bar: cases differ by orders of magnitude, and what is
    compared is the implementations of one.
    """
    groups: list[Html] = []
    top = 0.0
    for result in results:
        timed = [(name, summary) for name in names if (m := result.find(name, mode)) and (summary := m.summary)]
        if not timed:
            continue
        scale = _PLOT / max(summary.p90_us for _, summary in timed)
        label = f"B {result.case.batch}, S {result.case.sequence}"
        groups.append(el("text", label, x=0, y=f"{top + _BAR - 3:.1f}", class_="axis"))
        for name, summary in timed:
            middle = top + _BAR / 2
            width = summary.median_us * scale
            title = el(
                "title", f"{name}: median {summary.median_us:.1f} us, {summary.p10_us:.1f} to {summary.p90_us:.1f}"
            )
            bar = el("rect", title, x=_LABEL, y=f"{top:.1f}", width=f"{width:.1f}", height=_BAR - 2)
            groups.append(el("g", bar, class_=f"bar-of {_colour(names, name)}"))
            ends = (_LABEL + summary.p10_us * scale, _LABEL + summary.p90_us * scale)
            groups.append(el("line", x1=f"{ends[0]:.1f}", x2=f"{ends[1]:.1f}", y1=middle, y2=middle, class_="spread"))
            groups.append(el("text", _micros(summary.median_us), x=f"{ends[1] + 6:.1f}", y=f"{top + _BAR - 3:.1f}"))
            top += _BAR
        top += _GAP
    return _svg(groups, _LABEL + _PLOT + _VALUE, top) if groups else NOTHING


def roofline_chart(results: Sequence[CaseResult], peaks: Peaks, mode: Mode) -> Html:
    """FLOP/s over FLOPs per byte of the plugin's cases, both axes logarithmic, below what the card can do."""
    points = [
        (result.case.flops / result.case.min_bytes, tflops(result.case, summary.median_us), result.case.key)
        for result in results
        if result.case.dtype != "int8" and (m := result.find(PLUGIN, mode)) and (summary := m.summary)
    ]
    if not points:
        return NOTHING
    ridge = peaks.fp16_tflops * 1e3 / peaks.bandwidth_gbps  # FLOPs a byte
    low = min(*(x for x, _, _ in points), ridge) / 2
    high = max(*(x for x, _, _ in points), ridge) * 2
    floor, ceiling = min(y for _, y, _ in points) / 2, peaks.fp16_tflops * 1.5

    def place(x: float, y: float) -> tuple[float, float]:
        across = _MARGIN + _share(x, low, high) * (_ROOF_WIDTH - 2 * _MARGIN)
        return across, _ROOF_HEIGHT - _MARGIN - _share(y, floor, ceiling) * (_ROOF_HEIGHT - 2 * _MARGIN)

    start = max(low, floor * 1e3 / peaks.bandwidth_gbps)
    corners = [(start, start * peaks.bandwidth_gbps / 1e3), (ridge, peaks.fp16_tflops), (high, peaks.fp16_tflops)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*corner) for corner in corners))
    parts = [el("polyline", points=path, class_="roof")]
    for x, y, key in points:
        across, down = place(x, y)
        title = el("title", f"{key}: {y:.1f} TFLOP/s at {x:.0f} FLOPs a byte")
        parts.append(el("circle", title, cx=f"{across:.1f}", cy=f"{down:.1f}", r=4, class_="point"))
    parts += _ticks(low, high, lambda value: (place(value, floor)[0], _ROOF_HEIGHT - _MARGIN + 18.0))
    parts += _ticks(floor, ceiling, lambda value: (4.0, place(low, value)[1] + 4.0))
    parts.append(el("text", "FLOPs a byte that must be moved", x=_MARGIN, y=_ROOF_HEIGHT - 10, class_="axis"))
    parts.append(el("text", "TFLOP/s", x=4, y=16, class_="axis"))
    return _svg(parts, _ROOF_WIDTH, _ROOF_HEIGHT)


def _ticks(low: float, high: float, place: Callable[[float], tuple[float, float]]) -> list[Html]:
    """Powers of ten, and two and five times them."""
    marks = []
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        for factor in (1, 2, 5):
            if low <= (value := factor * 10.0**power) <= high:
                x, y = place(value)
                marks.append(el("text", f"{value:g}", x=f"{x:.1f}", y=f"{y:.1f}"))
    return marks


def _share(value: float, low: float, high: float) -> float:
    """Where a value stands on a logarithmic axis."""
    return math.log(value / low) / math.log(high / low)


def _svg(parts: Sequence[Html], width: float, height: float) -> Html:
    drawing = el("svg", join(parts), viewBox=f"0 0 {width:.0f} {height:.0f}", width=f"{width:.0f}", role="img")
    return el("div", drawing, class_="chart")


def _colour(names: Sequence[str], name: str) -> str:
    return f"c{names.index(name) % _NUM_COLOURS}"


def _micros(value: float) -> str:
    return f"{value:.1f} us" if value < 1000 else f"{value / 1000:.2f} ms"
