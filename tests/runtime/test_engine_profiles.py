"""Which profile of an engine runs a request, and what is said where none does."""

from __future__ import annotations

import pytest

from trtforge.runtime import EngineError
from trtforge.runtime.profiles import EngineProfile, Span, choose_profile

PREFILL = EngineProfile({"ids": Span((1, 16), (1, 128), (1, 512))}, {})
DECODE = EngineProfile({"ids": Span((1, 1), (8, 1), (32, 1))}, {})
WIDE = EngineProfile({"ids": Span((1, 1), (8, 256), (32, 512))}, {})
RESHAPED = EngineProfile({"x": Span((1, 4), (2, 4), (8, 4))}, {"size": Span((1, 4), (2, 4), (8, 4))})


@pytest.mark.parametrize(("shape", "expected"), [((1, 16), 0), ((1, 512), 0), ((1, 1), 1), ((32, 1), 1)])
def test_the_profile_that_holds_the_shapes_is_taken(shape: tuple[int, ...], expected: int) -> None:
    assert choose_profile([PREFILL, DECODE], {"ids": shape}, {}) == expected


@pytest.mark.parametrize(("shape", "expected"), [((1, 128), 0), ((1, 512), 0), ((8, 256), 1), ((1, 1), 1)])
def test_of_two_that_hold_them_the_one_tuned_for_nearer_shapes_is_taken(shape: tuple[int, int], expected: int) -> None:
    assert choose_profile([PREFILL, WIDE], {"ids": shape}, {}) == expected


@pytest.mark.parametrize("shape", [(1, 513), (33, 1), (1, 2, 3), (2, 16)])
def test_shapes_outside_of_all_are_refused_with_each_range(shape: tuple[int, ...]) -> None:
    with pytest.raises(EngineError) as caught:
        choose_profile([PREFILL, DECODE], {"ids": shape}, {})
    assert str(list(shape)) in str(caught.value)
    assert "profile 0: ids has shape" in str(caught.value)
    assert "takes [1, 1] to [32, 1]" in str(caught.value)


def test_values_that_become_shapes_have_to_fit_as_well() -> None:
    shapes = {"x": (8, 4), "size": (2,)}
    assert choose_profile([RESHAPED], shapes, {"size": (8, 4)}) == 0
    with pytest.raises(EngineError, match="size has values"):
        choose_profile([RESHAPED], shapes, {"size": (9, 4)})


def test_a_size_of_zero_can_be_held() -> None:
    empty = EngineProfile({"past": Span((0, 64), (128, 64), (512, 64))}, {})
    assert choose_profile([empty], {"past": (0, 64)}, {}) == 0
