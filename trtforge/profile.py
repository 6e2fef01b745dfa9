"""Optimisation profiles: min/opt/max of every dynamic input of an engine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal


@dataclasses.dataclass(frozen=True, slots=True)
class ShapeRange:
    """min, opt and max of one input's shape (or of a shape-tensor input's values), each one entry per axis."""

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]

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
        source: where the ranges came from: "file", "data", "graph" or "static".
    """

    profiles: tuple[Profile, ...]
    source: str

    @property
    def first(self) -> Profile:
        """The profile whose opt shape is used for costs and verification."""
        return self.profiles[0]


@dataclasses.dataclass(frozen=True, slots=True)
class DimFact:
    """What a graph says of one open dimension, which may be on several axes of several inputs.

    Attributes:
        name: as a profile file writes it.
        axes: (input, axis) of all that have to be equal.
        kind: "free"; "fixed" where the graph takes one size only; "derived" where it follows from other dims.
        low, high: the sizes that the graph takes; high is None where no end was found.
        multiple: sizes are multiples of this.
        suggestion: a fixed dim's size, or one that works where the graph takes few.
        terms: of a derived dim: (name, factor) of what it is the sum of.
        offset: what is added to that sum.
        reason: why, with the node; empty where there is nothing to say.
    """

    name: str
    axes: tuple[tuple[str, int], ...]
    kind: Literal["free", "fixed", "derived"]
    low: int = 1
    high: int | None = None
    multiple: int = 1
    suggestion: int | None = None
    terms: tuple[tuple[str, int], ...] = ()
    offset: int = 0
    reason: str = ""

    @property
    def formula(self) -> str:
        """`past + 2*seq + 1` of a derived dim."""
        parts = [name if factor == 1 else f"{factor}*{name}" for name, factor in self.terms]
        return " + ".join([*parts, str(self.offset)] if self.offset else parts)

    def total(self, sizes: Mapping[str, int]) -> int:
        """The size of a derived dim where its terms have these sizes, by name."""
        return self.offset + sum(factor * sizes[name] for name, factor in self.terms)

    def takes(self, size: int) -> bool:
        """Whether the graph takes a size; of a derived dim, any."""
        if self.kind == "derived":
            return True
        high = math.inf if self.high is None else self.high
        return self.low <= size <= high and size % self.multiple == 0

    @property
    def limits(self) -> str:
        """`1 to 512`, `a multiple of 32 from 32 on`."""
        steps = f"a multiple of {self.multiple} " if self.multiple > 1 else ""
        if self.low == self.high:
            return str(self.low)
        return f"{steps}from {self.low} on" if self.high is None else f"{steps}from {self.low} to {self.high}"


@dataclasses.dataclass(frozen=True, slots=True)
class DimReport:
    """What a graph says of its inputs' shapes.

    Attributes:
        dims: every open dimension once, in the order of the inputs.
        shape_inputs: integer inputs whose values become shapes or choose a branch, and where.
        caches: inputs that hold what earlier steps of a decoder computed, and the dim that counts those steps.
        note: what could not be examined; empty where everything was.
    """

    dims: tuple[DimFact, ...]
    shape_inputs: Mapping[str, str]
    caches: Mapping[str, str] = dataclasses.field(default_factory=dict)
    note: str = ""

    def dim_at(self, name: str, axis: int) -> DimFact | None:
        """The open dimension on an axis of an input."""
        return next((fact for fact in self.dims if (name, axis) in fact.axes), None)

    def dim(self, name: str) -> DimFact:
        """The open dimension of this name.

        Raises:
            KeyError: there is none.
        """
        return {fact.name: fact for fact in self.dims}[name]

    def following(self, names: Iterable[str]) -> tuple[DimFact, ...]:
        """The dims that are derived from these, directly or through others; each after what it is the sum of."""
        facts = {fact.name: fact for fact in self.dims}
        follows = dict.fromkeys(names, True)
        found: list[DimFact] = []

        def visit(name: str) -> bool:
            if name not in follows:
                terms = [visit(term) for term, _ in facts[name].terms]
                follows[name] = any(terms)
                if follows[name]:
                    found.append(facts[name])
            return follows[name]

        for name in facts:
            visit(name)
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> DimReport:
        """What `to_json` gave."""
        dims = []
        for entry in values["dims"]:
            axes = tuple((str(name), int(axis)) for name, axis in entry["axes"])
            terms = tuple((str(name), int(factor)) for name, factor in entry["terms"])
            dims.append(DimFact(**{**entry, "axes": axes, "terms": terms}))
        return DimReport(tuple(dims), dict(values["shape_inputs"]), dict(values["caches"]), str(values["note"]))
