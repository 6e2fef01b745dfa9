"""Charts of load tests: lines over load or time, percentiles by row, stacked bars, changes, trials with their front.

Every mark carries its figures as a title that shows on hover; the tables of the page have them too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from trtforge.loadtest.noise import Band
from trtforge.loadtest.plot import Frame, Scale, axes, colour, drawing, linear_scale, path, scale_of, tick
from trtforge.report.markup import NOTHING, Html, el, join

_ROW = 28  # height of a row of bars, pixels
_BAR = 14
_LABEL_LETTERS = 34  # of a row's name that fit before its bar
_TICK_ROOM = 34  # pixels that the label of a tick takes
HALF = Frame()
WIDE = Frame(width=1030, height=220)
_ROWS = Frame(width=1030, left=236, right=120, top=8)
_TRIALS = Frame(width=1030, height=380)


ShiftKind = Literal["better", "worse", "same"]


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """A value with its figures in words; `low` and `high` are of its repeats, None where it has none."""

    x: float
    y: float
    about: str
    low: float | None = None
    high: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """Points in the order in which they are joined; `colour` is an index."""

    name: str
    points: tuple[Point, ...]
    colour: int


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """Values of one row by the name of their series, and what stands behind its bar."""

    name: str
    values: tuple[tuple[str, float], ...]
    end: str


@dataclasses.dataclass(frozen=True, slots=True)
class Shift:
    """A relative change and what chance explains of it, as shares: 0.1 is 10 %."""

    name: str
    share: float
    noise: Band
    kind: ShiftKind


@dataclasses.dataclass(frozen=True, slots=True)
class TrialMark:
    """A configuration that was tried, by throughput (x) and latency (y)."""

    point: Point
    kind: Literal["tried", "default", "best"]


def legend(names: Sequence[str], colours: Sequence[int] | None = None) -> Html:
    """Series in their colours, which are in order unless given."""
    shown = range(len(names)) if colours is None else colours
    items = (el("li", el("i", class_=colour(index)), name) for index, name in zip(shown, names, strict=True))
    return el("ul", *items, class_="legend")


def line_chart(
    lines: Sequence[Line],
    titles: tuple[str, str],
    across: Literal["setting", "measure", "time"],
    frame: Frame = HALF,
    limit: float | None = None,
) -> Html:
    """Lines, with a dot and the span of the repeats at each point; nothing without points.

    Args:
        lines: to draw.
        titles: of the axes, with units.
        across: a "setting" has a tick at each of its values, a "measure" round ticks; "time" begins at zero and has
            lines without dots.
        frame: the size.
        limit: a value of y to mark, where it is in sight.
    """
    points = [point for line in lines for point in line.points]
    if not points:
        return NOTHING
    values = [value for point in points for value in (point.y, point.low, point.high) if value is not None]
    y = frame.up(lambda start, end: scale_of(values, start, end))
    xs = [point.x for point in points]
    if across == "time":
        x = frame.across(lambda start, end: linear_scale(0.0, max(xs), start, end))
    else:
        x = frame.across(lambda start, end: scale_of(xs, start, end, from_zero=False))
    if across == "setting":
        x = dataclasses.replace(x, ticks=_own_ticks(x, xs))
    parts = axes(frame, x, y, titles)
    if limit is not None and y.low <= limit <= y.high:
        parts.append(_limit(frame, y.place(limit)))
    for line in lines:
        drawn = [path([(x.place(point.x), y.place(point.y)) for point in line.points], f"line {across}")]
        if across != "time":
            drawn += [mark for point in line.points for mark in _dot(point, x, y, line.name)]
        parts.append(el("g", *drawn, class_=f"series {colour(line.colour)}"))
    return drawing(parts, frame, f"{titles[1]} over {titles[0]}")


def ladder_chart(rows: Sequence[Row], title: str, colours: Mapping[str, int]) -> Html:
    """Each row's values as dots on one line, from the smallest to the largest; nothing without rows.

    Args:
        rows: each with positive values in ascending order, e.g. percentiles.
        title: of the axis they share.
        colours: by the name of the series.
    """
    values = [value for row in rows for _, value in row.values]
    if not values:
        return NOTHING
    frame = dataclasses.replace(_ROWS, height=_ROWS.top + _ROWS.bottom + _ROW * len(rows))
    x = frame.across(lambda start, end: scale_of(values, start, end))
    parts = _row_axis(frame, x, title)
    names = _series(rows)
    for number, row in enumerate(rows):
        middle = frame.top + _ROW * (number + 0.5)
        places = [x.place(value) for _, value in row.values]
        parts.append(_row_name(row.name, frame, middle))
        ends = {"x1": f"{min(places):.1f}", "x2": f"{max(places):.1f}"}
        parts.append(el("line", **ends, y1=middle, y2=middle, class_="span"))
        for (name, value), place in zip(row.values, places, strict=True):
            about = el("title", f"{row.name}, {name}: {value:.4g}")
            dot = el("circle", about, cx=f"{place:.1f}", cy=middle, r=5)
            parts.append(el("g", dot, class_=f"series {colour(colours[name])}"))
        parts.append(el("text", row.end, x=f"{max(places) + 12:.1f}", y=middle, class_="middle"))
    return join([drawing(parts, frame, title), legend(names, [colours[name] for name in names])])


def stack_chart(rows: Sequence[Row], title: str) -> Html:
    """Each row's values one behind the other as a bar; nothing without rows.

    Args:
        rows: each with values that are not negative.
        title: of the axis they share.
    """
    totals = [sum(value for _, value in row.values) for row in rows]
    if not totals or max(totals) <= 0:
        return NOTHING
    frame = dataclasses.replace(_ROWS, height=_ROWS.top + _ROWS.bottom + _ROW * len(rows))
    x = frame.across(lambda start, end: linear_scale(0.0, max(totals), start, end))
    parts = _row_axis(frame, x, title)
    names = _series(rows)
    for number, row in enumerate(rows):
        middle = frame.top + _ROW * (number + 0.5)
        parts.append(_row_name(row.name, frame, middle))
        done = 0.0
        for name, value in row.values:
            left, right = x.place(done), x.place(done + value)
            about = el("title", f"{row.name}, {name}: {value:.4g}")
            bar = _bar(about, left, right, middle, None)
            parts.append(el("g", bar, class_=f"series {colour(names.index(name))}"))
            done += value
        parts.append(el("text", row.end, x=f"{x.place(done) + 8:.1f}", y=middle, class_="middle"))
    return join([drawing(parts, frame, title), legend(names)])


def shift_chart(shifts: Sequence[Shift], title: str) -> Html:
    """Each change as a dot, with the noise around zero as a band; nothing without changes."""
    if not shifts:
        return NOTHING
    frame = dataclasses.replace(_ROWS, height=_ROWS.top + _ROWS.bottom + _ROW * len(shifts))
    ends = [end for shift in shifts for end in (shift.share, shift.noise.low, shift.noise.high)]
    x = frame.across(lambda start, end: linear_scale(100 * min(ends), 100 * max(ends), start, end))
    parts = _row_axis(frame, x, title)
    parts.append(el("line", x1=x.place(0), x2=x.place(0), y1=frame.top, y2=frame.height - frame.bottom, class_="zero"))
    for number, shift in enumerate(shifts):
        middle = frame.top + _ROW * (number + 0.5)
        parts.append(_row_name(shift.name, frame, middle))
        left, right = x.place(100 * shift.noise.low), x.place(100 * shift.noise.high)
        parts.append(_bar(el("title", f"noise: {shift.noise}"), left, right, middle, "noise"))
        place = x.place(100 * shift.share)
        about = el("title", f"{shift.name}: {100 * shift.share:+.1f} %")
        parts.append(el("circle", about, cx=f"{place:.1f}", cy=middle, r=5, class_=f"shift {shift.kind}"))
        parts.append(el("text", f"{100 * shift.share:+.1f} %", x=frame.width - 8, y=middle, class_="end middle"))
    return drawing(parts, frame, title)


def front_chart(
    trials: Sequence[TrialMark], front: Sequence[Point], titles: tuple[str, str], limit: float | None
) -> Html:
    """Trials as dots, with the Pareto front as a line through those that no other beats in both; nothing without any.

    Args:
        trials: all that were measured.
        front: of them, in ascending throughput.
        titles: of the axes, with units.
        limit: of the objective, in the unit of y; None where it is of another statistic.
    """
    if not trials:
        return NOTHING
    frame = _TRIALS
    x = frame.across(lambda start, end: scale_of([trial.point.x for trial in trials], start, end))
    values = [trial.point.y for trial in trials] + ([] if limit is None else [limit])
    y = frame.up(lambda start, end: scale_of(values, start, end))
    parts = axes(frame, x, y, titles)
    if limit is not None:
        parts.append(_limit(frame, y.place(limit)))
    parts.append(path([(x.place(point.x), y.place(point.y)) for point in front], "front"))
    for trial in sorted(trials, key=lambda trial: trial.kind != "tried"):
        place = {"cx": f"{x.place(trial.point.x):.1f}", "cy": f"{y.place(trial.point.y):.1f}"}
        radius = 4 if trial.kind == "tried" else 7
        parts.append(el("circle", el("title", trial.point.about), **place, r=radius, class_=f"trial {trial.kind}"))
    return drawing(parts, frame, "Trials by throughput and latency")


def _dot(point: Point, x: Scale, y: Scale, name: str) -> list[Html]:
    across, down = f"{x.place(point.x):.1f}", f"{y.place(point.y):.1f}"
    marks = []
    if point.low is not None and point.high is not None:
        ends = {"y1": f"{y.place(point.low):.1f}", "y2": f"{y.place(point.high):.1f}"}
        marks.append(el("line", x1=across, x2=across, **ends, class_="repeats"))
    marks.append(el("circle", el("title", f"{name}: {point.about}"), cx=across, cy=down, r=4))
    return marks


def _limit(frame: Frame, down: float) -> Html:
    right = f"{frame.width - frame.right:.1f}"
    line = el("line", x1=frame.left, x2=right, y1=f"{down:.1f}", y2=f"{down:.1f}")
    return el("g", line, el("text", "objective", x=right, y=f"{down - 7:.1f}", class_="end"), class_="limit")


def _bar(about: Html, left: float, right: float, middle: float, class_: str | None) -> Html:
    width = f"{right - left:.1f}"
    return el("rect", about, x=f"{left:.1f}", width=width, y=middle - _BAR / 2, height=_BAR, class_=class_)


def _own_ticks(scale: Scale, values: Sequence[float]) -> tuple[float, ...]:
    """The values themselves, without those whose labels would lie on a former one."""
    kept: list[float] = []
    for value in sorted(set(values)):
        if not kept or scale.place(value) - scale.place(kept[-1]) >= _TICK_ROOM:
            kept.append(value)
    return tuple(kept)


def _row_axis(frame: Frame, x: Scale, title: str) -> list[Html]:
    bottom = frame.height - frame.bottom
    parts = []
    for value in x.ticks:
        across = f"{x.place(value):.1f}"
        parts.append(el("line", x1=across, x2=across, y1=frame.top, y2=bottom, class_="grid"))
        parts.append(el("text", tick(value), x=across, y=bottom + 18, class_="centre"))
    middle = (x.start + x.end) / 2
    return [*parts, el("text", title, x=f"{middle:.1f}", y=frame.height - 8, class_="axis centre")]


def _row_name(name: str, frame: Frame, middle: float) -> Html:
    shown = name if len(name) <= _LABEL_LETTERS else f"{name[: _LABEL_LETTERS - 1]}…"
    return el("text", el("title", name), shown, x=frame.left - 12, y=middle, class_="axis end middle")


def _series(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name, _ in row.values))
