"""The reference against a second one, in two libraries, and what its tolerance lets through."""

from __future__ import annotations

import dataclasses
import functools

import ml_dtypes
import numpy as np
import pytest
from block_reference import Sizes, block_in_float64

from trtforge.benchmark.arrays import Arrays, HostArrays, TorchArrays, bits_from_values, round_on_host, values_from_bits
from trtforge.benchmark.case import BlockCase
from trtforge.benchmark.operands import Operands, make_operands
from trtforge.benchmark.reference import K_MAX, K_RMS, Reference, calibrated
from trtforge.ops.attention_ffn import Variant

CASES = (
    BlockCase(2, 33, 64, 2, 96),
    BlockCase(2, 33, 64, 2, 96, "bf16", "causal", "pre", "silu"),
    BlockCase(3, 17, 64, 2, 96, "int8", "lengths", "post", "relu"),
    BlockCase(1, 33, 96, 3, 64, "fp16", "bias", "pre", "gelu_tanh"),
)


@functools.cache
def prepared(case: BlockCase) -> tuple[Operands, Reference]:
    operands = calibrated(case, make_operands(case), HostArrays())
    return operands, Reference(case, operands, HostArrays())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_the_exact_result_is_that_of_the_tests_own_reference(case: BlockCase) -> None:
    operands, reference = prepared(case)
    variant = Variant(case.order, case.activation, case.mask == "causal", case.dtype == "int8", case.mask == "lengths")
    sizes = Sizes(case.batch, case.sequence, case.width, case.num_heads, case.inner_width, case.bias_dims)
    scales = {f"{role}_input_scale": scale for role, scale in operands.input_scales.items()}
    other = block_in_float64(variant, sizes, dict(operands.values), scales)
    np.testing.assert_allclose(reference.exact, other, rtol=0, atol=1e-12)
    assert bool(scales) == (case.dtype == "int8")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_torch_gives_the_same(case: BlockCase) -> None:
    pytest.importorskip("torch")
    operands, reference = prepared(case)
    other = Reference(case, operands, TorchArrays("cpu"))
    np.testing.assert_allclose(reference.exact, other.exact.numpy(), rtol=0, atol=1e-12)
    assert other.plain_rms == pytest.approx(reference.plain_rms, rel=0.01)
    y = bits_from_values(reference.exact, case.element_type)
    assert other.judge(y).rms_ratio == pytest.approx(reference.judge(y).rms_ratio, rel=0.01)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_the_exact_result_rounded_once_is_right_and_the_plain_path_is_the_measure(case: BlockCase) -> None:
    _, reference = prepared(case)
    verdict = reference.judge(bits_from_values(reference.exact, case.element_type))
    assert verdict.is_right
    assert verdict.rms_ratio is not None
    assert verdict.rms_ratio < 1


def judge_with(change: np.typing.NDArray[np.float64]) -> tuple[float | None, float | None, bool]:
    _, reference = prepared(CASES[0])
    verdict = reference.judge(bits_from_values(reference.exact + change, "fp16"))
    return verdict.rms_ratio, verdict.max_ratio, verdict.is_right


def test_twice_the_error_of_the_plain_path_is_too_much() -> None:
    _, reference = prepared(CASES[0])
    noise = np.random.default_rng(1).normal(0, 2 * reference.plain_rms, reference.exact.shape)
    rms, _, is_right = judge_with(noise)
    assert rms is not None
    assert rms > K_RMS
    assert not is_right


def test_one_wrong_element_among_thousands_is_found() -> None:
    _, reference = prepared(CASES[0])
    change = np.zeros_like(reference.exact)
    change[1, 2, 3] = 6 * reference.plain_max
    rms, largest, is_right = judge_with(change)
    assert rms is not None and largest is not None
    assert rms < K_RMS
    assert largest > K_MAX
    assert not is_right


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_infinity_are_wrong(value: float) -> None:
    _, reference = prepared(CASES[0])
    change = np.zeros_like(reference.exact)
    change[0, 0, 0] = value
    assert judge_with(change) == (None, None, False)
    assert "NaN" in reference.judge(bits_from_values(reference.exact + change, "fp16")).describe()


def test_rows_of_padding_have_to_be_zero() -> None:
    case = CASES[2]
    _, reference = prepared(case)
    y = reference.exact.copy()
    sample = next(i for i, length in enumerate(case.lengths) if length < case.sequence)
    y[sample, case.lengths[sample]] = 1.0
    assert not reference.judge(bits_from_values(y, "fp16")).is_right


def test_a_peer_that_does_not_quantize_is_compared_with_a_block_that_does_not() -> None:
    case = CASES[2]
    operands, quantized = prepared(case)
    exact = Reference(case, operands, HostArrays(), is_quantized=False)
    float_case = dataclasses.replace(case, dtype="fp16")
    values = {**operands.values, **{f"w_{role}": operands.weight(role) for role in operands.input_scales}}
    same = Reference(float_case, Operands(values), HostArrays())
    np.testing.assert_allclose(exact.exact, same.exact, rtol=0, atol=1e-12)
    assert abs(quantized.exact - exact.exact).max() > 1e-3


@pytest.mark.parametrize("arrays", [HostArrays(), "torch"])
def test_rounding_to_bf16_is_that_of_ml_dtypes(arrays: Arrays | str) -> None:
    if arrays == "torch":
        pytest.importorskip("torch")
        arrays = TorchArrays("cpu")
    random = np.random.default_rng(3)
    values = np.concatenate([random.normal(0, 10.0**power, 500) for power in range(-30, 30, 6)]).astype(np.float32)
    values = np.concatenate([values, np.float32([0, -0.0, 1, 1.00390625, 1.01171875, np.inf, -np.inf])])
    expected = values.astype(ml_dtypes.bfloat16).astype(np.float64)
    assert not isinstance(arrays, str)
    np.testing.assert_array_equal(np.asarray(arrays.round(arrays.from_host(values), "bf16")), expected)
    bits = bits_from_values(values, "bf16")
    np.testing.assert_array_equal(bits, values.astype(ml_dtypes.bfloat16).view(np.int16))
    np.testing.assert_array_equal(values_from_bits(bits, "bf16"), expected.astype(np.float32))


def test_nan_stays_nan_in_bf16() -> None:
    odd = np.array([0x7F800001, 0x7FFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(round_on_host(odd, "bf16")).all()
