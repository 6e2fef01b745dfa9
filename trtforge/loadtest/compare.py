"""Compare a run with a baseline: the change of every figure, and whether it lies beyond the noise.

A figure's noise is that of its own repeats, or that of the same figure over all steps where that is wider: with three
repeats a narrow spread is often chance. Simulated with equal servers, three steps and three length buckets, the second
rule takes comparisons with a false regression from 17 to fewer than 2 in a hundred. Changes below 3 % are never called
a regression, whatever the repeats say. Of runs with fewer than three repeats nothing tells the noise; a stated default
takes its place.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from trtforge.errors import InputError
from trtforge.loadtest.noise import MIN_REPEATS, Band, band, center, log_spread, plain_band, rate_band, symmetric_band
from trtforge.loadtest.results import Cell, Latency, Measurement, Run, Step

Metric = Literal["throughput", "p50", "p95", "p99", "error rate"]
# Servers that differ in nothing differ by this share from start to start: memory placement, clocks, neighbours.
LEAST_BAND = 0.03
# The band of runs without enough repeats, as a share: what two runs of one server differ by on a busy machine.
DEFAULT_BANDS: dict[Metric, float] = {"throughput": 0.10, "p50": 0.15, "p95": 0.25, "p99": 0.40}
PERCENTILES: tuple[Metric, ...] = ("p50", "p95", "p99")
_MAX_CONFIG_CHANGES = 20


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """A figure in two runs.

    Attributes:
        step: see `Step.key`.
        cell: length bucket and batch size, e.g. "8-32, batch 1"; None for the whole step.
        metric: throughput in answers/s, percentiles in ms, the error rate as a share.
        before, now: over the repeats: geometric means, of the error rate the mean.
        change: relative; of the error rate the difference.
        noise: what chance explains of such a change.
        is_regression, is_improvement: beyond it, for the worse or the better.
    """

    step: str
    cell: str | None
    metric: Metric
    before: float
    now: float
    change: float
    noise: Band
    is_regression: bool
    is_improvement: bool

    @property
    def name(self) -> str:
        """Names the figure within a comparison."""
        return figure_name(self.step, self.cell, self.metric)


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """A run against a baseline.

    Attributes:
        baseline: where it came from.
        started_at: of the baseline.
        noise: "repeats", or "default" where one of the runs has too few of them.
        changes: by step: the step's own figures, then its cells'.
        not_compared: figures and steps of the baseline that have no counterpart or too few samples, with the reason.
        differences: of the two servers and models, which may differ: (what, before, now).
    """

    baseline: str
    started_at: str
    noise: Literal["repeats", "default"]
    changes: tuple[Change, ...]
    not_compared: tuple[str, ...]
    differences: tuple[tuple[str, str, str], ...]

    @property
    def regressions(self) -> tuple[Change, ...]:
        """Figures that are worse beyond the noise."""
        return tuple(change for change in self.changes if change.is_regression)

    @property
    def passed(self) -> bool:
        """No figure is worse beyond the noise."""
        return not self.regressions

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**dataclasses.asdict(self), "passed": self.passed}


def figure_name(step: str, cell: str | None, metric: Metric) -> str:
    """`4 users, batch 1: 8-32: p99`: names a figure within a comparison."""
    return ": ".join(part for part in (step, cell, metric) if part)


def cell_name(cell: Cell) -> str:
    """`8-32, batch 4`: names a cell within a step."""
    batch = f"batch {cell.batch}"
    return batch if cell.bucket is None else f"{cell.bucket}, {batch}"


def check_comparable(now: Run, before: Run, source: str) -> None:
    """Refuse runs whose figures differ for reasons that are not the server's.

    Args:
        now: this run; it needs no steps yet, so that a test need not run in vain.
        before: the baseline, from `source`.
        source: how an error names it.

    Raises:
        InputError: other requests, another protocol, other processors or GPUs.
    """
    pairs = {
        "traffic": (before.traffic_sha256[:12], now.traffic_sha256[:12]),
        "protocol": (before.protocol, now.protocol),
        "GPU": (_listed(before.server.gpus), _listed(now.server.gpus)),
        "processor": (before.environment.client_cpu, now.environment.client_cpu),
        "number of client cores": (str(before.environment.client_cores), str(now.environment.client_cores)),
        "place of the server": (_place(before), _place(now)),
    }
    for what, (was, is_now) in pairs.items():
        if was != is_now:
            fix = "compare runs of the same traffic file on the same machines"
            raise InputError(
                f"baseline {source} cannot be compared with this run", f"its {what} is {was}, here {is_now}", fix
            )


def compare_runs(now: Run, before: Run, source: str) -> Comparison:
    """Every figure of the baseline that was measured again.

    Args:
        now: this run.
        before: the baseline, from `source`.
        source: how an error and the page name it.

    Raises:
        InputError: the runs may not be compared, or have no step in common.
    """
    check_comparable(now, before, source)
    current = {step.key: step for step in now.steps if step.measurements}
    earlier = [step for step in before.steps if step.measurements]
    common = [(step, current[step.key]) for step in earlier if step.key in current]
    if not common:
        why = f"it has {_listed([step.key for step in earlier])}; this run {_listed(list(current))}"
        raise InputError(f"baseline {source} has no step of this run", why, "test the same loads and batch sizes")
    groups = [group for step, new in common for group in _groups(step, new)]
    has_repeats = all(min(len(group.before), len(group.now)) >= MIN_REPEATS for group in groups)
    figures = [figure for group in groups for figure in _figures(group)]
    spreads = _typical_spreads(figures) if has_repeats else {}
    return Comparison(
        source,
        before.environment.started_at,
        "repeats" if has_repeats else "default",
        tuple(change for figure in figures for change in _changes(figure, spreads)),
        (
            *(f"{step.key}: not in this run" for step in earlier if step.key not in current),
            *(f"{figure.name}: {figure.missing}" for figure in figures if figure.missing),
        ),
        tuple(_differences(now, before)),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Group:
    """A step, or a length bucket and batch size of it, in every repeat of two runs; only steps have a throughput."""

    step: str
    cell: str | None
    before: Sequence[Measurement | Cell]
    now: Sequence[Measurement | Cell]
    throughput: tuple[tuple[float, ...], tuple[float, ...]] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Figure:
    """One metric of a group, repeat by repeat; `missing` says why it cannot be compared."""

    group: _Group
    metric: Metric
    before: tuple[float, ...]
    now: tuple[float, ...]
    missing: str = ""

    @property
    def name(self) -> str:
        return figure_name(self.group.step, self.group.cell, self.metric)


def _groups(before: Step, now: Step) -> Iterator[_Group]:
    rates = [tuple(one.throughput for one in step.measurements) for step in (before, now)]
    yield _Group(before.key, None, before.measurements, now.measurements, (rates[0], rates[1]))
    old, new = ([{cell_name(cell): cell for cell in one.cells} for one in s.measurements] for s in (before, now))
    names = [name for name in old[0] if all(name in known for known in (*old, *new))]
    if len(names) > 1:
        for name in names:
            yield _Group(before.key, name, [known[name] for known in old], [known[name] for known in new])


def _figures(group: _Group) -> Iterator[_Figure]:
    if group.throughput is not None:
        yield _Figure(group, "throughput", *group.throughput)
    latencies = [one.latency for one in (*group.before, *group.now)]
    for metric in PERCENTILES:
        if missing := _why_missing(latencies, metric):
            yield _Figure(group, metric, (), (), missing)
        else:
            before, now = (
                tuple(one.latency.percentiles_ms[metric] for one in side) for side in (group.before, group.now)
            )
            yield _Figure(group, metric, before, now)
    if all(one.requests for one in (*group.before, *group.now)):
        before, now = (tuple(1 - one.ok / one.requests for one in side) for side in (group.before, group.now))
        yield _Figure(group, "error rate", before, now)


def _why_missing(latencies: Sequence[Latency], metric: Metric) -> str:
    if any(metric not in latency.percentiles_ms for latency in latencies):
        return "a repeat has no right answer"
    return "too few samples" if any(metric in latency.too_few for latency in latencies) else ""


def _typical_spreads(figures: Sequence[_Figure]) -> Mapping[Metric, float]:
    """The spread of each metric's logarithms over all groups: the root of the mean square."""
    squares: dict[Metric, list[float]] = {}
    for figure in figures:
        if figure.metric != "error rate" and not figure.missing:
            spread = log_spread(figure.before, figure.now)
            if spread is not None:
                squares.setdefault(figure.metric, []).append(spread**2)
    return {metric: statistics.fmean(values) ** 0.5 for metric, values in squares.items()}


