"""Requests that show where a model's profiles end: every profile's min, opt and max, and just outside of them.

Dims of one range change together, because they may be one dim of the model: a request with `batch` 33 in one input and
32 in another would be refused whatever the profile says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from trtforge.manifest import ProfileInfo, RangeInfo
from trtforge.serving.model_file import ModelFile
from trtforge.serving.request_values import POINTS, Point, profile_point

Sizes = Mapping[str, tuple[int, ...]]
OUTSIDE = "outside"


@dataclasses.dataclass(frozen=True, slots=True)
class ProbePoint:
    """The shapes of one request.

    Attributes:
        profile: its name.
        place: "min", "opt", "max" or "outside".
        shapes: of each input, batch included.
        values: of the inputs whose values become shapes.
    """

    profile: str
    place: str
    shapes: Sizes
    values: Sizes

    @property
    def is_inside(self) -> bool:
        """Whether the model has to answer it; it has to refuse the others."""
        return self.place != OUTSIDE


def probe_points(model: ModelFile) -> tuple[ProbePoint, ...]:
    """The requests of a model; those of equal shapes are made once."""
    profiles = [_as_served(profile, model.max_batch_size) for profile in model.profiles]
    points: dict[object, ProbePoint] = {}
    for profile in profiles:
        corners = [_corner(profile, place) for place in POINTS]
        outside = [point for point in _outside(profile) if not any(_holds(other, point) for other in profiles)]
        for point in (*corners, *outside):
            # A size of 0 is a past of no tokens, which no request can bring.
            if not any(0 in shape for shape in point.shapes.values()):
                points.setdefault((tuple(point.shapes.items()), tuple(point.values.items())), point)
    return tuple(points.values())


def _as_served(profile: ProfileInfo, max_batch_size: int) -> ProfileInfo:
    """The profile with the batches that the server lets through."""
    if not max_batch_size:
        return profile
    spans = {
        name: RangeInfo(**{place: (min(sizes[0], max_batch_size), *sizes[1:]) for place, sizes in span})
        for name, span in profile.inputs.items()
    }
    return profile.model_copy(update={"inputs": spans})


def _corner(profile: ProfileInfo, place: Point) -> ProbePoint:
    return ProbePoint(profile.name, place, *profile_point(profile, place))


def _outside(profile: ProfileInfo) -> list[ProbePoint]:
    """One below min and one above max, for each dim that has a range of its own, and for values."""
    points = []
    moves: tuple[tuple[Point, int], ...] = (("min", -1), ("max", 1))
    for place, step in moves:
        corner = _corner(profile, place)
        for group in _groups(profile):
            shapes = {name: list(shape) for name, shape in corner.shapes.items()}
            for name, axis in group:
                shapes[name][axis] += step
            if all(size > 0 for shape in shapes.values() for size in shape):
                moved = {name: tuple(shape) for name, shape in shapes.items()}
                points.append(dataclasses.replace(corner, place=OUTSIDE, shapes=moved))
        for name, values in corner.values.items():
            moved = dict(corner.values) | {name: tuple(value + step for value in values)}
            if min(moved[name], default=0) > 0:
                points.append(dataclasses.replace(corner, place=OUTSIDE, values=moved))
    return points


def _groups(profile: ProfileInfo) -> list[list[tuple[str, int]]]:
    """(input, axis) by range: those of one dim, and perhaps of dims that happen to have equal ranges.

    Without the inputs whose values become shapes: a profile says how many values they have.
    """
    groups: dict[tuple[int, int, int], list[tuple[str, int]]] = {}
    for name, span in profile.inputs.items():
        if name in profile.values:
            continue
        for axis, sizes in enumerate(zip(span.min, span.opt, span.max, strict=True)):
            groups.setdefault(sizes, []).append((name, axis))
    return list(groups.values())


def _holds(profile: ProfileInfo, point: ProbePoint) -> bool:
    return all(_is_inside(point.shapes[name], span) for name, span in profile.inputs.items()) and all(
        _is_inside(point.values[name], span) for name, span in profile.values.items()
    )


def _is_inside(sizes: Sequence[int], span: RangeInfo) -> bool:
    return len(sizes) == len(span.min) and all(
        low <= size <= high for low, size, high in zip(span.min, sizes, span.max, strict=True)
    )
