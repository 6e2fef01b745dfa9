"""`trtforge reduce`: from a model that does not build to the smallest part of it that fails the same way."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from trtforge.backends.registry import select_backend
from trtforge.errors import BuildError, InputError, TrtForgeError
from trtforge.exporting import on_exported
from trtforge.progress import Event, Reporter, ignore
from trtforge.spec import BuildSpec
from trtforge.staging import check_free, check_not_read
from trtforge.target import check_quantization

if TYPE_CHECKING:
    import onnx_graphsurgeon as gs

    from trtforge.graph.native import OnnxNative
    from trtforge.job import Job
    from trtforge.trials import Part, Trials


@dataclasses.dataclass(frozen=True, slots=True)
class Reduced:
    """What `reduce` wrote.

    Attributes:
        model: the ONNX file of the part that fails.
        nodes: names of its nodes.
        num_nodes: of the whole graph that was handed to the builder.
        error: the failure of the part.
        trials: builds that the search for it made.
        is_smallest: no node of it can be left out; False where the search ended early, or where only the whole is sure
            to fail.
        profiles: YAML of the ranges with which it fails.
    """

    model: Path
    nodes: tuple[str, ...]
    num_nodes: int
    error: TrtForgeError
    trials: int
    is_smallest: bool
    profiles: str


@on_exported
def reduce_model(spec: BuildSpec, output: Path, report: Reporter = ignore) -> Reduced:
    """Find the smallest part of a model that the builder refuses, or dies of, as it does of the whole.

    What a build does before the builder (normalise, quantize, cast, and the remedies that it takes) is done first, so
    the part is one of the graph that is built. What it refuses without asking the builder, such as an operator that no
    builder has, is handed to the builder all the same.

    Args:
        spec: source, precision, data, profile, recipe, backend, target and engine options count.
        output: the ONNX file to write; an existing one is replaced only with `spec.force`.
        report: takes progress and warnings.

    Raises:
        InputError: bad input, or the builder takes the model.
        TrtForgeError: not possible here; nothing is left behind.
    """
    check_not_read(output, (spec.source, spec.calib, spec.recipe, spec.profile))
    check_free(output, spec.force)
    backend = select_backend(spec.backend)
    target = backend.target(spec.gpu)
    check_quantization(target, spec.precision.quantization)
    backend.check(spec.engine_options, target)
    spec = dataclasses.replace(spec, verify="off", metric=None)
    with tempfile.TemporaryDirectory(prefix="trtforge-") as folder:
        from trtforge.graph.native import OnnxNative
        from trtforge.job import Job
        from trtforge.reduction import MAX_TRIALS
        from trtforge.trials import Trials, find_part

        job = Job(spec, report)
        with Trials(backend, target, Path(folder), tf32=spec.tf32, options=spec.engine_options) as trials:
            with OnnxNative() as native:
                job.load(native)
                graph, error = _failing_graph(job, native, trials)
            with job.watch.stage("reduce") as note:
                part = find_part(graph, error, job.inputs.profiles, trials, note, MAX_TRIALS)
        return _write(graph, part, output)


def _failing_graph(job: Job, native: OnnxNative, trials: Trials) -> tuple[gs.Graph, TrtForgeError]:
    """The graph that a build gives up on, and how it fails.

    Raises:
        InputError: it builds, or only trtforge itself refuses it, with its reason.
    """
    from trtforge import stages
    from trtforge.remedies import Remedies
    from trtforge.trials import with_culprit

    prepared = job.prepare(native)
    work = Path(tempfile.mkdtemp(dir=trials.folder))
    quantizer = job.quantizer(prepared, native, work)
    stored = job.store_weights(prepared, work)
    remedies = Remedies(prepared.graph, job.spec.precision)
    while True:
        lowered = stages.lower(prepared.graph, job.spec.precision, quantizer, stored, remedies.kept, remedies.wide)
        with job.watch.stage("build"):
            error = trials.failure(lowered.graph, job.inputs.profiles)
        if error is None:
            stages.check_lint(lowered.graph)
            raise InputError(
                f"{job.spec.source} builds: there is nothing to reduce",
                f"{job.spec.precision.name} for this target, with this profile",
                "give the options of the build that fails",
            )
        if not isinstance(error, BuildError):
            return lowered.graph, error
        if error.node is None:
            with job.watch.stage("diagnose") as note:
                error = with_culprit(error, lowered.graph, job.inputs.profiles, trials, note)
        done = remedies.take(error, lowered)
        if done is None:
            return lowered.graph, error
        job.report(Event("build", done.describe(), "notice"))


def _write(graph: gs.Graph, part: Part, output: Path) -> Reduced:
    from trtforge.artifact import write_model
    from trtforge.graph.signature import input_specs
    from trtforge.profile_text import profiles_to_yaml

    cut = part.cut
    write_model(cut.graph, output)
    return Reduced(
        output,
        tuple(graph.nodes[index].name for index in part.nodes),
        len(graph.nodes),
        part.error,
        part.trials,
        part.is_smallest,
        profiles_to_yaml(cut.profiles, input_specs(cut.graph)),
    )
