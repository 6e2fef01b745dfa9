"""The stages of a job, with what each of them hands to the next."""

from __future__ import annotations

import dataclasses
import importlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from trtforge import __version__, artifact, describe, stages
from trtforge.backends.base import Backend, BuildRequest
from trtforge.backends.base import BuildResult as EngineResult
from trtforge.graph.load import LoadedModel
from trtforge.graph.native import OnnxNative
from trtforge.graph.save import save_model
from trtforge.graph.signature import input_specs
from trtforge.inputs import BuildInputs, gather_inputs
from trtforge.isolation import Child
from trtforge.manifest import (
    ENGINE_NAME,
    MANIFEST_NAME,
    MODEL_NAME,
    REPORT_NAME,
    TABLE_NAME,
    BackendInfo,
    FileInfo,
    Manifest,
    ModelInfo,
)
from trtforge.progress import Event, Reporter, Stopwatch
from trtforge.quantization.table import CalibrationTable
from trtforge.spec import BuildSpec
from trtforge.staging import Staging
from trtforge.target import Target

if TYPE_CHECKING:
    from trtforge.quantization.placement import Placement


@dataclasses.dataclass(frozen=True, slots=True)
class BuildTools:
    """What a build works with.

    Attributes:
        backend: the engine builder.
        target: what the engine has to run on.
        staging: where the artifact's files go.
        worker: the backend's child process, which also runs onnx's C++.
        pool: one thread, which waits for the builder while the main one goes on.
    """

    backend: Backend
    target: Target
    staging: Staging
    worker: Child
    pool: ThreadPoolExecutor


class Job:
    """One job in progress: the stages' results as they come."""

    def __init__(self, spec: BuildSpec, report: Reporter) -> None:
        self.spec = spec
        self.report = report
        self.watch = Stopwatch(report)
        self.warnings: list[str] = []
        self.loaded: LoadedModel
        self.inputs: BuildInputs

    def warn(self, text: str) -> None:
        """Tell the user, and remember it for the manifest."""
        self.warnings.append(text)
        self.report(Event("warning", text, "warning"))

    def load(self) -> None:
        """Read the model and everything else that the job reads."""
        spec = self.spec
        with self.watch.stage("load"):
            self.loaded = stages.load_source(spec.source, spec.limits)
            self.inputs = gather_inputs(spec, input_specs(self.loaded.graph), self.loaded.sha256, self.warn)

    def run(self, tools: BuildTools, identity: str) -> Manifest:
        """Make every file of the artifact.

        Args:
            tools: see `BuildTools`.
            identity: fingerprint of the inputs.
        """
        spec, staging = self.spec, tools.staging
        native = OnnxNative(tools.worker)
        prepared = self.prepare(native)
        placement, table = self.calibrate(prepared, native, staging.work)
        model = staging.directory / MODEL_NAME
        with self.watch.stage("lower"):
            lowered = stages.lower(prepared.graph, spec.precision, placement, table)
            findings = stages.check_lint(lowered.graph)
            save_model(lowered.graph, model)
            if table is not None:
                (staging.directory / TABLE_NAME).write_text(table.to_json())
        engine, files = self._build_engine(tools, prepared)
        from trtforge.acceptance import verify_build
        from trtforge.report import render_report

        with self.watch.stage("verify") as note:
            parity = verify_build(spec, self.inputs, prepared, lowered, model, staging.work, note)
        with self.watch.stage("write"):
            precision = describe.describe_precision(spec, prepared, lowered, engine.plan)
            for text in describe.precision_warnings(precision, prepared, engine.plan):
                self.warn(text)
            manifest = Manifest(
                trtforge_version=__version__,
                inputs_sha256=identity,
                model=ModelInfo(name=self.loaded.name, sha256=self.loaded.sha256),
                backend=BackendInfo(name=tools.backend.name, version=engine.backend_version),
                targets=tuple(tools.target.names),
                precision=precision,
                fusion=describe.describe_fusion(prepared),
                near_misses=describe.describe_near_misses(prepared),
                plan=engine.plan.to_info(),
                profiles=describe.describe_profiles(self.inputs.profiles),
                io=describe.describe_io(self.loaded),
                calibration=describe.describe_calibration(placement, table),
                parity=parity,
                lint=describe.describe_findings(findings),
                warnings=tuple(self.warnings),
                notes=describe.pass_notes(prepared, lowered),
                files=files,
                timings_s=dict(self.watch.seconds),
                environment=describe.environment(spec),
            )
            (staging.directory / REPORT_NAME).write_text(render_report(manifest, table))
            (staging.directory / MANIFEST_NAME).write_text(manifest.to_json())
        return manifest

    def _build_engine(self, tools: BuildTools, prepared: stages.Prepared) -> tuple[EngineResult, dict[str, FileInfo]]:
        """Build the engine, and meanwhile do what needs none: load the later stages, infer shapes, hash files."""
        folder = tools.staging.directory
        with self.watch.stage("build") as note:
            request = BuildRequest(
                folder / MODEL_NAME, folder / ENGINE_NAME, self.inputs.profiles, tools.target, self.spec.tf32
            )
            building = tools.pool.submit(
                tools.backend.build, request, tools.worker, lambda progress: note(str(progress.get("phase", "")))
            )
            for later_stage in ("trtforge.acceptance", "trtforge.report"):
                importlib.import_module(later_stage)
            with OnnxNative() as native:
                prepared.infer_shapes(native)
            files = artifact.describe_files(folder)
            files.pop(ENGINE_NAME, None)  # which may be half written
            engine = building.result()
            tools.pool.submit(tools.worker.close)  # its memory takes a while to be freed
            size = (folder / ENGINE_NAME).stat().st_size
            files[ENGINE_NAME] = FileInfo(sha256=engine.engine_sha256, bytes=size)
            return engine, dict(sorted(files.items()))

    def prepare(self, native: OnnxNative) -> stages.Prepared:
        """Normalise the graph."""
        with self.watch.stage("normalise"):
            return stages.prepare(self.loaded, self.inputs.profiles, self.spec.precision, native)

    def calibrate(
        self, prepared: stages.Prepared, native: OnnxNative, work: Path
    ) -> tuple[Placement | None, CalibrationTable | None]:
        """Where Q/DQ goes and with what ranges: the user's table, or a calibration run."""
        if not self.spec.precision.int8:
            return None, None
        placement = stages.plan_quantization(prepared, self.inputs.recipe, native)
        if self.inputs.table is not None:
            return placement, self.inputs.table
        with self.watch.stage("calibrate") as note:
            table = stages.calibrate_table(prepared, placement, self.inputs, self.loaded.sha256, work, note)
        return placement, table
