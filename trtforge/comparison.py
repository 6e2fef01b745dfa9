"""The method table of a model: every calibration method, weight granularity and smoothing, judged by the outputs.

One pass over the calibration samples feeds all of them: each method chooses its ranges from the same histograms, and
smoothing is searched on the same sampled rows. The graphs differ in nothing else: what is not quantized stays as it is
in the fp32 graph, which runs once and is what all outputs are compared with.
"""

from __future__ import annotations

import dataclasses
import resource
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import get_args

import numpy as np

from trtforge import __version__
from trtforge.data import Dataset
from trtforge.errors import InputError
from trtforge.graph.load import LoadedModel
from trtforge.graph.native import OnnxNative
from trtforge.inputs import BuildInputs
from trtforge.method_table import (
    COSINE,
    DataInfo,
    MethodRow,
    MethodTable,
    Smooth,
    Weights,
    find_best,
    measured,
    titles,
    vary,
)
from trtforge.progress import Note, Stopwatch
from trtforge.quantization.checkpoint import open_checkpoint
from trtforge.quantization.formats import INT8
from trtforge.quantization.observation import Observation
from trtforge.quantization.placement import Placement
from trtforge.quantization.quantizer import Quantizer, with_rounded_weights
from trtforge.quantization.ranges import choose_ranges, samples_rows
from trtforge.recipe import CalibrationMethod, QuantRecipe
from trtforge.reference import ReferenceModel
from trtforge.spec import Precision
from trtforge.stages import (
    FP32_NAME,
    Prepared,
    lower,
    nothing_to_quantize,
    observe_activations,
    plan_quantization,
    save_for_onnxruntime,
)
from trtforge.user_code import load_function
from trtforge.verify import Candidate, Run, Scorer

METHODS: tuple[CalibrationMethod, ...] = get_args(CalibrationMethod)
WEIGHTS: tuple[Weights, ...] = get_args(Weights)
SMOOTH: tuple[Smooth, ...] = get_args(Smooth)
_COMBINATIONS = [(method, weights, smooth) for method in METHODS for weights in WEIGHTS for smooth in SMOOTH]
# Only quantization is compared: the rest stays in the source's own types.
PRECISION = Precision("int8", "fp32")


@dataclasses.dataclass(frozen=True, slots=True)
class _Observed:
    """What all combinations share.

    Attributes:
        prepared: the fp32 graph.
        placements: by weight granularity; they differ in nothing else.
        observation: of the one pass.
        hashes: of the model and of the calibration data.
    """

    prepared: Prepared
    placements: Mapping[Weights, Placement]
    observation: Observation
    hashes: tuple[str, str]


def compare_methods(
    loaded: LoadedModel,
    inputs: BuildInputs,
    prepared: Prepared,
    native: OnnxNative,
    work: Path,
    watch: Stopwatch,
    warn: Callable[[str], None],
    *,
    metric: str | None = None,
    samples: int,
    partial: Path | None = None,
) -> MethodTable:
    """Measure all combinations.

    Args:
        loaded: the source.
        inputs: recipe, calibration and evaluation data.
        prepared: the source's graph as it is quantized.
        native: onnx's C++.
        work: a folder for graphs and outputs.
        watch: takes the time of the pass, and progress.
        warn: takes what the user must know.
        metric: the user's `module:function(outputs, reference, feeds)`; larger figures are better.
        samples: evaluation samples to run, the first ones.
        partial: a file for the state of the pass; see `quantization.checkpoint`.

    Raises:
        InputError: nothing can be quantized, the samples hold only zeros, or the metric fails.
    """
    assert inputs.calibration is not None and inputs.evaluation is not None
    evaluation = _first(inputs.evaluation, samples)
    if metric is not None:
        load_function(metric, "metric")  # before the pass, which may take long
    observed = _observe(loaded, inputs, prepared, native, work, watch, warn, partial)
    peak_rss_bytes = _peak_rss_bytes()
    rows: list[MethodRow] = []
    with watch.stage("compare") as note, ReferenceModel(work / FP32_NAME, as_written=True) as model:
        label = "fp32 graph"

        def show(*_: object, **__: object) -> None:
            """Say which combination it is at, whatever a stage of it has to say: the line has little room."""
            note(label, len(rows), len(_COMBINATIONS))

        scorer = Scorer(model, [Run(evaluation, inputs.batch.opt)], metric, work, show)
        for method, weights, smooth in _COMBINATIONS:
            name = ", ".join((method, *titles(weights, smooth)))
            label = f"{len(rows) + 1} of {len(_COMBINATIONS)}: {name}"
            show()
            recipe = vary(measured(inputs.recipe), method, weights, smooth)
            rows.append(_measure(observed, recipe, (method, weights, smooth), scorer, work, show))
        version = model.version
    judged_by = scorer.figure or ("top1" if "top1" in scorer.exact.metrics else COSINE)
    return MethodTable(
        model=loaded.name,
        model_sha256=loaded.sha256,
        recipe=inputs.recipe,
        versions={"trtforge": __version__, "onnxruntime": version, "numpy": np.__version__},
        calibration=DataInfo(samples=observed.observation.samples, sha256=inputs.calibration.sha256),
        evaluation=DataInfo(samples=len(evaluation), sha256=evaluation.sha256),
        batch=inputs.batch.opt,
        reference_metrics=scorer.exact.metrics,
        judged_by=judged_by,
        best=find_best(rows, judged_by),
        tensors=len(observed.observation.observers),
        pass_seconds=watch.seconds["calibrate"],
        peak_rss_bytes=peak_rss_bytes,
        rows=tuple(rows),
    )


