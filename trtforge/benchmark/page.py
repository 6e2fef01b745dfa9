"""A run as one page that needs nothing else: tables and charts of what was measured, with its conditions."""

from __future__ import annotations

import json
from collections.abc import Sequence

from trtforge.benchmark.case import BlockCase
from trtforge.benchmark.charts import latency_chart, legend, roofline_chart
from trtforge.benchmark.implementations import MODES, Mode
from trtforge.benchmark.results import PLUGIN, CaseResult, Measurement, RunResult
from trtforge.benchmark.roofline import Peaks, bound, gbps, tflops
from trtforge.benchmark.tensorrt_peers import TENSORRT_PEERS
from trtforge.benchmark.torch_peers import TORCH_PEERS
from trtforge.report.document import document, resource
from trtforge.report.markup import NOTHING, Column, Html, block, code, el, note, section, table

_MODE_TITLES: dict[Mode, str] = {"call": "As called, launches included", "graph": "As one CUDA graph: device time"}


def render_page(run: RunResult) -> str:
    """The page of a run: the text of an HTML file, in UTF-8."""
    heading = f"Transformer blocks on {run.conditions.get('card', 'unknown card')}"
    names = _names(run)
    peaks = peaks_of(run)
    sections = [
        section(f"mode-{mode}", _MODE_TITLES[mode], *_mode_blocks(run, names, peaks, mode))
        for mode in MODES
        if any(m.mode == mode for result in run.cases for m in result.measurements)
    ]
    body = el(
        "main",
        el("p", "trtforge bench plugin", class_="kicker"),
        el("h1", heading),
        _wrong(run),
        *sections,
        section("implementations", "Implementations", _implementations(run)),
        section("failures", "Not timed", _failures(run)),
        section("conditions", "Conditions", _conditions(run)),
    )
    style = resource("style.css") + resource("bench.css", "trtforge.benchmark")
    return document(heading, style, body)


def peaks_of(run: RunResult) -> Peaks | None:
    """The peaks that a run noted."""
    peaks = run.conditions.get("peaks")
    return Peaks(**peaks) if isinstance(peaks, dict) else None


def descriptions(run: RunResult) -> dict[str, str]:
    """What each implementation of a run is."""
    known = {PLUGIN: "trtforge's kernels, launched by themselves", **TORCH_PEERS, **TENSORRT_PEERS}
    return {name: known.get(name, "trtforge's kernels, always by that strategy") for name in _names(run)}


def figures(case: BlockCase, measured: Measurement, peaks: Peaks | None) -> tuple[str, ...]:
    """Median, 10th and 90th percentile in microseconds, TFLOP/s, GB/s and share of the roofline, as text."""
    summary = measured.summary
    if summary is None:
        return ("-",) * 6
    limit = None if peaks is None else bound(case, peaks)
    share = "-" if limit is None else f"{100 * limit.time_us / summary.median_us:.0f} % ({limit.limited_by})"
    times = (f"{value:.1f}" for value in (summary.median_us, summary.p10_us, summary.p90_us))
    rates = (f"{tflops(case, summary.median_us):.1f}", f"{gbps(case, summary.median_us):.0f}")
    return (*times, *rates, share)


def speedup_text(result: CaseResult, measured: Measurement) -> str:
    """How many times faster the plugin is than a peer."""
    if measured.implementation == PLUGIN:
        return ""
    ratio = result.speedup(measured.implementation, measured.mode)
    return "-" if ratio is None else f"{ratio:.2f} x"


def _mode_blocks(run: RunResult, names: Sequence[str], peaks: Peaks | None, mode: Mode) -> list[Html]:
    blocks = []
    for title, results in _groups(run).items():
        chart = latency_chart(results, names, mode)
        rows = [
            [code(result.case.key), m.implementation, *figures(result.case, m, peaks), speedup_text(result, m)]
            for result in results
            for m in result.measurements
            if m.mode == mode and m.samples_us
        ]
        columns = [
            Column("Case"),
            Column("Implementation"),
            *(Column(name, "number") for name in ("median us", "p10", "p90", "TFLOP/s", "GB/s", "of the roofline")),
            Column("plugin is faster by", "number"),
        ]
        blocks.append(block(title, chart, legend(names) if chart else NOTHING, table(columns, rows)))
    if peaks is not None:
        blocks.append(block("Roofline of the fp16 and bf16 cases", roofline_chart(run.cases, peaks, mode)))
    return blocks


def _groups(run: RunResult) -> dict[str, list[CaseResult]]:
    """Cases that belong in one chart."""
    groups: dict[str, list[CaseResult]] = {}
    for result in run.cases:
        case = result.case
        title = f"H {case.width}, {case.num_heads} heads, F {case.inner_width}, {case.dtype}, mask {case.mask}"
        groups.setdefault(title, []).append(result)
    return groups


def _implementations(run: RunResult) -> Html:
    rows = [[name, about] for name, about in descriptions(run).items()]
    return table([Column("Name"), Column("What it is", "name")], rows)


def _names(run: RunResult) -> list[str]:
    return list(dict.fromkeys(m.implementation for result in run.cases for m in result.measurements))


def _wrong(run: RunResult) -> Html:
    if not run.wrong:
        return NOTHING
    return el(
        "div", el("strong", "Wrong results"), el("ul", *(el("li", text) for text in run.wrong)), class_="warnings"
    )


def _failures(run: RunResult) -> Html:
    rows = [
        [code(result.case.key), m.implementation, m.mode, m.failure]
        for result in run.cases
        for m in result.measurements
        if m.failure is not None
    ]
    return table([Column("Case"), Column("Implementation"), Column("Mode"), Column("Why", "name")], rows)


def _conditions(run: RunResult) -> Html:
    rows = [[code(name), code(json.dumps(value))] for name, value in run.conditions.items()]
    about = note(
        "CUDA events around one call after a write of twice the L2 cache; medians of all samples. TFLOP/s count the "
        "products alone, GB/s the bytes that any implementation must move, and the roofline is the larger of the two "
        "times that these take at the card's peaks."
    )
    return el("div", about, table([Column("What"), Column("Value", "name")], rows))
