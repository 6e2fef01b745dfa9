"""The page of a method table: a bar per combination on a logarithmic axis, the rows, and what was measured on what.

The height of a bar is the loss, 1 - cosine of the worst output: the shorter, the better. The axis begins at a whole
decade below the smallest loss, so heights compare in decades and not in ratios; a loss of 0 has no bar.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from trtforge.method_table import MethodRow, MethodTable, titles
from trtforge.report import figures
from trtforge.report.document import document, resource
from trtforge.report.markup import Column, Html, block, code, el, join, note, section, table
from trtforge.report.summary import metric_title, metric_writer

# The chart's geometry in SVG user units.
_WIDTH, _HEIGHT = 1040, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 6, 22, 48
_BAR_SHARE = 0.42
# log10 of the axis' ends where every loss is 0.
_EMPTY_AXIS = (-6, 0)


def render_methods(found: MethodTable) -> str:
    """The page; equal tables give equal pages.

    Returns:
        The text of an HTML file; its encoding is UTF-8.
    """
    body = el(
        "main",
        _header(found),
        _key_figures(found),
        section("chart", "Loss", _legend(), _chart(found), _about(found)),
        section("methods", "Methods", _rows(found), _costs(found)),
        section("recipe", "Recipe of the best", _recipe(found)),
        section("conditions", "Conditions", _conditions(found)),
    )
    return document(f"{found.model}: calibration methods", resource("style.css") + resource("methods.css"), body)


def _header(found: MethodTable) -> Html:
    return el(
        "header",
        el("p", f"trtforge {found.versions['trtforge']} method table", class_="kicker"),
        el("h1", found.model),
        el("p", el("span", "int8", class_="tag"), el("span", "the rest in fp32", class_="tag"), class_="tags"),
    )


def _key_figures(found: MethodTable) -> Html:
    best = found.best_row
    cards: list[tuple[str, str, str]] = [("Best method", best.method, ", ".join(titles(best.weights, best.smooth)))]
    cards.append(("Cosine to fp32", _cosine(best), f"1 - cosine {best.loss:.1e}"))
    for name, value in list(best.metrics.items())[:2]:
        write = metric_writer(name)
        exact = found.reference_metrics.get(name)
        cards.append((metric_title(name), write(value), "" if exact is None else f"fp32 {write(exact)}"))
    observed = f"{figures.count(found.tensors, 'activation')}, {figures.count(found.calibration.samples, 'sample')}"
    cards.append(("One pass for all", figures.seconds(found.pass_seconds), observed))
    cards.append(("Peak memory", figures.size(found.peak_rss_bytes), "the largest process up to its end"))
    items = (el("div", el("dt", title), el("dd", value), el("dd", sub, class_="sub")) for title, value, sub in cards)
    return el("dl", *items, class_="key", style=f"--columns:{len(cards)}")


def _legend() -> Html:
    entries = (("plain", "plain"), ("smoothed", "smoothed (smooth: auto)"), ("best", "best"))
    return el("ul", *(el("li", el("i", class_=f"swatch {name}"), text) for name, text in entries), class_="legend")


def _chart(found: MethodTable) -> Html:
    low, high = _axis([row.loss for row in found.rows if row.is_finite])
    groups: dict[tuple[str, str], list[MethodRow]] = {}
    for row in sorted(found.rows, key=lambda row: row.weights):
        groups.setdefault((row.method, row.weights), []).append(row)
    pitch = (_WIDTH - _LEFT - _RIGHT) / len(groups)
    parts = [_grid(low, high)]
    for index, ((method, weights), rows) in enumerate(groups.items()):
        left = _LEFT + index * pitch
        for side, row in enumerate(rows):
            x = left + pitch * (0.5 - _BAR_SHARE * len(rows) / 2 + _BAR_SHARE * side)
            parts.append(_bar(row, x, pitch * _BAR_SHARE, low, high, row is found.best_row))
        for y, text in ((18, method), (34, weights.replace("_", " "))):
            style = "axis" if text == method else None
            parts.append(
                el(
                    "text",
                    text,
                    x=f"{left + pitch / 2:.1f}",
                    y=_HEIGHT - _BOTTOM + y,
                    text_anchor="middle",
                    class_=style,
                )
            )
    drawing = el(
        "svg",
        *parts,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        style=f"width:{_WIDTH}px",
        role="img",
        aria_label=f"1 - cosine of {len(found.rows)} combinations; the table below holds the same figures",
    )
    return el("div", drawing, class_="chart")


def _axis(losses: Sequence[float]) -> tuple[int, int]:
    """log10 of the axis' ends, whole decades; the smallest loss stands a little above the lower one."""
    positive = [math.log10(loss) for loss in losses if loss > 0.0]
    if not positive:
        return _EMPTY_AXIS
    low = math.floor(min(positive) - 0.15)
    return low, max(math.ceil(max(positive)), low + 1)


