from __future__ import annotations

import numpy as np
import pytest

from trtforge.quantization.formats import INT8
from trtforge.quantization.grid import grid_amax


def pixels(transform, count=4096):
    return transform(np.random.default_rng(0).integers(0, 256, (count, 3)).astype(np.float32)).astype(np.float32)


@pytest.mark.parametrize(
    ("transform", "step"),
    [
        (lambda p: (p - 127) / 128, 1 / 128),
        (lambda p: p - 128, 1.0),
        (lambda p: np.floor(p / 16) / 16, 1 / 16),
    ],
)
def test_values_on_a_grid_become_exact(transform, step) -> None:
    rows = pixels(transform)
    amax = grid_amax(rows, float(np.abs(rows).max()))
    assert amax == pytest.approx(127 * step)
    scale = INT8.scale_from_amax(np.float32(amax), np.float16)
    inside = rows[np.abs(rows) <= amax]
    np.testing.assert_allclose(INT8.encode(inside / scale) * scale, inside, atol=1e-3 * step)


@pytest.mark.parametrize(
    "transform",
    [
        lambda p: p / 255,  # 255 steps do not fit
        lambda p: (p / 255 - 0.5) / 0.5,  # no value is 0: all lie between two codes
        np.sqrt,
        np.zeros_like,
        lambda p: p + np.random.default_rng(1).normal(size=p.shape),
    ],
)
def test_other_values_have_none(transform) -> None:
    rows = pixels(transform)
    assert grid_amax(rows, float(np.abs(rows).max())) is None


def test_a_value_that_the_sample_lacks_counts() -> None:
    rows = pixels(lambda p: np.floor(p / 16))
    assert grid_amax(rows, 15.0) == 127.0
    assert grid_amax(rows, 200.0) is None
    assert grid_amax(np.zeros((0, 0), np.float32), 0.0) is None
