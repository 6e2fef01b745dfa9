from __future__ import annotations

import pytest

from trtforge.profile import ShapeRange


@pytest.mark.parametrize(
    ("shape", "is_inside"),
    [
        ((1, 5), True),
        ((4, 9), True),
        ((0, 5), False),
        ((5, 5), False),
        ((2, 10), False),
        ((2,), False),
        ((2, 5, 1), False),
    ],
)
def test_contains_checks_every_axis_and_the_rank(shape: tuple[int, ...], is_inside: bool) -> None:
    assert ShapeRange((1, 5), (2, 5), (4, 9)).contains(shape) == is_inside