def _grid(low: int, high: int) -> Html:
    parts = []
    for decade in range(low, high + 1):
        y = f"{_y(10.0**decade, low, high):.1f}"
        parts.append(el("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y, class_="grid"))
        parts.append(el("text", f"{10.0**decade:g}", x=_LEFT - 8, y=f"{float(y) + 4:.1f}", text_anchor="end"))
    parts.append(el("text", "1 - cosine", x=4, y=12, class_="axis"))
    return join(parts)


def _bar(row: MethodRow, x: float, width: float, low: int, high: int, is_best: bool) -> Html:
    """A bar with its value above; where there is nothing to draw, a word at the axis."""
    style = "plain" if row.smooth == "none" else "smoothed"
    bottom = _HEIGHT - _BOTTOM
    if row.is_finite and row.loss > 0.0:
        top, text = _y(row.loss, low, high), f"{row.loss:.1e}"
    else:
        top, text = float(bottom), "exact" if row.is_finite else "NaN"
    return el(
        "g",
        el("title", f"{row.label}: {text}"),
        el("rect", x=f"{x + 1:.1f}", y=f"{top:.1f}", width=f"{width - 2:.1f}", height=f"{bottom - top:.1f}"),
        el("text", text, x=f"{x + width / 2:.1f}", y=f"{top - 5:.1f}", text_anchor="middle"),
        class_=f"method {style} best" if is_best else f"method {style}",
    )


def _y(value: float, low: int, high: int) -> float:
    return _TOP + (high - math.log10(value)) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)


def _about(found: MethodTable) -> Html:
    outputs = len(found.best_row.outputs)
    which = "the output" if outputs == 1 else f"the worst of {outputs} outputs"
    return note(
        f"1 - mean cosine of {which} against the fp32 graph, on a logarithmic axis; the shorter the bar, the better. "
        "Graphs in ONNX Runtime, Q/DQ computed as written; no engine was run."
    )


def _rows(found: MethodTable) -> Html:
    metrics = list(found.reference_metrics)
    columns = [Column("Method"), Column("Weights"), Column("Smoothing")]
    columns += [Column(title, "number") for title in ("Cosine", "Worst sample", "SQNR")]
    columns += [Column(metric_title(name), "number") for name in metrics]
    columns += [Column(title, "number") for title in ("Nodes in INT8", "Smoothed", "Seconds", "Memory")]
    columns.append(Column(""))
    return table(columns, [_cells(row, row is found.best_row, metrics) for row in found.rows])


def _cells(row: MethodRow, is_best: bool, metrics: Sequence[str]) -> list[str]:
    return [
        row.method,
        *titles(row.weights, row.smooth),
        _cosine(row),
        figures.cosine(row.worst.cosine_min),
        figures.decibel(row.worst),
        *(metric_writer(name)(row.metrics[name]) for name in metrics),
        f"{row.quantized_nodes:,}",
        f"{row.smoothed_tensors:,}",
        f"{row.seconds:.2f}",
        figures.size(row.state_bytes),
        el("span", "best", class_="mark good") if is_best else "",
    ]


def _cosine(row: MethodRow) -> str:
    return figures.cosine(row.worst.cosine) if row.is_finite else "NaN"


def _costs(found: MethodTable) -> Html:
    return note(
        f"Best by {found.criterion}. Seconds: choosing ranges and smoothing, beside the one pass of "
        f"{figures.seconds(found.pass_seconds)} that all rows share. Memory: what calibration holds for the row; "
        "it does not grow with the samples."
    )


def _recipe(found: MethodTable) -> Html:
    """The YAML, line by line: names in it may hold anything."""
    lines = found.best_recipe().splitlines()
    return el("pre", *(join([code(line), Html("\n")]) for line in lines))


def _conditions(found: MethodTable) -> Html:
    columns = [Column("What"), Column("Samples", "number"), Column("SHA-256", "name")]
    rows = [
        ["Model", "", code(found.model_sha256)],
        ["Calibration data", f"{found.calibration.samples:,}", code(found.calibration.sha256)],
        ["Evaluation data", f"{found.evaluation.samples:,}", code(found.evaluation.sha256)],
    ]
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    fields = ("method", "weights", "smooth")
    shared = found.recipe.model_dump(mode="json", exclude_defaults=True, exclude=set(fields))
    options = "; ".join(f"{name}: {value}" for name, value in shared.items()) or "the defaults"
    return join(
        [
            table(columns, rows),
            block("Versions", el("p", versions)),
            block("Recipe, but for method, weights and smooth", el("p", options)),
            note(f"Evaluated at batch {found.batch}."),
        ]
    )
