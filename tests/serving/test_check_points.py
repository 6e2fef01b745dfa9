"""The requests that a check sends: corners of every profile, and one step outside of each range."""

from __future__ import annotations

from packaging_cases import one_profile, span

from trtforge.manifest import ProfileInfo
from trtforge.serving.check.points import ProbePoint, probe_points
from trtforge.serving.model_file import ModelFile, Port


def model_of(*profiles: ProfileInfo, max_batch_size: int = 0) -> ModelFile:
    ports = tuple(Port(name=name, dtype="float32", shape=(-1,) * len(s.opt)) for name, s in profiles[0].inputs.items())
    return ModelFile(
        kind="onnxruntime",
        file="model.onnx",
        max_batch_size=max_batch_size,
        inputs=ports,
        outputs=(),
        profiles=profiles,
    )


def shapes(points: tuple[ProbePoint, ...], place: str) -> list[dict[str, tuple[int, ...]]]:
    return [dict(point.shapes) for point in points if point.place == place]


def test_min_opt_and_max_are_inside_and_a_step_further_is_outside() -> None:
    points = probe_points(model_of(one_profile(x=span((2, 4), (4, 4), (8, 4)))))
    assert [shapes(points, place) for place in ("min", "opt", "max")] == [
        [{"x": (2, 4)}],
        [{"x": (4, 4)}],
        [{"x": (8, 4)}],
    ]
    assert shapes(points, "outside") == [{"x": (1, 4)}, {"x": (2, 3)}, {"x": (9, 4)}, {"x": (8, 5)}]
    assert [point.is_inside for point in points] == [True] * 3 + [False] * 4


def test_dims_of_one_range_leave_it_together() -> None:
    batch_and_length = span((1, 1), (2, 8), (4, 16))
    points = probe_points(model_of(one_profile(ids=batch_and_length, mask=batch_and_length)))
    assert shapes(points, "outside") == [{"ids": (5, 16), "mask": (5, 16)}, {"ids": (4, 17), "mask": (4, 17)}]


def test_what_another_profile_takes_is_not_outside() -> None:
    short = one_profile("short", x=span((1, 1), (1, 4), (1, 8)))
    long = one_profile("long", x=span((1, 9), (1, 12), (1, 16)))
    outside = shapes(probe_points(model_of(short, long)), "outside")
    assert {"x": (1, 9)} not in outside
    assert {"x": (1, 8)} not in outside
    assert {"x": (1, 17)} in outside


def test_a_batch_above_what_the_server_joins_is_outside() -> None:
    points = probe_points(model_of(one_profile(x=span((1, 3), (4, 3), (32, 3))), max_batch_size=8))
    assert shapes(points, "max") == [{"x": (8, 3)}]
    assert {"x": (9, 3)} in shapes(points, "outside")


def test_values_that_become_shapes_are_tried_too() -> None:
    profile = ProfileInfo(
        name="default",
        inputs={"x": span((1, 4), (2, 4), (8, 4)), "size": span((2,), (2,), (2,))},
        values={"size": span((1, 4), (2, 4), (8, 4))},
    )
    points = probe_points(model_of(profile))
    assert [point.values["size"] for point in points if point.is_inside] == [(1, 4), (2, 4), (8, 4)]
    outside = [point for point in points if not point.is_inside]
    assert (9, 5) in [point.values["size"] for point in outside]
    assert {point.shapes["size"] for point in outside} == {(2,)}
    # To Reshape 0 and less are no sizes.
    assert all(min(point.values["size"]) > 0 for point in outside)


def test_equal_requests_are_made_once_and_empty_ones_never() -> None:
    points = probe_points(model_of(one_profile(x=span((0, 4), (2, 4), (2, 4)))))
    assert [point.shapes["x"] for point in points if point.is_inside] == [(2, 4)]
