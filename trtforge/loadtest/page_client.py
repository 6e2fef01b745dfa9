"""The parts of the page that show what the client saw: latency by load and by length, time, service levels, errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trtforge.loadtest import charts
from trtforge.loadtest.charts import Line, Point, Row
from trtforge.loadtest.noise import center
from trtforge.loadtest.objective import parse_objectives
from trtforge.loadtest.page_figures import (
    STATISTICS,
    Names,
    error_share,
    milliseconds,
    over_repeats,
    per_second,
    percentile_text,
    share,
    statistic,
    throughput,
)
from trtforge.loadtest.results import Cell, ErrorCount, Run, ServiceLevel, Step
from trtforge.report.markup import NOTHING, Column, Html, block, code, el, join, note, section, table

_SHOWN = ("p50", "p95", "p99")
# Of percentiles on a chart; the tail is the warmest.
COLOURS = {"p50": 1, "p90": 0, "p95": 2, "p99": 6, "p99.9": 3}
_LADDER = ("p50", "p95", "p99", "p99.9")


def load(run: Run) -> Html:
    """Latency against load and throughput, and the table of all steps."""
    blocks = []
    for title, steps in _groups(run).items():
        if len(steps) < 2:
            continue
        limit = _limit(run)
        unit = "requests/s" if steps[0].load.kind == "open" else "users"
        over_load = _latency_lines(steps, lambda step: step.load.end)
        over_rate = _latency_lines(steps, throughput)
        pair = el(
            "div",
            charts.line_chart(over_load, (unit, "latency, ms"), "setting", limit=limit),
            charts.line_chart(over_rate, ("right answers/s", "latency, ms"), "measure", limit=limit),
            class_="pair",
        )
        blocks.append(block(title, pair, charts.legend(_SHOWN, [COLOURS[name] for name in _SHOWN])))
    return section("load", "Latency by load", *blocks, _steps_table(run))


def lengths(run: Run) -> Html:
    """The tail of each length bucket and batch size, at every load; nothing where there is one bucket alone."""
    names = Names(run)
    rows = []
    for step in run.steps:
        cells = _cells(step, names)
        if len(cells) > 1:
            rows += [
                Row(f"{names.step(step)}: {name}", _ladder(found), _tail_text(found))
                for name, found in cells.items()
                if _ladder(found)
            ]
    about = note("Each line runs from the median to p99.9 of one length bucket.")
    chart = charts.ladder_chart(rows, "latency, ms", COLOURS)
    return section("lengths", "Tail by length", chart, about) if chart else NOTHING


def time(run: Run) -> Html:
    """Throughput and p99 in every second of the last repeat of each step."""
    names = Names(run)
    rates, tails = [], []
    for number, step in enumerate(run.steps):
        seconds = [at for one in step.measurements[-1:] for at in one.timeline if 0 <= at.second < one.duration_s]
        if len(seconds) > 1:
            timed = ((at.second, at.p99_ms) for at in seconds if at.p99_ms is not None)
            rates.append(Line(names.step(step), tuple(Point(at.second, at.ok, "") for at in seconds), number))
            tails.append(Line(names.step(step), tuple(Point(second, ms, "") for second, ms in timed), number))
    if not rates:
        return NOTHING
    return section(
        "time",
        "Over time",
        charts.line_chart(rates, ("seconds", "right answers/s"), "time", charts.WIDE),
        charts.line_chart([line for line in tails if line.points], ("seconds", "p99, ms"), "time", charts.WIDE),
        charts.legend([line.name for line in rates], [line.colour for line in rates]),
    )


def service_levels(run: Run) -> Html:
    """The share of requests within each objective, by step and cell."""
    names = Names(run)
    steps = [(names.step(step), step, _cells(step, names)) for step in run.steps if step.measurements]
    cell_names = list(dict.fromkeys(name for _, _, cells in steps for name in cells))
    columns = [Column("Load"), Column("All", "number"), *(Column(name, "number") for name in cell_names)]
    blocks = []
    for number, objective in enumerate(run.objectives):
        rows = [
            [
                title,
                _heat([one.service_levels[number] for one in step.measurements]),
                *(_heat([cell.service_levels[number] for cell in cells.get(name, ())]) for name in cell_names),
            ]
            for title, step, cells in steps
        ]
        blocks.append(block(f"Requests within the limit of {objective}", table(columns, rows)))
    about = note("Failed and unsent requests are outside. Green where the objective is met in every repeat.")
    return section("service-levels", "Service levels", *blocks, about) if blocks else NOTHING


def streams(run: Run) -> Html:
    """Time to the first answer and between answers, of models that stream."""
    rows, names = [], Names(run)
    for step in run.steps:
        for title, found in (
            ("first answer", [one.first for one in step.measurements if one.first is not None]),
            ("between answers", [one.between for one in step.measurements if one.between is not None]),
        ):
            if found:
                rows.append([names.step(step), title, *(percentile_text(found, name) for name in STATISTICS)])
    columns = [Column("Load"), Column("Time"), *(Column(name, "number") for name in STATISTICS)]
    return section("streams", "Streamed answers", table(columns, rows))


def errors(run: Run) -> Html:
    """Requests without a right answer, by kind and step."""
    rows, names = [], Names(run)
    for step in run.steps:
        requests = sum(one.requests for one in step.measurements)
        for (kind, text), found in _errors(step).items():
            count = sum(error.count for error in found)
            rows.append([names.step(step), kind, text, f"{count:,}", share(count / requests), code(found[0].example)])
    columns = [
        Column("Load"),
        Column("Kind"),
        Column("What", "name"),
        Column("Requests", "number"),
        Column("Share", "number"),
        Column("One of them", "name"),
    ]
    return section("errors", "Errors", table(columns, rows))


def _groups(run: Run) -> dict[str, list[Step]]:
    """Steps whose load alone differs; ramps, whose load is not one number, belong to none."""
    groups: dict[str, list[Step]] = {}
    for step in run.steps:
        if step.load.start == step.load.end and step.measurements:
            title = "Open loop: Poisson arrivals" if step.load.kind == "open" else "Closed loop"
            batch = "" if step.batch is None else f", batch {step.batch}"
            groups.setdefault(title + batch, []).append(step)
    return {title: sorted(steps, key=lambda step: step.load.end) for title, steps in groups.items()}


def _latency_lines(steps: Sequence[Step], across: Callable[[Step], float]) -> list[Line]:
    lines = []
    for name in _SHOWN:
        points = []
        for step in steps:
            found = over_repeats(step, statistic(name))
            if found is not None:
                about = f"{step.key}: {milliseconds(found[0])} at {per_second(throughput(step))} answers/s"
                span = found[1:] if len(step.measurements) > 1 else (None, None)
                points.append(Point(across(step), found[0], about, *span))
        lines.append(Line(name, tuple(points), COLOURS[name]))
    return [line for line in lines if line.points]


def _limit(run: Run) -> float | None:
    """The limit of the first objective whose statistic is on the chart, in ms."""
    objectives = parse_objectives(run.objectives)
    return next((objective.limit_ms for objective in objectives if objective.statistic in _SHOWN), None)


def _steps_table(run: Run) -> Html:
    columns = [
        Column("Load"),
        *(Column(name, "number") for name in ("Requests", "Answers/s", "Samples/s", *STATISTICS, "Max", "Errors")),
        Column("Client cores", "number"),
    ]
    rows, names = [], Names(run)
    for step in run.steps:
        if not step.measurements:
            continue
        latencies = [one.latency for one in step.measurements]
        largest = [latency.max_ms for latency in latencies if latency.max_ms is not None]
        samples = center([one.samples_per_s for one in step.measurements])
        rows.append(
            [
                names.step(step),
                f"{sum(one.requests for one in step.measurements):,}",
                per_second(throughput(step)),
                per_second(samples),
                *(percentile_text(latencies, name) for name in STATISTICS),
                milliseconds(max(largest, default=None)),
                share(error_share(step)),
                f"{center([one.client.cpu for one in step.measurements]):.2f}",
            ]
        )
    repeats = f"Means of {run.repeats} repeats; bars on the chart run from the lowest to the highest. "
    few = "~: fewer than ten values lie above it."
    return join([table(columns, rows), note((repeats if run.repeats > 1 else "") + few)])


def _cells(step: Step, names: Names) -> dict[str, list[Cell]]:
    """The cells of every repeat, by name; in the order of the traffic."""
    cells: dict[str, list[Cell]] = {}
    for one in step.measurements:
        for cell in one.cells:
            cells.setdefault(names.cell(cell), []).append(cell)
    return cells


def _ladder(cells: Sequence[Cell]) -> tuple[tuple[str, float], ...]:
    """Percentiles over the repeats; nothing where a repeat has no right answer."""
    if any(name not in cell.latency.percentiles_ms for cell in cells for name in _LADDER):
        return ()
    return tuple((name, center([cell.latency.percentiles_ms[name] for cell in cells])) for name in _LADDER)


def _tail_text(cells: Sequence[Cell]) -> str:
    return f"p99 {percentile_text([cell.latency for cell in cells], 'p99')}"


def _heat(levels: Sequence[ServiceLevel]) -> Html:
    shares = [level.share for level in levels if level.share is not None]
    if not shares:
        return el("span", "-")
    is_met = all(level.is_met for level in levels)
    return el("span", share(sum(shares) / len(shares)), class_=f"heat {'good' if is_met else 'bad'}")


def _errors(step: Step) -> dict[tuple[str, str], list[ErrorCount]]:
    """Of every repeat, by kind and text."""
    found: dict[tuple[str, str], list[ErrorCount]] = {}
    for one in step.measurements:
        for error in one.errors:
            found.setdefault((error.kind, error.text), []).append(error)
    return found
