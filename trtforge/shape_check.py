"""Whether a model takes the shapes of its profiles, found out before anything is built.

1. Shapes are inferred at min, opt and max of every profile, node by node; the first node that cannot take them ends it,
   and what the graph says of its dims tells what to change.
2. ONNX Runtime runs the source model once at the first profile's opt, where memory allows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.data import Dataset
from trtforge.errors import InputError, TrtForgeError
from trtforge.graph.dims.probe import Conflict
from trtforge.graph.native import OnnxNative
from trtforge.graph.save import skeleton_from_graph
from trtforge.profile import DimFact, DimReport, Profile, ProfileSet
from trtforge.profile_choice import DimSource
from trtforge.reference import ReferenceModel
from trtforge.tensor import TensorSpec

# Share of the free memory that one run may take, and bytes at most: a large model is not read just for this.
_MEMORY_SHARE, _MOST_BYTES = 0.5, 4 * 2**30
_Point = tuple[Profile, str]
Note = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A model as it was given.

    Attributes:
        path: its ONNX file.
        specs: its inputs.
        data: samples, one of which may be run; or None.
    """

    path: Path
    specs: Sequence[TensorSpec]
    data: Dataset | None


def check_shapes(
    source: Source, graph: gs.Graph, profiles: ProfileSet, native: OnnxNative, note: Note, dims_of: DimSource
) -> int:
    """Refuse profiles whose shapes a node of the graph cannot take.

    Inference has the say only where ONNX Runtime does not run the same shapes.

    Args:
        source: the model.
        graph: the same, normalised.
        profiles: the ranges.
        native: runs the inference.
        note: takes what was not done, and why.
        dims_of: examines the dims of the source; called only where something is wrong.

    Returns:
        Bytes that a run at the first profile's opt takes.

    Raises:
        InputError: names node, operator, dim and the profile's entry, and what to write there.
    """
    points: dict[str, _Point] = {}
    for profile in profiles.profiles:
        for kind in ("opt", "min", "max"):
            points.setdefault(repr(_point(profile, kind)), (profile, kind))
    chosen = list(points.values())
    model = skeleton_from_graph(graph).model
    results = native.probe_shapes(model, [_point(profile, kind) for profile, kind in chosen])
    for (profile, kind), result in zip(chosen, results, strict=True):
        if result.conflict is None:
            continue
        if _run(source, profile, kind, result.peak_bytes).has_run:
            note(f"inference expects node {result.conflict.node!r} to fail at {kind}, and ONNX Runtime runs it")
            continue
        raise _misfit(profile, kind, result.conflict, dims_of(True))
    return results[0].peak_bytes


def check_values(profiles: ProfileSet, report: DimReport) -> None:
    """Refuse values for inputs whose values no shape depends on.

    Raises:
        InputError: names the input.
    """
    for profile in profiles.profiles:
        for name in profile.values:
            if name not in report.shape_inputs:
                known = ", ".join(report.shape_inputs) or "none"
                raise InputError(
                    f"profile '{profile.name}' gives values for input '{name}'",
                    f"no shape and no branch of the model depends on its values (inputs where one does: {known})",
                    f"remove '{name}' from 'values:'",
                )


def _point(profile: Profile, kind: str) -> dict[str, dict[str, list[int]]]:
    return {
        "shapes": {name: list(getattr(span, kind)) for name, span in profile.inputs.items()},
        "values": {name: list(getattr(span, kind)) for name, span in profile.values.items()},
    }


def _misfit(profile: Profile, kind: str, conflict: Conflict, report: DimReport) -> InputError:
    sizes = {name: getattr(span, kind) for name, span in profile.inputs.items()}
    found = [problem for fact in report.dims for problem in _problems(fact, sizes, report)]
    shapes = ", ".join(f"{name} {list(size)}" for name, size in sizes.items())
    if not found:
        return InputError(
            f"the model cannot take the {kind} shapes of profile '{profile.name}': node {conflict.node!r} "
            f"({conflict.op}) fails",
            f"with {shapes}: {conflict.why}",
            "change the sizes that reach this node; trtforge profile MODEL tells what the graph takes",
        )
    what, fix = found[0]
    return InputError(
        f"profile '{profile.name}' does not fit the model: {what} at {kind}",
        f"node {conflict.node!r} ({conflict.op}) fails with {shapes}: {conflict.why}",
        fix,
    )


def _problems(fact: DimFact, sizes: Mapping[str, Sequence[int]], report: DimReport) -> list[tuple[str, str]]:
    """What is wrong with one dim at these sizes, and what to write instead."""
    at = [(name, axis, sizes[name][axis]) for name, axis in fact.axes if axis < len(sizes.get(name, ()))]
    if not at:
        return []
    name, axis, size = at[0]
    place = f"axis {axis} of input '{name}' (dim {fact.name})"
    other = next((entry for entry in at if entry[2] != size), None)
    if other is not None:
        there = f"axis {other[1]} of input '{other[0]}'"
        return [(f"{place} is {size} and {there} is {other[2]}", "give both one range: they are one dim of the model")]
    if fact.kind == "derived":
        axes = {term: report.dim(term).axes[0] for term, _ in fact.terms}
        if all(name in sizes for name, _ in axes.values()):
            total = fact.total({term: sizes[name][axis] for term, (name, axis) in axes.items()})
            if total != size:
                return [(f"{place} is {size}", f"write {total}: it is {fact.formula} ({fact.reason})")]
        return []
    if not fact.takes(size):
        return [(f"{place} is {size}", f"give {fact.name} {fact.limits}: {fact.reason}")]
    return []


