from __future__ import annotations

import numpy as np
import pytest

from trtforge.quantization.cast_constants import convert_constant, refuse_constant
from trtforge.quantization.op_types import BFLOAT16

FLOAT16 = np.dtype(np.float16)
LOWEST = np.finfo(np.float32).min


@pytest.mark.parametrize("op", ["Add", "Mul", "Where", "Expand", "ConstantOfShape"])
@pytest.mark.parametrize("value", [-1e9, LOWEST, -65536.0])
def test_mask_becomes_a_quarter_of_the_range(op, value):
    values = np.array([0.0, value], np.float32)
    assert refuse_constant(values, op, FLOAT16) is None
    converted, is_clamped = convert_constant(values, op, FLOAT16)
    assert converted.tolist() == [0.0, -16376.0]
    assert is_clamped


def test_three_masks_and_a_score_still_add_up_to_a_finite_number():
    mask = convert_constant(np.float32([LOWEST]), "Add", FLOAT16)[0]
    assert np.isfinite(mask + mask + mask + np.float16(-1000))
    assert np.exp(mask.astype(np.float32)) == 0.0


def test_positive_mask_that_is_subtracted_is_clamped():
    assert convert_constant(np.float32([1e9]), "Sub", FLOAT16)[0] == 16376.0
    assert refuse_constant(np.float32([1e9]), "Sub", FLOAT16) is None


@pytest.mark.parametrize("op", ["Clip", "Max", "Min"])
def test_bound_becomes_the_largest_finite_number(op):
    assert convert_constant(np.float32([LOWEST, -LOWEST]), op, FLOAT16)[0].tolist() == [-65504.0, 65504.0]
    assert refuse_constant(np.float32([LOWEST]), op, FLOAT16) is None


def test_the_largest_finite_number_fits_and_is_not_clamped():
    converted, is_clamped = convert_constant(np.float32([65504.0, -65504.0]), "Add", FLOAT16)
    assert converted.tolist() == [65504.0, -65504.0]
    assert not is_clamped


def test_infinity_stays_infinite():
    converted, is_clamped = convert_constant(np.float32([-np.inf, 1.0]), "Where", FLOAT16)
    assert converted.tolist() == [-np.inf, 1.0]
    assert not is_clamped


def test_infinity_beside_a_mask_stays_infinite():
    assert convert_constant(np.float32([-np.inf, -1e9]), "Add", FLOAT16)[0].tolist() == [-np.inf, -16376.0]


def test_finfo_min_stays_finite_in_bfloat16():
    assert np.isfinite(convert_constant(np.float32([LOWEST]), "Add", BFLOAT16)[0].astype(np.float32)).all()


def test_minus_1e9_fits_bfloat16_as_it_is():
    converted, is_clamped = convert_constant(np.float32([-1e9]), "Add", BFLOAT16)
    assert not is_clamped
    assert converted.astype(np.float32)[0] == pytest.approx(-1e9, rel=2**-8)


def test_factor_beyond_the_range_keeps_its_node_float32():
    assert refuse_constant(np.float32([1e5]), "Mul", FLOAT16) == "a constant reaches 1e+05, beyond float16's 65504"


def test_weight_beyond_the_range_keeps_its_node_float32():
    assert refuse_constant(np.float32([-1e5, 2.0]), "MatMul", FLOAT16).startswith("a constant reaches 1e+05")


def test_epsilon_that_would_vanish_keeps_its_node_float32():
    assert refuse_constant(np.float32(1e-12), "Add", FLOAT16) == (
        "a constant is at most 1e-12, below float16's 6.104e-05"
    )


@pytest.mark.parametrize("values", [np.float32([1e-12, 1.0]), np.float32([0.0]), np.zeros((0, 3), np.float32)])
def test_small_values_beside_normal_ones_zeros_and_empty_tensors_convert(values):
    assert refuse_constant(values, "Add", FLOAT16) is None
    assert convert_constant(values, "Add", FLOAT16)[0].shape == values.shape
