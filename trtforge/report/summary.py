"""The top of the report: the verdict, what it rests on, key figures, warnings.

`passed` None, or `verified` False, is NOT VERIFIED: nothing is claimed that was not compared.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

from trtforge.manifest import Manifest, ParityInfo
from trtforge.parity import OutputParity, misses_budget
from trtforge.report import figures
from trtforge.report.markup import NOTHING, Html, command, el
from trtforge.spec import CALIBRATED

ENGINE_NAME = "model.engine"
GRAPH_NAME = "model.onnx"
RTX = "tensorrt-rtx"
_CARDS_PER_ROW = 6


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """The word of the verdict, its class in the style sheet and what it means."""

    word: str
    style: str
    meaning: str


def all_outputs(parity: ParityInfo) -> Iterator[tuple[int | None, int, str, OutputParity]]:
    """(batch, samples, output name, figures) of everything that was compared; batch None when it is not recorded."""
    if not parity.batches:
        for name, output in parity.outputs.items():
            yield None, parity.samples, name, output
    for run in parity.batches:
        for name, output in run.outputs.items():
            yield run.batch, run.samples, name, output


def verdict(parity: ParityInfo) -> Verdict:
    """PASSED, FAILED or NOT VERIFIED, and why."""
    if not parity.verified or parity.passed is None:
        reason = f" ({parity.note.rstrip('.')})" if parity.note else ""
        return Verdict("NOT VERIFIED", "unknown", f"No output was compared{reason}, so its accuracy is not known.")
    budget = f"{parity.budget:g}"
    if parity.figure is not None:
        value = parity.metrics.get(parity.figure, {}).get("candidate", math.nan)
        meaning = f"The budget is {budget} on {metric_title(parity.figure)}, which is {value:.6g}."
        word, style = ("PASSED", "good") if parity.passed else ("FAILED", "bad")
        return Verdict(word, style, f"{meaning} Compared with: {parity.reference}.")
    if parity.passed:
        meaning = f"Every output is finite and its mean cosine reaches the budget of {budget}."
        return Verdict("PASSED", "good", f"{meaning} Compared with: {parity.reference}.")
    found = []
    for batch, _, name, output in all_outputs(parity):
        if misses_budget(output, parity.budget):
            where = "" if batch is None else f" at batch {batch}"
            what = "has NaN or Inf" if output.nan else f"has a mean cosine of {figures.cosine(output.cosine)}"
            found.append(f"Output {name} {what}{where}.")
    more = f" {len(found) - 3} more outputs miss it." if len(found) > 3 else ""
    meaning = " ".join([*found[:3]]) + more
    return Verdict("FAILED", "bad", f"The budget is a mean cosine of {budget}. {meaning} {parity.note or ''}".strip())


def header(manifest: Manifest) -> Html:
    """Model, verdict, and what was run."""
    result = verdict(manifest.parity)
    made_by = f"{manifest.backend.name} {manifest.backend.version}"
    return el(
        "header",
        el("p", f"trtforge {manifest.trtforge_version} build report", class_="kicker"),
        el("h1", manifest.model.name),
        el(
            "p",
            el("span", manifest.precision.requested, class_="tag"),
            el("span", made_by, class_="tag"),
            *(el("span", target, class_="tag") for target in manifest.targets),
            class_="tags",
        ),
        el(
            "div",
            el("strong", result.word),
            el("div", el("p", result.meaning), _what_was_run(manifest)),
            class_=f"verdict {result.style}",
        ),
    )


def warnings(manifest: Manifest) -> Html:
    """What the build warned about."""
    if not manifest.warnings:
        return NOTHING
    items = (el("li", warning) for warning in manifest.warnings)
    title = figures.count(len(manifest.warnings), "warning")
    return el("aside", el("strong", title), el("ul", *items), class_="warnings")


def remedies(manifest: Manifest) -> Html:
    """What was done about nodes that the builder refused, or has no fused kernel for."""
    if not manifest.remedies:
        return NOTHING
    items = (el("li", el("code", e.node), f" ({e.op}): {e.reason}; {e.remedy}") for e in manifest.remedies)
    title = f"{figures.count(len(manifest.remedies), 'node')} not taken as written"
    return el("aside", el("strong", title), el("ul", *items), class_="warnings")


def key_figures(manifest: Manifest) -> Html:
    """The figures that decide whether to read on."""
    cards = [*_accuracy_cards(manifest.parity), *_size_cards(manifest), *_plan_cards(manifest)]
    columns = len(cards) if len(cards) <= _CARDS_PER_ROW else -(-len(cards) // 2)
    items = (el("div", el("dt", title), el("dd", value), el("dd", sub, class_="sub")) for title, value, sub in cards)
    return el("dl", *items, class_="key", style=f"--columns:{columns}")


def _what_was_run(manifest: Manifest) -> Html:
    parity = manifest.parity
    if not parity.verified or parity.passed is None:
        return el(
            "p", "To measure it, give samples with ", command("--eval"), " or to ", command("trtforge verify"), "."
        )
    if "engine" in parity.candidate:
        return el("p", f"What was run: {parity.candidate}.")
    return el(
        "p",
        el("b", f"What was run: {parity.candidate}, not the engine."),
        f" The figures are those of {GRAPH_NAME}, from which the engine was compiled; the engine itself has not been "
        "run, which takes a GPU.",
    )


def _accuracy_cards(parity: ParityInfo) -> Iterator[tuple[str, str, str]]:
    outputs = [output for _, _, _, output in all_outputs(parity)]
    if outputs:
        lowest = min(output.cosine for output in outputs)
        scope = "" if len(outputs) == 1 else "lowest mean; "
        worst = min(output.cosine_min for output in outputs)
        budget = f"budget {parity.budget:g}, " if parity.figure is None else ""
        detail = f"{scope}{budget}worst sample {figures.cosine(worst)}"
        missed = parity.figure is None and any(misses_budget(output, parity.budget) for output in outputs)
        value = el("span", figures.cosine(lowest), class_="mark bad") if missed else figures.cosine(lowest)
        yield "Cosine to fp32", value, detail
    for name, values in list(parity.metrics.items())[:2]:
        if "candidate" in values:
            write = metric_writer(name)
            steps = [
                f"{step} {write(values[key])}"
                for key, step in (("fp32", "fp32"), ("before_qdq", "before Q/DQ"))
                if key in values
            ]
            yield metric_title(name), write(values["candidate"]), ", ".join(steps)


def metric_title(name: str) -> str:
    """How a metric is called on the page."""
    return "Top-1" if name == "top1" else name


def metric_writer(name: str) -> Callable[[float], str]:
    """How a metric's value is printed: top1 as a percentage."""
    return figures.percent if name == "top1" else "{:.5g}".format


