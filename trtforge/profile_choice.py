"""Which optimisation profiles a job takes: a file's, the data's shapes, or those that the graph fixes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trtforge.data import Dataset
from trtforge.errors import InputError
from trtforge.export_info import DimInfo
from trtforge.limits import Limits
from trtforge.profile import DimReport, Profile, ProfileSet
from trtforge.profile_data import profiles_from_data
from trtforge.profile_sources import SHAPE_DTYPES, load_profiles, static_profiles
from trtforge.recipe import shipped_files
from trtforge.source import source_name
from trtforge.tensor import TensorSpec
from trtforge.textfile import kind_of
from trtforge.traced_dims import KEY

# Batch at which calibration runs: large enough for speed, small enough that tapped activations stay in memory.
CALIBRATION_BATCH = 8
# Gives what the graph says of the inputs' dims, with the limits of each where asked for.
DimSource = Callable[[bool], DimReport]


def resolve_profiles(
    given: str | None,
    model: Path,
    specs: Sequence[TensorSpec],
    data: Dataset | None,
    limits: Limits,
    dims: DimSource | None = None,
) -> ProfileSet:
    """Profiles from the file given or found, else static shapes, else the data's shapes, else what the graph fixes.

    Raises:
        InputError: an open dimension that none of them gives; the message holds the YAML to fill in.
    """
    path = profile_file(given, model)
    if path is not None:
        return load_profiles(path, specs, limits)
    is_open = any(item.is_dynamic for item in specs)
    may_hold_shapes = any(holds_shape(item) for item in specs)
    if dims is None or not (is_open or may_hold_shapes):
        return profiles_of_data(data, specs) if data is not None and is_open else static_profiles(specs)
    report = dims(data is None)
    if data is not None and (is_open or report.shape_inputs):
        return profiles_of_data(data, specs, report)
    return static_profiles(specs, report)


def check_traced(profiles: ProfileSet, specs: Sequence[TensorSpec], dims: Mapping[str, DimInfo]) -> None:
    """Refuse sizes that a traced model was not traced for: outside them it computes another branch than its source.

    Args:
        profiles: the ranges.
        specs: the inputs of the exported model.
        dims: the sizes that it holds for, by the name of a dim.

    Raises:
        InputError: names the profile and the dim.
    """
    for profile in profiles.profiles:
        for spec in specs:
            span = profile.inputs[spec.name]
            for axis, dim in enumerate(spec.shape or ()):
                traced = dims.get(dim) if isinstance(dim, str) else None
                low, high = span.min[axis], span.max[axis]
                if traced is not None and not traced.covers(low, high):
                    raise InputError(
                        f"profile '{profile.name}' gives dim '{dim}' {low} to {high}",
                        f"the model was traced for {traced.limits}: beyond, its code does something else",
                        f"keep '{dim}' within that range (with data: leave out samples of other sizes, or give a "
                        "profile file), or change the model's code and export it again (the range is in the ONNX "
                        f"file's metadata {KEY!r})",
                    )


def holds_shape(spec: TensorSpec) -> bool:
    """Whether an input can be one whose values become shapes: integers without or with one axis."""
    return spec.dtype in SHAPE_DTYPES and spec.shape is not None and len(spec.shape) < 2


def profiles_of_data(data: Dataset, specs: Sequence[TensorSpec], report: DimReport | None = None) -> ProfileSet:
    """The profile that spans a dataset, in the batches that calibration runs; see `profiles_from_data`."""
    batch = 1 if data.has_whole_feeds else _fixed_batch(report) or CALIBRATION_BATCH
    shapes, values = data.batch_shapes(batch, list(report.shape_inputs) if report is not None else ())
    return profiles_from_data(shapes, specs, values=values, report=report, has_whole_feeds=data.has_whole_feeds)


def _fixed_batch(report: DimReport | None) -> int | None:
    """The size of the first axis that the graph fixes although the model leaves it open."""
    facts = report.dims if report is not None else ()
    return next((f.suggestion for f in facts if f.kind == "fixed" and any(axis == 0 for _, axis in f.axes)), None)


def describe_shapes(profile: Profile) -> str:
    """`x [1, 3, 48, 320], mask [1, 40]`: the opt shapes."""
    return ", ".join(f"{name} {list(span.opt)}" for name, span in profile.inputs.items())


def profile_file(given: str | None, model: Path) -> Path | None:
    """The file that `--profile` names, by its path or a shipped name; without one, that of the conventions."""
    if given is None:
        return find_profile(model)
    path = Path(given)
    return path if kind_of(path, "profile") is not None else shipped_files("profiles").get(given, path)


def find_profile(model: Path) -> Path | None:
    """The profile file that the conventions name."""
    for base in (model.parent, Path()):
        path = base / "profiles" / f"{source_name(model)}.yaml"
        if kind_of(path, "profile") is not None:
            return path
    return None
