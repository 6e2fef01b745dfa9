"""Scores of a built graph against the fp32 reference, both run in ONNX Runtime.

One model is loaded at a time. The reference's outputs are spooled to disk, so that memory does not grow with the number
of samples. Both run as written, without graph optimisation: what that changes is no error of the candidate, and shows
where outputs are small differences of large numbers. All samples run at the profile's opt batch; the first few also at
batch 1, where a graph that has a batch size baked in shows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trtforge.batch import Batch
from trtforge.data import Dataset
from trtforge.data_checks import LABELS
from trtforge.errors import InputError, InternalError
from trtforge.manifest import BatchParity, NodeError
from trtforge.parity import ParityAccumulator, sqnr_db, top1
from trtforge.reference import ReferenceModel
from trtforge.user_code import USER_ERRORS, load_function

# Samples that also run at batch 1, and samples that the search for the worst nodes uses.
SMALL_BATCH_SAMPLES = 16
WORST_NODE_SAMPLES = 8
NUM_WORST_NODES = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A graph to score.

    Attributes:
        name: "candidate" or "before_qdq".
        label: how progress notes call it.
        path: its ONNX file.
    """

    name: str
    label: str
    path: Path


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One pass over samples at one batch size."""

    dataset: Dataset
    batch: int


@dataclasses.dataclass(frozen=True, slots=True)
class Scores:
    """Figures of one candidate.

    Attributes:
        batches: per run.
        metrics: values by metric name.
        unproven: outputs of which the reference gives nothing but NaN and Inf in the first run.
    """

    batches: tuple[BatchParity, ...]
    metrics: dict[str, float]
    unproven: tuple[str, ...] = ()


def plan_runs(dataset: Dataset, opt_batch: int, min_batch: int) -> list[Run]:
    """All samples at the opt batch, and the first few at batch 1 (or the smallest batch that the profile allows).

    Feeds that are run whole have one size only, so they run once.
    """
    runs = [Run(dataset, opt_batch)]
    if min_batch < opt_batch and not dataset.has_whole_feeds:
        stop = dataset.start + min(len(dataset), max(SMALL_BATCH_SAMPLES, min_batch))
        runs.append(Run(dataset.view(dataset.start, stop), min_batch))
    return runs


class MetricError(InputError):
    """The user's metric failed."""


class Scorer:
    """Scores candidates, one after the other, against a reference that runs once.

    Args:
        model: the reference as ONNX Runtime has it loaded; the candidates are loaded in its place.
        runs: the first one gives the metrics.
        metric: the user's `module:function(outputs, reference, feeds)`, which returns a number or a dictionary of
            them; all three arguments are dictionaries of arrays over all samples.
        work: a folder for the reference's outputs.
        report: takes progress notes.
        needs_values: refuse data on which the reference gives nothing but NaN and Inf in an output; None refuses it
            where no metric judges.

    Attributes:
        exact: the metrics of the reference itself.
        figure: the first figure that the user's metric gives; None without a metric.
    """

    def __init__(
        self,
        model: ReferenceModel,
        runs: Sequence[Run],
        metric: str | None,
        work: Path,
        report: Callable[[str], None],
        *,
        needs_values: bool | None = None,
    ) -> None:
        self._model = model
        self._runs = runs
        self._report = report
        self._spools = [_Spool(work / f"reference-{index}") for index in range(len(runs))]
        self._meter = _Meter(load_function(metric, "metric") if metric else None)
        for run, spool in zip(runs, self._spools, strict=True):
            for batch in _with_progress(run, "fp32 reference", report):
                outputs = model.run(batch.feeds)
                spool.append(outputs)
                if run is runs[0]:
                    self._meter.add(batch, outputs)
        self.exact = Scores((), self._meter.result(self._meter))
        self.figure = self._meter.figure
        self._needs_values = not self.exact.metrics if needs_values is None else needs_values

    def score(self, candidate: Candidate) -> Scores:
        """Figures of one candidate, a graph with the reference's inputs and outputs.

        Raises:
            InputError: ONNX Runtime cannot run it, outputs differ in shape, the metric fails, or the reference itself
                gives nothing to compare with.
        """
        self._model.load(candidate.path, as_written=True)
        scores = _score_one(self._model, candidate, self._runs, self._spools, self._meter, self._report)
        if self._needs_values:
            for name in scores.unproven:
                raise _nothing_finite(name, scores.batches[0], self._runs[0].dataset)
        return scores