def run_once(source: Source, profile: Profile, peak_bytes: int, note: Note) -> None:
    """Run the source model at a profile's opt in ONNX Runtime.

    With samples of that shape, or with inputs of floats alone, a failure is the shapes'. Made-up integers may be no
    valid lengths or indices, so then it is only told; so is a model that ONNX Runtime cannot load.

    Args:
        source: the model, and samples to take instead of made-up values.
        profile: the shapes.
        peak_bytes: see `check_shapes`.
        note: takes what was not done, and why.

    Raises:
        InputError: ONNX Runtime names the node that refuses the shapes.
    """
    found = _run(source, profile, "opt", peak_bytes)
    if found.refusal and found.is_certain:
        shapes = ", ".join(f"{name} {list(span.opt)}" for name, span in profile.inputs.items())
        raise InputError(
            f"the model does not run at the opt shapes of profile '{profile.name}': {shapes}",
            found.refusal,
            "change opt; trtforge profile MODEL tells what the graph takes",
        )
    if found.refusal:
        note(f"ONNX Runtime did not run the model on made-up integers at opt: {found.refusal}")
    elif not found.has_run:
        note(f"not run at opt: {found.obstacle}")


@dataclasses.dataclass(frozen=True, slots=True)
class _Outcome:
    """What came of a run: it ran, ONNX Runtime refused it (certainly for its shapes, or not), or it was not tried."""

    has_run: bool = False
    refusal: str = ""
    is_certain: bool = False
    obstacle: str = ""


def _run(source: Source, profile: Profile, kind: str, peak_bytes: int) -> _Outcome:
    """Run the source once at min, opt or max."""
    allowed = min(_MEMORY_SHARE * _available_bytes(), _MOST_BYTES)
    if peak_bytes > allowed:
        return _Outcome(obstacle=f"it may take {peak_bytes / 2**30:.1f} GiB, above {allowed / 2**30:.1f} GiB")
    feeds = _sample_of_shape(profile, kind, source.data)
    is_certain = feeds is not None or all(
        spec.dtype.startswith("float") or spec.name in profile.values for spec in source.specs
    )
    if feeds is None:
        feeds = _made_up(profile, kind, source.specs)
    if feeds is None:
        return _Outcome(obstacle="nothing can be made up for the type of one of the inputs")
    try:
        with ReferenceModel(source.path, as_written=True) as reference:
            try:
                reference.run(feeds)
            except InputError as err:
                return _Outcome(refusal=err.why, is_certain=is_certain)
    except TrtForgeError as err:
        return _Outcome(obstacle=f"{err.what} ({err.why})")
    return _Outcome(has_run=True)


def _sample_of_shape(profile: Profile, kind: str, data: Dataset | None) -> dict[str, np.ndarray] | None:
    """The first batch of the data, where it has these shapes."""
    if data is None:
        return None
    shapes: dict[str, tuple[int, ...]] = {name: getattr(span, kind) for name, span in profile.inputs.items()}
    batch = max(1, next((shape[0] for shape in shapes.values() if shape), 1))
    first = next(data.batches(batch), None)
    if first is None or any(feed.shape != shapes[name] for name, feed in first.feeds.items()):
        return None
    return first.feeds


def _made_up(profile: Profile, kind: str, specs: Sequence[TensorSpec]) -> dict[str, np.ndarray] | None:
    """Seeded floats, ones for booleans, the profile's values or zeros for integers; None for any other type."""
    rng = np.random.default_rng(0)
    feeds: dict[str, np.ndarray] = {}
    for spec in specs:
        shape: tuple[int, ...] = getattr(profile.inputs[spec.name], kind)
        if spec.dtype in ("float16", "float32", "float64"):
            feeds[spec.name] = rng.standard_normal(shape).astype(spec.dtype)
            continue
        try:
            dtype = np.dtype(spec.dtype)
        except TypeError:
            return None
        if dtype.hasobject:
            return None
        given = getattr(profile.values[spec.name], kind) if spec.name in profile.values else ()
        if len(given) == math.prod(shape) and spec.name in profile.values:
            feeds[spec.name] = np.array(given, dtype).reshape(shape)
        else:
            feeds[spec.name] = np.full(shape, dtype == np.bool_, dtype)
    return feeds


def _available_bytes() -> int:
    """Memory that can be had, from /proc/meminfo."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 2**62


def check_profiles(
    source: Source, graph: gs.Graph, profiles: ProfileSet, native: OnnxNative, note: Note, dims_of: DimSource
) -> None:
    """Both checks of a build or of `trtforge profile`; nothing is to be checked where no size was chosen.

    Args:
        source: the model.
        graph: the same, normalised.
        profiles: the ranges.
        native: runs onnx's C++.
        note: takes what was not done, and why.
        dims_of: examines the dims of the source; called only where values are given or something is wrong.

    Raises:
        InputError: see `check_shapes`, `check_values` and `run_once`.
    """
    if profiles.source == "static":
        return
    if any(profile.values for profile in profiles.profiles):
        check_values(profiles, dims_of(False))
    peak_bytes = check_shapes(source, graph, profiles, native, note, dims_of)
    run_once(source, profiles.first, peak_bytes, note)


def note_missing_values(profiles: ProfileSet, report: DimReport, note: Note) -> None:
    """Tell of inputs whose values decide shapes or a branch, and of which a profile gives none."""
    for name, place in report.shape_inputs.items():
        lacking = [profile.name for profile in profiles.profiles if name not in profile.values]
        if lacking:
            note(
                f"profile {lacking[0]!r} gives no values for input {name!r}, which decides shapes or a branch ({place})"
            )
