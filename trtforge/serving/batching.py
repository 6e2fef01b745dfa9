"""How far Triton may batch a model, from what its manifest says of shapes and what ONNX Runtime shows.

Triton prepends one batch axis to every input and output, and joins requests along it, from a single sample up to
`max_batch_size`. So a model can be batched only if

    1. axis 0 of every input is one open dim, and every output has it as axis 0 as well,
    2. no input holds values that become shapes, because one request's values would hold for all,
    3. every profile takes a batch of 1, and none less than `max_batch_size`,
    4. the answer to a sample is the same beside others: axis 0 counts samples, not positions of one sample.

Names and ranges decide 1 to 3. Point 4 cannot be read off a name: ONNX Runtime computes a few samples together and one
by one. Where a point does not hold, `max_batch_size` is 0 and requests bring whole shapes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from trtforge.errors import InputError, TrtForgeError
from trtforge.manifest import IoInfo, Manifest, ProfileInfo
from trtforge.reference import ReferenceModel
from trtforge.serving.model_file import ModelFile
from trtforge.serving.request_values import POINTS, profile_point, request_values

# Samples that are computed together and one by one.
_SAMPLES = 3
# |together - alone| / |alone| over an output. The order of a sum changes with the batch, which fp32 shows in its last
# digits; in fp16, bf16 and Q/DQ graphs it moves a value to the next step, and through layers to a few steps. A model
# that mixes its samples differs by about 1.
FLOAT32_TOLERANCE, LOW_TOLERANCE = 1e-3, 5e-2


@dataclasses.dataclass(frozen=True, slots=True)
class Batching:
    """What the server may do.

    Attributes:
        max_batch_size: samples that it may join; 0 where it must not, and requests bring whole shapes.
        reason: why it is that much.
        preferred: batch sizes that the engine is tuned for, ascending.
    """

    max_batch_size: int
    reason: str
    preferred: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """What a run in ONNX Runtime showed.

    Attributes:
        ranks: number of axes of each output; empty where the model did not run.
        mixes: which output is not the same for samples together and one by one, and how; empty where all are.
        failure: why the model did not run; empty where it did.
        is_loaded: ONNX Runtime takes the graph.
        refusal: at which further point of the profiles it did not run, and why; empty where it ran at all that were
            tried.
    """

    ranks: Mapping[str, int]
    mixes: str = ""
    failure: str = ""
    is_loaded: bool = True
    refusal: str = ""


def plan_batching(manifest: Manifest, seen: Observation, limit: int | None = None) -> Batching:
    """The batch sizes of a model.

    Args:
        manifest: of the artifact.
        seen: what a run showed.
        limit: what the user wants at most.

    Raises:
        InputError: the limit cannot be had.
    """
    obstacle = find_obstacle(manifest) or seen.mixes
    if not obstacle and seen.failure and not _names_agree(manifest.io):
        obstacle = f"nothing shows that axis 0 counts samples: {seen.failure}"
    if obstacle:
        if limit is not None:
            raise InputError(
                f"--max-batch {limit} cannot be had: the model has no batch dim",
                obstacle,
                "leave --max-batch out, or build the artifact from a model and a profile with an open batch dim",
            )
        return Batching(0, obstacle)
    most = {profile.name: batch_span(profile)[1] for profile in manifest.profiles}
    smallest = min(most, key=lambda name: most[name])
    if limit is not None and limit > most[smallest]:
        raise InputError(
            f"--max-batch {limit} is more than the engine takes",
            f"profile '{smallest}' takes a batch of {most[smallest]} at most",
            f"give --max-batch {most[smallest]} or less, or build with a larger profile",
        )
    size = most[smallest] if limit is None else limit
    opts = {min(profile.inputs[_first_input(profile)].opt[0], size) for profile in manifest.profiles}
    reason = f"profile '{smallest}' takes at most {most[smallest]}" if limit is None else "as asked for"
    # A preferred size of 1 would send every request alone.
    return Batching(size, reason, tuple(sorted(opts - {1})))


def find_obstacle(manifest: Manifest) -> str:
    """Why names and ranges do not allow batches; empty where they do."""
    inputs = [port for port in manifest.io if port.mode == "input"]
    for profile in manifest.profiles:
        if profile.values:
            return f"the values of input '{next(iter(profile.values))}' become shapes, so requests cannot share them"
    for port in inputs:
        if not all(profile.inputs[port.name].opt for profile in manifest.profiles):
            return f"input '{port.name}' has no axis"
        if port.shape and isinstance(port.shape[0], int):
            return f"axis 0 of input '{port.name}' is fixed at {port.shape[0]}"
    heads = {port.shape[0]: port.name for port in inputs if port.shape and isinstance(port.shape[0], str)}
    if len(heads) > 1:
        names = ", ".join(f"'{dim}' of input '{name}'" for dim, name in heads.items())
        return f"axis 0 is not the same dim everywhere: {names}"
    return _span_obstacle(manifest.profiles) or _output_obstacle(manifest.io)


def _span_obstacle(profiles: Sequence[ProfileInfo]) -> str:
    for profile in profiles:
        spans = {(span.min[0], span.opt[0], span.max[0]) for span in profile.inputs.values()}
        if len(spans) > 1:
            return f"axis 0 has different ranges in the inputs of profile '{profile.name}'"
        low = batch_span(profile)[0]
        if low > 1:
            return f"profile '{profile.name}' takes no batch below {low}, and requests come one by one"
    return ""


def _output_obstacle(io: Sequence[IoInfo]) -> str:
    inner = {dim for port in io if port.mode == "input" for dim in (port.shape or ())[1:] if isinstance(dim, str)}
    for port in io:
        if port.mode == "output" and port.shape is not None:
            if not port.shape:
                return f"output '{port.name}' has no axis"
            if isinstance(port.shape[0], int):
                return f"axis 0 of output '{port.name}' is fixed at {port.shape[0]}"
            if port.shape[0] in inner:
                return f"axis 0 of output '{port.name}' is the dim '{port.shape[0]}'"
    return ""


def _names_agree(io: Sequence[IoInfo]) -> bool:
    """Whether one name marks axis 0 of every input and output."""
    heads = {port.shape[0] if port.shape else None for port in io}
    return len(heads) == 1 and isinstance(heads.pop(), str)


def batch_span(profile: ProfileInfo) -> tuple[int, int]:
    """Smallest and largest size of axis 0 in a profile of a model that has a batch axis."""
    span = profile.inputs[_first_input(profile)]
    return span.min[0], span.max[0]


def _first_input(profile: ProfileInfo) -> str:
    return next(iter(profile.inputs))


def observe_model(
    path: Path, model: ModelFile, is_batched: bool, tolerance: float, *, every_point: bool = False
) -> Observation:
    """Run a graph in ONNX Runtime on made-up values.

    Args:
        path: the ONNX file.
        model: its inputs and profiles.
        is_batched: run some samples together and one by one as well.
        tolerance: by how much an answer may change beside others; `FLOAT32_TOLERANCE` or `LOW_TOLERANCE`.
        every_point: run min, opt and max of every profile as well, with one sample where there are samples.
    """
    profile = model.profiles[0]
    shapes, given = profile_point(profile, "opt" if any(0 in span.min for span in profile.inputs.values()) else "min")
    count = min(_SAMPLES, batch_span(profile)[1]) if is_batched else 0
    if is_batched:
        shapes = {name: (count, *shape[1:]) for name, shape in shapes.items()}
    is_loaded = False
    try:
        with ReferenceModel(path, as_written=model.as_written) as reference:
            is_loaded = True
            feeds = request_values(model, shapes, given)
            together = reference.run(feeds)
            alone = [
                reference.run({name: feed[i : i + 1] for name, feed in feeds.items()})
                for i in range(count if count > 1 else 0)
            ]
            refusal = _refusal(reference, model, is_batched) if every_point else ""
    except TrtForgeError as err:
        return Observation({}, failure=err.why or err.what, is_loaded=is_loaded)
    ranks = {name: array.ndim for name, array in together.items()}
    mixes = (_mixing(name, array, count, alone, tolerance) for name, array in together.items() if is_batched)
    return Observation(ranks, next(filter(None, mixes), ""), refusal=refusal)


def _refusal(reference: ReferenceModel, model: ModelFile, is_batched: bool) -> str:
    """The first point of the profiles that the model does not run at, and why."""
    for profile in model.profiles:
        for point in POINTS:
            shapes, given = profile_point(profile, point)
            if is_batched:
                shapes = {name: (1, *shape[1:]) for name, shape in shapes.items()}
            try:
                reference.run(request_values(model, shapes, given))
            except TrtForgeError as err:
                return f"{point} of profile '{profile.name}': {err.why or err.what}"
    return ""


def _mixing(
    name: str, together: np.ndarray, count: int, alone: Sequence[Mapping[str, np.ndarray]], tolerance: float
) -> str:
    """How an output of samples together differs from theirs one by one; empty where it does not."""
    if not together.ndim or len(together) != count:
        return f"output '{name}' has shape {list(together.shape)} for a batch of {count}"
    if not alone:
        return ""
    shapes = [sample[name].shape for sample in alone]
    if any(shape != (1, *together.shape[1:]) for shape in shapes):
        return f"output '{name}' has shape {list(shapes[0])} for a sample alone and {list(together.shape)} for {count}"
    error = relative_error(np.concatenate([sample[name] for sample in alone]), together)
    if error <= tolerance:
        return ""
    return (
        f"output '{name}' differs by {error:.2g} of its size when samples are computed together: "
        "axis 0 does not count samples"
    )


def relative_error(expected: np.ndarray, actual: np.ndarray) -> float:
    """|actual - expected| / |expected| over the finite values; infinite where others are finite in one of them.

    Of integers and booleans it is the share of elements that differ.
    """
    if expected.dtype.kind in "iub":
        return float(np.mean(expected != actual)) if expected.size else 0.0
    r, c = expected.astype(np.float64).reshape(-1), actual.astype(np.float64).reshape(-1)
    is_finite = np.isfinite(r)
    if not np.array_equal(is_finite, np.isfinite(c)):
        return float("inf")
    r, c = r[is_finite], c[is_finite]
    size = float(np.linalg.norm(r))
    error = float(np.linalg.norm(c - r))
    return error / size if size else error