def _changes(figure: _Figure, spreads: Mapping[Metric, float]) -> Iterator[Change]:
    """The change of a figure, or nothing where it cannot be compared."""
    if figure.missing:
        return
    before, now = center(figure.before), center(figure.now)
    if figure.metric == "error rate":
        change, noise = now - before, _noise_of_rates(figure.group, figure.before, figure.now)
    else:
        change = now / before - 1 if before else (0.0 if now == before else 1.0)
        noise = _noise_of_times(figure, spreads)
    is_noise, is_more = noise.holds(change), change > 0
    is_better = is_more == (figure.metric == "throughput")
    yield Change(
        step=figure.group.step,
        cell=figure.group.cell,
        metric=figure.metric,
        before=before,
        now=now,
        change=change,
        noise=noise,
        is_regression=not is_noise and not is_better,
        is_improvement=not is_noise and is_better,
    )


def _noise_of_times(figure: _Figure, spreads: Mapping[Metric, float]) -> Band:
    if figure.metric not in spreads:
        return symmetric_band(DEFAULT_BANDS[figure.metric])
    own = log_spread(figure.before, figure.now) or 0.0
    return band(max(own, spreads[figure.metric]), len(figure.before), len(figure.now), LEAST_BAND)


def _noise_of_rates(group: _Group, before: Sequence[float], now: Sequence[float]) -> Band:
    """What counting explains, or the spread of the repeats where there are enough of them and it is wider."""
    failed = sum(one.requests - one.ok for one in (*group.before, *group.now))
    counted = rate_band(failed, *(sum(one.requests for one in side) for side in (group.before, group.now)))
    return symmetric_band(max(counted, plain_band(before, now)))


