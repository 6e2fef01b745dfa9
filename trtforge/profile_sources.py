"""Where optimisation profiles come from besides data: a YAML file, or a model in which nothing is open.

A dimension that no source gives is an error that prints the YAML to fill in: a guessed range changes the engine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pydantic

from trtforge.errors import InputError
from trtforge.limits import DEFAULT_LIMITS, Limits
from trtforge.profile import DimReport, Profile, ProfileSet, ShapeRange
from trtforge.profile_text import missing_ranges
from trtforge.tensor import TensorSpec
from trtforge.textfile import FileModel, parse_yaml, read_text, validate

NonNegative = Annotated[int, pydantic.Field(ge=0, le=2**31 - 1, strict=True)]
# Element types of inputs whose values become shapes or choose a branch.
SHAPE_DTYPES = ("int32", "int64", "bool")


class DimRange(FileModel):
    """`{min: 1, opt: 8, max: 32}`."""

    min: NonNegative
    opt: NonNegative
    max: NonNegative

    @pydantic.model_validator(mode="after")
    def _check_order(self) -> DimRange:
        if not self.min <= self.opt <= self.max:
            raise ValueError(f"needs min <= opt <= max, got min {self.min}, opt {self.opt}, max {self.max}")
        return self


class _PartialRange(FileModel):
    min: NonNegative | None = None
    opt: NonNegative | None = None
    max: NonNegative | None = None


class ValueRange(FileModel):
    """Values of a shape-tensor input, one entry per element."""

    min: tuple[Annotated[int, pydantic.Field(strict=True)], ...]
    opt: tuple[Annotated[int, pydantic.Field(strict=True)], ...]
    max: tuple[Annotated[int, pydantic.Field(strict=True)], ...]

    @pydantic.model_validator(mode="after")
    def _check_order(self) -> ValueRange:
        if not len(self.min) == len(self.opt) == len(self.max):
            raise ValueError("min, opt and max need the same number of values")
        if any(not a <= b <= c for a, b, c in zip(self.min, self.opt, self.max, strict=True)):
            raise ValueError(f"needs min <= opt <= max, got {self.min}, {self.opt}, {self.max}")
        return self


def _kind_of_dim(value: Any) -> str:
    return "name" if isinstance(value, str) else "size" if isinstance(value, int) else "range"


# Picks the type that an error speaks of; pydantic otherwise lists what each member of a union misses.
_BY_KIND = pydantic.Discriminator(
    _kind_of_dim, custom_error_type="dim", custom_error_message="needs a size or {min: .., opt: .., max: ..}"
)
_SIZE_OR_NAME = pydantic.Discriminator(
    _kind_of_dim, custom_error_type="dim", custom_error_message="needs a size or the name of a dim"
)
_Size = Annotated[NonNegative, pydantic.Tag("size")]


class _Override(FileModel):
    name: Annotated[str, pydantic.Field(min_length=1, max_length=64)]
    dims: dict[str, Annotated[_Size | Annotated[_PartialRange, pydantic.Tag("range")], _BY_KIND]] = pydantic.Field(
        default_factory=dict
    )
    values: dict[str, ValueRange] = pydantic.Field(default_factory=dict)


class ProfileFile(FileModel):
    """The content of a profile YAML file; the format is in the README."""

    dims: dict[str, Annotated[_Size | Annotated[DimRange, pydantic.Tag("range")], _BY_KIND]] = pydantic.Field(
        default_factory=dict
    )
    inputs: dict[str, tuple[Annotated[_Size | Annotated[str, pydantic.Tag("name")], _SIZE_OR_NAME], ...]] = (
        pydantic.Field(default_factory=dict)
    )
    values: dict[str, ValueRange] = pydantic.Field(default_factory=dict)
    profiles: tuple[_Override, ...] = ()


def load_profiles(path: Path, specs: Sequence[TensorSpec], limits: Limits = DEFAULT_LIMITS) -> ProfileSet:
    """The profiles of a YAML file, checked against the model's inputs.

    Args:
        path: the file.
        specs: the model's inputs.
        limits: bounds on the file.

    Raises:
        InputError: unknown input or dim, an open dimension without a range, a size that contradicts the model.
    """
    return profiles_from_file(read_profile_file(path, limits), specs, f"profile {path}")


def read_profile_file(path: Path, limits: Limits = DEFAULT_LIMITS) -> ProfileFile:
    """The content of a profile file, whatever the model.

    Raises:
        InputError: it cannot be read, is not filled in, or has another format.
    """
    source = f"profile {path}"
    text = read_text(path, "profile", limits)
    _check_filled_in(text, source)
    return validate(ProfileFile, parse_yaml(text, source, limits), source)


def _check_filled_in(text: str, source: str) -> None:
    """Refuse a template that still has its question marks; YAML would speak of mapping keys.

    Raises:
        InputError: names the first line.
    """
    for number, line in enumerate(text.splitlines(), 1):
        content = line.split("#", 1)[0]
        if re.search(r"[:\[,]\s*\?\s*[,}\]]", content) or re.search(r":\s*\?\s*$", content):
            raise InputError(
                f"{source} still has a ? to fill in, in line {number}",
                content.strip()[:200],
                "put a number in its place",
            )


def profiles_from_file(content: ProfileFile, specs: Sequence[TensorSpec], source: str) -> ProfileSet:
    """The profiles of a parsed file; see `load_profiles`."""
    known = {spec.name for spec in specs}
    for section in ("inputs", "values"):
        for name in getattr(content, section):
            _check_known(name, known, "input", source, f"the model's inputs are {', '.join(sorted(known))}")
    layout = {spec.name: _input_layout(spec, content, source) for spec in specs}
    used = {dim for dims in layout.values() for dim in dims if isinstance(dim, str)}
    for name in content.dims:
        if name not in used:
            raise InputError(
                f"{source} gives a range for dim '{name}', which no input has",
                f"dims of the inputs: {', '.join(sorted(used)) or 'all static'}",
                f"remove '{name}', or name it in the shape of an input under 'inputs:'",
            )
    overrides = content.profiles or (_Override(name="default"),)
    if len({override.name for override in overrides}) != len(overrides):
        raise InputError(f"{source} repeats a profile name", "each profile needs its own", "rename one of them")
    profiles = tuple(_resolve(content, override, layout, specs, source) for override in overrides)
    _check_counts(profiles, source)
    return ProfileSet(profiles, "file")


def _check_counts(profiles: Sequence[Profile], source: str) -> None:
    """Refuse values of one input in several numbers: an engine takes one."""
    counts: dict[str, tuple[int, str]] = {}
    for profile in profiles:
        for name, span in profile.values.items():
            count, first = counts.setdefault(name, (len(span.min), profile.name))
            if len(span.min) != count:
                raise InputError(
                    f"{source} gives '{name}' {count} values in profile '{first}' and {len(span.min)} in profile "
                    f"'{profile.name}'",
                    "an input whose values decide shapes or a branch has one size in all profiles",
                    "give as many values in each profile",
                )


def static_profiles(specs: Sequence[TensorSpec], report: DimReport | None = None) -> ProfileSet:
    """The profile of a model without open dimensions, or whose graph takes one size only for each of them.

    Args:
        specs: the model's inputs.
        report: what the graph says of their dims.

    Raises:
        InputError: a dimension is open; the message holds the YAML to fill in.
    """
    sizes = _fixed_sizes(report)
    inputs = {}
    for spec in specs:
        open_sizes = [sizes.get((spec.name, axis)) for axis in range(len(spec.shape or ()))]
        shape = [d if isinstance(d, int) else size for d, size in zip(spec.shape or (), open_sizes, strict=True)]
        if spec.shape is None or None in shape:
            raise missing_ranges(specs, report)
        known = tuple(dim for dim in shape if dim is not None)
        inputs[spec.name] = ShapeRange(known, known, known)
    return ProfileSet((Profile("default", inputs),), "graph" if sizes else "static")


def _fixed_sizes(report: DimReport | None) -> dict[tuple[str, int], int]:
    """Sizes by (input, axis) of dims without a choice; none where values count too, or something is unknown."""
    if report is None or report.shape_inputs or report.note:
        return {}
    sizes = {fact.name: fact.suggestion for fact in report.dims if fact.kind == "fixed" and fact.suggestion is not None}
    for fact in report.following(list(sizes)):
        if all(name in sizes for name, _ in fact.terms):
            sizes[fact.name] = fact.total(sizes)
    return {axis: sizes[fact.name] for fact in report.dims for axis in fact.axes if fact.name in sizes}


def _check_known(name: str, known: Iterable[str], kind: str, source: str, why: str) -> None:
    if name not in known:
        raise InputError(f"{source} names an unknown {kind} '{name}'", why, f"correct or remove '{name}'")


def _input_layout(spec: TensorSpec, content: ProfileFile, source: str) -> tuple[int | str, ...]:
    """The dims of one input: the file's, checked against the model's; else the model's own names."""
    given = content.inputs.get(spec.name)
    if given is None:
        shape = (None,) if spec.shape is None else spec.shape
        own = [dim if isinstance(dim, int) or dim in content.dims else None for dim in shape]
        if any(dim is None for dim in own):
            raise missing_ranges([spec])
        return tuple(dim for dim in own if dim is not None)
    if spec.shape is not None:
        if len(given) != len(spec.shape):
            raise InputError(
                f"{source} gives input '{spec.name}' {len(given)} dims",
                f"the model has {spec.describe()}",
                "give one entry per axis",
            )
        for axis, (mine, theirs) in enumerate(zip(given, spec.shape, strict=True)):
            if isinstance(theirs, int) and isinstance(mine, int) and mine != theirs:
                raise InputError(
                    f"{source} gives axis {axis} of input '{spec.name}' the size {mine}",
                    f"the model fixes it to {theirs}",
                    f"write {theirs} there",
                )
    for dim in given:
        if isinstance(dim, str):
            known = ", ".join(content.dims) or "none"
            _check_known(dim, content.dims, "dim", source, f"'dims:' defines {known}")
    return given


