"""The main job: from a source file to an artifact.

load -> normalise -> match regions -> calibrate -> insert Q/DQ -> cast -> lint -> build -> read the plan -> verify

The child that runs native code starts first, and this process imports what it needs itself (job.py and all below it)
while the child does the same: together that is a third of the time which a small build takes.
"""

from __future__ import annotations

import dataclasses
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from trtforge.backends.registry import select_backend
from trtforge.errors import InputError
from trtforge.exporting import on_exported
from trtforge.isolation import Child
from trtforge.progress import Reporter, ignore
from trtforge.source import source_name
from trtforge.spec import BuildSpec, Precision
from trtforge.staging import check_free, check_not_read, open_staging
from trtforge.target import Target, check_quantization

if TYPE_CHECKING:
    from trtforge.backends.base import Backend
    from trtforge.cache.store import StageCache
    from trtforge.graph.lint import Finding
    from trtforge.graph.native import OnnxNative
    from trtforge.job import Job
    from trtforge.manifest import Manifest
    from trtforge.method_table import MethodTable
    from trtforge.quantization.qdq import QdqReport
    from trtforge.quantization.table import CalibrationTable
    from trtforge.sensitivity import SensitivityInfo

_NATIVE, _PURPOSE = "trtforge.graph.native:SERVICE", "ONNX model reading"
# Evaluation samples that each of the graphs of `compare` runs.
COMPARED_SAMPLES = 64


@dataclasses.dataclass(frozen=True, slots=True)
class BuildResult:
    """What a build left.

    Attributes:
        directory: the artifact.
        manifest: its manifest.
        reused: an artifact made from identical inputs was there already.
        passed: no check failed: the accuracy budget was met, or nothing was to be verified.
    """

    directory: Path
    manifest: Manifest
    reused: bool
    passed: bool

    @property
    def engine(self) -> Path:
        """The engine file."""
        return self.directory / "model.engine"


@dataclasses.dataclass(frozen=True, slots=True)
class QuantizeResult:
    """What `quantize` wrote.

    Attributes:
        model: the ONNX file with Q/DQ.
        table: the ranges that its scales come from; None where only weights are quantized.
        qdq: what was quantized, and what stayed float and why.
        findings: lint findings that the builder tolerates.
        sensitivity: how nodes that stay float were found; None without a budget.
    """

    model: Path
    table: CalibrationTable | None
    qdq: QdqReport
    findings: tuple[Finding, ...]
    sensitivity: SensitivityInfo | None = None

    @property
    def passed(self) -> bool:
        """The budget was met, or none was given."""
        return self.sensitivity is None or self.sensitivity.met


def build(spec: BuildSpec, report: Reporter = ignore) -> BuildResult:
    """Build the artifact of one model.

    Args:
        spec: what to build.
        report: takes progress and warnings.

    Raises:
        TrtForgeError: bad input, or not possible here; nothing is left behind.
    """
    backend = select_backend(spec.backend)
    target = backend.target(spec.gpu)
    check_quantization(target, spec.precision.quantization)
    backend.check(spec.engine_options, target)
    _check_apart(spec)
    return _build(spec, report, backend, target)


@on_exported
def _build(spec: BuildSpec, report: Reporter, backend: Backend, target: Target) -> BuildResult:
    """Build, once everything is checked that needs no model."""
    # Leaving in reverse order: a failure ends the worker first, so that the thread that waits for one ends too.
    with open_staging(spec.target_directory) as staging, ThreadPoolExecutor(1) as pool:
        with backend.start_worker(staging.directory / "build.log") as worker, _open_cache(spec, report) as cache:
            from trtforge.artifact import commit, find_artifact
            from trtforge.build_job import BuildJob, BuildTools
            from trtforge.describe import build_identity
            from trtforge.graph.native import OnnxNative

            job = BuildJob(spec, report, cache)
            job.load(OnnxNative(worker))
            identity = build_identity(spec, job.loaded, job.inputs, target, backend)
            found = find_artifact(spec.target_directory, identity, spec.force, spec.limits)
            if found is not None:
                return _result(spec, found, reused=True)
            manifest = job.run(BuildTools(backend, target, staging, worker, pool), identity)
        other = commit(staging, identity, spec.force, spec.limits)
    if other is not None:
        job.warn("another build finished the same artifact first; this one was dropped")
    return _result(spec, other or manifest, reused=other is not None)


