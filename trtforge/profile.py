"""Optimisation profiles: min/opt/max of every dynamic input of an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence


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
        source: where the ranges came from: "file", "data" or "static".
    """

    profiles: tuple[Profile, ...]
    source: str

    @property
    def first(self) -> Profile:
        """The profile whose opt shape is used for costs and verification."""
        return self.profiles[0]
