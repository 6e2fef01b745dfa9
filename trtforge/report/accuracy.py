"""Accuracy: every output at every batch size, and what each step of the build costs.

fp32 reference -> graph passes and casts (before Q/DQ) -> Q/DQ (the candidate). The loss of a step is the growth of
1 - cosine.
"""

from __future__ import annotations

from trtforge.manifest import Manifest, ParityInfo
from trtforge.parity import OutputParity, misses_budget
from trtforge.report import figures
from trtforge.report.markup import NOTHING, Column, Html, block, code, el, long_table, note, section, table
from trtforge.report.summary import all_outputs, metric_title, metric_writer

# An SQNR bar is full at this many dB: INT8 with a well chosen scale reaches about 40 dB on one tensor.
_FULL_BAR_DB = 40.0


def accuracy(manifest: Manifest) -> Html:
    """The section on accuracy, or nothing when nothing was compared."""
    parity = manifest.parity
    return section(
        "accuracy", "Accuracy", _outputs(parity), _metrics(parity), _steps(parity), _worst_nodes(parity), _basis(parity)
    )


def _outputs(parity: ParityInfo) -> Html:
    columns = [
        Column("Output", "name"),
        Column("Batch", "number"),
        Column("Samples", "number"),
        Column("Cosine, mean", "number"),
        Column("Cosine, worst sample", "number"),
        Column("SQNR", "number"),
        Column("Largest error", "number"),
        Column("Budget"),
    ]
    found = list(all_outputs(parity))
    if len(found) > 15:
        found.sort(key=lambda item: item[3].cosine)
    rows = [
        [
            code(name),
            "-" if batch is None else str(batch),
            f"{samples:,}",
            figures.cosine(output.cosine),
            figures.cosine(output.cosine_min),
            figures.decibel(output),
            figures.significant(output.max_abs_error),
            _mark(output, parity),
        ]
        for batch, samples, name, output in found
    ]
    budget = f", budget {parity.budget:g}" if parity.figure is None else ""
    return block(f"Outputs against fp32{budget}", long_table(columns, rows))


def _mark(output: OutputParity, parity: ParityInfo) -> Html:
    if output.nan:
        return el("span", "NaN or Inf", class_="mark bad")
    if parity.figure is not None:
        return Html("-")
    is_missed = misses_budget(output, parity.budget)
    return el("span", "missed" if is_missed else "met", class_="mark bad" if is_missed else "mark good")


def _metrics(parity: ParityInfo) -> Html:
    keys = [
        key for key in ("fp32", "before_qdq", "candidate") if any(key in values for values in parity.metrics.values())
    ]
    titles = {"fp32": "fp32 reference", "before_qdq": "Before Q/DQ", "candidate": "Candidate"}
    columns = [Column("Metric", "name"), *(Column(titles[key], "number") for key in keys), Column("Change", "number")]
    rows = []
    for name, values in parity.metrics.items():
        write = metric_writer(name)
        change = "-"
        if "fp32" in values and "candidate" in values:
            difference = values["candidate"] - values["fp32"]
            change = f"{100 * difference:+.2f} points" if name == "top1" else f"{difference:+.4g}"
        rows.append([metric_title(name), *(write(values[key]) if key in values else "-" for key in keys), change])
    budget = f"The budget is {parity.budget:g}, on {metric_title(parity.figure)}." if parity.figure is not None else ""
    return block("Task metrics", table(columns, rows), note(budget) if budget else "")


def _steps(parity: ParityInfo) -> Html:
    columns = [
        Column("Output", "name"),
        Column("1 - cosine before Q/DQ", "number"),
        Column("SQNR", "number"),
        Column("1 - cosine with Q/DQ", "number"),
        Column("SQNR", "number"),
        Column("Cost of Q/DQ", "number"),
    ]
    rows = []
    for name, before in parity.before_qdq.items():
        after = parity.outputs.get(name)
        if after is not None:
            rows.append(
                [
                    code(name),
                    figures.significant(1.0 - before.cosine),
                    figures.decibel(before),
                    figures.significant(1.0 - after.cosine),
                    figures.decibel(after),
                    figures.significant(before.cosine - after.cosine),
                ]
            )
    about = note("Before Q/DQ, the graph has been through every pass and cast; the rest of the loss is INT8's.")
    return block("What each step costs", long_table(columns, rows), about) if rows else NOTHING


def _worst_nodes(parity: ParityInfo) -> Html:
    rows = []
    for entry in parity.worst_nodes:
        decibels = entry.sqnr_db
        width = 0.0 if decibels is None else max(0.0, min(1.0, decibels / _FULL_BAR_DB))
        bar = el("span", el("i", style=f"width:{100 * width:.1f}%"), class_="meter")
        rows.append([code(entry.node), "not finite" if decibels is None else f"{decibels:.1f} dB", bar])
    content = table([Column("Node", "name"), Column("SQNR", "number"), Column("")], rows)
    explained = note("Error of each node's own output against the fp32 graph, worst first: where accuracy is lost.")
    return block("Worst nodes", content, explained) if rows else NOTHING


def _basis(parity: ParityInfo) -> Html:
    if not parity.outputs and not parity.batches:
        return NOTHING
    parts = [f"Reference: {parity.reference}. Candidate: {parity.candidate}."]
    if parity.samples:
        parts.append(f" {figures.count(parity.samples, 'sample')}.")
    decides = "; the mean decides" if parity.figure is None else ""
    parts.append(f" Cosines are per sample over the flattened output, rounded down{decides}.")
    if parity.note and parity.passed:  # a verdict that is not passed has it
        parts.append(f" {parity.note}")
    return note(*parts)
