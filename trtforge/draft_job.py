"""From a prepared graph to the one that is built: lower it, verify it, keep more nodes wide where a budget is missed.

What is tried, in this order and once each, because every step is judged by the figures of the one before:

    1. values too large for float16: what computes or reads them stays float32 (quantization/overflow.py)
    2. nodes whose INT8 or FP8 costs too much stay float (budget.py)

`build_job.py` builds the draft. A remedy for what the builder refuses makes another draft, which is verified as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from trtforge import reuse, stages, trail
from trtforge.errors import ChildDiedError, InputError
from trtforge.fusion.lower_block import brings_blocks, lower_blocks
from trtforge.graph.save import save_model
from trtforge.job import Job
from trtforge.manifest import MODEL_NAME, ParityInfo
from trtforge.profile_choice import CALIBRATION_BATCH
from trtforge.progress import Event
from trtforge.remedies import Remedies
from trtforge.stage_keys import overflow_inputs, verification_inputs
from trtforge.staging import Staging

if TYPE_CHECKING:
    from trtforge.graph.lint import Finding
    from trtforge.quantization.overflow import Overflow
    from trtforge.quantization.quantizer import Quantizer
    from trtforge.quantization.weight_only_graph import StoredWeights
    from trtforge.sensitivity import SensitivityInfo


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """What every draft of a graph is made of.

    Attributes:
        prepared: the float graph.
        quantizer: inserts Q/DQ; None for none.
        stored: the weights of a weight-only build.
        remedies: what was done for the builder, which may have rewritten the float graph.
        staging: takes the files.
    """

    prepared: stages.Prepared
    quantizer: Quantizer | None
    stored: StoredWeights | None
    remedies: Remedies
    staging: Staging


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """What was found out because a budget was missed.

    Attributes:
        overflow: tensors that are too large for float16; None where nothing looked for them.
        kept: nodes that a search leaves float, and why.
        sensitivity: that search's story; None where there was none.
    """

    overflow: Overflow | None = None
    kept: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sensitivity: SensitivityInfo | None = None

    def leaves_same_graph(self, other: Found) -> bool:
        """Whether both keep the same nodes and tensors wide."""
        amax, others = ({} if found.overflow is None else found.overflow.amax for found in (self, other))
        return dict(self.kept) == dict(other.kept) and dict(amax) == dict(others)


@dataclasses.dataclass(frozen=True, slots=True)
class Draft:
    """A graph that may be built, which lies in the staging folder.

    Attributes:
        found: what it was made with.
        lowered: the graph.
        findings: of the linter.
        parity: its figures; None until it is verified.
    """

    found: Found
    lowered: stages.Lowered
    findings: tuple[Finding, ...]
    parity: ParityInfo | None = None


class DraftJob(Job):
    """A job that makes the graph of an engine."""

    def lower(self, parts: Parts, found: Found) -> Draft:
        """Write the graph that is built; what `found` and the remedies say stays wide."""
        model, remedies, precision = parts.staging.directory / MODEL_NAME, parts.remedies, self.spec.precision

        def make() -> tuple[stages.Lowered, tuple[Finding, ...]]:
            with self.watch.stage("lower"):
                kept = {**found.kept, **remedies.kept}
                graph, overflow = parts.prepared.graph, found.overflow
                lowered = stages.lower(graph, precision, parts.quantizer, parts.stored, kept, remedies.wide, overflow)
                if brings_blocks(self.spec.engine_options.plugins):
                    lowered = dataclasses.replace(lowered, blocks=lower_blocks(lowered.graph))
                findings = stages.check_lint(lowered.graph)
                save_model(lowered.graph, model)
            return lowered, findings

        lowered, findings = self.stage(
            "lower",
            lambda: (
                [self.keys[name] for name in ("prepared", "calibrate", "weights") if name in self.keys]
                + [
                    brings_blocks(self.spec.engine_options.plugins),
                    precision.name,
                    dict(found.kept),
                    [entry.model_dump() for entry in remedies.applied],
                ]
                + ([dataclasses.asdict(found.overflow)] if found.overflow is not None else [])
            ),
            reuse.LoweredCodec(model, self.spec.limits),
            make,
        )
        self.explain(trail.of_lowered(parts.prepared, lowered, findings))
        return Draft(found, lowered, findings)

    def may_keep_wide(self, parts: Parts) -> bool:
        """Whether anything can be done where a budget is missed."""
        return self._may_overflow() or self._may_search(parts)

    def _may_search(self, parts: Parts) -> bool:
        """Whether nodes can be left float so that a budget is met."""
        return parts.quantizer is not None and self.spec.search and self.inputs.evaluation is not None

    def _may_overflow(self) -> bool:
        """Whether values can be found that are too large for the type."""
        return self.spec.precision.base == "fp16" and self.inputs.evaluation is not None

    def keep_wide(self, parts: Parts, draft: Draft) -> Draft:
        """The draft with its figures; where it misses the budget, another one that keeps more nodes wide, with its own.

        Overflow is looked for once in a build, and nodes to leave float again only where the last search met the
        budget, so that a remedy undid it.
        """
        draft = self.verify(parts, draft)
        if self._misses(draft) and self._may_overflow() and draft.found.overflow is None:
            found = dataclasses.replace(draft.found, overflow=self._find_overflow(parts, draft))
            draft = self._redraft(parts, draft, found)
        last = draft.found.sensitivity
        if self._misses(draft) and self._may_search(parts) and (last is None or last.met):
            assert parts.quantizer is not None
            remedies, kept = parts.remedies, draft.found.kept
            choice = self.meet_budget(
                parts.prepared,
                parts.quantizer,
                None if kept else draft.parity,
                parts.staging.work,
                stages.Wider(remedies.kept, remedies.wide, draft.found.overflow),
            )
            found = dataclasses.replace(draft.found, kept=choice.reasons, sensitivity=choice.info)
            draft = self._redraft(parts, draft, found)
        return draft

    def _redraft(self, parts: Parts, draft: Draft, found: Found) -> Draft:
        """The draft with what was found, lowered and verified again where that changes the graph."""
        if found.leaves_same_graph(draft.found):
            return dataclasses.replace(draft, found=found)
        return self.verify(parts, self.lower(parts, found))

    def _misses(self, draft: Draft) -> bool:
        """Whether figures were taken, and are below the budget or not finite."""
        return draft.parity is not None and draft.parity.verified and not draft.parity.passed

    def verify(self, parts: Parts, draft: Draft) -> Draft:
        """The draft with its figures."""
        if draft.parity is not None:
            return draft
        from trtforge.acceptance import verify_build

        prepared, staging = parts.prepared, parts.staging
        wider = stages.Wider(float32=parts.remedies.wide, overflow=draft.found.overflow)

        def make() -> ParityInfo:
            with self.watch.stage("verify") as note:
                model = staging.directory / MODEL_NAME
                return verify_build(self.spec, self.inputs, prepared, draft.lowered, model, staging.work, note, wider)

        if self.inputs.evaluation is None:
            return dataclasses.replace(draft, parity=make())
        parity = self.stage(
            "verify",
            lambda: [
                self.keys["lower"],
                verification_inputs(self.spec, self.inputs, prepared, self.loaded.sha256),
            ],
            reuse.JsonCodec(ParityInfo),
            make,
        )
        return dataclasses.replace(draft, parity=parity)

    def _find_overflow(self, parts: Parts, draft: Draft) -> Overflow:
        """The tensors of the float32 graph that are too large for float16 on the calibration samples.

        Without calibration samples it takes the evaluation samples, and says so. A graph that cannot be run with its
        tensors as outputs stays as it is: that is no reason to fail.
        """
        from trtforge.quantization.calibrate import Pass
        from trtforge.quantization.overflow import Overflow, batch_bytes, find_overflow, tensors_to_observe

        inputs, prepared, path = self.inputs, parts.prepared, parts.staging.work / stages.FP32_NAME
        dataset = inputs.calibration or inputs.evaluation
        assert dataset is not None and draft.lowered.cast is not None
        kind = "evaluation" if dataset is inputs.evaluation else "calibration"
        samples = f"{len(dataset)} {kind} samples"
        tensors = tensors_to_observe(prepared.graph, draft.lowered.cast)
        batch = inputs.batch.clamp(CALIBRATION_BATCH)
        work = Pass(path, self.loaded.sha256, dict.fromkeys(tensors), dataset, batch)

        def make() -> Overflow:
            with self.watch.stage("find overflow") as note:
                if not path.exists():
                    stages.save_for_onnxruntime(prepared.graph, path)
                sizes = batch_bytes(prepared.shapes, batch / inputs.batch.opt)
                return find_overflow(work, samples, sizes, note, self.warn)

        try:
            overflow = self.stage(
                "overflow",
                lambda: [
                    self.keys["prepared"],
                    [entry.model_dump() for entry in parts.remedies.applied],
                    samples,
                    overflow_inputs(work),
                ],
                reuse.JsonCodec(Overflow),
                make,
            )
        except (InputError, ChildDiedError) as err:
            self.warn(f"nothing tells whether values are too large for float16: {err.what} ({err.why})")
            return Overflow(samples, {})
        if overflow.amax:
            self.report(Event("find overflow", overflow.describe(), "notice"))
        return overflow

    def explain(self, steps: Iterable[Event]) -> None:
        """Report steps of the trail."""
        for step in steps:
            self.report(step)
