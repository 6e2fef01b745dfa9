"""The stages up to the graph that is built, with what each of them hands to the next; `build_job.py` has the rest."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import onnx_graphsurgeon as gs

from trtforge import reuse, stages
from trtforge.cache.store import Codec, StageCache
from trtforge.errors import InputError
from trtforge.graph.dims.report import report_dims
from trtforge.graph.load import LoadedModel
from trtforge.graph.native import OnnxNative
from trtforge.graph.normalise import NormaliseReport
from trtforge.graph.signature import input_specs
from trtforge.inputs import BuildInputs, gather_inputs
from trtforge.manifest import ParityInfo
from trtforge.profile import DimReport
from trtforge.progress import Event, Reporter, Stopwatch
from trtforge.spec import FLOAT_DTYPES, BuildSpec
from trtforge.stage_keys import calibration_inputs, graph_sha256, search_inputs, stage_key
from trtforge.traced_dims import TracedDims, read_traced_dims

if TYPE_CHECKING:
    from trtforge.mixed.choose import Choice
    from trtforge.quantization.checkpoint import Checkpoint
    from trtforge.quantization.quantizer import Quantizer
    from trtforge.quantization.rounding import RoundedWeights
    from trtforge.quantization.rows import Rows
    from trtforge.quantization.sites import Placement
    from trtforge.quantization.table import CalibrationTable
    from trtforge.quantization.weight_only_graph import StoredWeights

T = TypeVar("T")
# Stages whose result depends on the user's metric: code of which nobody knows when it changes.
_JUDGED = {"artifact", "verify", "search"}


class Job:
    """One job in progress: the stages' results as they come.

    Args:
        spec: what is asked for.
        report: takes progress and warnings.
        cache: gives results of earlier jobs, and takes this one's; None for neither.

    Attributes:
        keys: of the stages so far, by name; filled only with a cache.
    """

    def __init__(self, spec: BuildSpec, report: Reporter, cache: StageCache | None = None) -> None:
        self.spec = spec
        self.report = report
        self.cache = cache
        self.keys: dict[str, str] = {}
        self.watch = Stopwatch(report)
        if spec.exported is not None:
            self.watch.seconds["export"] = spec.exported.seconds
        self.warnings: list[str] = []
        self.loaded: LoadedModel
        self.inputs: BuildInputs
        self._dims: dict[bool, DimReport] = {}
        self._traced = TracedDims()

    def warn(self, text: str) -> None:
        """Tell the user, and remember it for the manifest."""
        self.warnings.append(text)
        self.report(Event("warning", text, "warning"))

    def stage(self, name: str, depends_on: Callable[[], Any], codec: Codec[T], make: Callable[[], T]) -> T:
        """The result of a stage: from the cache where it is there, else made, and stored.

        Args:
            name: of the stage.
            depends_on: everything that changes the result, as JSON; called only with a cache.
            codec: writes and reads the result.
            make: runs the stage.
        """
        if self.cache is None or (name in _JUDGED and self.spec.metric is not None):
            return make()
        with self.watch.stage("cache"):
            key = self.keys[name] = stage_key(name, depends_on())
            found = self.cache.find(name, key, codec)
        if found is not None:
            for text in found.warnings:
                self.warn(text)
            self.report(Event("cache", f"{name} is that of an earlier run", "detail"))
            return found.value
        told = len(self.warnings)
        result = make()
        with self.watch.stage("cache"):
            self.cache.store(name, key, result, codec, self.warnings[told:])
        return result

    def load(self, native: OnnxNative) -> None:
        """Read the model and everything else that the job reads; `native` examines the graph where that is needed."""
        spec = self.spec
        with self.watch.stage("load"):
            self.loaded = stages.load_source(spec.model_file, spec.limits)
            specs = input_specs(self.loaded.graph)
            dims_of = functools.partial(self._examine_dims, native, lambda: self.loaded.graph)
            self._traced = read_traced_dims(self.loaded.metadata, specs, spec.limits)
            for text in self._traced.notes:
                self.warn(text)
            self.inputs = gather_inputs(spec, specs, self.loaded.sha256, self.warn, dims_of, self._traced.dims)

    def _examine_dims(self, native: OnnxNative, read: Callable[[], gs.Graph], find_limits: bool) -> DimReport:
        """What the source's graph, which `read` gives, says of its dims; what is known already is not found again."""
        known = self._dims.get(True) or self._dims.get(find_limits)
        if known is not None:
            return known
        report = self.stage(
            "dims",
            lambda: [self.loaded.sha256, find_limits],
            reuse.JsonCodec(DimReport),
            lambda: report_dims(read(), find_limits=find_limits, native=native),
        )
        self._dims[find_limits] = self._traced.narrow(report)
        return self._dims[find_limits]

    def _check_shapes(self, prepared: stages.Prepared, native: OnnxNative) -> None:
        """Refuse profiles that the model cannot take, before anything is done with them."""
        from trtforge.shape_check import Source, check_profiles

        inputs, spec = self.inputs, self.spec
        data = inputs.calibration or inputs.evaluation
        # Read again: normalisation has used up the graph that was loaded.
        dims_of = functools.partial(
            self._examine_dims, native, lambda: stages.load_source(spec.model_file, spec.limits).graph
        )

        def make() -> bool:
            with self.watch.stage("check shapes") as note:
                source = Source(spec.model_file, input_specs(prepared.graph), data)
                check_profiles(source, prepared.graph, inputs.profiles, native, note, dims_of)
            return True

        profiles = [dataclasses.asdict(profile) for profile in inputs.profiles.profiles]
        sha256 = None if data is None else data.sha256
        self.stage("shapes", lambda: [self.keys["prepared"], profiles, sha256], reuse.JsonCodec(bool), make)

    def prepare(self, native: OnnxNative) -> stages.Prepared:
        """Normalise the graph, and fold what the profiles decide."""

        def make() -> tuple[gs.Graph, NormaliseReport]:
            with self.watch.stage("normalise"):
                return stages.normalise_source(self.loaded, self.spec.precision, native)

        graph, report = self.stage(
            "normalise",
            lambda: [self.loaded.sha256, self.spec.precision.name],
            reuse.NormalisedCodec(self.spec.limits),
            make,
        )
        with self.watch.stage("specialise"):
            prepared = stages.prepare(graph, report, self.inputs.profiles, self.spec.precision, native)
        if self.cache is not None:
            # By content: most profiles give the same graph.
            self.keys["prepared"] = graph_sha256(prepared.graph)
        self._check_shapes(prepared, native)
        if prepared.mended:
            self.warn(
                f"{len(prepared.mended)} places where this model's quantization does not suit TensorRT were mended, "
                f"the first: {prepared.mended[0]} (all of them: trtforge lint MODEL --fix)"
            )
        return prepared

    def quantizer(
        self,
        prepared: stages.Prepared,
        native: OnnxNative,
        work: Path,
        checkpoint: Checkpoint | None = None,
        *,
        decides_weights: bool = True,
    ) -> Quantizer | None:
        """Where Q/DQ goes, with what ranges and weights; None where activations stay float.

        Args:
            prepared: the graph.
            native: runs onnx's C++.
            work: a folder for the graph while ONNX Runtime reads it.
            checkpoint: saves the state of the calibration run.
            decides_weights: decide on the weights as the recipe says; otherwise only ranges are of use.
        """
        precision = self.spec.precision
        if not precision.is_calibrated:
            return None
        from trtforge.quantization.formats import FORMATS
        from trtforge.quantization.quantizer import Quantizer

        placement = stages.plan_quantization(prepared, self.inputs.recipe, native)
        stages.check_arrived(precision, placement)
        if self.inputs.table is None and not placement.nodes:
            self.accept_unquantized(stages.nothing_to_quantize(precision, placement))
            return None
        number_format, dtype = FORMATS[precision.quantization or "int8"], FLOAT_DTYPES[precision.base]
        decides_weights = decides_weights and precision.quantization == "int8"

        def make() -> tuple[CalibrationTable, RoundedWeights]:
            rows: dict[str, Rows] = {}
            table = self.inputs.table
            if table is None:
                table, rows = self._choose_ranges(prepared, placement, work, checkpoint)
            quantizer = Quantizer(placement, table, number_format, dtype)
            if decides_weights:
                quantizer = self._round_weights(prepared, quantizer, rows)
            return quantizer.table, quantizer.rounded

        table, rounded = self.stage(
            "calibrate",
            lambda: [
                self.keys["prepared"],
                calibration_inputs(self.spec, self.inputs, placement, decides_weights=decides_weights),
            ],
            reuse.CalibrationCodec(),
            make,
        )
        # The key is the prepared graph, which models of other bytes may share.
        table = table.model_copy(update={"model_sha256": self.loaded.sha256})
        return Quantizer(placement, table, number_format, dtype, rounded)

    def accept_unquantized(self, reason: InputError) -> None:
        """Refuse a model in which nothing is left to quantize: this job is for nothing else.

        Raises:
            InputError: always.
        """
        raise reason

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

    def _round_weights(self, prepared: stages.Prepared, quantizer: Quantizer, rows: dict[str, Rows]) -> Quantizer:
        """The quantizer with the weights decided as the recipe says."""
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
        number_format, scale_dtype = FORMATS[precision.quantization or ""], FLOAT_DTYPES[precision.base]

        def make() -> StoredWeights:
            rows: dict[str, Rows] = {}
            if self.inputs.calibration is not None and placement.tensors:
                with self.watch.stage("calibrate") as note:
                    observation = stages.observe_activations(
                        prepared, placement, self.inputs, self.loaded.sha256, work, note, self.warn, keep_rows=True
                    )
                rows = observation.sampled_rows()
            with self.watch.stage("round weights") as note:
                return choose_weights(prepared.graph, placement, number_format, rows, scale_dtype, note)

        return self.stage(
            "weights",
            lambda: [
                self.keys["prepared"],
                calibration_inputs(self.spec, self.inputs, placement, decides_weights=True),
            ],
            reuse.StoredWeightsCodec(precision),
            make,
        )

    def meet_budget(
        self,
        prepared: stages.Prepared,
        quantizer: Quantizer,
        parity: ParityInfo | None,
        work: Path,
        wider: stages.Wider = stages.AS_ASKED,
    ) -> Choice:
        """The nodes that stay float so that the budget is met, besides those that `wider` names.

        `parity` holds what quantizing all gave, where known.
        """
        from trtforge.budget import meet_budget
        from trtforge.mixed.choose import Choice

        def make() -> Choice:
            with self.watch.stage("meet budget") as note:
                if parity is not None:
                    name = quantizer.number_format.name.upper()
                    note(
                        f"{name} alone misses the budget of {parity.budget:g}: looking for nodes to keep float",
                        level="notice",
                    )
                return meet_budget(self.spec, self.inputs, prepared, quantizer, parity, work, note, wider)

        choice = self.stage(
            "search",
            lambda: [
                self.keys["calibrate"],
                self.keys.get("lower"),  # of a build: what a remedy or an overflow changed
                search_inputs(self.spec, self.inputs, prepared, parity),
            ],
            reuse.JsonCodec(Choice),
            make,
        )
        if not choice.info.met:
            self.warn(choice.info.note)
        return choice