def _size_cards(manifest: Manifest) -> Iterator[tuple[str, str, str]]:
    engine, graph = manifest.files.get(ENGINE_NAME), manifest.files.get(GRAPH_NAME)
    if engine is not None:
        yield "Engine", figures.size(engine.bytes), "" if graph is None else f"{GRAPH_NAME} {figures.size(graph.bytes)}"
    for dtype, stored in manifest.precision.weights.items():
        title = f"Weights in {figures.type_name(dtype)}"
        detail = f"{figures.size(stored.bytes)} with scales, instead of {figures.size(stored.float_bytes)}"
        yield title, f"{stored.count:,}", detail


def _plan_cards(manifest: Manifest) -> Iterator[tuple[str, str, str]]:
    plan = manifest.plan
    if plan.unreadable is not None:
        yield "Kernels", "not read", "the plan could not be read"
        return
    gemms = ", ".join(f"{number} {figures.type_name(dtype)}" for dtype, number in plan.gemm.items() if number)
    yield "Kernels", f"{plan.kernels:,}", f"GEMM and convolution: {gemms}" if gemms else ""
    shares = manifest.precision.gemm_flops_fraction
    if shares:
        asked_for = manifest.precision.requested.partition("+")[0]
        # The products of a weight-only build run in its float type.
        dtype = asked_for if asked_for in CALIBRATED else max(shares, key=lambda key: shares[key])
        others = ", ".join(
            f"{figures.percent(share)} {figures.type_name(key)}"
            for key, share in shares.items()
            if key != dtype and share > 0
        )
        yield f"GEMM FLOPs in {figures.type_name(dtype)}", figures.percent(shares.get(dtype, 0.0)), others
    yield "Fused attention", f"{plan.fused_attention:,}", "kernels, read from the compiled plan"
