"""Optimisation profiles: min/opt/max of every dynamic input, from a YAML file, from data, or from static shapes.

Sources, in order: the file given or found; the shapes of the calibration data; the model itself when nothing is open.
A dimension that no source gives is an error that prints the YAML to fill in: a guessed range changes the engine.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import pydantic

from trtforge.errors import InputError
from trtforge.limits import DEFAULT_LIMITS, Limits
from trtforge.tensor import TensorSpec
from trtforge.textfile import FileModel, parse_yaml, read_text, validate

NonNegative = Annotated[int, pydantic.Field(ge=0, le=2**31 - 1, strict=True)]
SHAPE_DTYPES = ("int32", "int64")
# Words that PyYAML reads as something other than text.
_YAML_WORDS = {"yes", "no", "on", "off", "true", "false", "null"}


@dataclasses.dataclass(frozen=True, slots=True)
class ShapeRange:
    """min, opt and max of one input's shape (or of a shape-tensor input's values), each one entry per axis."""

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]

    @property
    def is_static(self) -> bool:
        """True when nothing can vary."""
        return self.min == self.max

    def contains(self, shape: Sequence[int]) -> bool:
        """Whether a shape lies inside the range on every axis."""
        return len(shape) == len(self.min) and all(
            low <= dim <= high for low, dim, high in zip(self.min, shape, self.max, strict=True)
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    """One optimisation profile.

    Attributes:
        name: as in the file; "default" when the file names none.
        inputs: shape range of every input of the model.
        values: range of the values of shape-tensor inputs.
    """

    name: str
    inputs: Mapping[str, ShapeRange]
    values: Mapping[str, ShapeRange] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class ProfileSet:
    """The optimisation profiles of one engine, in order.

    Attributes:
        profiles: at least one; the first profile's opt is where costs are counted.
        source: where the ranges came from: "file", "data" or "static".
    """

    profiles: tuple[Profile, ...]
    source: str

    @property
    def first(self) -> Profile:
        """The profile whose opt shape is used for costs and verification."""
        return self.profiles[0]


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
    source = f"profile {path}"
    value = parse_yaml(read_text(path, "profile", limits), source, limits)
    return profiles_from_file(validate(ProfileFile, value, source), specs, source)


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
    return ProfileSet(tuple(_resolve(content, override, layout, specs, source) for override in overrides), "file")


def profiles_from_data(shapes: Mapping[str, Sequence[tuple[int, ...]]], specs: Sequence[TensorSpec]) -> ProfileSet:
    """One profile that spans the shapes seen in data; opt is the most frequent size of each axis.

    The first axis of every input counts samples, so its min is 1 where the model leaves it open.

    Args:
        shapes: for each input, the shape of every batch.
        specs: the model's inputs.

    Raises:
        InputError: an open dimension of an input that the data does not have, or data of several ranks.
    """
    inputs: dict[str, ShapeRange] = {}
    for spec in specs:
        seen = shapes.get(spec.name)
        if not seen:
            raise missing_ranges(specs)
        ranks = sorted({len(shape) for shape in seen})
        if len(ranks) > 1:
            raise InputError(
                f"the data gives input '{spec.name}' different numbers of axes",
                f"it has arrays with {' and '.join(map(str, ranks))} axes",
                "save every sample with the same axes",
            )
        axes = list(zip(*seen, strict=True))
        dims: list[int | str | None] = list(spec.shape) if spec.shape is not None else [None] * len(axes)
        low = [min(sizes) for sizes in axes]
        if dims and not isinstance(dims[0], int):
            low[0] = min(1, low[0])
        most = [max(sorted(set(sizes), reverse=True), key=sizes.count) for sizes in axes]
        high = [max(sizes) for sizes in axes]
        inputs[spec.name] = ShapeRange(
            *(
                tuple(dim if isinstance(dim, int) else size for dim, size in zip(dims, sizes, strict=True))
                for sizes in (low, most, high)
            )
        )
    return ProfileSet((Profile("default", inputs),), "data")


def static_profiles(specs: Sequence[TensorSpec]) -> ProfileSet:
    """The profile of a model without open dimensions.

    Raises:
        InputError: a dimension is open; the message holds the YAML to fill in.
    """
    if any(spec.is_dynamic for spec in specs):
        raise missing_ranges(specs)
    inputs = {}
    for spec in specs:
        shape = tuple(dim for dim in spec.shape or () if isinstance(dim, int))
        inputs[spec.name] = ShapeRange(shape, shape, shape)
    return ProfileSet((Profile("default", inputs),), "static")


def missing_ranges(specs: Sequence[TensorSpec]) -> InputError:
    """The error for open dimensions without a range; its fix is the YAML to fill in."""
    dynamic = [spec for spec in specs if spec.is_dynamic]
    return InputError(
        "the model has dynamic dimensions without a range",
        "; ".join(spec.describe() for spec in dynamic),
        "save this as profiles/<model name>.yaml beside the model (or give it with --profile), with your own "
        f"min/opt/max:\n\n{profile_template(specs)}",
    )


def profile_template(specs: Sequence[TensorSpec]) -> str:
    """A profile YAML for the model with the ranges left to fill in; equal dim names are shared."""
    names = dim_names(specs)
    ordered = list(dict.fromkeys(dim for dims in names.values() for dim in dims if isinstance(dim, str)))
    lines = ["dims:"] if ordered else []
    lines += [f"  {name}: {{min: 1, opt: ?, max: ?}}" for name in ordered]
    lines += ["inputs:"]
    for spec in specs:
        if spec.shape is None:
            lines.append(f"  {_yaml_key(spec.name)}: [?]  # one entry per axis; the model does not state how many")
        else:
            lines.append(f"  {_yaml_key(spec.name)}: [{', '.join(map(str, names[spec.name]))}]")
    return "\n".join(lines) + "\n"


def profiles_to_yaml(profiles: ProfileSet, specs: Sequence[TensorSpec]) -> str:
    """The YAML of resolved profiles, as `trtforge profile` prints it; reading it back gives the same ranges."""
    names = dim_names(specs, profiles)
    dims, values = [], []
    for profile in profiles.profiles:
        spans = [(dim, profile.inputs[name], axis) for name, own in names.items() for axis, dim in enumerate(own)]
        dims.append({dim: _span_to_yaml(span, axis) for dim, span, axis in spans if isinstance(dim, str)})
        values.append({_yaml_key(name): _span_to_yaml(span) for name, span in profile.values.items()})
    shared = {name: value for name, value in values[0].items() if all(name in other for other in values)}
    lines = ["dims:"] if dims[0] else []
    lines += [f"  {name}: {span}" for name, span in dims[0].items()]
    lines += ["inputs:"] + [f"  {_yaml_key(name)}: [{', '.join(map(str, own))}]" for name, own in names.items()]
    lines += ["values:"] if shared else []
    lines += [f"  {name}: {span}" for name, span in shared.items()]
    if len(dims) > 1 or profiles.first.name != "default":
        lines.append("profiles:")
        for profile, own_dims, own_values in zip(profiles.profiles, dims, values, strict=True):
            parts = [f"name: {_yaml_key(profile.name)}"]
            for section, own, base in (("dims", own_dims, dims[0]), ("values", own_values, shared)):
                changed = [f"{name}: {span}" for name, span in own.items() if base.get(name) != span]
                parts += [f"{section}: {{{', '.join(changed)}}}"] if changed else []
            lines.append(f"  - {{{', '.join(parts)}}}")
    return "\n".join(lines) + "\n"


def _span_to_yaml(span: ShapeRange, axis: int | None = None) -> str:
    low, opt, high = (list(sizes) if axis is None else sizes[axis] for sizes in (span.min, span.opt, span.max))
    return f"{{min: {low}, opt: {opt}, max: {high}}}"


def dim_names(specs: Sequence[TensorSpec], profiles: ProfileSet | None = None) -> dict[str, list[int | str]]:
    """Every input's dims as a profile file writes them: an integer, or a name made plain and unique where it must be.

    With `profiles`, a name shared by dims whose ranges differ is split, and a dim that cannot vary is an integer.
    """
    result: dict[str, list[int | str]] = {}
    meanings: dict[str, Any] = {}
    for spec in specs:
        spans = [profile.inputs[spec.name] for profile in profiles.profiles] if profiles else []
        shape = spec.shape if spec.shape is not None else (None,) * (len(spans[0].min) if spans else 0)
        dims: list[int | str] = []
        for axis, dim in enumerate(shape):
            sizes = tuple(sizes[axis] for span in spans for sizes in (span.min, span.opt, span.max))
            if isinstance(dim, int) or len(set(sizes)) == 1:
                dims.append(dim if isinstance(dim, int) else sizes[0])
                continue
            plain = re.sub(r"\W+", "_", dim or "").strip("_")
            is_name = plain and not plain[0].isdigit() and plain.lower() not in _YAML_WORDS
            own = re.sub(r"\W+", "_", f"{spec.name}_{axis}").strip("_")
            own = f"dim_{own}" if own[0].isdigit() else own
            meaning = sizes or (dim if is_name else (spec.name, axis))
            candidates = itertools.chain([plain] if is_name else [], [own], (f"{own}_{n}" for n in itertools.count(2)))
            dims.append(next(name for name in candidates if meanings.setdefault(name, meaning) == meaning))
        result[spec.name] = dims
    return result


def _yaml_key(name: str) -> str:
    """A name as YAML text that reads back as it is."""
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_./-]*", name) and name.lower() not in _YAML_WORDS:
        return name
    plain = (c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in name)
    return f'"{"".join(plain)}"'


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
        _check_values(by_name[name], len(value.min), place)
        values[name] = ShapeRange(value.min, value.opt, value.max)
    return Profile(override.name, inputs, values)


def _check_values(spec: TensorSpec, count: int, place: str) -> None:
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