def _first(dataset: Dataset, samples: int) -> Dataset:
    """The first samples of a dataset, at least as many as a batch needs.

    Raises:
        InputError: none are wanted.
    """
    if samples < 1:
        raise InputError(
            f"--samples {samples} cannot be used", "it is how many samples every graph runs", "give 1 or more"
        )
    wanted = max(samples, dataset.smallest_batch)
    return dataset if wanted >= len(dataset) else dataset.view(dataset.start, dataset.start + wanted)


def _observe(
    loaded: LoadedModel,
    inputs: BuildInputs,
    prepared: Prepared,
    native: OnnxNative,
    work: Path,
    watch: Stopwatch,
    warn: Callable[[str], None],
    partial: Path | None,
) -> _Observed:
    """Plan the placement, and run the one pass.

    Raises:
        InputError: there is nothing to quantize, or the samples hold only zeros.
    """
    assert inputs.calibration is not None
    placements = {
        weights: plan_quantization(prepared, inputs.recipe.model_copy(update={"weights": weights}), native)
        for weights in WEIGHTS
    }
    placement = placements["per_channel"]
    if not placement.nodes:
        raise nothing_to_quantize(PRECISION, placement)
    with watch.stage("calibrate") as note, open_checkpoint(partial) if partial else nullcontext() as checkpoint:
        observation = observe_activations(
            prepared, placement, inputs, loaded.sha256, work, note, warn, checkpoint, keep_rows=True
        )
    observers = observation.observers
    if observers and not any(observer.amax > 0.0 for observer in observers.values()):
        raise InputError(
            "no range can be chosen from the calibration data",
            f"each of the {len(observers)} activations to quantize was zero in all {observation.samples} samples",
            "give real samples with --calib",
        )
    return _Observed(prepared, placements, observation, (loaded.sha256, inputs.calibration.sha256))


def _measure(
    observed: _Observed,
    recipe: QuantRecipe,
    combination: tuple[CalibrationMethod, Weights, Smooth],
    scorer: Scorer,
    work: Path,
    note: Note,
) -> MethodRow:
    """Choose ranges as one combination says, quantize, and score the graph."""
    method, weights, smooth = combination
    started = time.perf_counter()
    quantizer = _choose(observed, recipe, observed.placements[weights], note)
    seconds = time.perf_counter() - started
    lowered = lower(observed.prepared.graph, PRECISION, quantizer)
    assert lowered.qdq is not None
    with tempfile.TemporaryDirectory(dir=work) as folder:
        path = Path(folder) / "candidate.onnx"
        save_for_onnxruntime(lowered.graph, path)
        scores = scorer.score(Candidate("candidate", "quantized graph", path))
    return MethodRow(
        method=method,
        weights=weights,
        smooth=smooth,
        outputs=scores.batches[0].outputs,
        metrics=scores.metrics,
        quantized_nodes=len(lowered.qdq.nodes),
        smoothed_tensors=sum(entry.equalization is not None for entry in quantizer.table.tensors.values()),
        seconds=round(seconds, 3),
        state_bytes=_state_bytes(observed.observation, samples_rows(recipe)),
    )


def _choose(observed: _Observed, recipe: QuantRecipe, placement: Placement, note: Note) -> Quantizer:
    """What `quantize` with this recipe would use."""
    observation, graph = observed.observation, observed.prepared.graph
    model_sha256, data_sha256 = observed.hashes
    table = choose_ranges(
        graph,
        placement,
        observation,
        recipe,
        model_sha256=model_sha256,
        data_sha256=data_sha256,
        is_int8=True,
        note=note,
    )
    quantizer = Quantizer(placement, table, INT8, np.float32)
    return with_rounded_weights(quantizer, graph, observation.sampled_rows(), recipe, note)


def _state_bytes(observation: Observation, uses_rows: bool) -> int:
    """What the pass left: of every tensor its observer, and the rows where they are used."""
    parts = [*observation.observers.values(), *(observation.rows.values() if uses_rows else ())]
    return sum(array.nbytes for part in parts for array in part.state().values())


def _peak_rss_bytes() -> int:
    """Of the largest process so far: this one, or a child that has ended. Linux counts in units of 1,024 bytes."""
    return 1024 * max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
