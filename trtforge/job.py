"""The stages of a job, with what each of them hands to the next."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
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
    ParityInfo,
)
from trtforge.progress import Event, Reporter, Stopwatch
from trtforge.spec import FLOAT_DTYPES, BuildSpec
from trtforge.staging import Staging
from trtforge.target import Target

if TYPE_CHECKING:
    from trtforge.graph.lint import Finding
    from trtforge.mixed.choose import Choice
    from trtforge.quantization.checkpoint import Checkpoint
    from trtforge.quantization.quantizer import Quantizer
    from trtforge.quantization.rows import Rows
    from trtforge.quantization.sites import Placement
    from trtforge.quantization.table import CalibrationTable
    from trtforge.quantization.weight_only_graph import StoredWeights


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
        quantizer, rows = self.calibrate(prepared, native, staging.work)
        quantizer = self.round_weights(prepared, quantizer, rows)
        placement, table = (None, None) if quantizer is None else (quantizer.placement, quantizer.table)
        stored = self.store_weights(prepared, staging.work)
        if table is not None:
            (staging.directory / TABLE_NAME).write_text(table.to_json())
        lowered, findings = self._lower(prepared, quantizer, stored, {}, staging)
        parity, sensitivity = None, None
        if quantizer is not None and spec.search and self.inputs.evaluation is not None:
            # Before the engine is built, which takes the nodes that have to stay float.
            parity = self._verify(prepared, lowered, staging)
            if not parity.passed:
                choice = self.meet_budget(prepared, quantizer, parity, staging.work)
                sensitivity = choice.info
                if choice.reasons:
                    lowered, findings = self._lower(prepared, quantizer, stored, choice.reasons, staging)
                    parity = self._verify(prepared, lowered, staging)
        engine, files = self._build_engine(tools, prepared)
        from trtforge.report import render_report

        if parity is None:
            parity = self._verify(prepared, lowered, staging)
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
                sensitivity=sensitivity,
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

    def _lower(
        self,
        prepared: stages.Prepared,
        quantizer: Quantizer | None,
        stored: StoredWeights | None,
        kept: Mapping[str, str],
        staging: Staging,
    ) -> tuple[stages.Lowered, tuple[Finding, ...]]:
        """Write the graph that is built; `kept` says which nodes stay float, and why."""
        with self.watch.stage("lower"):
            lowered = stages.lower(prepared.graph, self.spec.precision, quantizer, stored, kept)
            findings = stages.check_lint(lowered.graph)
            save_model(lowered.graph, staging.directory / MODEL_NAME)
        return lowered, findings

    def _verify(self, prepared: stages.Prepared, lowered: stages.Lowered, staging: Staging) -> ParityInfo:
        from trtforge.acceptance import verify_build

        model = staging.directory / MODEL_NAME
        with self.watch.stage("verify") as note:
            return verify_build(self.spec, self.inputs, prepared, lowered, model, staging.work, note)

    def meet_budget(
        self, prepared: stages.Prepared, quantizer: Quantizer, parity: ParityInfo | None, work: Path
    ) -> Choice:
        """The nodes that stay float so that the budget is met; `parity` holds what quantizing all gave, where known."""
        from trtforge.budget import meet_budget

        with self.watch.stage("meet budget") as note:
            if parity is not None:
                name = quantizer.number_format.name.upper()
                note(
                    f"{name} alone misses the budget of {parity.budget:g}: looking for nodes to keep float",
                    level="notice",
                )
            choice = meet_budget(self.spec, self.inputs, prepared, quantizer, parity, work, note)
        if not choice.info.met:
            self.warn(choice.info.note)
        return choice

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
            prepared = stages.prepare(self.loaded, self.inputs.profiles, self.spec.precision, native)
        if prepared.mended:
            self.warn(
                f"{len(prepared.mended)} places where this model's quantization does not suit TensorRT were mended, "
                f"the first: {prepared.mended[0]} (all of them: trtforge lint MODEL --fix)"
            )
        return prepared

    def calibrate(
        self, prepared: stages.Prepared, native: OnnxNative, work: Path, checkpoint: Checkpoint | None = None
    ) -> tuple[Quantizer | None, dict[str, Rows]]:
        """Where Q/DQ goes and with what ranges: the user's table, or a calibration run with rows of the activations."""
        precision = self.spec.precision
        if not precision.is_calibrated:
            return None, {}
        from trtforge.quantization.formats import FORMATS
        from trtforge.quantization.quantizer import Quantizer

        placement = stages.plan_quantization(prepared, self.inputs.recipe, native)
        stages.check_arrived(precision, placement)
        table = self.inputs.table
        rows: dict[str, Rows] = {}
        if table is None:
            if not placement.nodes:
                raise stages.nothing_to_quantize(precision, placement)
            table, rows = self._choose_ranges(prepared, placement, work, checkpoint)
        number_format = FORMATS[precision.quantization or "int8"]
        return Quantizer(placement, table, number_format, FLOAT_DTYPES[precision.base]), rows

    def _choose_ranges(
        self, prepared: stages.Prepared, placement: Placement, work: Path, checkpoint: Checkpoint | None
    ) -> tuple[CalibrationTable, dict[str, Rows]]:
        """Run the calibration samples; the table, and rows of the activations where the recipe needs any."""
        from trtforge.quantization.ranges import choose_ranges, samples_rows

        recipe, is_int8 = self.inputs.recipe, self.spec.precision.quantization == "int8"
        keep_rows = is_int8 and samples_rows(recipe)
        assert self.inputs.calibration is not None
        with self.watch.stage("calibrate") as note:
            seen = stages.observe_activations(
                prepared,
                placement,
                self.inputs,
                self.loaded.sha256,
                work,
                note,
                self.warn,
                checkpoint,
                keep_rows=keep_rows,
            )
            table = choose_ranges(
                prepared.graph,
                placement,
                seen,
                recipe,
                model_sha256=self.loaded.sha256,
                data_sha256=self.inputs.calibration.sha256,
                is_int8=is_int8,
                note=note,
            )
        return table, seen.sampled_rows()

    def round_weights(
        self, prepared: stages.Prepared, quantizer: Quantizer | None, rows: dict[str, Rows]
    ) -> Quantizer | None:
        """The quantizer with the weights decided as the recipe says."""
        if quantizer is None or self.spec.precision.quantization != "int8":
            return quantizer
        from trtforge.quantization.quantizer import with_rounded_weights
        from trtforge.quantization.rounding import needs_rows

        recipe = self.inputs.recipe
        if needs_rows(recipe) and not rows:
            self.warn(
                "a calibration table holds no activations, so weights are rounded to nearest and biases stay; "
                "give the data instead of the table for what the recipe asks"
            )
        with self.watch.stage("round weights") as note:
            return with_rounded_weights(quantizer, prepared.graph, rows, recipe, note)

    def store_weights(self, prepared: stages.Prepared, work: Path) -> StoredWeights | None:
        """The weights of a weight-only build, chosen by rows of the activations where there is data; else None."""
        precision = self.spec.precision
        if not precision.is_weight_only:
            return None
        from trtforge.quantization.formats import FORMATS
        from trtforge.quantization.weight_only_graph import choose_weights

        placement = stages.plan_weights(prepared, precision, self.inputs.recipe)
        rows: dict[str, Rows] = {}
        if self.inputs.calibration is not None and placement.tensors:
            with self.watch.stage("calibrate") as note:
                observation = stages.observe_activations(
                    prepared, placement, self.inputs, self.loaded.sha256, work, note, self.warn, keep_rows=True
                )
            rows = observation.sampled_rows()
        number_format, scale_dtype = FORMATS[precision.quantization or ""], FLOAT_DTYPES[precision.base]
        with self.watch.stage("round weights") as note:
            return choose_weights(prepared.graph, placement, number_format, rows, scale_dtype, note)
