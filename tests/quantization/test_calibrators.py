from __future__ import annotations

import typing

import numpy as np
import pytest
from quant_cases import normal

from trtforge.quantization.calibrators import CALIBRATORS, choose_amax
from trtforge.quantization.observers import StreamingObserver
from trtforge.recipe import QuantRecipe


@pytest.fixture
def with_outlier():
    """99,999 values within 5 and one of 1000."""
    observer = StreamingObserver()
    observer.update(np.append(np.clip(normal(99_999), -5, 5), np.float32(1000.0)))
    return observer


def test_minmax_keeps_the_outlier(with_outlier):
    assert choose_amax(with_outlier, QuantRecipe(method="minmax")) == 1000.0


def test_percentile_clips_the_outlier(with_outlier):
    assert choose_amax(with_outlier, QuantRecipe(method="percentile", percentile=99.99)) < 6.0


def test_percentile_100_is_minmax(with_outlier):
    assert choose_amax(with_outlier, QuantRecipe(method="percentile", percentile=100.0)) == 1000.0


def test_higher_percentile_never_gives_a_smaller_amax(with_outlier):
    chosen = [
        choose_amax(with_outlier, QuantRecipe(method="percentile", percentile=p))
        for p in (90.0, 99.0, 99.9, 99.999, 100.0)
    ]
    assert chosen == sorted(chosen)


@pytest.mark.parametrize("method", CALIBRATORS)
def test_unobserved_tensor_has_amax_zero(method):
    assert choose_amax(StreamingObserver(), QuantRecipe(method=method)) == 0.0


def test_every_method_of_the_recipe_has_a_calibrator():
    assert set(CALIBRATORS) == set(typing.get_args(QuantRecipe.model_fields["method"].annotation))