@on_exported
def calibrate(spec: BuildSpec, report: Reporter = ignore, partial: Path | None = None) -> CalibrationTable:
    """The calibration table of a model, from all of its calibration data.

    Args:
        spec: source, data, profile and recipe count; the precision is INT8's.
        report: takes progress and warnings.
        partial: a file for the state of the run, which is saved from time to time and gone on from; it stays after an
            interruption only.

    Raises:
        TrtForgeError: bad input, or not possible here.
    """
    with (
        tempfile.TemporaryDirectory(prefix="trtforge-") as work,
        Child(_NATIVE, purpose=_PURPOSE) as child,
        _open_cache(spec, report) as cache,
    ):
        from trtforge.graph.native import OnnxNative
        from trtforge.quantization.checkpoint import open_checkpoint

        native = OnnxNative(child)
        job = _load_to_quantize(spec, report, cache, native)
        _refuse_table(job)
        with open_checkpoint(partial) if partial else nullcontext() as checkpoint:
            quantizer = job.quantizer(job.prepare(native), native, Path(work), checkpoint, decides_weights=False)
    assert quantizer is not None
    return quantizer.table


@on_exported
def compare(
    spec: BuildSpec, samples: int = COMPARED_SAMPLES, report: Reporter = ignore, partial: Path | None = None
) -> MethodTable:
    """Every calibration method, per channel and per tensor, plain and smoothed, judged by the model's outputs.

    Args:
        spec: source, data, evaluation data, metric, profile and recipe count; without evaluation data the last fifth of
            the data is held out.
        samples: evaluation samples that each graph runs.
        report: takes progress and warnings.
        partial: a file for the state of the calibration run; see `calibrate`.

    Raises:
        TrtForgeError: bad input, or not possible here.
    """
    with (
        tempfile.TemporaryDirectory(prefix="trtforge-") as work,
        Child(_NATIVE, purpose=_PURPOSE) as child,
        _open_cache(spec, report) as cache,
    ):
        from trtforge.comparison import PRECISION, compare_methods
        from trtforge.graph.native import OnnxNative
        from trtforge.job import Job

        job = Job(dataclasses.replace(spec, precision=PRECISION), report, cache)
        native = OnnxNative(child)
        job.load(native)
        _refuse_table(job)
        return compare_methods(
            job.loaded,
            job.inputs,
            job.prepare(native),
            native,
            Path(work),
            job.watch,
            job.warn,
            metric=spec.metric,
            samples=samples,
            partial=partial,
        )


def quantize(spec: BuildSpec, output: Path, report: Reporter = ignore) -> QuantizeResult:
    """Write the graph that a build would hand to the backend, without building it.

    Args:
        spec: source, precision, data, profile, recipe, budget and metric count; only with a budget is anything run to
            judge accuracy.
        output: the ONNX file to write; an existing one is replaced only with `spec.force`.
        report: takes progress and warnings.

    Raises:
        TrtForgeError: bad input, or not possible here; nothing is left behind.
    """
    check_not_read(output, (spec.source, spec.calib, spec.recipe, spec.profile))
    check_free(output, spec.force)
    _check_budget(spec)
    return _quantize(spec, output, report)