def find_worst_nodes(
    reference: Path, candidate: Path, outputs_of: Mapping[str, str], dataset: Dataset, batch: int
) -> tuple[NodeError, ...]:
    """The nodes whose own output is furthest from the fp32 graph's, worst first; none that is equal to it.

    Args:
        reference: the fp32 graph that has the same tensor names.
        candidate: the built graph.
        outputs_of: output tensor by node name.
        dataset: a few of its samples are run.
        batch: batch size to run them at.
    """
    few = dataset.view(
        dataset.start, dataset.start + min(len(dataset), max(WORST_NODE_SAMPLES, dataset.smallest_batch))
    )
    taps = list(outputs_of.values())
    worst = dict.fromkeys(outputs_of, math.inf)
    with (
        ReferenceModel(reference, taps=taps, as_written=True) as exact,
        ReferenceModel(candidate, taps=taps, as_written=True) as built,
    ):
        for chunk in few.batches(batch):
            expected, actual = exact.run(chunk.feeds), built.run(chunk.feeds)
            for node, tensor in outputs_of.items():
                worst[node] = min(worst[node], sqnr_db(expected[tensor], actual[tensor]))
    ranked = sorted((item for item in worst.items() if item[1] < math.inf), key=lambda item: item[1])
    return tuple(
        NodeError(node=node, sqnr_db=value if math.isfinite(value) else None)
        for node, value in ranked[:NUM_WORST_NODES]
    )


def _score_one(
    model: ReferenceModel,
    candidate: Candidate,
    runs: Sequence[Run],
    spools: Sequence[_Spool],
    exact: _Meter,
    report: Callable[[str], None],
) -> Scores:
    """Figures of one candidate, which is loaded, against the spooled outputs of the reference."""
    meter = _Meter(exact.function)
    batches = []
    unproven: tuple[str, ...] = ()
    for run, spool in zip(runs, spools, strict=True):
        accumulator = ParityAccumulator()
        samples = 0
        for batch, expected in zip(_with_progress(run, candidate.label, report), spool.read(), strict=True):
            actual = model.run(batch.feeds)
            wanted = _with_lost_axes(expected, actual) if run.batch == 1 else expected
            try:
                accumulator.add(wanted, actual, batch.feeds)
            except (ValueError, KeyError) as err:
                raise InternalError(
                    f"the {candidate.label} does not match the source model",
                    str(err),
                    "report this model: a graph pass changed its outputs",
                ) from err
            samples += len(batch)
            if run is runs[0]:
                meter.add(batch, actual)
        outputs = accumulator.result()
        if run is runs[0]:
            unproven = accumulator.unproven()
        else:
            # The few samples of a further run may be those that the reference gives nothing for.
            outputs = {name: output for name, output in outputs.items() if name not in accumulator.unproven()}
        if outputs:
            batches.append(BatchParity(batch=run.batch, samples=samples, outputs=outputs))
    return Scores(tuple(batches), meter.result(exact), unproven)


def _nothing_finite(name: str, run: BatchParity, dataset: Dataset) -> InputError:
    value = "NaN" if run.outputs[name].nan_reference else "Inf"
    return InputError(
        f"the source model itself gives {value} in output '{name}' on all {run.samples} samples that verify the build",
        f"it was run in fp32 in ONNX Runtime on {dataset.source}, and without one finite value there is nothing to "
        "compare with",
        "give other samples with --eval: such inputs may be out of the model's range, or not prepared as it expects",
    )