def _differences(now: Run, before: Run) -> Iterator[tuple[str, str, str]]:
    """What is allowed to differ and does: (what, before, now)."""
    pairs = {
        "trtforge": (before.environment.trtforge, now.environment.trtforge),
        "server": tuple(f"{run.server.name} {run.server.version}" for run in (before, now)),
        "model": (before.model.name, now.model.name),
        "model version": (before.model.version, now.model.version),
        "artifact": (_short(before.model.artifact_sha256), _short(now.model.artifact_sha256)),
        "traffic's duration": (f"{before.traffic.duration_s:g} s", f"{now.traffic.duration_s:g} s"),
    }
    for what, (was, is_now) in pairs.items():
        if was != is_now:
            yield what, was, is_now
    configs = [dict(_flat(run.model.config or {}, "")) for run in (before, now)]
    keys = [key for key in dict.fromkeys((*configs[0], *configs[1])) if configs[0].get(key) != configs[1].get(key)]
    for key in keys[:_MAX_CONFIG_CHANGES]:
        yield f"config {key}", configs[0].get(key, "-"), configs[1].get(key, "-")
    if len(keys) > _MAX_CONFIG_CHANGES:
        yield "config", f"{len(keys) - _MAX_CONFIG_CHANGES} more keys", "differ"


def _flat(value: object, key: str) -> Iterator[tuple[str, str]]:
    """The leaves of a JSON value by their dotted place."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _flat(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for number, item in enumerate(value):
            yield from _flat(item, f"{key}[{number}]")
    else:
        yield key, str(value)


def _place(run: Run) -> str:
    return "the client's machine" if run.server.is_local else "another machine"


def _listed(items: Sequence[str]) -> str:
    return ", ".join(items) or "none"


def _short(sha256: str | None) -> str:
    return sha256[:12] if sha256 else "unknown"
