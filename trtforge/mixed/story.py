"""A search in words and figures: why each node is kept or lowered, and what came of the whole."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from trtforge.mixed.judge import Judge
from trtforge.mixed.measure import Sensitivity
from trtforge.quantization.regions import Region
from trtforge.quantization.search import Kept, Outcome, Trial
from trtforge.sensitivity import NodeSensitivity, SensitivityInfo, TriedSet


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """What the sensitivity of the regions was found to be.

    Attributes:
        found: by region name.
        losses: by region name; what the search ranks by.
        ranked_by: what those are measured in.
        samples: that every region was measured on.
        correlation: of the last two rankings; None where there was only one.
    """

    found: Mapping[str, Sensitivity]
    losses: Mapping[str, float]
    ranked_by: str
    samples: int
    correlation: float | None


def tell(
    budget: float,
    number_format: str,
    flops: Mapping[str, int],
    regions: Sequence[Region],
    outcome: Outcome,
    measured: Measured | None,
    chooser: Judge,
    confirmer: Judge | None,
) -> tuple[dict[str, str], SensitivityInfo]:
    """The reason for every node that stays float, and the whole story.

    Args:
        budget: the criterion's value to reach.
        number_format: what nodes are lowered to.
        flops: of every node that counts, by name.
        regions: in graph order.
        outcome: of the search.
        measured: None where nothing had to be measured.
        chooser: judged every set.
        confirmer: judged the chosen sets once more, where there were further samples.
    """
    total = max(sum(flops.values()), 1)
    rows = list(_rows(regions, outcome.kept, measured, number_format.upper(), chooser.allowed, flops))
    reasons = {row.node: row.why for row in rows if row.kept}
    judges = {"chosen": chooser, "confirmed": confirmer or chooser}
    info = SensitivityInfo(
        number_format=number_format,
        criterion=chooser.criterion,
        budget=budget,
        met=outcome.met,
        note=_note(budget, number_format.upper(), regions, outcome, judges, total),
        measured_on=f"{measured.samples} {chooser.label.split(' ', 1)[1]}" if measured else "",
        rank_correlation=measured.correlation if measured else None,
        ranked_by=measured.ranked_by if measured else "",
        chosen_on=chooser.label,
        confirmed_on=confirmer.label if confirmer else "",
        nodes=tuple(rows),
        tried=tuple(_tried(trial, regions, judges[trial.data], total) for trial in outcome.trials),
    )
    return reasons, info


def _rows(
    regions: Sequence[Region], kept: Kept, measured: Measured | None, low: str, allowed: float, flops: Mapping[str, int]
) -> Iterator[NodeSensitivity]:
    total = max(sum(flops.values()), 1)
    for region in regions if measured else ():
        assert measured is not None
        sensitivity, loss = measured.found[region.name], measured.losses[region.name]
        for node in region.nodes:
            yield NodeSensitivity(
                node=node,
                region=region.name,
                flops_share=flops.get(node, 0) / total,
                node_sqnr_db=sensitivity.node_sqnr_db.get(node),
                output_sqnr_db=sensitivity.output_sqnr_db,
                loss=loss,
                kept=region.name in kept,
                why=_why(region, region.name in kept, loss, low, allowed, measured, total),
            )


def _why(region: Region, is_kept: bool, loss: float, low: str, allowed: float, measured: Measured, total: int) -> str:
    """In words, with the region's own loss."""
    alone = f"{low} here alone takes {loss:.2g} off the {measured.ranked_by}"
    if is_kept:
        return f"kept float to meet the budget: {alone}; the budget allows {max(allowed, 0.0):.2g} in all"
    return f"{alone}, for {region.flops / total:.1%} of the FLOPs"


def _tried(trial: Trial, regions: Sequence[Region], judge: Judge, total: int) -> TriedSet:
    lowered = sum(region.flops for region in regions if region.name not in trial.kept)
    return TriedSet(
        kept=tuple(region.name for region in regions if region.name in trial.kept),
        data=trial.data,
        predicted=judge.ceiling - trial.predicted,
        measured=judge.ceiling - trial.measured if trial.measured < math.inf else None,
        lowered_flops_share=lowered / total,
        met=trial.met,
    )


def _note(
    budget: float, low: str, regions: Sequence[Region], outcome: Outcome, judges: Mapping[str, Judge], total: int
) -> str:
    """What came of it, in a sentence or two."""
    if not outcome.trials:
        return "there is no node to choose"
    last = next(trial for trial in reversed(outcome.trials) if trial.kept == outcome.kept)
    judge = judges[last.data]
    value = "NaN" if last.measured == math.inf else _rounded_down(judge.ceiling - last.measured)
    result = f"{judge.criterion} {value} on {judge.label}"
    kept = [region for region in regions if region.name in outcome.kept]
    share = sum(region.flops for region in kept) / total
    count = sum(len(region.nodes) for region in kept)
    what = f"{count} of {sum(len(region.nodes) for region in regions)} nodes kept float ({share:.1%} of the FLOPs)"
    if outcome.met:
        return (
            f"budget {budget:g} met with {what}: {result}"
            if kept
            else f"budget {budget:g} met by {low} alone: {result}"
        )
    everything = frozenset(region.name for region in regions)
    is_beyond = any(trial.kept == everything and trial.data == "chosen" for trial in outcome.trials)
    end = "; the float type alone does not reach it either" if is_beyond else ""
    return f"budget {budget:g} not met; the best set tried has {what}: {result}{end}"


def _rounded_down(value: float) -> str:
    """Six decimals; never better than it is."""
    return f"{math.floor(value * 1e6) / 1e6:.6f}"
