from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from quant_cases import normal

from trtforge.quantization.formats import INT4, INT8
from trtforge.quantization.weight_only_codes import WeightLayout, store_matrices

FLOAT16 = np.dtype(np.float16)
BLOCKS = WeightLayout(INT4, 128, FLOAT16)
CHANNELS = WeightLayout(INT8, None, FLOAT16)


def correlated_rows(count, width, seed=0):
    """Rows whose channels depend on each other, as activations do, of which a few are 30 times as large."""
    random = np.random.default_rng(seed)
    mixing = np.random.default_rng(99).normal(size=(24, width))
    scale = np.where(np.arange(width) % 29 == 3, 30.0, 1.0)
    return ((random.normal(size=(count, 24)) @ mixing + random.normal(size=(count, width))) * scale).astype(np.float32)


def plain(matrices, layout):
    return store_matrices(matrices, layout, None, may_scale=True)


@pytest.mark.parametrize("layout", [BLOCKS, CHANNELS], ids=["int4", "int8"])
def test_shapes_and_exact_scales(layout):
    stored = plain([normal(256, 48)], layout).weights[0]
    assert (stored.codes.shape, stored.codes.dtype) == ((256, 48), layout.number_format.dtype)
    assert stored.scales.shape == ((2, 48) if layout is BLOCKS else (1, 48))
    assert np.array_equal(stored.scales, stored.scales.astype(np.float16).astype(np.float32))


def test_range_of_a_block_is_clipped_where_that_lowers_the_error():
    matrix = normal(128, 1)
    matrix[5] = 20.0
    stored = plain([matrix], BLOCKS).weights[0]
    unclipped = np.rint(matrix / (20.0 / 7)) * (20.0 / 7)
    assert stored.scales[0, 0] < 20.0 / 7
    rounded = stored.codes.astype(np.float32) * stored.scales
    assert np.square(rounded - matrix).sum() < np.square(unclipped - matrix).sum()


def test_blocks_do_not_know_each_other():
    matrix = normal(256, 8)
    matrix[128:] *= 100
    alone = plain([matrix[:128]], BLOCKS).weights[0]
    both = plain([matrix], BLOCKS).weights[0]
    assert np.array_equal(both.codes[:128], alone.codes)
    assert np.array_equal(both.scales[:1], alone.scales)


@pytest.mark.parametrize("layout", [BLOCKS, CHANNELS], ids=["int4", "int8"])
def test_rows_lower_the_output_error_on_rows_that_were_not_seen(layout):
    matrix, rows, unseen = normal(256, 64, scale=0.05), correlated_rows(700, 256), correlated_rows(300, 256, seed=1)
    by_rows = store_matrices([matrix], layout, rows, may_scale=False)
    by_weight = plain([matrix], layout)
    assert by_rows.factors is None
    errors = [stored.output_error([matrix], layout.block, unseen) for stored in (by_rows, by_weight)]
    assert errors[0] < 0.5 * errors[1]


def test_output_error_is_that_of_the_product():
    matrix, rows = normal(256, 16), correlated_rows(40, 256)
    stored = plain([matrix], BLOCKS)
    rounded = stored.weights[0].codes.astype(np.float32) * np.repeat(stored.weights[0].scales, 128, axis=0)
    expected = np.square(rows.astype(np.float64) @ (rounded - matrix)).sum()
    assert stored.output_error([matrix], 128, rows) == pytest.approx(expected, rel=1e-4)


def test_feedback_is_not_used_where_it_does_not_help():
    """Independent rows, fewer than channels: what one row of the weight gives up no other can make good."""
    rows = normal(24, 512, seed=3)
    matrix = normal(512, 16, seed=4)
    stored = store_matrices([matrix], BLOCKS, rows, may_scale=False)
    held_out = rows[::8]
    assert stored.output_error([matrix], 128, held_out) <= plain([matrix], BLOCKS).output_error([matrix], 128, held_out)


