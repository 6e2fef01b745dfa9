"""A build in progress, from a source file to the files of an artifact."""

from __future__ import annotations

import dataclasses
import importlib
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from trtforge import __version__, artifact, describe, reuse, stages, trail
from trtforge.backends.base import Backend, BuildRequest
from trtforge.backends.base import BuildResult as EngineResult
from trtforge.draft_job import Draft, DraftJob, Found, Parts
from trtforge.engine_options import EngineOptions
from trtforge.errors import BuildError, InputError
from trtforge.fusion.lower_block import brings_blocks
from trtforge.gpu import find_gpus
from trtforge.graph.native import OnnxNative
from trtforge.isolation import Child
from trtforge.manifest import (
    ENGINE_NAME,
    LOG_NAME,
    MANIFEST_NAME,
    MODEL_NAME,
    REPORT_NAME,
    TABLE_NAME,
    BackendInfo,
    FileInfo,
    Manifest,
    ModelInfo,
)
from trtforge.progress import Event, Note
from trtforge.remedies import Remedies, decomposed_attention, with_history
from trtforge.stage_keys import engine_inputs, graph_sha256
from trtforge.staging import Staging
from trtforge.target import BackendName, Target

if TYPE_CHECKING:
    from trtforge.trials import Trials


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


class BuildJob(DraftJob):
    """A job that ends with an engine."""

    _trials: Trials | None = None

    def run(self, tools: BuildTools, identity: str) -> Manifest:
        """Put every file of the artifact into the staging folder.

        Args:
            tools: see `BuildTools`.
            identity: fingerprint of the inputs.
        """
        folder = tools.staging.directory
        manifest = self.stage(
            "artifact", lambda: identity, reuse.ArtifactCodec(folder), lambda: self._make(tools, identity)
        )
        from trtforge.quantization.table import CalibrationTable
        from trtforge.report import render_report

        with self.watch.stage("write"):
            environment = describe.environment(self.spec, manifest.environment.get("timing_cache_sha256"))
            if self.cache is not None:
                environment["cache"] = self.cache.describe()
            # What the cache gave has those of the build that made it.
            update = {
                "export": None if self.spec.exported is None else self.spec.exported.info,
                "timings_s": dict(self.watch.seconds),
                "environment": environment,
            }
            manifest = manifest.model_copy(update=update)
            table = folder / TABLE_NAME
            ranges = CalibrationTable.model_validate_json(table.read_bytes()) if table.exists() else None
            (folder / REPORT_NAME).write_text(render_report(manifest, ranges))
            (folder / MANIFEST_NAME).write_text(manifest.to_json())
        return manifest

    def _make(self, tools: BuildTools, identity: str) -> Manifest:
        """Run the stages; what they do not take from the cache themselves."""
        spec, staging = self.spec, tools.staging
        native = OnnxNative(tools.worker)
        prepared = self._lower_regions(tools, self.prepare(native), native)
        self.explain(trail.of_prepared(prepared))
        stages.check_operators(prepared.graph)
        quantizer = self.quantizer(prepared, native, staging.work)
        placement, table = (None, None) if quantizer is None else (quantizer.placement, quantizer.table)
        stored = self.store_weights(prepared, staging.work)
        if table is not None:
            (staging.directory / TABLE_NAME).write_text(table.to_json())
        parts = Parts(prepared, quantizer, stored, Remedies(prepared.graph, spec.precision), staging)
        engine, files, draft = self._build_verified(tools, parts, native)
        lowered, findings, parity = draft.lowered, draft.findings, draft.parity
        assert parity is not None
        remedies = parts.remedies
        describe.check_plugin_layers(lowered, engine)
        precision = describe.describe_precision(spec, prepared, lowered, engine.plan)
        for text in describe.precision_warnings(precision, prepared, engine.plan, is_quantized=quantizer is not None):
            self.warn(text)
        for text in describe.engine_warnings(spec, engine):
            self.warn(text)
        return Manifest(
            trtforge_version=__version__,
            inputs_sha256=identity,
            model=ModelInfo(name=self.loaded.name, sha256=self.loaded.sha256),
            backend=BackendInfo(name=tools.backend.name, version=engine.backend_version),
            targets=tuple(tools.target.names),
            engine=describe.describe_engine(spec, engine),
            precision=precision,
            fusion=describe.describe_fusion(prepared, lowered),
            near_misses=describe.describe_near_misses(prepared, lowered),
            plan=engine.plan.to_info(),
            profiles=describe.describe_profiles(self.inputs.profiles),
            io=describe.describe_io(self.loaded),
            calibration=describe.describe_calibration(placement, table),
            parity=parity,
            sensitivity=draft.found.sensitivity,
            lint=describe.describe_findings(findings),
            remedies=(*remedies.applied, *decomposed_attention(lowered.graph, engine.plan)),
            warnings=tuple(self.warnings),
            notes=describe.pass_notes(prepared, lowered),
            files=files,
            timings_s=dict(self.watch.seconds),
            environment=describe.environment(spec, engine.timing_cache_sha256),
        )

    def _build_verified(
        self, tools: BuildTools, parts: Parts, native: OnnxNative
    ) -> tuple[EngineResult, dict[str, FileInfo], Draft]:
        """The engine, with the draft that it was built from and its figures.

        Raises:
            BuildError: no remedy is left.
            InputError: nothing can run the graph.
        """
        draft = self.lower(parts, Found())
        if self.may_keep_wide(parts):
            # Before the engine is built, which takes the nodes that have to stay wide.
            parts.prepared.infer_shapes(native)
            try:
                draft = self.keep_wide(parts, draft)
            except InputError:
                # Where nothing can run the model, what the builder refuses says more: it names the node.
                self._build(tools, parts, draft)
                raise
        engine, files, draft = self._build(tools, parts, draft)
        if draft.parity is None:
            verified = self.keep_wide(parts, draft)
            if verified.lowered is not draft.lowered:
                # The first worker has ended.
                with tools.backend.start_worker(parts.staging.directory / LOG_NAME) as worker:
                    tools = dataclasses.replace(tools, worker=worker)
                    engine, files, verified = self._build(tools, parts, verified)
            draft = self.verify(parts, verified)
        return engine, files, draft

    def accept_unquantized(self, reason: InputError) -> None:
        """Go on with what the model is, as every build of a list of models wants, and say so."""
        self.warn(f"{reason.what}; it is built in {self.spec.precision.base} as it is ({reason.why})")

    def _build(self, tools: BuildTools, parts: Parts, draft: Draft) -> tuple[EngineResult, dict[str, FileInfo], Draft]:
        """The engine, with the draft that the builder took: each refusal costs one of the remedies, which are limited.

        Raises:
            BuildError: no remedy is left.
        """
        while (built := self._try_engine(tools, parts.prepared, draft.lowered, parts.remedies)) is None:
            # It was written from the graph before the remedy.
            (parts.staging.work / stages.FP32_NAME).unlink(missing_ok=True)
            draft = self.lower(parts, draft.found)
        return (*built, draft)

    def _try_engine(
        self, tools: BuildTools, prepared: stages.Prepared, lowered: stages.Lowered, remedies: Remedies
    ) -> tuple[EngineResult, dict[str, FileInfo]] | None:
        """The engine; None where the builder refused the graph and a remedy was found, so that it is to be tried again.

        Raises:
            BuildError: no remedy is left.
        """
        try:
            return self._build_engine(tools, prepared)
        except BuildError as refusal:
            err = self._find_culprit(tools, lowered, refusal)
            self.explain(trail.of_refusal(err))
            done = remedies.take(err, lowered)
            if done is None:
                raise with_history(err, remedies) from refusal
            self.report(Event("build", done.describe(), "notice"))
            return None

    def _find_culprit(self, tools: BuildTools, lowered: stages.Lowered, refusal: BuildError) -> BuildError:
        """The refusal with the node that is to blame, where the builder named none and a few trials find it."""
        if refusal.node is not None:
            return refusal
        from trtforge.trials import with_culprit

        with self.watch.stage("diagnose") as note, self._open_trials(tools) as trials:
            return with_culprit(refusal, lowered.graph, self.inputs.profiles, trials, note)

    def _open_trials(self, tools: BuildTools) -> Trials:
        """Builds of other graphs than the job's; one for all, which counts what refusals take together."""
        from trtforge.trials import Trials

        if self._trials is None:
            folder = tools.staging.work / "trials"
            folder.mkdir()
            spec = self.spec
            self._trials = Trials(tools.backend, tools.target, folder, tf32=spec.tf32, options=spec.engine_options)
        return self._trials

    def _lower_regions(self, tools: BuildTools, prepared: stages.Prepared, native: OnnxNative) -> stages.Prepared:
        """The prepared graph, with attention in the form of which the builder makes the better plan."""
        from trtforge import lowering

        precision, recipe, graph = self.spec.precision, self.inputs.recipe, prepared.graph
        if precision.base == "fp32":  # nothing to choose, and such builds are short
            return prepared
        with self.watch.stage("match"):
            has_blocks = brings_blocks(self.spec.engine_options.plugins)
            candidates = lowering.find_candidates(graph, precision, recipe, leaves_blocks=has_blocks)

        def make() -> lowering.Decision:
            with self.watch.stage("choose fusion") as note, self._open_trials(tools) as trials:
                measure = lowering.measure_with(
                    prepared,
                    lambda form: lowering.lower_for_trial(form, precision, recipe, native),
                    lambda lowered, whole: trials.plan(lowered, self.inputs.profiles, whole),
                    note,
                )
                wanted = precision.quantization if precision.is_calibrated else None
                return lowering.decide(graph, candidates.regions, wanted, measure)

        decision = lowering.Decision((), {})
        if candidates.regions:
            decision = self.stage(
                "regions",
                lambda: [
                    self.keys["prepared"],
                    precision.name,
                    recipe.model_dump(mode="json"),
                    engine_inputs(tools.backend, self._request(tools)),
                ],
                reuse.JsonCodec(lowering.Decision),
                make,
            )
        prepared = lowering.apply_decision(prepared, candidates, decision)
        if self.cache is not None and decision.lowered:
            self.keys["prepared"] = graph_sha256(prepared.graph)
        return prepared

    def _build_engine(self, tools: BuildTools, prepared: stages.Prepared) -> tuple[EngineResult, dict[str, FileInfo]]:
        """The engine, and what the manifest says of the files beside it."""
        folder = tools.staging.directory
        request = self._request(tools, prepared.regions.whole_attention)
        files: dict[str, FileInfo] = {}
        engine = self.stage(
            "build",
            lambda: [self.keys["lower"], engine_inputs(tools.backend, request)],
            reuse.EngineCodec(folder),
            lambda: self._run_builder(tools, request, prepared, files),
        )
        if not files:  # it came from the cache
            prepared.infer_shapes(OnnxNative(tools.worker))
            files = artifact.describe_files(folder, {ENGINE_NAME})
        tools.pool.submit(tools.worker.close)  # its memory takes a while to be freed
        files[ENGINE_NAME] = FileInfo(sha256=engine.engine_sha256, bytes=(folder / ENGINE_NAME).stat().st_size)
        return engine, dict(sorted(files.items()))

    def _request(self, tools: BuildTools, whole_attention: tuple[str, ...] = ()) -> BuildRequest:
        """What the builder is asked for."""
        folder = tools.staging.directory
        return BuildRequest(
            folder / MODEL_NAME,
            folder / ENGINE_NAME,
            self.inputs.profiles,
            tools.target,
            self.spec.tf32,
            self._engine_options(tools),
            own_timing_cache=self.spec.engine_options.timing_cache is None,
            whole_attention=whole_attention,
        )

    def _run_builder(
        self, tools: BuildTools, request: BuildRequest, prepared: stages.Prepared, files: dict[str, FileInfo]
    ) -> EngineResult:
        """Build the engine, and meanwhile do what needs none: load the later stages, infer shapes, hash files."""
        with self.watch.stage("build") as note:
            building = tools.pool.submit(self._take_trial_or_build, tools, request, note)
            for later_stage in ("trtforge.acceptance", "trtforge.report"):
                importlib.import_module(later_stage)
            with OnnxNative() as native:
                prepared.infer_shapes(native)
            # The engine may be half written, and the builder says what its hash is.
            files |= artifact.describe_files(tools.staging.directory, {ENGINE_NAME})
            return building.result()

    def _take_trial_or_build(self, tools: BuildTools, request: BuildRequest, note: Note) -> EngineResult:
        """The engine: of the trial that chose the graph's form, where that was of this very file."""
        tried = None if self._trials is None else self._trials.reuse(request, tools.staging.directory / LOG_NAME)
        if tried is not None:
            return tried
        return tools.backend.build(request, tools.worker, lambda progress: note(str(progress.get("phase", ""))))

    def _engine_options(self, tools: BuildTools) -> EngineOptions:
        """The options, with the cache's timing cache where the builder has such a thing and the user named none."""
        options = self.spec.engine_options
        if self.cache is None or options.timing_cache is not None or tools.backend.name is not BackendName.TENSORRT:
            return options
        # Times of one GPU model are not those of another of its compute capability.
        name = "-".join([tools.backend.name, tools.backend.version(), find_gpus()[0].name])
        return dataclasses.replace(options, timing_cache=self.cache.timing_file(re.sub(r"[^\w.-]+", "_", name)))