def _with_lost_axes(expected: Mapping[str, np.ndarray], actual: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The source's outputs at batch 1 with the axes of size 1 that the candidate kept: a Squeeze without axes removes a
    batch of 1 as well, and an engine has one rank for all batches.
    """

    def restore(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        is_longer = new.ndim > old.ndim and np.squeeze(new).shape == np.squeeze(old).shape
        return old.reshape(new.shape) if is_longer else old

    return {name: restore(array, actual[name]) if name in actual else array for name, array in expected.items()}


def _with_progress(run: Run, label: str, report: Callable[[str], None]) -> Iterator[Batch]:
    done = 0
    for batch in run.dataset.batches(run.batch):
        yield batch
        done += len(batch)
        report(f"{label}, batch {run.batch}: {done} of {len(run.dataset)} samples")


class _Spool:
    """Outputs of a model on disk, one array after the other."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names: list[list[str]] = []
        path.write_bytes(b"")

    def append(self, outputs: Mapping[str, np.ndarray]) -> None:
        """Add the outputs of one batch."""
        self._names.append(list(outputs))
        with self._path.open("ab") as file:
            for array in outputs.values():
                np.save(file, array, allow_pickle=False)

    def read(self) -> Iterator[dict[str, np.ndarray]]:
        """The outputs of every batch, in order."""
        with self._path.open("rb") as file:
            for names in self._names:
                yield {name: np.load(file, allow_pickle=False) for name in names}


class _Meter:
    """top1 from labels, batch by batch, and the user's metric, for which all outputs are kept."""

    def __init__(self, function: Callable[..., Any] | None) -> None:
        self.function = function
        self.figure: str | None = None
        self._hits = 0.0
        self._labelled = 0
        self._outputs: list[Mapping[str, np.ndarray]] = []
        self._feeds: list[Mapping[str, np.ndarray]] = []

    def add(self, batch: Batch, outputs: Mapping[str, np.ndarray]) -> None:
        """Add one batch of a model's outputs."""
        scores = next(iter(outputs.values()))
        if batch.labels is not None and scores.ndim == 2 and len(scores) == len(batch.labels):
            self._hits += top1(scores, batch.labels) * len(batch.labels)
            self._labelled += len(batch.labels)
        if self.function is not None:
            self._outputs.append(outputs)
            self._feeds.append(feeds_and_labels(batch))

    def result(self, reference: _Meter) -> dict[str, float]:
        """Metric values by name; `reference` holds the fp32 outputs of the same batches."""
        values = {"top1": self._hits / self._labelled} if self._labelled else {}
        if self.function is None:
            return values
        figures = call_metric(self.function, self._outputs, reference._outputs, self._feeds)
        self.figure = next(iter(figures), None)
        return values | figures


def feeds_and_labels(batch: Batch) -> dict[str, np.ndarray]:
    """What the user's metric is given of a batch."""
    return batch.feeds if batch.labels is None else {**batch.feeds, LABELS: batch.labels}


def call_metric(
    function: Callable[..., Any],
    outputs: Sequence[Mapping[str, np.ndarray]],
    reference: Sequence[Mapping[str, np.ndarray]],
    feeds: Sequence[Mapping[str, np.ndarray]],
) -> dict[str, float]:
    """The figures of the user's metric over some batches, by name; a bare number is called "metric".

    Raises:
        InputError: the batches differ in shape.
        MetricError: it failed, or returned what is no finite number.
    """
    arguments = [_concatenate(part) for part in (outputs, reference, feeds)]
    try:
        found = function(*arguments)
        named = found if isinstance(found, Mapping) else {"metric": found}
        values = {str(name): float(value) for name, value in named.items()}
    except USER_ERRORS as err:
        raise MetricError(
            "the metric function failed",
            f"{type(err).__name__}: {err}",
            "it takes (outputs, reference, feeds), dictionaries of arrays, and returns a number or a dictionary",
        ) from err
    if not all(math.isfinite(value) for value in values.values()):
        raise MetricError("the metric function returned NaN or Inf", f"got {values}", "return finite numbers")
    return values


def _concatenate(batches: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    try:
        return {name: np.concatenate([np.atleast_1d(batch[name]) for batch in batches]) for name in batches[0]}
    except ValueError as err:
        raise InputError(
            "--metric needs batches of one shape", str(err), "pad the evaluation data to one shape"
        ) from err