def _resolve(
    content: ProfileFile,
    override: _Override,
    layout: Mapping[str, tuple[int | str, ...]],
    specs: Sequence[TensorSpec],
    source: str,
) -> Profile:
    """One profile: the file's dims with this profile's overrides, written out for every input."""
    place = f"{source}, profile '{override.name}'"
    ranges = {name: _as_range(dim) for name, dim in content.dims.items()}
    for name, change in override.dims.items():
        _check_known(name, ranges, "dim", place, f"'dims:' defines {', '.join(ranges) or 'none'}")
        ranges[name] = _merge(ranges[name], change, name, place)
    inputs: dict[str, ShapeRange] = {}
    for spec in specs:
        spans = [ranges[dim] if isinstance(dim, str) else (dim, dim, dim) for dim in layout[spec.name]]
        for axis, span in enumerate(spans):
            fixed = spec.shape[axis] if spec.shape is not None else None
            if isinstance(fixed, int) and span != (fixed, fixed, fixed):
                raise InputError(
                    f"{place} gives axis {axis} of input '{spec.name}' the range {span[0]}..{span[2]}",
                    f"the model fixes it to {fixed}",
                    f"write {fixed} there",
                )
        inputs[spec.name] = ShapeRange(*(tuple(span[i] for span in spans) for i in range(3)))
    values = {}
    by_name = {spec.name: spec for spec in specs}
    for name, value in {**content.values, **override.values}.items():
        _check_known(name, by_name, "input", place, f"the model's inputs are {', '.join(sorted(by_name))}")
        _check_values(by_name[name], value, place)
        values[name] = ShapeRange(value.min, value.opt, value.max)
    return Profile(override.name, inputs, values)


