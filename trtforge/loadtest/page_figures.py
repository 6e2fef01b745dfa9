"""Figures and names of a run as the page writes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from trtforge.loadtest.compare import cell_name
from trtforge.loadtest.noise import center
from trtforge.loadtest.results import Cell, Latency, Measurement, Run, Step
from trtforge.report.markup import Html, el, escape, join

STATISTICS = ("p50", "p90", "p95", "p99", "p99.9")


@dataclasses.dataclass(frozen=True, slots=True)
class Names:
    """Short names of the steps and cells of a run: a batch size that they all have is left out."""

    run: Run

    def step(self, step: Step) -> str:
        """`4 users`, with the batch size where steps differ in it."""
        return step.load.describe() if len({one.batch for one in self.run.steps}) == 1 else step.key

    def cell(self, cell: Cell) -> str:
        """`8-32`, with the batch size where cells of one step differ in it."""
        steps = (one.cells for step in self.run.steps for one in step.measurements)
        is_mixed = any(len({one.batch for one in cells}) > 1 for cells in steps)
        return cell_name(cell) if is_mixed or cell.bucket is None else cell.bucket


def pre(text: str) -> Html:
    """Text whose lines stay lines."""
    return el("pre", join([part for line in text.split("\n") for part in (escape(line), Html("\n"))]))


def milliseconds(value: float | None) -> str:
    """Three digits: `0.42 ms`, `12.3 ms`, `1.25 s`."""
    if value is None:
        return "-"
    if value >= 999.5:
        return f"{value / 1e3:.3g} s" if value < 99_950 else f"{value / 1e3:,.0f} s"
    return f"{value:.0f} ms" if value >= 99.95 else f"{value:.3g} ms"


def per_second(value: float) -> str:
    """Three digits where they tell something: `4.21`, `84.3`, `1,250`."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def share(value: float | None) -> str:
    """A share in percent; small ones keep a digit that is not zero."""
    if value is None:
        return "-"
    percent = 100 * value
    if percent in {0, 100}:
        return f"{percent:.0f} %"
    return f"{percent:.2g} %" if percent < 1 else f"{min(percent, 99.99):.2f} %" if percent > 99 else f"{percent:.1f} %"


def over_repeats(step: Step, value: Callable[[Measurement], float | None]) -> tuple[float, float, float] | None:
    """(centre, smallest, largest) of a figure over the repeats of a step; None where a repeat has none."""
    values = [found for one in step.measurements if (found := value(one)) is not None]
    if not values or len(values) < len(step.measurements):
        return None
    return center(values), min(values), max(values)


def throughput(step: Step) -> float:
    """Right answers per second, over the repeats of a step."""
    return center([one.throughput for one in step.measurements])


def statistic(name: str) -> Callable[[Measurement], float | None]:
    """Reads a percentile or the mean of the latency, in ms."""
    return lambda one: one.latency.statistics_ms.get(name)


def percentile_text(latencies: Sequence[Latency], name: str) -> str:
    """A percentile over repeats; "~" marks one that chance decides, as fewer than ten values lie above it."""
    values = [latency.percentiles_ms[name] for latency in latencies if name in latency.percentiles_ms]
    if not values or len(values) < len(latencies):
        return "-"
    mark = "~" if any(name in latency.too_few for latency in latencies) else ""
    return f"{mark}{milliseconds(center(values))}"


def error_share(step: Step) -> float:
    """Share of all requests of a step, over its repeats, without a right answer."""
    requests = sum(one.requests for one in step.measurements)
    return 1 - sum(one.ok for one in step.measurements) / requests if requests else 0.0


def meets(step: Step) -> bool | None:
    """Whether every repeat of a step meets every objective; None without objectives."""
    levels = [level for one in step.measurements for level in one.service_levels]
    return all(level.is_met for level in levels) if levels else None
