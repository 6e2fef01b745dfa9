"""The frame of a chart: scales, ticks and axes as SVG, in the page's own colours and without a script."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from trtforge.report.markup import Html, el, join

# Ticks of an axis at most; more of them would overlap on the narrow charts.
_MAX_TICKS = 7
# From this ratio of its largest to its smallest value on, an axis is logarithmic: on a linear one the small values
# would lie on each other.
_LOG_RATIO = 8.0
_NUM_COLOURS = 8
_TICK_GAP = 8  # between axis and tick label, pixels


@dataclasses.dataclass(frozen=True, slots=True)
class Scale:
    """Values to pixels.

    Attributes:
        low, high: values at the ends.
        start, end: pixels at the ends; `start` is larger on a vertical axis.
        is_log: equal ratios take equal lengths; `low` is then positive.
        ticks: values that are labelled, ascending.
    """

    low: float
    high: float
    start: float
    end: float
    is_log: bool
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        """The pixel of a value; outside the ends it is held at the nearer one."""
        held = min(max(value, self.low), self.high)
        if self.is_log:
            share = math.log(held / self.low) / math.log(self.high / self.low)
        else:
            share = (held - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """Where a chart is drawn, in pixels."""

    width: float = 500
    height: float = 300
    left: float = 58
    right: float = 16
    top: float = 26
    bottom: float = 46

    def across(self, scale: Callable[[float, float], Scale]) -> Scale:
        """A scale from left to right."""
        return scale(self.left, self.width - self.right)

    def up(self, scale: Callable[[float, float], Scale]) -> Scale:
        """A scale from the bottom to the top."""
        return scale(self.height - self.bottom, self.top)


def scale_of(values: Sequence[float], start: float, end: float, from_zero: bool = True) -> Scale:
    """The scale that shows values well: logarithmic where they differ by much, else linear.

    Args:
        values: finite; those that are not positive rule a logarithmic scale out.
        start, end: pixels.
        from_zero: a linear scale begins at zero, so that lengths compare as the values do.
    """
    low, high = min(values), max(values)
    if low > 0 and high / low >= _LOG_RATIO:
        return log_scale(low, high, start, end)
    return linear_scale(0.0 if from_zero and low >= 0 else low, high, start, end)


def linear_scale(low: float, high: float, start: float, end: float) -> Scale:
    """Ends at round values, with a tick at each round step."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    step = _round_step((high - low) / (_MAX_TICKS - 2))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(number * step for number in range(first, last + 1))
    return Scale(ticks[0], ticks[-1], start, end, False, ticks)


def log_scale(low: float, high: float, start: float, end: float) -> Scale:
    """Ends with a little room beyond positive values; ticks at 1, 2 and 5 times powers of ten, or at the powers."""
    low, high = low / 1.25, high * 1.25
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: tuple[float, ...] = ()
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = tuple(value for power in powers for factor in factors if low <= (value := factor * 10.0**power) <= high)
        if len(ticks) <= _MAX_TICKS:
            break
    return Scale(low, high, start, end, True, ticks)


def axes(
    frame: Frame, x: Scale, y: Scale, titles: tuple[str, str], write: Callable[[float], str] | None = None
) -> list[Html]:
    """Grid lines, tick labels and titles of both axes.

    Args:
        frame: of the chart.
        x, y: its scales.
        titles: what each axis shows, with its unit.
        write: labels the ticks of x; None writes them as those of y.
    """
    bottom = frame.height - frame.bottom
    parts = []
    for value in y.ticks:
        down = f"{y.place(value):.1f}"
        parts.append(el("line", x1=frame.left, x2=f"{frame.width - frame.right:.1f}", y1=down, y2=down, class_="grid"))
        parts.append(el("text", tick(value), x=frame.left - _TICK_GAP, y=down, class_="end middle"))
    for value in x.ticks:
        across = f"{x.place(value):.1f}"
        parts.append(el("line", x1=across, x2=across, y1=f"{bottom:.1f}", y2=f"{bottom + 4:.1f}", class_="grid"))
        parts.append(el("text", (write or tick)(value), x=across, y=f"{bottom + 18:.1f}", class_="centre"))
    middle = (frame.left + frame.width - frame.right) / 2
    parts.append(el("text", titles[0], x=f"{middle:.1f}", y=frame.height - 8, class_="axis centre"))
    parts.append(el("text", titles[1], x=4, y=14, class_="axis"))
    return parts


def drawing(parts: Sequence[Html], frame: Frame, label: str) -> Html:
    """The chart as an element; `label` says what it shows to those who do not see it."""
    size = {"viewBox": f"0 0 {frame.width:.0f} {frame.height:.0f}", "width": f"{frame.width:.0f}"}
    return el("div", el("svg", join(parts), **size, role="img", aria_label=label), class_="chart")


def path(points: Sequence[tuple[float, float]], class_: str) -> Html:
    """A line through points given in pixels."""
    return el("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), class_=class_)


def colour(index: int) -> str:
    """The class of a colour of the page."""
    return f"c{index % _NUM_COLOURS}"


def tick(value: float) -> str:
    """`0.5`, `20`, `5k`: three digits at most."""
    return f"{value / 1e6:g}M" if value >= 1e6 else f"{value / 1e3:g}k" if value >= 1e4 else f"{value:.6g}"


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least this."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
