"""The search for the nodes that stay float: what quantizing each region alone costs, and every set that was tried."""

from __future__ import annotations

from trtforge.manifest import Manifest
from trtforge.report import figures
from trtforge.report.markup import NOTHING, Column, Html, block, el, long_table, names, note, section
from trtforge.report.precision import share_bar
from trtforge.sensitivity import NodeSensitivity, SensitivityInfo


def sensitivity(manifest: Manifest) -> Html:
    """The section, or nothing for a build that did not have to search."""
    info = manifest.sensitivity
    if info is None:
        return NOTHING
    return section("sensitivity", "Sensitivity", el("p", info.note), _shares(info), _regions(info), _tried(info))


def _shares(info: SensitivityInfo) -> Html:
    kept = sum(entry.flops_share for entry in info.nodes if entry.kept)
    lowered = sum(entry.flops_share for entry in info.nodes if not entry.kept)
    parts = [
        (
            figures.type_name(info.number_format),
            lowered,
            figures.percent(lowered),
            figures.type_class(info.number_format),
        ),
        ("kept float for the budget", kept, figures.percent(kept), "c6"),
    ]
    return block("FLOPs of the nodes that could be quantized", share_bar(parts))


def _regions(info: SensitivityInfo) -> Html:
    """One row per region, the one that costs most first."""
    regions: dict[str, list[NodeSensitivity]] = {}
    for entry in info.nodes:
        regions.setdefault(entry.region, []).append(entry)
    ranked = sorted(regions.values(), key=lambda members: -members[0].loss)
    largest = max((members[0].loss for members in ranked), default=0.0)
    columns = [
        Column("Nodes", "name"),
        Column("FLOPs", "number"),
        Column("SQNR at the node", "number"),
        Column("At the outputs", "number"),
        Column("Loss", "number"),
        Column(""),
        Column(""),
        Column("Why", "name"),
    ]
    rows = [_row(members, largest) for members in ranked]
    correlation = "" if info.rank_correlation is None else f"; rank correlation {info.rank_correlation:.2f} on doubling"
    about = f"Each region quantized alone, on {info.measured_on}{correlation}."
    about += f" Loss: what it takes off the {info.ranked_by}."
    return (
        block("What each region costs in low precision", long_table(columns, rows, keep=24), note(about))
        if rows
        else NOTHING
    )


def _row(members: list[NodeSensitivity], largest: float) -> list[str]:
    first = members[0]
    width = 100 * first.loss / largest if largest > 0 else 0.0
    bar = el("i", style=f"width:{width:.1f}%", class_="kept" if first.kept else None)
    worst = min((entry.node_sqnr_db for entry in members if entry.node_sqnr_db is not None), default=None)
    return [
        names([entry.node for entry in members]),
        figures.percent(sum(entry.flops_share for entry in members)),
        _decibels(worst),
        _decibels(first.output_sqnr_db),
        f"{first.loss:.2g}",
        el("span", bar, class_="meter"),
        "kept float" if first.kept else "lowered",
        first.why,
    ]


def _tried(info: SensitivityInfo) -> Html:
    columns = [
        Column("Regions in float", "number"),
        Column("Lowered FLOPs", "number"),
        Column("Predicted", "number"),
        Column("Measured", "number"),
        Column("Samples"),
        Column("Budget"),
    ]
    samples = {"chosen": info.chosen_on, "confirmed": info.confirmed_on}
    rows = [
        [
            str(len(trial.kept)),
            figures.percent(trial.lowered_flops_share),
            figures.cosine(trial.predicted),
            "not finite" if trial.measured is None else figures.cosine(trial.measured),
            samples[trial.data],
            el("span", "met" if trial.met else "missed", class_="mark good" if trial.met else "mark bad"),
        ]
        for trial in info.tried
    ]
    return block(f"Sets tried, by {info.criterion}, budget {info.budget:g}", long_table(columns, rows))


def _decibels(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} dB"
