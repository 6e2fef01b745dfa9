"""The main job: from a source file to an artifact, in the order of the README's diagram.

load -> normalise -> match regions -> calibrate -> insert Q/DQ -> cast -> lint -> build -> read the plan -> verify
"""

from __future__ import annotations

import dataclasses
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trtforge import __version__, artifact, describe, stages
from trtforge.acceptance import verify_build
from trtforge.backends.base import Backend, BuildRequest
from trtforge.backends.base import BuildResult as EngineResult
from trtforge.backends.registry import select_backend
from trtforge.errors import InputError
from trtforge.graph.lint import Finding
from trtforge.graph.load import LoadedModel
from trtforge.graph.native import OnnxNative
from trtforge.graph.save import save_model
from trtforge.graph.signature import input_specs
from trtforge.inputs import BuildInputs, gather_inputs
from trtforge.isolation import Child
from trtforge.manifest import MANIFEST_NAME, BackendInfo, Manifest, ModelInfo, ParityInfo
from trtforge.progress import Event, Reporter, Stopwatch, ignore
from trtforge.quantization.placement import Placement
from trtforge.quantization.qdq import QdqReport
from trtforge.quantization.table import CalibrationTable
from trtforge.report import render_report
from trtforge.spec import BuildSpec
from trtforge.target import Target, rtx_target_from_option


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
    job = _Job(spec, report)
    artifact.check_place(spec.target_directory)
    # Leaving in reverse order: a failure ends the children first, so that the thread that waits for one ends too.
    with artifact.open_staging(spec.target_directory) as staging, ThreadPoolExecutor(1) as pool:
        log = staging.directory / "build.log"
        with job.backend.start_worker(log) as worker, OnnxNative() as native:
            job.load()
            found = artifact.find_artifact(spec.target_directory, job.identity, spec.force)
            if found is not None:
                return _result(spec, found, reused=True)
            manifest = job.run(staging, worker, native, pool)
        other = artifact.commit(staging, job.identity, spec.force)
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
    job = _Job(_without_verification(spec), report)
    job.load()
    if job.inputs.table is not None:
        raise InputError(
            f"{spec.calib} is a calibration table already", "calibrate needs data", "give data with --calib"
        )
    with tempfile.TemporaryDirectory(prefix="trtforge-") as work, OnnxNative() as native:
        placement, table = job.calibrate(job.prepare(native), Path(work))
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
    if output.exists() and not spec.force:
        raise InputError(f"{output} exists", "it is not replaced unasked", "give --force or another path with -o")
    job = _Job(_without_verification(spec), report)
    job.load()
    with tempfile.TemporaryDirectory(prefix="trtforge-") as work, OnnxNative() as native:
        prepared = job.prepare(native)
        placement, table = job.calibrate(prepared, Path(work))
    with job.watch.stage("lower"):
        lowered = stages.lower(prepared.graph, job.spec.precision, placement, table)
        findings = stages.check_lint(lowered.graph)
        artifact.write_model(lowered.graph, output)
    assert table is not None and lowered.qdq is not None
    return QuantizeResult(output, table, lowered.qdq, findings)


def _without_verification(spec: BuildSpec) -> BuildSpec:
    return dataclasses.replace(spec, verify="off", precision=dataclasses.replace(spec.precision, int8=True))


