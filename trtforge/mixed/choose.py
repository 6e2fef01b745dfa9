"""Which nodes stay float so that the model's outputs meet a budget, at the least cost in lowered FLOPs.

    1. all nodes lowered; where that meets the budget nothing else is done
    2. the sensitivity of every region, on samples that double until the ranking is stable (`measure`)
    3. a search over sets of regions, judged by real graphs on real outputs (`quantization.search`, `judge`)

Sets are chosen on calibration samples; held-out samples only confirm the choice, and where they lose more, the search
asks as much more of the others. What step 2 may cost is counted in runs of the model and not in seconds, so that the
result does not depend on the machine's speed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from trtforge.batch import Batch
from trtforge.data import Dataset
from trtforge.errors import InputError
from trtforge.inputs import BatchRange
from trtforge.mixed.judge import Judge
from trtforge.mixed.measure import Probe, Sensitivity
from trtforge.mixed.story import Measured, tell
from trtforge.mixed.task import Task
from trtforge.profile_choice import CALIBRATION_BATCH
from trtforge.quantization.regions import Region, Sites, find_needs, find_regions, find_sites
from trtforge.quantization.search import search
from trtforge.reference import ReferenceModel
from trtforge.sensitivity import SensitivityInfo
from trtforge.user_code import load_function

# Samples that sensitivity starts with, and holds in memory at a time.
FIRST_SAMPLES = 8
# Samples that sets are chosen on.
CHOICE_SAMPLES = 64
# Sensitivity may cost this many runs of the model per calibration sample. With its comparisons, and without graph
# optimisation, a run took 1.4 (MiniLM-L6) to 1.5 times (EfficientNet-lite0) the CPU time of one of calibration, so that
# this stays below three passes over the calibration data.
MAX_PASSES = 1.5
# A ranking is stable when doubling the samples leaves it correlated this well (Spearman).
STABLE_CORRELATION = 0.95
# Loss of a region that makes an output NaN: no cosine loses more.
_NOT_FINITE = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """What stays float.

    Attributes:
        reasons: why, by node name.
        info: the whole story, for manifest and report.
    """

    reasons: Mapping[str, str]
    info: SensitivityInfo


def choose_float_nodes(task: Task, report: Callable[[str], None]) -> Choice:
    """Find the nodes that stay float.

    Args:
        task: see `Task`.
        report: takes progress notes.

    Raises:
        InputError: there are no samples, or ONNX Runtime or the metric fails.
    """
    data = task.calibration or task.held_out
    if data is None:
        raise InputError(
            "a budget needs samples to judge by, and there are none",
            "a calibration table holds no samples",
            "give the data with --calib instead of the table",
        )
    kind = "held-out" if task.calibration is None else "calibration"
    few = _first(data, CHOICE_SAMPLES, task.batch.min)
    further = task.held_out if task.calibration is not None and task.held_out is not None else data
    sites = find_sites(task.base, task.quantized)
    # Attention products count where they can be quantized.
    flops = {**task.gemm_flops, **{name: n for name, n in task.attention_flops.items() if name in sites}}
    regions = find_regions(task.base, sites, flops, task.dependents)
    with ReferenceModel(task.reference, as_written=True) as model:
        chooser = Judge(task, model, few, regions, f"{len(few)} {kind} samples", report)
        confirmer = None
        if further is not data or len(few) < len(data):
            label = "held-out" if further is task.held_out else kind
            confirmer = Judge(task, model, further, regions, f"{len(further)} {label} samples", report)
            if further is task.held_out and task.held_out_loss is not None:
                confirmer.known[frozenset()] = task.held_out_loss
        confirm = None if confirmer is None else confirmer.loss
        confirm_allowed = chooser.allowed if confirmer is None else confirmer.allowed
        outcome = search((), {}, chooser.loss, chooser.allowed, confirm, confirm_allowed)
        measured = None
        if not outcome.met and regions:
            measured = _measure(task, sites, regions, data, chooser, report)
            needs = find_needs(regions, task.dependents)
            outcome = search(regions, measured.losses, chooser.loss, chooser.allowed, confirm, confirm_allowed, needs)
    reasons, info = tell(task.budget, task.number_format, flops, regions, outcome, measured, chooser, confirmer)
    return Choice(reasons, info)


def _first(data: Dataset, count: int, smallest: int) -> Dataset:
    """The first samples of a dataset; all of them where there are no more."""
    count = max(count, smallest)
    return data if len(data) <= count else data.view(data.start, data.start + count)


def _measure(
    task: Task,
    sites: Sites,
    regions: Sequence[Region],
    data: Dataset,
    judge: Judge,
    report: Callable[[str], None],
) -> Measured:
    """The sensitivity of every region, on samples that double until the ranking is stable or the cost is spent."""
    metric = None if task.metric is None else load_function(task.metric, "metric")
    missed = judge.missed_outputs(frozenset())
    samples, correlation = 0, None
    costs = {**task.gemm_flops, **task.attention_flops}
    with Probe(task.base, task.quantized, sites, regions, costs, metric, task.work, report) as probe:
        affordable = int(MAX_PASSES * len(data) / probe.cost)
        # Half of what is affordable, so that it can double once.
        chunk = max(min(FIRST_SAMPLES, affordable // 2), task.batch.min, 1)
        chunk -= chunk % task.batch.min
        wanted = chunk
        ranking: Mapping[str, float] = {}
        for batches in _chunks(data, chunk, task.batch):
            probe.add(batches)
            samples += sum(len(batch) for batch in batches)
            if samples < wanted:
                continue
            _, losses = _losses(probe.results(), missed, judge.criterion)
            correlation = spearman(list(ranking.values()), list(losses.values())) if ranking else None
            ranking, wanted = losses, 2 * samples
            is_stable = correlation is not None and correlation >= STABLE_CORRELATION
            if is_stable or len(regions) == 1 or wanted > affordable:
                break
        found = probe.results()
    ranked_by, losses = _losses(found, missed, judge.criterion)
    return Measured(found, losses, ranked_by, samples, correlation)


def _chunks(data: Dataset, size: int, batch: BatchRange) -> Iterator[list[Batch]]:
    """The batches of `size` samples at a time."""
    stop = data.start + len(data)
    for start in range(data.start, stop, size):
        batches = list(data.view(start, min(start + size, stop)).batches(min(size, batch.clamp(CALIBRATION_BATCH))))
        if batches:
            yield batches


def _losses(found: Mapping[str, Sensitivity], missed: Sequence[str], criterion: str) -> tuple[str, dict[str, float]]:
    """The loss that ranks each region, and what it is measured in.

    A metric that does not move for most regions on a few samples, such as a share of right answers, ranks nothing: the
    cosine of the outputs that miss the budget does then.
    """
    by_metric = {name: entry.metric_loss for name, entry in found.items() if entry.metric_loss is not None}
    if by_metric and sum(loss > 0 for loss in by_metric.values()) * 2 >= len(found):
        return criterion, {name: min(max(loss, 0.0), _NOT_FINITE) for name, loss in by_metric.items()}
    losses = {}
    for name, entry in found.items():
        wanted = [figures for output, figures in entry.outputs.items() if output in missed or not missed]
        losses[name] = max((_NOT_FINITE if f.nan else 1.0 - f.cosine for f in wanted), default=0.0)
    return "mean cosine", losses


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation of two equally long lists; 1 for lists of one."""
    if len(first) < 2:
        return 1.0
    ranks = [np.argsort(np.argsort(np.asarray(values), kind="stable"), kind="stable") for values in (first, second)]
    difference = (ranks[0] - ranks[1]).astype(np.float64)
    count = len(first)
    return float(1.0 - 6.0 * (difference @ difference) / (count * (count * count - 1.0)))
