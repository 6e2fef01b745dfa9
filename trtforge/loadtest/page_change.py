"""The part of the page that compares the run with a baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trtforge.loadtest import charts
from trtforge.loadtest.charts import Shift
from trtforge.loadtest.compare import Change, Comparison
from trtforge.loadtest.page_figures import milliseconds, per_second, share
from trtforge.report.markup import Column, Html, block, el, fold, long_table, note, section, table

_BANDS = {
    "repeats": "The band is what the repeats of both runs explain (99 %), at least 3 %.",
    "default": "One of the runs has fewer than three repeats, so the noise is unknown; the band is a default.",
}


def comparison(found: Comparison) -> Html:
    """Every change with its noise band; the steps' own on a chart."""
    names = _short_names([name for change in found.changes for name in (change.step, change.cell or "all")])
    whole = [change for change in found.changes if change.cell is None and change.metric != "error rate"]
    shifts = [Shift(f"{names[c.step]}: {c.metric}", c.change, c.noise, _kind(c)) for c in whole]
    chart = charts.shift_chart(shifts, "change against the baseline, %")
    about = note(f"Baseline: {found.baseline}, of {found.started_at}. {_BANDS[found.noise]}")
    columns = [
        Column("Load"),
        Column("Length and batch"),
        Column("Figure"),
        *(Column(name, "number") for name in ("Before", "Now", "Change", "Noise")),
        Column(""),
    ]
    ranked = sorted(found.changes, key=lambda change: (not change.is_regression, change.cell is not None))
    not_compared = fold("not compared", el("ul", *(el("li", text) for text in found.not_compared)))
    differences = table(
        [Column("What"), Column("Baseline", "name"), Column("Now", "name")], [list(row) for row in found.differences]
    )
    return section(
        "comparison",
        "Against the baseline",
        chart,
        about,
        long_table(columns, [_row(change, names) for change in ranked], keep=20),
        not_compared if found.not_compared else "",
        block("What differs", differences),
    )


def change_texts(change: Change) -> tuple[str, str, str, str]:
    """Before, now, change and noise, as text; of error rates the change is in percentage points."""
    if change.metric == "error rate":
        points = f"{100 * change.change:+.2f} points"
        return share(change.before), share(change.now), points, f"± {100 * change.noise.high:.2f}"
    write = per_second if change.metric == "throughput" else milliseconds
    return write(change.before), write(change.now), f"{100 * change.change:+.1f} %", str(change.noise)


def _row(change: Change, names: Mapping[str, str]) -> list[str]:
    kind = _kind(change)
    mark = {"worse": el("span", "regression", class_="mark bad"), "better": el("span", "better", class_="mark good")}
    return [names[change.step], names[change.cell or "all"], change.metric, *change_texts(change), mark.get(kind, "")]


def _short_names(names: Sequence[str]) -> dict[str, str]:
    """Without the batch size, where all that name one name the same."""
    parts = {name: name.partition(", batch ") for name in names}
    sizes = {size for _, comma, size in parts.values() if comma}
    return {name: first if len(sizes) == 1 else name for name, (first, _, _) in parts.items()}


def _kind(change: Change) -> charts.ShiftKind:
    return "worse" if change.is_regression else "better" if change.is_improvement else "same"
