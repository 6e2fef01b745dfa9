"""Grids: what they hold, in which order, and the work of a case counted by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from trtforge.benchmark.case import BATCHES, SEQUENCES, WIDTHS, BlockCase, Grid
from trtforge.benchmark.gpu_check import correctness_cases, measured_cases, usable
from trtforge.benchmark.host import sample_for_host
from trtforge.benchmark.operands import make_operands
from trtforge.benchmark.roofline import Peaks, bound, gbps, known_peaks, tflops
from trtforge.benchmark.sanitized import case_from_key
from trtforge.errors import InputError

TINY = BlockCase(2, 4, 64, 2, 96)


def test_the_default_grid_is_what_the_plugin_has_to_show() -> None:
    cases = Grid().cases()
    assert len(cases) == len(set(cases)) == 3 * 5 * 3
    assert {case.batch for case in cases} == {1, 8, 32}
    assert {case.sequence for case in cases} == {64, 128, 384, 512, 2048}
    assert {(case.width, case.num_heads) for case in cases} == {(384, 12), (768, 12), (1024, 16)}
    assert all(case.inner_width == 4 * case.width for case in cases)


def test_the_most_telling_case_is_first_and_the_least_is_last() -> None:
    cases = Grid().cases()
    assert (cases[0].batch, cases[0].sequence, cases[0].width) == (8, 512, 768)
    assert (cases[-1].batch, cases[-1].sequence, cases[-1].width) == (32, 2048, 1024)
    ranks = [BATCHES.index(c.batch) + SEQUENCES.index(c.sequence) + WIDTHS.index(c.width) for c in cases]
    assert ranks == sorted(ranks)


def test_types_and_masks_come_before_the_rest_of_the_sizes() -> None:
    cases = measured_cases()
    assert len(cases) == len(set(cases))
    early = cases[:25]
    assert {case.dtype for case in early} == {"fp16", "bf16", "int8"}
    assert {case.mask for case in early} == {"none", "causal", "lengths", "bias"}
    assert set(Grid().cases()) <= set(cases)


def test_correctness_is_checked_in_every_head_size_type_mask_and_activation() -> None:
    cases = correctness_cases()
    for dtype in ("fp16", "bf16", "int8"):
        seen = {(case.head_size, case.mask) for case in cases if case.dtype == dtype}
        assert {size for size, _ in seen} == {32, 64, 80, 96, 128}
        assert {mask for _, mask in seen} == {"none", "causal", "lengths", "bias"}
        assert len({(c.order, c.activation) for c in cases if c.dtype == dtype}) == 8


def test_turing_is_not_asked_for_bf16() -> None:
    assert {case.dtype for case in usable(correctness_cases(), 75)} == {"fp16", "int8"}
    assert usable(correctness_cases(), 80) == correctness_cases()


def test_samples_for_the_emulator_are_small_and_keep_head_sizes_types_and_masks() -> None:
    cases = Grid(widths=(768, 384), dtypes=("fp16", "int8"), masks=("none", "bias")).cases()
    sampled = sample_for_host(cases)
    assert len(sampled) == len(set(sampled)) < len(cases)
    assert all(case.batch * case.sequence <= 140 and case.width <= 256 for case in sampled)
    for attribute in ("head_size", "dtype", "mask"):
        assert {getattr(case, attribute) for case in sampled} == {getattr(case, attribute) for case in cases}


@pytest.mark.parametrize("case", [*correctness_cases()[::7], TINY])
def test_a_key_names_its_case(case: BlockCase) -> None:
    assert case_from_key(case.key) == case


def test_the_work_of_a_block_counted_by_hand() -> None:
    rows, width, inner = 8, 64, 96
    assert TINY.product_flops == 2 * rows * width * (3 * width + width + inner + inner)
    assert TINY.attention_flops == 2 * 2 * (2 * 4 * 4 * 32) * 2  # two products, multiply and add, B N S S D
    causal = dataclasses.replace(TINY, mask="causal")
    assert causal.attention_flops * 16 == TINY.attention_flops * 10  # 10 of 16 pairs are seen
    assert causal.product_flops == TINY.product_flops


@pytest.mark.parametrize("dtype", ["fp16", "int8"])
@pytest.mark.parametrize("mask", ["none", "bias"])
def test_least_bytes_are_those_of_the_operands_and_the_output(dtype: str, mask: str) -> None:
    case = dataclasses.replace(TINY, dtype=dtype, mask=mask)
    values = make_operands(case).values
    sizes = [v.nbytes if v.dtype == np.int8 or name.endswith("_scale") else 2 * v.size for name, v in values.items()]
    assert case.min_bytes == sum(sizes) + 2 * values["x"].size


def test_padding_is_no_work() -> None:
    padded = BlockCase(8, 128, 384, 12, 1536, mask="lengths")
    whole = dataclasses.replace(padded, mask="none")
    assert all(32 <= length <= 128 for length in padded.lengths)
    assert len(set(padded.lengths)) > 1
    assert padded.product_flops * 8 * 128 == whole.product_flops * sum(padded.lengths)


def test_the_roofline_is_the_larger_of_two_times() -> None:
    peaks = Peaks(100.0, 200.0, 1000.0, "made up for this test")
    large = BlockCase(8, 512, 768, 12, 3072)
    limit = bound(large, peaks)
    assert limit is not None
    assert limit.limited_by == "compute"
    assert limit.time_us == pytest.approx(large.flops / 100e12 * 1e6)
    assert tflops(large, limit.time_us) == pytest.approx(100.0)
    small = bound(TINY, peaks)
    assert small is not None
    assert small.limited_by == "memory"
    assert gbps(TINY, small.time_us) == pytest.approx(1000.0)


def test_int8_halves_the_products_and_not_attention() -> None:
    peaks = Peaks(100.0, 200.0, 1e9, "made up for this test")
    case = BlockCase(8, 512, 768, 12, 3072, "int8")
    limit = bound(case, peaks)
    assert limit is not None
    assert limit.time_us == pytest.approx((case.product_flops / 200e12 + case.attention_flops / 100e12) * 1e6)
    assert bound(case, dataclasses.replace(peaks, int8_tops=None)) is None


def test_variants_of_a_chip_are_told_apart() -> None:
    sxm, pcie = known_peaks("NVIDIA H100 80GB HBM3"), known_peaks("NVIDIA H100 PCIe")
    assert sxm is not None and pcie is not None
    assert sxm.fp16_tflops > pcie.fp16_tflops
    assert known_peaks("NVIDIA H200 NVL") is None
    assert known_peaks("some other card") is None


@pytest.mark.parametrize(
    ("grid", "text"),
    [
        (Grid(widths=(100,)), "multiples of 8"),
        (Grid(widths=(384,), heads=(5,)), "--heads 5 does not suit --hidden 384"),
        (Grid(widths=(48,), heads=(1,)), "the head size, their ratio, must be one of 32, 64, 80, 96, 128"),
        (Grid(batches=(0,)), "sizes are positive"),
        (Grid(widths=(768,), inner_widths=(72,), dtypes=("int8",)), "multiples of 16"),
    ],
)
def test_sizes_that_the_kernels_do_not_take_are_refused(grid: Grid, text: str) -> None:
    with pytest.raises(InputError) as caught:
        grid.cases()
    assert text in str(caught.value)
