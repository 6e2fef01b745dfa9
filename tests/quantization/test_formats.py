from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from quant_cases import normal

from trtforge.errors import InputError
from trtforge.quantization.formats import FORMATS, FP8, INT4, INT8, check_finite, smallest_scale

DTYPES = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale_is_exact_in_its_type_and_never_below_amax_over_127(dtype):
    amax = np.abs(normal(5000)) * 10
    scale = INT8.scale_from_amax(amax, dtype)
    assert np.array_equal(scale, scale.astype(dtype).astype(np.float32))
    floor = float(ml_dtypes.finfo(dtype).smallest_normal)
    assert (scale.astype(np.float64) >= np.maximum(amax.astype(np.float64) / 127, floor)).all()
    assert (scale <= np.maximum(amax / 127, floor) * (1 + float(ml_dtypes.finfo(dtype).eps))).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("amax", [0.0, 1e-40, 1e-9])
def test_scale_of_a_dead_channel_is_positive_and_has_a_finite_reciprocal(dtype, amax):
    scale = INT8.scale_from_amax(np.float32(amax), dtype).astype(dtype)
    assert scale > 0
    assert np.isfinite(dtype.type(1) / scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale_of_an_enormous_amax_is_finite(dtype):
    assert np.isfinite(INT8.scale_from_amax(np.float32(3e38), dtype).astype(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_use_127_and_never_minus_128(dtype):
    values = INT8.quantize(normal(64, 256), 1, dtype).codes
    assert values.min() >= -127
    assert (np.abs(values).max(axis=0) >= 126).all()


def test_weight_beyond_the_largest_scale_clips_at_127():
    weight = INT8.quantize(np.float32([[-1e8], [1e8]]), 1, np.float16)
    assert (weight.codes.reshape(-1).tolist(), weight.scales.tolist()) == ([-127, 127], [65504.0])


def test_dead_channel_is_all_zero():
    weight = normal(32, 16)
    weight[:, 3] = 0.0
    stored = INT8.quantize(weight, 1, np.float16)
    assert not stored.codes[:, 3].any()
    assert stored.scales[3] == 2.0**-14


def test_weight_without_elements_has_positive_scales():
    stored = INT8.quantize(np.zeros((0, 4), np.float32), 1, np.float16)
    assert stored.codes.shape == (0, 4)
    assert (stored.scales > 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number_format", [INT4, FP8], ids=["int4", "fp8"])
def test_amax_maps_to_the_largest_code(number_format, dtype):
    weight = normal(64, 48)
    stored = number_format.quantize(weight, 1, dtype)
    reached = np.abs(stored.codes.astype(np.float32)).max(axis=0)
    # A scale is rounded up by at most one step of its type, a code of FP8 to one of 3 bits.
    assert (reached >= number_format.max_code * (1 - 2**-3)).all()
    assert (reached <= number_format.max_code).all()
    assert stored.codes.dtype == number_format.dtype


def test_int4_rounds_half_to_even_within_16_codes():
    codes = INT4.encode(np.float32([-99, -8.4, -7.5, -0.5, 0.5, 1.5, 6.5, 7.4, 99]))
    assert codes.astype(int).tolist() == [-8, -8, -8, 0, 0, 2, 6, 7, 7]
    assert INT4.scale_from_amax(np.float32(7.0), np.float32) == 1.0


def test_fp8_has_three_bits_saturates_and_is_finite():
    codes = FP8.encode(np.float32([1e9, -1e9, 449, 1.0, 1.0624, 1.0626, 2.0**-6, 2.0**-9, 2.0**-11]))
    expected = [448, -448, 448, 1, 1, 1.125, 2.0**-6, 2.0**-9, 0]
    assert codes.astype(np.float32).tolist() == expected
    assert np.array_equal(FP8.nearest(np.float32([1.0624, 300.0])), np.float32([1.0, 288.0]))


def test_fp8_error_is_relative_where_int8_error_is_absolute():
    weight = (normal(512, 1) * np.geomspace(1e-2, 1, 512)[:, None]).astype(np.float32)
    errors = {}
    for number_format in (INT8, FP8):
        stored = number_format.quantize(weight, 1, np.float16)
        errors[number_format.name] = np.abs(stored.codes.astype(np.float32) * stored.scales - weight)
    amax = np.abs(weight).max()
    assert errors["int8"].max() <= 0.5001 * amax / 127 * (1 + 2**-10)
    is_normal = np.abs(weight) > amax / 448 * 2.0**-6
    assert (errors["fp8"][is_normal] <= 2.0**-4 * 1.001 * np.abs(weight)[is_normal]).all()


def test_a_tensor_needs_all_steps_of_an_integer_but_one_step_of_fp8():
    floor = smallest_scale(np.float16)
    assert floor == 2.0**-14
    assert INT8.is_too_small(126 * floor, np.float16)
    assert not INT8.is_too_small(127 * floor, np.float16)
    assert INT4.is_too_small(6 * floor, np.float16)
    assert not FP8.is_too_small(floor, np.float16)


def test_every_quantization_has_a_format():
    names = {name: (found.name, found.opset) for name, found in FORMATS.items()}
    assert names == {"int8": ("int8", 10), "fp8": ("fp8", 19), "int4": ("int4", 21), "int8-weights": ("int8", 10)}


def test_weight_with_infinity_is_refused():
    with pytest.raises(InputError, match="the weight 'w' of node 'n' holds NaN or infinity") as caught:
        check_finite(np.float32([1, np.inf]), "w", "n")
    assert (caught.value.why, "exclude" in caught.value.fix) == ("it has no scale", True)
