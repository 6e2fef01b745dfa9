"""What `trtforge loadtest` prints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtforge.cli.render import plain, print_table

if TYPE_CHECKING:
    from trtforge.load_testing import LoadTestResult
    from trtforge.loadtest.compare import Comparison
    from trtforge.loadtest.results import Latency, Measurement, Run, Step

# Kinds of errors that are printed of a measurement; `run.json` has more.
_MAX_ERRORS = 5


def result_as_json(result: LoadTestResult) -> dict[str, Any]:
    """`run.json`, with the comparison and the verdict."""
    comparison = None if result.comparison is None else result.comparison.to_dict()
    content = {**result.run.model_dump(mode="json"), "comparison": comparison}
    return {**content, "passed": not result.problems, "problems": list(result.problems)}


def print_result(result: LoadTestResult, output: Path | None) -> None:
    """The result for people.

    Args:
        result: what was measured.
        output: the folder that holds it; None without one.
    """
    run_ = result.run
    server = f"{run_.server.name} {run_.server.version}".strip()
    place = "on this machine" if run_.server.is_local else "on another machine"
    head = f"{run_.model.name} on {run_.server.url} ({server}, {place}), {run_.protocol}"
    sys.stdout.write(f"{plain(head)}\n")
    _print_steps(run_)
    for step in run_.steps:
        _print_cells(step)
    _print_errors(run_)
    if result.comparison is not None:
        _print_comparison(result.comparison)
    sys.stdout.write("what the figures mean\n")
    print_table(list(run_.definitions.items()))
    if any(one.client.is_saturated for step in run_.steps for one in step.measurements):
        sys.stderr.write(
            "warning: the client was at its limit in some steps, and their latencies hold its own delay: lower the "
            "load, or give the client a core of its own\n"
        )
    if output is not None and result.unwritten is None:
        sys.stdout.write(f"{plain(str(output))}: run.json, report.html\n")


def _print_steps(run_: Run) -> None:
    head = ("load", "requests", "errors", "answers/s", "p50 ms", "p95 ms", "p99 ms", "p99.9 ms")
    rows: list[tuple[str, ...]] = [(*head, "server batch", "queue ms", "compute ms")]
    for step in run_.steps:
        for one in step.measurements:
            name = step.key if run_.repeats == 1 else f"{step.key}, repeat {one.repeat}"
            figures = (name, str(one.requests), str(one.requests - one.ok), f"{one.throughput:.1f}")
            rows.append((*figures, *_percentiles(one.latency), *_server_figures(one)))
    print_table(rows)
    if any(one.latency.count and one.latency.too_few for step in run_.steps for one in step.measurements):
        sys.stdout.write("~: fewer than ten answers took longer, so that chance decides\n")


def _percentiles(latency: Latency) -> list[str]:
    cells = []
    for name in ("p50", "p95", "p99", "p99.9"):
        value = latency.percentiles_ms.get(name)
        cells.append("-" if value is None else f"{'~' if name in latency.too_few else ''}{value:.2f}")
    return cells


def _server_figures(one: Measurement) -> tuple[str, str, str]:
    """Mean batch size, queue and compute time of the model under test."""
    if not one.server.models:
        return "-", "-", "-"
    work = one.server.models[0]
    batch = f"{work.inferences / work.executions:.1f}" if work.executions else "-"
    times = (f"{value:.2f}" if value is not None else "-" for value in (work.queue_ms, work.compute_ms))
    return batch, next(times), next(times)


def _print_cells(step: Step) -> None:
    """Length buckets and batch sizes, and how far the objectives are met, of the last repeat."""
    one = step.measurements[-1]
    if len(one.cells) < 2 and not one.service_levels:
        return
    sys.stdout.write(f"{step.key}\n")
    rows = [("length", "batch", "requests", "p50 ms", "p99 ms", *(level.objective for level in one.service_levels))]
    for cell in one.cells:
        p50, _, p99, _ = _percentiles(cell.latency)
        levels = (f"{level.share:.2%}" if level.share is not None else "-" for level in cell.service_levels)
        rows.append((cell.bucket or "-", str(cell.batch), str(cell.requests), p50, p99, *levels))
    if one.service_levels:
        verdicts = (f"{level.share or 0:.2%}, {'met' if level.is_met else 'not met'}" for level in one.service_levels)
        rows.append(("all", "", str(one.requests), "", "", *verdicts))
    print_table(rows)


def _print_errors(run_: Run) -> None:
    for step in run_.steps:
        for one in step.measurements:
            for error in one.errors[:_MAX_ERRORS]:
                text = plain(f"{step.key}: {error.count} x {error.kind}: {error.text}")
                sys.stdout.write(f"{text}\n")
            if len(one.errors) > _MAX_ERRORS:
                sys.stdout.write(f"{step.key}: {len(one.errors) - _MAX_ERRORS} more kinds of errors\n")


def _print_comparison(comparison: Comparison) -> None:
    words = {(True, False): "REGRESSION", (False, True): "better"}
    for change in comparison.changes:
        word = words.get((change.is_regression, change.is_improvement), "ok")
        sys.stdout.write(f"{word}: {plain(change.name)}: {change.change:+.1%}, noise {change.noise}\n")
    for text in comparison.not_compared:
        sys.stdout.write(f"not compared: {plain(text)}\n")
