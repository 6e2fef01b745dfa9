"""Builds of parts of a graph, to find the smallest one that fails as the whole does."""

from __future__ import annotations

import dataclasses
import filecmp
import re
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import onnx_graphsurgeon as gs

from trtforge.backends.base import Backend, BuildRequest, BuildResult
from trtforge.backends.diagnose import describe_place
from trtforge.backends.messages import RULES
from trtforge.backends.plan import EnginePlan
from trtforge.engine_options import DEFAULT_OPTIONS, EngineOptions
from trtforge.errors import BuildError, ChildDiedError, Diagnosis, TrtForgeError
from trtforge.graph.cut import Cut, Scissors, ShapeTable
from trtforge.graph.native import OnnxNative
from trtforge.graph.save import save_model
from trtforge.graph.shapes import infer_shapes_at
from trtforge.isolation import Child
from trtforge.profile import ProfileSet
from trtforge.progress import Note
from trtforge.reduction import Search
from trtforge.target import Target

# Trials to find the node behind one failure that names none, and behind all those of a build.
BLAME_TRIALS = 24
ALL_BLAME_TRIALS = 5 * BLAME_TRIALS
# Kinds of failure for which no node is searched.
_OF_THE_MODEL = frozenset(rule.cause for rule in RULES if rule.subject != "node")
_WORD = re.compile(r"[A-Za-z]{3,}")


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A part of a graph that fails like the whole.

    Attributes:
        nodes: indices of its nodes in the whole.
        cut: the part.
        error: its failure.
        trials: builds that the search made; one more has built the part that it found.
        is_smallest: no node of it can be left out; False where the trials ran out before that was known, and for the
            whole graph where the part that was found does not fail every time.
    """

    nodes: tuple[int, ...]
    cut: Cut
    error: TrtForgeError
    trials: int
    is_smallest: bool


@dataclasses.dataclass(frozen=True, slots=True)
class _Trial:
    """What the last trial was asked for and gave."""

    request: BuildRequest
    result: BuildResult


class Trials:
    """Builds parts of a graph in a child process, which is started again where it dies.

    Args:
        backend: the builder.
        target: what the engine has to run on.
        folder: for models, engines and the builder's log.
        tf32, options: how the builder makes the engine.

    Attributes:
        blame_left: trials that `with_culprit` may still make.
    """

    def __init__(
        self,
        backend: Backend,
        target: Target,
        folder: Path,
        *,
        tf32: bool = True,
        options: EngineOptions = DEFAULT_OPTIONS,
    ) -> None:
        self._backend = backend
        self._target = target
        self.folder = folder
        self.blame_left = ALL_BLAME_TRIALS
        self._log = folder / "build.log"
        self._tf32 = tf32
        # What a part takes to build is of no use for the whole.
        self._options = dataclasses.replace(options, timing_cache=None)
        self._worker: Child | None = None
        self._last: _Trial | None = None

    def failure(self, graph: gs.Graph, profiles: ProfileSet) -> TrtForgeError | None:
        """The builder's refusal or death; None where it builds the graph."""
        found = self.build(graph, profiles)
        return found if isinstance(found, TrtForgeError) else None

    def build(
        self, graph: gs.Graph, profiles: ProfileSet, whole_attention: tuple[str, ...] = ()
    ) -> BuildResult | TrtForgeError:
        """The engine, which the next trial overwrites; the builder's refusal or death where it does not build."""
        model = self.folder / "part.onnx"
        save_model(graph, model)
        self._log.write_bytes(b"")  # the worker appends to it
        if self._worker is None:
            self._worker = self._backend.start_worker(self._log)
        request = BuildRequest(
            model,
            self.folder / "part.engine",
            profiles,
            self._target,
            self._tf32,
            self._options,
            whole_attention=whole_attention,
        )
        self._last = None
        try:
            result = self._backend.build(request, self._worker)
        except ChildDiedError as err:
            self.close()
            return err
        except BuildError as err:
            return err
        self._last = _Trial(request, result)
        return result

    def reuse(self, request: BuildRequest, log: Path) -> BuildResult | None:
        """The engine of the last trial, where it was of the very file and options that are asked for now.

        Args:
            request: the engine is moved to where it wants it.
            log: what the builder said then is appended to it.
        """
        model, last = self.folder / "part.onnx", self._last
        if last is None or request.options != self._options or request.whole_attention != last.request.whole_attention:
            return None
        has_weights_beside = model.with_name(f"{model.name}.data").exists()
        if has_weights_beside or not filecmp.cmp(model, request.model, shallow=False):
            return None
        self.close()
        last.result.engine.replace(request.engine)
        with log.open("ab") as file:
            file.write(self._log.read_bytes())
        self._last = None
        return dataclasses.replace(last.result, engine=request.engine)

    def plan(
        self, graph: gs.Graph, profiles: ProfileSet, whole_attention: tuple[str, ...] = ()
    ) -> EnginePlan | TrtForgeError:
        """How the builder does a graph; its refusal or death where it does not."""
        found = self.build(graph, profiles, whole_attention)
        return found if isinstance(found, TrtForgeError) else found.plan

    def close(self) -> None:
        """End the child."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def find_part(
    graph: gs.Graph, error: TrtForgeError, profiles: ProfileSet, trials: Trials, note: Note, max_trials: int
) -> Part:
    """The smallest part of a graph that fails like the whole.

    Args:
        graph: what failed; its element types are filled in.
        error: how.
        profiles: ranges of its inputs.
        trials: builds the parts.
        note: takes progress.
        max_trials: builds that the search may make.
    """
    with OnnxNative() as native:
        scissors = Scissors(graph, shape_table(graph, profiles, native))
    node = None if error.diagnosis is None else error.diagnosis.node
    blamed = next((index for index, other in enumerate(graph.nodes) if node and other.name == node), None)

    def fails(nodes: Sequence[int]) -> bool:
        note(f"trial {search.trials}: {len(nodes)} of {len(graph.nodes)} nodes", search.trials, max_trials)
        part = scissors.cut(nodes)
        found = trials.failure(part.graph, part.profiles)
        return found is not None and is_same_failure(error, found)

    search = Search(scissors, fails, max_trials)
    nodes = search.run(len(graph.nodes), blamed)
    part = scissors.cut(nodes)
    found = trials.failure(part.graph, part.profiles)
    if found is None or not is_same_failure(error, found):
        # A part that fails only sometimes proves nothing: the whole does.
        nodes = list(range(len(graph.nodes)))
        return Part(tuple(nodes), scissors.cut(nodes), error, search.trials, is_smallest=False)
    return Part(tuple(nodes), part, found, search.trials, search.is_complete)


def with_culprit(error: BuildError, graph: gs.Graph, profiles: ProfileSet, trials: Trials, note: Note) -> BuildError:
    """A refusal that names no node, with the node that a few trials find; the error as it is where none is to blame.

    Args:
        error: the refusal.
        graph: what was refused; its element types are filled in.
        profiles: ranges of its inputs.
        trials: builds parts of it.
        note: takes progress.
    """
    diagnosis = error.diagnosis
    if diagnosis is None or diagnosis.node or diagnosis.cause in _OF_THE_MODEL or diagnosis.cause.startswith("profile"):
        return error
    if not trials.blame_left:
        return error
    note("looking for the node that the builder refuses")
    part = find_part(graph, error, profiles, trials, note, min(BLAME_TRIALS, trials.blame_left))
    trials.blame_left -= part.trials
    nodes = [graph.nodes[index] for index in part.nodes]
    if not part.is_smallest or len(nodes) == len(graph.nodes):
        return error
    last, why = nodes[-1], error.why
    if len(nodes) > 1:
        why += f"; the smallest part that fails is of {len(nodes)} nodes: {', '.join(repr(n.name) for n in nodes[:8])}"
    found = dataclasses.replace(
        diagnosis, node=last.name, op=last.op, reason=why, shapes=getattr(part.error.diagnosis, "shapes", ())
    )
    what = error.what.replace("the model", describe_place(last.name, last.op))
    return BuildError(what, why, error.fix, last.name, found)


def is_same_failure(one: TrtForgeError, other: TrtForgeError) -> bool:
    """Whether two failures are of one kind: the same cause and operator, or where those say little, like words."""
    first, second = (error.diagnosis or Diagnosis("", "", "", message=error.what) for error in (one, other))
    if (type(one), first.cause) != (type(other), second.cause) or (first.op and second.op and first.op != second.op):
        return False
    if first.cause == "crash":
        return one.what == other.what
    if first.cause not in ("", "unknown", "internal-error"):
        return True
    words, others = set(_WORD.findall(first.message)), set(_WORD.findall(second.message))
    return 2 * len(words & others) >= max(len(words), len(others))


def shape_table(graph: gs.Graph, profiles: ProfileSet, native: OnnxNative) -> ShapeTable:
    """The shapes of a graph's tensors at the ends and the opt of every profile; fills in its element types."""
    from trtforge.quantization.op_types import fill_element_types

    fill_element_types(graph)
    rows = []
    for profile in profiles.profiles:
        at = [{name: getattr(span, end) for name, span in profile.inputs.items()} for end in ("min", "opt", "max")]
        rows.append(tuple(infer_shapes_at(graph, sizes, native) | sizes for sizes in at))
    names = tuple(profile.name for profile in profiles.profiles)
    return ShapeTable(names, tuple(rows), tuple(profile.values for profile in profiles.profiles))  # type: ignore[arg-type]
