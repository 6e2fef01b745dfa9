"""The parts of the page that show what the server said: batches, where the time went, GPUs, tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal

from trtforge.loadtest import charts
from trtforge.loadtest.charts import Line, Point, Row
from trtforge.loadtest.page_figures import Names, milliseconds, pre, share
from trtforge.loadtest.results import Measurement, Run, Step
from trtforge.loadtest.server_side import ServerSecond
from trtforge.report.markup import NOTHING, Column, Html, block, code, fold, note, section, table


def batches(run: Run) -> Html:
    """Batch sizes: over time, and how often the server ran each."""
    lines = _per_second(run, lambda at: at.mean_batch)
    over_time = charts.line_chart(lines, ("seconds", "mean batch size"), "time", charts.WIDE)
    rows, names = [], Names(run)
    for step in run.steps:
        for name, sizes in _batch_sizes(step).items():
            total = sum(sizes.values())
            if total:
                mean = sum(batch * number for batch, number in sizes.items()) / total
                shown = tuple((f"batch {span}", 100 * number / total) for span, number in _spans(sizes))
                rows.append(Row(f"{names.step(step)}: {name}", shown, f"mean {mean:.2f}"))
    return section(
        "batches",
        "Batches",
        block("Mean batch size in every second", over_time, _legend(lines)) if over_time else NOTHING,
        block("Executions by batch size", charts.stack_chart(rows, "share of the executions, %")),
    )


def server_time(run: Run) -> Html:
    """The mean latency, split by the server's own clocks; what is left is the network, and the client."""
    rows, others, names = [], [], Names(run)
    for step in run.steps:
        one = step.measurements[-1] if step.measurements else None
        parts = _parts(one) if one else ()
        if one is not None and parts:
            total = one.latency.mean_ms
            rows.append(Row(names.step(step), parts, milliseconds(total)))
            others += [
                [names.step(step), code(work.name), f"{work.inferences:,}", f"{work.executions:,}"]
                + [milliseconds(ms) for ms in (work.queue_ms, work.compute_input_ms, work.compute_ms)]
                + [milliseconds(work.compute_output_ms), milliseconds(work.request_ms)]
                for work in one.server.models
            ]
    columns = [
        Column("Load"),
        Column("Model"),
        *(Column(name, "number") for name in ("Samples", "Batches", "Queue", "Input", "Compute", "Output", "Request")),
    ]
    about = note(
        "Means of a request in the last repeat, by the server's statistics of the model that was asked. "
        "Outside the server: what the client waited beyond that, in the network and in its own process."
    )
    if not rows:
        return NOTHING
    chart = charts.stack_chart(rows, "mean latency, ms")
    return section("server-time", "Server time against client time", chart, about, table(columns, others))


def gpus(run: Run) -> Html:
    """Use and memory of each GPU over time."""
    names = sorted({gpu for _, seconds in _timelines(run) for at in seconds for gpu in at.gpus})
    blocks = []
    for gpu in names:
        use = _per_second(run, partial(_gpu, gpu, "utilization", 100.0))
        memory = _per_second(run, partial(_gpu, gpu, "memory_bytes", 1e-9))
        shown = [
            charts.line_chart(use, ("seconds", "utilisation, %"), "time", charts.WIDE),
            charts.line_chart(memory, ("seconds", "memory, GB"), "time", charts.WIDE),
        ]
        blocks.append(block(f"GPU {gpu}", *shown, _legend(use or memory)))
    return section("gpus", "GPUs", *blocks)


def tokens(run: Run) -> Html:
    """Real tokens and padding that a text front counted."""
    rows, names = [], Names(run)
    for step in run.steps:
        counted = [one.server.tokens for one in step.measurements if one.server.tokens is not None]
        padded = sum(found.padded for found in counted)
        if padded:
            real = sum(found.real for found in counted)
            parts = (("real tokens", real / 1e3), ("padding", (padded - real) / 1e3))
            rows.append(Row(names.step(step), parts, f"{share(1 - real / padded)} padding"))
    return section("tokens", "Padded against real tokens", charts.stack_chart(rows, "thousand tokens"))


def missing(run: Run) -> list[str]:
    """Why figures of the server are not there."""
    texts = (one.server.missing for step in run.steps for one in step.measurements)
    return list(dict.fromkeys(text for text in texts if text))


def model_config(run: Run) -> Html:
    """The model's configuration as the server has it."""
    if run.model.config is None:
        return NOTHING
    return fold(f"configuration of {run.model.name}", pre(json.dumps(run.model.config, indent=1)))


def _parts(one: Measurement) -> tuple[tuple[str, float], ...]:
    """Where the mean latency of a measurement went, in ms; nothing where the server has no statistics."""
    if not one.server.models or one.latency.mean_ms is None:
        return ()
    work = one.server.models[0]
    spent = {
        "queue": work.queue_ms,
        "input": work.compute_input_ms,
        "compute": work.compute_ms,
        "output": work.compute_output_ms,
    }
    known = {name: ms for name, ms in spent.items() if ms is not None}
    rest = max(0.0, one.latency.mean_ms - sum(known.values()))
    return (*known.items(), ("outside the server", rest)) if known else ()


def _batch_sizes(step: Step) -> dict[str, dict[int, int]]:
    """Executions by batch size over the repeats of a step, of each model."""
    found: dict[str, dict[int, int]] = {}
    for one in step.measurements:
        for work in one.server.models:
            sizes = found.setdefault(work.name, {})
            for batch, number in work.batch_sizes.items():
                sizes[int(batch)] = sizes.get(int(batch), 0) + number
    return found


def _spans(sizes: Mapping[int, int]) -> list[tuple[str, int]]:
    """Executions by ranges of batch sizes that end at powers of two: a colour for every size would be too many."""
    spans: dict[int, int] = {}
    for batch, number in sorted(sizes.items()):
        end = 1 << max(batch - 1, 0).bit_length()
        spans[end] = spans.get(end, 0) + number
    return [(str(end) if end <= 2 else f"{end // 2 + 1}-{end}", number) for end, number in spans.items()]


def _timelines(run: Run) -> Iterator[tuple[Step, tuple[ServerSecond, ...]]]:
    """Whole seconds of the last repeat of each step."""
    for step in run.steps:
        for one in step.measurements[-1:]:
            seconds = tuple(at for at in one.server.seconds if 0 <= at.second < one.duration_s)
            if len(seconds) > 1:
                yield step, seconds


def _per_second(run: Run, value: Callable[[ServerSecond], float | None]) -> list[Line]:
    """A line for each step of what its last repeat shows, where there is anything."""
    lines, names = [], Names(run)
    for number, (step, seconds) in enumerate(_timelines(run)):
        points = [(at.second, found) for at in seconds if (found := value(at)) is not None]
        lines.append(Line(names.step(step), tuple(Point(second, y, "") for second, y in points), number))
    return [line for line in lines if line.points]


def _gpu(gpu: str, name: Literal["utilization", "memory_bytes"], factor: float, at: ServerSecond) -> float | None:
    use = at.gpus.get(gpu)
    value = getattr(use, name) if use else None
    return None if value is None else factor * value


def _legend(lines: Sequence[Line]) -> Html:
    return charts.legend([line.name for line in lines], [line.colour for line in lines])
