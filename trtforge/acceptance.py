"""Whether a build is accepted: its figures against the fp32 source model, and the budget that they must meet."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import onnx_graphsurgeon as gs

from trtforge.artifact import damaged_files
from trtforge.data import Dataset, open_dataset
from trtforge.describe import profiles_from_manifest
from trtforge.errors import InputError, TrtForgeError
from trtforge.graph.intake import leaves_out_rounding
from trtforge.graph.load import LoadedModel, load_model
from trtforge.graph.normalise import normalise
from trtforge.graph.save import save_model
from trtforge.graph.signature import input_specs
from trtforge.inputs import BatchRange, BuildInputs, batch_range, find_calibration, fit_to_profiles, split_held_out
from trtforge.limits import DEFAULT_LIMITS, Limits
from trtforge.manifest import MANIFEST_NAME, MODEL_NAME, REPORT_NAME, TABLE_NAME, Manifest, ParityInfo, load_manifest
from trtforge.parity import left_out_note
from trtforge.progress import Event, Reporter, ignore
from trtforge.quantization.emulation import as_computed, computes_float16, uses_bfloat16
from trtforge.quantization.table import load_table
from trtforge.reference import ReferenceModel
from trtforge.report import render_report
from trtforge.spec import BuildSpec, precision_from_name
from trtforge.stages import AS_ASKED, FP32_NAME, Lowered, Prepared, Wider, load_source, lower, save_for_onnxruntime
from trtforge.staging import replace_file
from trtforge.textfile import kind_of
from trtforge.verify import Candidate, Scorer, Scores, find_worst_nodes, plan_runs

SOURCE = "the source model in ONNX Runtime"
NORMALISED = "the normalised source model in ONNX Runtime, which cannot load the source itself"
NORMALISED_EMULATED = "the normalised source model in ONNX Runtime, bf16 emulated"
BUILT_GRAPH = "the built graph in ONNX Runtime"
_NOTE_ON_FLOAT16 = (
    "The source itself is in float16, and a value passes the type's range, which ends at 65504; ONNX Runtime computes "
    "the source in float32, where that does not show. Export the model in float32."
)
BEFORE_QDQ = "before_qdq"
CANDIDATE = "candidate"


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """What outputs are compared with, as it is loaded, and how the manifest calls it."""

    label: str
    model: ReferenceModel


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """What a build has to reach.

    Attributes:
        value: the mean cosine of every output, or the metric's first figure.
        metric: the user's `module:function`, or None.
        is_on_metric: which of the two it is.
    """

    value: float
    metric: str | None
    is_on_metric: bool


def verify_build(
    spec: BuildSpec,
    inputs: BuildInputs,
    prepared: Prepared,
    lowered: Lowered,
    model: Path,
    work: Path,
    report: Callable[[str], None],
    wider: Wider = AS_ASKED,
) -> ParityInfo:
    """Score the built graph, and the same graph before Q/DQ, against the source model.

    Args:
        spec: the build.
        inputs: the evaluation data and the batch sizes.
        prepared: the graph before it was lowered.
        lowered: the graph that is built.
        model: its file.
        work: a folder for files that only this stage needs.
        report: takes progress notes.
        wider: what stays float32 in the built graph stays it in the same graph before Q/DQ.
    """
    dataset = inputs.evaluation
    if dataset is None:
        note = "--no-verify was given" if spec.verify == "off" else "there is no data to verify with"
        return unverified(spec.cosine_budget, note)
    candidates = [_candidate(lowered.graph, model, work)]
    if lowered.qdq is not None:
        plain = lower(prepared.graph, spec.precision, None, wide=wider.float32, overflow=wider.overflow)
        path = work / "before_qdq.onnx"
        save_model(as_computed(plain.graph), path)
        candidates.append(Candidate(BEFORE_QDQ, "graph before Q/DQ", path))
    exact = work / FP32_NAME
    if not exact.exists():
        save_for_onnxruntime(prepared.graph, exact)
    with _open_reference(spec.model_file, exact, uses_bfloat16(prepared.graph)) as reference:
        budget = Budget(spec.cosine_budget, spec.metric, spec.budget_metric is not None)
        parity = compare(reference, candidates, dataset, inputs.batch, budget, work, report)
    if parity.passed:
        return parity
    notes = [parity.note]
    if leaves_out_rounding(prepared.graph):
        notes.append(_note_on_rounding(spec, inputs, exact, work, report))
    if any(output.nan for output in parity.outputs.values()) and computes_float16(prepared.graph):
        notes.append(_NOTE_ON_FLOAT16)
    parity = parity.model_copy(update={"note": " ".join(note for note in notes if note) or None})
    weighted = prepared.gemm_flops
    outputs_of = {node.name: node.outputs[0].name for node in prepared.graph.nodes if node.name in weighted}
    worst = find_worst_nodes(exact, candidates[0].path, outputs_of, dataset, inputs.batch.opt)
    return parity.model_copy(update={"worst_nodes": worst})


def _note_on_rounding(
    spec: BuildSpec, inputs: BuildInputs, exact: Path, work: Path, report: Callable[[str], None]
) -> str:
    """How far the float form of a dynamically quantized source is from the source, before any cast or Q/DQ."""
    assert inputs.evaluation is not None
    alone = Candidate(CANDIDATE, "float form of the source", exact)
    budget = Budget(spec.cosine_budget, None, is_on_metric=False)
    with _open_reference(spec.model_file, exact, is_emulated=False) as reference:
        parity = compare(reference, [alone], inputs.evaluation, inputs.batch, budget, work, report)
    worst = min(output.cosine for run in parity.batches for output in run.outputs.values())
    return (
        "The source rounds activations to 8 bits with scales that it finds anew for every batch; this build does not "
        f"round them there, and that alone, in fp32, gives a cosine of {worst:.5f}. "
        "A higher budget judges that rounding."
    )


def _candidate(graph: gs.Graph, model: Path, work: Path) -> Candidate:
    """A built graph to judge: its own file, or a twin that rounds as the graph does where ONNX Runtime would not."""
    computed = as_computed(graph)
    if computed is graph:
        return Candidate(CANDIDATE, BUILT_GRAPH, model)
    twin = work / "candidate.onnx"
    save_model(computed, twin)
    # ONNX Runtime's CPU provider lacks kernels of these types: fp32 ones run, and every result is rounded.
    rounded = [name for name, is_used in (("bf16", uses_bfloat16), ("fp16", computes_float16)) if is_used(graph)]
    return Candidate(CANDIDATE, f"{BUILT_GRAPH}, {' and '.join(rounded)} emulated", twin)


@contextmanager
def _open_reference(source: Path, normalised: Path, is_emulated: bool) -> Iterator[Reference]:
    """The source model, or its normalised form where ONNX Runtime refuses the source (bf16, repeated node names)."""
    label = SOURCE
    try:
        model = ReferenceModel(source, as_written=True, exact_integers=True)
    except TrtForgeError:
        label = NORMALISED_EMULATED if is_emulated else NORMALISED
        try:
            model = ReferenceModel(normalised, as_written=True)
        except InputError as err:
            raise InputError(
                f"ONNX Runtime can load neither {source} nor its normalised form, so nothing can verify a build",
                err.why,
                "export the model with operators and types that ONNX Runtime has, or give --no-verify",
            ) from err
    with model:
        yield Reference(label, model)


def compare(
    reference: Reference,
    candidates: list[Candidate],
    dataset: Dataset,
    batch: BatchRange,
    budget: Budget,
    work: Path,
    report: Callable[[str], None],
) -> ParityInfo:
    """The parity figures of the candidates; the first one is judged.

    Args:
        reference: what to compare with.
        candidates: the graph to judge, then graphs that are shown beside it.
        dataset: samples to run.
        batch: sizes to run them at.
        budget: what to reach.
        work: a folder for the reference's outputs.
        report: takes progress notes.
    """
    runs = plan_runs(dataset, batch.opt, batch.min)
    # A budget of 0 asks nothing of the outputs.
    needs_values = budget.value > 0 and not budget.is_on_metric
    scorer = Scorer(reference.model, runs, budget.metric, work, report, needs_values=needs_values)
    scores = {"fp32": scorer.exact, **{candidate.name: scorer.score(candidate) for candidate in candidates}}
    judged = scores[candidates[0].name]
    before = scores.get(BEFORE_QDQ)
    parity = ParityInfo(
        reference=reference.label,
        candidate=candidates[0].label,
        verified=True,
        passed=None,
        budget=budget.value,
        figure=scorer.figure if budget.is_on_metric else None,
        samples=judged.batches[0].samples,
        data_sha256=dataset.sha256,
        outputs=judged.batches[0].outputs,
        batches=judged.batches,
        before_qdq=before.batches[0].outputs if before else {},
        metrics=_metrics(scores),
        note=left_out_note(judged.batches[0].outputs),
    )
    return parity.model_copy(update={"passed": parity.meets(budget.value)})


@dataclasses.dataclass(frozen=True, slots=True)
class VerifySpec:
    """One `trtforge verify`.

    Attributes:
        artifact: the folder.
        model: the source model; None takes the path that the build recorded.
        eval: data to run; None takes the held-out part of what `calibration/<stem>.npz` holds, as a build does.
        budget: mean cosine to reach, or with a metric its first figure; None keeps the build's.
        metric: `module:function`.
        limits: bounds on untrusted input.
    """

    artifact: Path
    model: Path | None = None
    eval: str | None = None
    budget: float | None = None
    metric: str | None = None
    limits: Limits = DEFAULT_LIMITS


def verify_artifact(spec: VerifySpec, report: Reporter = ignore) -> ParityInfo:
    """Check an artifact's files, score its graph against the source model, and record the figures in it.

    Raises:
        InputError: not an artifact, damaged files, another source model, or data that cannot be used.
    """
    manifest = load_manifest(spec.artifact, spec.limits)
    damaged = damaged_files(spec.artifact, manifest)
    if damaged:
        raise InputError(
            f"{spec.artifact} is damaged",
            f"{', '.join(damaged)} missing or not as the manifest records",
            "build it again with --force",
        )
    source = spec.model or Path(str(manifest.environment.get("source", "")))
    if spec.model is None and manifest.export is not None:
        raise InputError(
            f"{spec.artifact} was built from {source}, which is no ONNX file",
            "verify runs the ONNX model that was exported from it; the same export gives the same file",
            f"trtforge export {source} --{precision_from_name(manifest.precision.requested).base} "
            f"-o {manifest.model.name}.onnx, with the build's profile and data, then give that file with --model",
        )
    if kind_of(source, "source model") != "file":
        raise InputError(
            f"the source model {source} does not exist"
            if source.name
            else "the artifact does not say where its source is",
            "the artifact's figures are against the model that it was built from",
            "give its place with --model",
        )
    loaded = load_source(source, spec.limits)
    if loaded.sha256 != manifest.model.sha256:
        raise InputError(
            f"{source} is not the model that {spec.artifact} was built from",
            f"its sha256 is {loaded.sha256[:12]}..., the artifact's is {manifest.model.sha256[:12]}...",
            "give the right one with --model",
        )
    parity = _score_artifact(spec, manifest, source, loaded, report)
    updated = manifest.model_copy(update={"parity": parity})
    table = spec.artifact / TABLE_NAME
    replace_file(
        spec.artifact / REPORT_NAME, render_report(updated, load_table(table, spec.limits) if table.exists() else None)
    )
    replace_file(spec.artifact / MANIFEST_NAME, updated.to_json())
    return parity


def _score_artifact(
    spec: VerifySpec, manifest: Manifest, source: Path, loaded: LoadedModel, report: Reporter
) -> ParityInfo:
    """The figures of the artifact's graph on the data given or found."""
    specs = input_specs(loaded.graph)
    data = spec.eval or find_calibration(source)
    if data is None or str(data).endswith(".json"):
        raise InputError("there is no data to verify with", "none was given or found", "give it with --eval")
    profiles = profiles_from_manifest(manifest)
    dataset = open_dataset(data, specs, spec.limits)
    batch = batch_range(profiles.first, dataset)
    dataset = fit_to_profiles(dataset, profiles, batch)
    if spec.eval is None:
        _, dataset = split_held_out(dataset)
    if spec.budget is None and manifest.parity.figure is not None and spec.metric is None:
        raise InputError(
            f"the budget of {spec.artifact} is on the metric's figure {manifest.parity.figure!r}",
            "the metric is not given",
            "give it with --metric, or a mean cosine to reach with --budget",
        )
    is_on_metric = spec.metric is not None and (spec.budget is not None or manifest.parity.figure is not None)
    value = manifest.parity.budget if spec.budget is None else spec.budget
    budget = Budget(value, spec.metric, is_on_metric)
    with tempfile.TemporaryDirectory(prefix="trtforge-") as folder:
        work = Path(folder)
        built = spec.artifact / MODEL_NAME
        candidate = _candidate(load_model(built, spec.limits).graph, built, work)
        normalised = work / FP32_NAME
        is_emulated = save_for_onnxruntime(normalise(loaded.graph)[0], normalised)
        with _open_reference(source, normalised, is_emulated) as reference:
            return compare(
                reference,
                [candidate],
                dataset,
                batch,
                budget,
                work,
                lambda note: report(Event("verify", note)),
            )


def unverified(budget: float, note: str) -> ParityInfo:
    """The parity of an artifact that nothing was compared for."""
    return ParityInfo(reference=SOURCE, candidate="nothing", verified=False, passed=None, budget=budget, note=note)


def _metrics(scores: Mapping[str, Scores]) -> dict[str, dict[str, float]]:
    """Metric name -> which graph -> value."""
    names = sorted({name for entry in scores.values() for name in entry.metrics})
    return {
        name: {graph: entry.metrics[name] for graph, entry in scores.items() if name in entry.metrics} for name in names
    }