@on_exported
def _quantize(spec: BuildSpec, output: Path, report: Reporter) -> QuantizeResult:
    """Write the graph, once everything is checked that needs no model."""
    check_not_read(output, (spec.profile,))  # which the export may have found
    with (
        tempfile.TemporaryDirectory(prefix="trtforge-") as work,
        Child(_NATIVE, purpose=_PURPOSE) as child,
        _open_cache(spec, report) as cache,
    ):
        from trtforge import stages
        from trtforge.artifact import write_model
        from trtforge.graph.native import OnnxNative

        native = OnnxNative(child)
        job = _load_to_quantize(spec, report, cache, native)
        prepared = job.prepare(native)
        quantizer = job.quantizer(prepared, native, Path(work))
        stored = job.store_weights(prepared, Path(work))
        choice = None
        if quantizer is not None and spec.budget is not None:
            choice = job.meet_budget(prepared, quantizer, None, Path(work))
        kept = {} if choice is None else choice.reasons
        with job.watch.stage("lower"):
            lowered = stages.lower(prepared.graph, job.spec.precision, quantizer, stored, kept)
            findings = stages.check_lint(lowered.graph)
            write_model(lowered.graph, output, job.loaded.metadata)
    assert lowered.qdq is not None
    table = None if quantizer is None else quantizer.table
    return QuantizeResult(output, table, lowered.qdq, findings, None if choice is None else choice.info)


def _check_apart(spec: BuildSpec) -> None:
    """Refuse a stage cache that shares its folder with the artifact, which is replaced as a whole.

    Raises:
        InputError: one is the other, or inside it.
    """
    if spec.cache is None:
        return
    target, cache = spec.target_directory.resolve(), spec.cache.resolve()
    if target.is_relative_to(cache) or cache.is_relative_to(target):
        raise InputError(
            f"--cache {spec.cache} and the artifact {spec.target_directory} cannot share a folder",
            "an artifact is replaced as a whole, and a cache holds nothing else",
            "give another folder with --cache, outside the artifact and not above it",
        )


def _open_cache(spec: BuildSpec, report: Reporter) -> AbstractContextManager[StageCache | None]:
    """The stage cache that the user named; None where there is none."""
    from trtforge.cache.store import open_cache

    return open_cache(spec.cache, spec.limits.cache_bytes, report)


def _load_to_quantize(spec: BuildSpec, report: Reporter, cache: StageCache | None, native: OnnxNative) -> Job:
    """A job that calibrates on all of its data and builds nothing."""
    from trtforge.job import Job

    precision = Precision(spec.precision.quantization or "int8", spec.precision.base)
    spec = dataclasses.replace(spec, precision=precision)
    job = Job(dataclasses.replace(spec, verify="off", metric=None), report, cache)
    job.load(native)
    job.spec = spec
    return job


def _refuse_table(job: Job) -> None:
    """Refuse a calibration table where data is needed.

    Raises:
        InputError: that is what was given or found.
    """
    if job.inputs.table is not None:
        spec = job.spec
        raise InputError(
            f"what was found for {spec.source.name} is a calibration table already",
            f"it is {spec.calib or f'calibration/{source_name(spec.source)}.json'}; calibrate needs data",
            "give data with --calib",
        )


def _check_budget(spec: BuildSpec) -> None:
    """Refuse a budget or metric that `quantize` would not use.

    Raises:
        InputError: it would not.
    """
    if spec.metric is not None and spec.budget is None:
        raise InputError(
            "--metric has nothing to judge",
            "without a budget, quantize does not run the model that it writes",
            "give --budget as well",
        )
    if spec.budget is not None and spec.precision.is_weight_only:
        raise InputError(
            f"--budget and --{spec.precision.quantization} exclude each other",
            "the search for nodes to keep float is for activations and weights in 8 bits",
            "build it, which verifies it: trtforge build MODEL --budget VALUE",
        )


def _result(spec: BuildSpec, manifest: Manifest, reused: bool) -> BuildResult:
    """The result, judged by this build's budget: `verify` may have recorded another in the meantime."""
    parity = manifest.parity
    if parity.verified:
        passed = parity.meets(spec.cosine_budget)
    else:
        passed = spec.verify != "required"
    passed = passed and (manifest.export is None or manifest.export.passed)
    return BuildResult(spec.target_directory, manifest, reused, passed)