def spiky_rows(count):
    """Independent channels of which a few are 300 times as large: what scaling is for, and feedback cannot help."""
    return (normal(count, 256, seed=5) * np.where(np.arange(256) % 64 == 7, 300.0, 1.0)).astype(np.float32)


def test_channels_with_large_activations_are_scaled_up_before_rounding():
    matrices = [normal(256, 32, seed=6), normal(256, 16, seed=7)]
    stored = store_matrices(matrices, BLOCKS, spiky_rows(600), may_scale=True)
    assert stored.factors is not None
    large = stored.factors[7::64]
    assert large.max() < 0.5 * np.delete(stored.factors, np.arange(7, 256, 64)).min()
    assert np.array_equal(stored.factors, stored.factors.astype(np.float16).astype(np.float32))
    unscaled = store_matrices(matrices, BLOCKS, spiky_rows(600), may_scale=False)
    assert unscaled.factors is None
    unseen = spiky_rows(900)[600:]
    assert stored.output_error(matrices, 128, unseen) < 0.9 * unscaled.output_error(matrices, 128, unseen)


def test_factors_never_lift_an_activation_beyond_half_of_float16():
    rows = spiky_rows(600) * np.float32(200)
    rows[:, 0] = 1e-3
    rows[1, 0] = 2.5e4
    stored = store_matrices([normal(256, 32, seed=6)], BLOCKS, rows, may_scale=True)
    assert stored.factors is None or np.abs(rows * stored.factors).max() <= 3e4 * 1.01


@pytest.mark.parametrize("rows", [None, normal(15, 256), np.zeros((64, 256), np.float32)], ids=["none", "few", "zero"])
def test_without_telling_rows_weights_are_rounded_to_nearest(rows):
    matrix = normal(256, 16)
    stored, expected = store_matrices([matrix], BLOCKS, rows, may_scale=True), plain([matrix], BLOCKS)
    assert stored.factors is None
    assert np.array_equal(stored.weights[0].codes, expected.weights[0].codes)


def test_dead_channels_and_dead_weights_are_harmless():
    rows, matrix = correlated_rows(200, 256), normal(256, 16)
    rows[:, :130] = 0.0
    matrix[:, 3] = 0.0
    stored = store_matrices([matrix], BLOCKS, rows, may_scale=True)
    assert not stored.weights[0].codes[:, 3].astype(np.float32).any()
    assert (stored.weights[0].scales > 0).all()
    assert stored.factors is None or np.isfinite(1.0 / stored.factors).all()


def test_depth_that_no_chunk_divides():
    rows, matrix = correlated_rows(300, 300), normal(300, 20)
    stored, unseen = store_matrices([matrix], CHANNELS, rows, may_scale=False), correlated_rows(200, 300, seed=1)
    assert stored.weights[0].scales.shape == (1, 20)
    errors = [found.output_error([matrix], None, unseen) for found in (stored, plain([matrix], CHANNELS))]
    assert errors[0] < 0.5 * errors[1]


def test_weight_without_elements():
    stored = plain([np.zeros((0, 4), np.float32)], CHANNELS).weights[0]
    assert (stored.codes.shape, stored.scales.shape) == ((0, 4), (1, 4))


def test_bfloat16_scales_are_exact():
    stored = plain([normal(256, 16)], WeightLayout(INT4, 128, np.dtype(ml_dtypes.bfloat16))).weights[0]
    assert np.array_equal(stored.scales, stored.scales.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_equal_rows_give_equal_codes():
    matrix, rows = normal(256, 32), correlated_rows(500, 256)
    first, second = (store_matrices([matrix.copy()], BLOCKS, rows.copy(), may_scale=True) for _ in range(2))
    assert first.weights[0].codes.tobytes() == second.weights[0].codes.tobytes()
    assert first.weights[0].scales.tobytes() == second.weights[0].scales.tobytes()
