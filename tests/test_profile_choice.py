from __future__ import annotations

import pytest

from trtforge.errors import InputError
from trtforge.export_info import DimInfo
from trtforge.profile import Profile, ProfileSet, ShapeRange
from trtforge.profile_choice import check_traced
from trtforge.tensor import TensorSpec

SPECS = [TensorSpec("x", "float32", ("batch", "seq", 4))]


def profiles(low: tuple[int, int], high: tuple[int, int]) -> ProfileSet:
    span = ShapeRange((*low, 4), (*high, 4), (*high, 4))
    return ProfileSet((Profile("default", {"x": span}),), "data")


@pytest.mark.parametrize(
    ("traced", "low", "high", "text"),
    [
        (DimInfo(min=1, max=3), (1, 6), (3, 6), None),
        (DimInfo(min=1, max=3), (1, 6), (8, 6), "dim 'batch' 1 to 8"),
        (DimInfo(min=4, max=None), (1, 6), (8, 6), "dim 'batch' 1 to 8"),
        (DimInfo(min=4, max=None), (4, 6), (8, 6), None),
        # An empty cache: torch's least size is no property of the model.
        (DimInfo(min=1, max=None), (0, 6), (8, 6), None),
    ],
)
def test_sizes_beyond_those_that_a_model_was_traced_for_are_refused(
    traced: DimInfo, low: tuple[int, int], high: tuple[int, int], text: str | None
) -> None:
    if text is None:
        check_traced(profiles(low, high), SPECS, {"batch": traced})
        return
    with pytest.raises(InputError, match=text) as caught:
        check_traced(profiles(low, high), SPECS, {"batch": traced})
    assert f"the model was traced for {traced.limits}" in caught.value.why
    assert "metadata 'trtforge.dims'" in caught.value.fix
