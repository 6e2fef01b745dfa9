from __future__ import annotations

import pytest

from trtforge.tensor import TensorSpec


@pytest.mark.parametrize(
    ("shape", "is_dynamic", "text"),
    [
        ((1, 3), False, "x int64 [1, 3]"),
        ((), False, "x int64 []"),
        (("batch", 3), True, "x int64 [batch, 3]"),
        ((None, 3), True, "x int64 [?, 3]"),
        (None, True, "x int64 [unknown rank]"),
    ],
)
def test_open_sizes_and_description(shape: tuple[int | str | None, ...] | None, is_dynamic: bool, text: str) -> None:
    spec = TensorSpec("x", "int64", shape)
    assert spec.is_dynamic == is_dynamic
    assert spec.describe() == text
