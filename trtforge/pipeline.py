"""The main job: from a source file to an artifact.

load -> normalise -> match regions -> calibrate -> insert Q/DQ -> cast -> lint -> build -> read the plan -> verify

The child that runs native code starts first, and this process imports what it needs itself (job.py and all below it)
while the child does the same: together that is a third of the time which a small build takes.
"""

from __future__ import annotations

import dataclasses
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from trtforge.backends.registry import select_backend
from trtforge.errors import InputError
from trtforge.isolation import Child
from trtforge.progress import Reporter, ignore
from trtforge.spec import BuildSpec
from trtforge.staging import check_free, open_staging
from trtforge.target import rtx_target_from_option

if TYPE_CHECKING:
    from trtforge.graph.lint import Finding
    from trtforge.job import Job
    from trtforge.manifest import Manifest
    from trtforge.quantization.qdq import QdqReport
    from trtforge.quantization.table import CalibrationTable

_NATIVE, _PURPOSE = "trtforge.graph.native:SERVICE", "ONNX model reading"


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
        table: the ranges that its scales come from.
        qdq: what was quantized, and what stayed float and why.
        findings: lint findings that the builder tolerates.
    """

    model: Path
    table: CalibrationTable
    qdq: QdqReport
    findings: tuple[Finding, ...]


def build(spec: BuildSpec, report: Reporter = ignore) -> BuildResult:
    """Build the artifact of one model.

    Args:
        spec: what to build.
        report: takes progress and warnings.

    Raises:
        TrtForgeError: bad input, or not possible here; nothing is left behind.
    """
    target = rtx_target_from_option(spec.gpu)
    backend = select_backend(spec.backend)
    # Leaving in reverse order: a failure ends the worker first, so that the thread that waits for one ends too.
    with open_staging(spec.target_directory) as staging, ThreadPoolExecutor(1) as pool:
        with backend.start_worker(staging.directory / "build.log") as worker:
            from trtforge.artifact import commit, find_artifact
            from trtforge.describe import build_identity
            from trtforge.job import BuildTools, Job

            job = Job(spec, report)
            job.load()
            identity = build_identity(spec, job.loaded, job.inputs, target, backend)
            found = find_artifact(spec.target_directory, identity, spec.force, spec.limits)
            if found is not None:
                return _result(spec, found, reused=True)
            manifest = job.run(BuildTools(backend, target, staging, worker, pool), identity)
        other = commit(staging, identity, spec.force, spec.limits)
    if other is not None:
        job.warn("another build finished the same artifact first; this one was dropped")
    return _result(spec, other or manifest, reused=other is not None)


def calibrate(spec: BuildSpec, report: Reporter = ignore) -> CalibrationTable:
    """The calibration table of a model, from all of its calibration data.

    Args:
        spec: source, data, profile and recipe count; the precision is INT8's.
        report: takes progress and warnings.

    Raises:
        TrtForgeError: bad input, or not possible here.
    """
    with tempfile.TemporaryDirectory(prefix="trtforge-") as work, Child(_NATIVE, purpose=_PURPOSE) as child:
        from trtforge.graph.native import OnnxNative

        job = _load_to_quantize(spec, report)
        if job.inputs.table is not None:
            raise InputError(
                f"what was found for {spec.source.name} is a calibration table already",
                f"it is {spec.calib or f'calibration/{spec.source.stem}.json'}; calibrate needs data",
                "give data with --calib",
            )
        native = OnnxNative(child)
        placement, table = job.calibrate(job.prepare(native), native, Path(work))
    assert placement is not None and table is not None
    return table


def quantize(spec: BuildSpec, output: Path, report: Reporter = ignore) -> QuantizeResult:
    """Write the graph that a build would hand to the backend, without building it.

    Args:
        spec: source, precision, data, profile and recipe count.
        output: the ONNX file to write; an existing one is replaced only with `spec.force`.
        report: takes progress and warnings.

    Raises:
        TrtForgeError: bad input, or not possible here; nothing is left behind.
    """
    check_free(output, spec.force)
    with tempfile.TemporaryDirectory(prefix="trtforge-") as work, Child(_NATIVE, purpose=_PURPOSE) as child:
        from trtforge import stages
        from trtforge.artifact import write_model
        from trtforge.graph.native import OnnxNative

        job = _load_to_quantize(spec, report)
        native = OnnxNative(child)
        prepared = job.prepare(native)
        placement, table = job.calibrate(prepared, native, Path(work))
        with job.watch.stage("lower"):
            lowered = stages.lower(prepared.graph, job.spec.precision, placement, table)
            findings = stages.check_lint(lowered.graph)
            write_model(lowered.graph, output)
    assert table is not None and lowered.qdq is not None
    return QuantizeResult(output, table, lowered.qdq, findings)


def _load_to_quantize(spec: BuildSpec, report: Reporter) -> Job:
    """A job that calibrates on all of its data and builds nothing."""
    from trtforge.job import Job

    precision = dataclasses.replace(spec.precision, int8=True)
    spec = dataclasses.replace(spec, verify="off", precision=precision)
    job = Job(spec, report)
    job.load()
    return job


def _result(spec: BuildSpec, manifest: Manifest, reused: bool) -> BuildResult:
    """The result, judged by this build's budget: `verify` may have recorded another in the meantime."""
    from trtforge.parity import meets_budget

    parity = manifest.parity
    if parity.verified:
        passed = all(meets_budget(run.outputs, spec.cosine_budget) for run in parity.batches)
    else:
        passed = spec.verify != "required"
    return BuildResult(spec.target_directory, manifest, reused, passed)
