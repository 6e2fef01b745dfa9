from __future__ import annotations

import pytest

from trtforge.profile import DimFact, DimReport, ShapeRange

# a = 2 b + 1 and b = c + d: what a follows from is found before b is known.
CHAIN = DimReport(
    (
        DimFact("a", (("x", 0),), "derived", terms=(("b", 2),), offset=1),
        DimFact("b", (("x", 1),), "derived", terms=(("c", 1), ("d", 1))),
        DimFact("c", (("x", 2),), "free"),
        DimFact("d", (("x", 3),), "free"),
        DimFact("e", (("x", 4),), "derived", terms=(("d", 1), ("a", 1))),
    ),
    {},
)


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


def test_a_derived_dim_is_the_sum_of_its_terms() -> None:
    assert CHAIN.dim("a").total({"b": 5, "c": 9}) == 11
    assert CHAIN.dim("b").total({"c": 2, "d": 3}) == 5


def test_what_follows_from_dims_comes_after_what_it_is_the_sum_of() -> None:
    assert [fact.name for fact in CHAIN.following(["c"])] == ["b", "a", "e"]
    assert [fact.name for fact in CHAIN.following(["d"])] == ["b", "a", "e"]
    assert [fact.name for fact in CHAIN.following(["b", "a"])] == ["e"]
    assert CHAIN.following([]) == ()