class _Job:
    """One build in progress: the stages' results as they come."""

    def __init__(self, spec: BuildSpec, report: Reporter) -> None:
        self.spec = spec
        self.report = report
        self.watch = Stopwatch(report)
        self.warnings: list[str] = []
        self.target: Target = rtx_target_from_option(spec.gpu)
        self.backend: Backend = select_backend(spec.backend)
        self.loaded: LoadedModel
        self.inputs: BuildInputs
        self.identity: str

    def warn(self, text: str) -> None:
        """Tell the user, and remember it for the manifest."""
        self.warnings.append(text)
        self.report(Event("warning", text, "warning"))

    def load(self) -> None:
        """Read the model and everything else that the build reads."""
        spec = self.spec
        with self.watch.stage("load"):
            self.loaded = stages.load_source(spec.source, spec.limits)
            self.inputs = gather_inputs(spec, input_specs(self.loaded.graph), self.loaded.sha256, self.warn)
            self.identity = describe.build_identity(spec, self.loaded, self.inputs, self.target, self.backend)

    def run(self, staging: artifact.Staging, worker: Child, native: OnnxNative, pool: ThreadPoolExecutor) -> Manifest:
        """Make every file of the artifact.

        Args:
            staging: where.
            worker: the backend's child process.
            native: the child process that runs onnx's C++.
            pool: one thread, which waits for the builder while this one goes on.
        """
        spec, watch = self.spec, self.watch
        model = staging.directory / "model.onnx"
        prepared = self.prepare(native)
        placement, table = self.calibrate(prepared, staging.work)
        with watch.stage("lower"):
            lowered = stages.lower(prepared.graph, spec.precision, placement, table)
            findings = stages.check_lint(lowered.graph)
            save_model(lowered.graph, model)
        with watch.stage("build") as note:
            engine_path = staging.directory / "model.engine"
            request = BuildRequest(model, engine_path, self.inputs.profiles, self.target, spec.tf32)
            building = pool.submit(self.backend.build, request, worker, lambda p: note(str(p.get("phase", ""))))
            prepared.gemm_flops()  # shapes are inferred while the builder works
            engine = building.result()
        with watch.stage("verify") as note:
            parity = verify_build(spec, self.inputs, prepared, lowered, staging.work, note)
        with watch.stage("write"):
            if table is not None:
                (staging.directory / "calibration.json").write_text(table.to_json())
            manifest = self._describe(prepared, lowered, findings, engine, placement, table, parity, staging)
            (staging.directory / "report.html").write_text(render_report(manifest, table))
            (staging.directory / MANIFEST_NAME).write_text(manifest.to_json())
        return manifest

    def prepare(self, native: OnnxNative) -> stages.Prepared:
        """Normalise the graph."""
        with self.watch.stage("normalise"):
            return stages.prepare(self.loaded, self.inputs.profiles, self.spec.precision, native)

    def calibrate(self, prepared: stages.Prepared, work: Path) -> tuple[Placement | None, CalibrationTable | None]:
        """Where Q/DQ goes and with what ranges: the user's table, or a calibration run."""
        if not self.spec.precision.int8:
            return None, None
        placement = stages.plan_quantization(prepared, self.inputs.recipe)
        if self.inputs.table is not None:
            return placement, self.inputs.table
        with self.watch.stage("calibrate") as note:
            table = stages.calibrate_table(prepared, placement, self.inputs, self.loaded.sha256, work, note)
        return placement, table

    def _describe(
        self,
        prepared: stages.Prepared,
        lowered: stages.Lowered,
        findings: tuple[Finding, ...],
        engine: EngineResult,
        placement: Placement | None,
        table: CalibrationTable | None,
        parity: ParityInfo,
        staging: artifact.Staging,
    ) -> Manifest:
        fusion, near_misses = describe.describe_fusion(prepared)
        return Manifest(
            trtforge_version=__version__,
            inputs_sha256=self.identity,
            model=ModelInfo(name=self.loaded.name, sha256=self.loaded.sha256),
            backend=BackendInfo(name=self.backend.name, version=engine.backend_version),
            targets=tuple(self.target.names),
            precision=describe.describe_precision(self.spec, prepared, lowered, engine.plan),
            fusion=fusion,
            near_misses=near_misses,
            plan=engine.plan.to_info(),
            profiles=describe.describe_profiles(self.inputs.profiles),
            io=describe.describe_io(self.loaded),
            calibration=describe.describe_calibration(placement, table),
            parity=parity,
            lint=describe.describe_findings(findings),
            warnings=tuple(self.warnings),
            files=artifact.describe_files(staging.directory),
            timings_s=dict(self.watch.seconds),
            environment=describe.environment(self.spec),
        )


def _result(spec: BuildSpec, manifest: Manifest, reused: bool) -> BuildResult:
    failed = manifest.parity.passed is False or (spec.verify == "required" and not manifest.parity.verified)
    return BuildResult(spec.target_directory, manifest, reused, not failed)
