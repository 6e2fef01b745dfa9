"""Whole blocks through launch_block, compiled with g++ and run on the emulated GPU, against float64.

Every case runs by both strategies. TRTFORGE_ALL_KERNEL_TESTS=1 runs every variant in every size; without it, every
variant once and a sample of sizes.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from block_cases import PERSISTENT, SOURCES, STRATEGIES, Case, check, check_blocks, prepare, run
from block_reference import Sizes
from case_count import RUNS_ALL
from emulation_build import TYPES, build_host_program

from trtforge.ops.attention_ffn import Variant, all_variants

# Odd sizes, more rows than a tile of attention has, every head size, and each way to broadcast the bias.
SIZES = (
    Sizes(),
    Sizes(1, 1, 64, 2, 64),
    Sizes(2, 65, 128, 2, 88, (2, 1, 1, 65)),
    Sizes(1, 70, 128, 2, 80, (1, 2, 70, 70)),
    Sizes(3, 17, 160, 2, 48, (3, 1, 1, 17)),
    Sizes(2, 9, 96, 1, 112, (1, 1, 9, 1)),
    Sizes(1, 33, 256, 2, 512, (1, 2, 1, 33)),
)
SAMPLED = (
    Variant("post", "gelu"),
    Variant("pre", "silu", is_causal=True),
    Variant("post", "relu", has_lengths=True),
    Variant("pre", "gelu_tanh", is_int8=True, has_lengths=True),
    Variant("post", "silu", is_int8=True, is_causal=True),
)


@pytest.fixture(scope="session")
def program() -> Path:
    return build_host_program(SOURCES)


def test_every_variant_is_right(program: Path, tmp_path: Path) -> None:
    check(program, tmp_path, [Case(variant) for variant in all_variants()])


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_size_and_type_is_right(program: Path, tmp_path: Path, sizes: Sizes, type: str) -> None:
    whole = dataclasses.replace(sizes, inner=-(-sizes.inner // 16) * 16)  # what int8 takes
    variants = all_variants() if RUNS_ALL else SAMPLED
    check(program, tmp_path, [Case(variant, whole if variant.is_int8 else sizes, type) for variant in variants])


@pytest.mark.parametrize("type", TYPES)
def test_keys_with_the_lowest_value_as_a_mask_are_hidden(program: Path, tmp_path: Path, type: str) -> None:
    blocks = []
    for variant in (Variant("post", "gelu"), Variant("pre", "relu", is_int8=True)):
        case, operands, scales = prepare(Case(variant, Sizes(2, 70, 64, 2, 96, (2, 1, 1, 70)), type))
        mask = np.zeros((2, 1, 1, 70))
        mask[0, ..., 5:] = mask[1, ..., :66] = float(ml_dtypes.finfo(TYPES[type]).min)
        operands["attention_bias"] = mask.astype(TYPES[type])
        blocks.append((case, operands, scales))
    check_blocks(program, tmp_path, blocks)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("is_int8", [False, True])
def test_order_of_warps_changes_no_bit(program: Path, tmp_path: Path, strategy: str, is_int8: bool) -> None:
    variant = Variant("pre", "gelu", is_causal=True, is_int8=is_int8, has_lengths=True)
    case = Case(variant, SIZES[3], strategy=STRATEGIES[strategy])
    seeds = range(20 if RUNS_ALL else 4)
    blocks = [prepare(dataclasses.replace(case, settings=(("seed", seed),))) for seed in seeds]
    first, *others = run(program, tmp_path, blocks)
    assert first.status == 0
    assert all(np.array_equal(first.y, other.y) for other in others)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("variant", [Variant("post", "gelu"), Variant("pre", "gelu", is_int8=True)])
def test_workspace_grows_with_rows_and_nothing_beyond_it_is_touched(
    tmp_path: Path, variant: Variant, strategy: str
) -> None:
    # Every buffer has exactly its size, and AddressSanitizer ends the program at the first byte past one.
    sanitized = build_host_program(SOURCES, sanitizer="address")
    wide, deep = Sizes(1, 7, 64, 2, 16), Sizes(4, 7, 64, 2, 256)  # qkv is the wider tensor, then the inner one
    blocks = [prepare(Case(variant, sizes, strategy=STRATEGIES[strategy])) for sizes in (wide, deep)]
    small, large = run(sanitized, tmp_path, blocks)
    assert (small.status, large.status) == (0, 0)
    assert 0 < small.workspace_bytes < large.workspace_bytes


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_nan_reaches_the_output(program: Path, tmp_path: Path, strategy: int) -> None:
    case, operands, scales = prepare(Case(Variant("post", "gelu"), strategy=strategy))
    operands["x"][1, 3, 5] = np.nan
    (result,) = run(program, tmp_path, [(case, operands, scales)])
    assert result.status == 0
    assert np.isnan(result.y[1].astype(np.float32)).all()  # its row is a key of every row
    assert np.isfinite(result.y[0].astype(np.float32)).all()


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize("is_int8", [False, True])
def test_padding_is_not_read_and_zero_in_the_output(
    program: Path, tmp_path: Path, strategy: int, is_int8: bool
) -> None:
    variant = Variant("pre", "relu", is_int8=is_int8, has_lengths=True)
    case, operands, scales = prepare(Case(variant, strategy=strategy))
    operands["lengths"] = np.array([0, 4], np.int32)
    clean = run(program, tmp_path, [(case, dict(operands), scales)])[0]
    operands["x"] = operands["x"].copy()
    operands["x"][0] = np.nan
    operands["x"][1, 4:] = np.nan
    spoilt = run(program, tmp_path, [(case, operands, scales)])[0]
    assert spoilt.status == 0
    assert np.array_equal(spoilt.y, clean.y)
    assert not spoilt.y[0].any()
    assert not spoilt.y[1, 4:].any()
    assert spoilt.y[1, :4].all()


REFUSALS: list[tuple[dict[str, object], str]] = [
    ({"width": 60}, "multiple of 8"),
    ({"batch": -1}, "negative"),
    ({"num_heads": 3}, "num_heads is not a positive divisor of H"),
    ({"num_heads": 0}, "num_heads is not a positive divisor of H"),
    ({"num_heads": 1, "width": 48}, "head_size is not 32, 64, 80, 96 or 128"),
    ({"bias2": 3}, "a dim of attention_bias is neither 1 nor that of [B, N, S, S]"),
    ({"activation": 0}, "unknown activation"),
    ({"strategy": 9}, "unknown activation, order of norms or strategy"),
    *(({"null": name}, "an operand of the block is null") for name in ("w_up", "x", "b_qkv", "ln2_beta", "y")),
    ({"null": "workspace"}, "smaller than block_workspace_bytes"),
    ({"aliased": 1}, "y is x"),
    *(({"misaligned": name}, "does not start on 16 bytes") for name in ("w_qkv", "x", "b_down", "ln1_gamma", "y")),
    ({"misaligned": "workspace"}, "the workspace does not start on 16 bytes"),
    ({"missing_workspace": 1}, "smaller than block_workspace_bytes"),
    ({"int8": 1, "inner": 88}, "not a multiple of 16"),
    ({"int8": 1}, "a scale is not positive and finite"),
    (
        {"int8": 1, **{f"{role}_input_scale": 1 for role in ("qkv", "out", "up", "down")}},
        "operand of the block is null",
    ),
    (
        {
            "int8": 1,
            "inner": 131072,
            "qkv_input_scale": 1,
            "out_input_scale": 1,
            "up_input_scale": 1,
            "down_input_scale": 1,
        },
        "int8 K over 131071",
    ),
    ({"epsilon": -1}, "epsilon is negative"),
    ({"softmax_scale": "nan"}, "softmax_scale is not finite"),
    ({"type": "bf16", "sm": 75}, "bf16 needs sm_80"),
    ({"multiprocessors": 0}, "a device without multiprocessors"),
    ({"batch": 40000, "sequence": 40000}, "is over 2^30"),
    ({"batch": 2**30, "sequence": 1}, "batch * num_heads"),
    ({"batch": 2**20, "sequence": 2**10, "num_heads": 1024, "width": 2**16}, "tiles"),
]


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_what_cannot_be_computed_is_refused(program: Path, tmp_path: Path, strategy: int) -> None:
    variant = Variant("post", "gelu")
    _, operands, _ = prepare(Case(variant))
    cases = [Case(variant, strategy=strategy, settings=tuple(settings.items())) for settings, _ in REFUSALS]
    results = run(program, tmp_path, [(case, operands, {}) for case in cases])
    for (settings, text), result in zip(REFUSALS, results, strict=True):
        assert result.status != 0, settings
        assert text in result.text, (settings, result.text)
        assert np.isnan(result.y.astype(np.float32)).all() or "aliased" in settings  # nothing was launched


def test_a_device_that_holds_no_block_is_refused(program: Path, tmp_path: Path) -> None:
    case = Case(Variant("post", "gelu"), strategy=PERSISTENT, settings=(("resident", 0),))
    (result,) = run(program, tmp_path, [prepare(case)])
    assert result.status != 0
    assert "no block of the persistent kernel fits" in result.text
    assert "kLaunches" in result.text


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize("empty", ["batch", "sequence"])
def test_no_rows_is_nothing_to_do(program: Path, tmp_path: Path, empty: str, strategy: int) -> None:
    _, operands, _ = prepare(Case(Variant("post", "gelu")))
    case = Case(Variant("post", "gelu"), strategy=strategy, settings=((empty, 0), ("null", "x")))
    assert run(program, tmp_path, [(case, operands, {})])[0].status == 0