def _check_values(spec: TensorSpec, value: ValueRange, place: str) -> None:
    count = len(value.min)
    if spec.dtype not in SHAPE_DTYPES:
        raise InputError(
            f"{place} gives values for '{spec.name}'",
            f"values are for integer inputs that hold a shape; this one is {spec.dtype}",
            f"remove '{spec.name}' from 'values:'",
        )
    if not spec.is_dynamic and count != math.prod(dim for dim in spec.shape or () if isinstance(dim, int)):
        raise InputError(
            f"{place} gives {count} values for '{spec.name}'",
            f"the model has {spec.describe()}",
            "give one value per element",
        )
    limits = np.iinfo(spec.dtype)
    beyond = next((number for number in (*value.min, *value.max) if not limits.min <= number <= limits.max), None)
    if beyond is not None:
        raise InputError(
            f"{place} gives '{spec.name}' the value {beyond}",
            f"it is {spec.dtype}, which ends at {limits.min} and {limits.max}",
            "give a value within them",
        )


def _as_range(dim: int | DimRange) -> tuple[int, int, int]:
    return (dim, dim, dim) if isinstance(dim, int) else (dim.min, dim.opt, dim.max)


def _merge(base: tuple[int, int, int], change: int | _PartialRange, name: str, place: str) -> tuple[int, int, int]:
    if isinstance(change, int):
        return (change, change, change)
    low, opt, high = (
        old if new is None else new for old, new in zip(base, (change.min, change.opt, change.max), strict=True)
    )
    if not low <= opt <= high:
        raise InputError(
            f"{place}, dim '{name}' has min {low}, opt {opt}, max {high}",
            "it needs min <= opt <= max after the override",
            "give all three in the override",
        )
    return (low, opt, high)
