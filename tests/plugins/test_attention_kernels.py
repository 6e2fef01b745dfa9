"""The attention kernel, compiled with g++ and run on the emulated GPU, against float64.

TRTFORGE_ALL_KERNEL_TESTS=1 runs the whole grid and compiles for every target; without it, a sample of both.
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from attention_cases import Attention, Run, check, compute, random_attention, reference, start
from case_count import RUNS_ALL
from emulation_build import TYPES, build_host_program

from trtforge.ops.attention_ffn import HEAD_SIZES
from trtforge.plugins.compile import ARCHITECTURES

ROOT = Path(__file__).parents[2]
LAUNCHER = ROOT / "plugins" / "csrc" / "launch" / "attention.cu"
SOURCES = [ROOT / "tests" / "csrc" / "attention" / "attention_runner.cpp", LAUNCHER]

BATCH, HEADS = 3, 2
SEQUENCES = (1, 5, 64, 65, 130)
BIASES = ("none", "keys", "heads", "full")


@pytest.fixture(scope="session")
def program() -> Path:
    return build_host_program(SOURCES)


def bias_shape(name: str, sequence: int) -> tuple[int, int, int, int]:
    return {
        "none": (1, 1, 1, 1),
        "keys": (BATCH, 1, 1, sequence),
        "heads": (1, HEADS, sequence, sequence),
        "full": (BATCH, HEADS, sequence, sequence),
    }[name]


def grid() -> list[tuple[object, ...]]:
    """Every combination, or one of each (sequence, head size) with the other choices taken in turn."""
    choices = list(itertools.product(TYPES, BIASES, (False, True), (False, True)))
    sizes = list(itertools.product(SEQUENCES, HEAD_SIZES))
    if RUNS_ALL:
        return [(*size, *choice) for size in sizes for choice in choices]
    # 7 has no factor in common with the 32 choices: neighbours differ in every one of them.
    return [(*size, *choices[7 * index % len(choices)]) for index, size in enumerate(sizes)]


@pytest.mark.parametrize(("sequence", "head_size", "type", "bias", "is_causal", "has_lengths"), grid())
def test_attention_is_right_over_the_grid(
    program: Path, sequence: int, head_size: int, type: str, bias: str, is_causal: bool, has_lengths: bool
) -> None:
    attention = random_attention(
        seed=sequence * head_size,
        shape=(BATCH, sequence, HEADS, head_size),
        type=type,
        bias_shape=bias_shape(bias, sequence),
        is_causal=is_causal,
        lengths=[sequence // 2, 0, sequence] if has_lengths else None,
    )
    check(attention, Run(program, seed=sequence + head_size))


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_every_schedule_gives_the_same_bits(program: Path, type: str, is_causal: bool) -> None:
    attention = random_attention(1, (2, 130, 1, 64), type, (2, 1, 130, 130), is_causal, lengths=[130, 70])
    outputs = {compute(attention, Run(program, seed)).tobytes() for seed in range(20 if RUNS_ALL else 6)}
    assert len(outputs) == 1


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_packed_and_separate_inputs_give_the_same_bits(program: Path, head_size: int) -> None:
    attention = random_attention(2, (2, 70, 3, head_size))
    separate = compute(attention, Run(program))
    packed = compute(attention, Run(program, options={"packed": 1}))
    assert packed.tobytes() == separate.tobytes()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_blocks", [1, 3])
def test_blocks_that_take_several_tiles_give_the_same_bits(program: Path, num_blocks: int, is_causal: bool) -> None:
    attention = random_attention(3, (2, 200, 2, 64), is_causal=is_causal, lengths=[200, 65])
    one_tile_each = compute(attention, Run(program))
    for seed in range(4):
        taken_in_turn = compute(attention, Run(program, seed, {"num_blocks": num_blocks}))
        assert taken_in_turn.tobytes() == one_tile_each.tobytes()


@pytest.mark.parametrize("shape", [(1, 1, 1, 65), (1, 1, 65, 1), (2, 2, 65, 1), (2, 1, 65, 65), (1, 2, 1, 65)])
def test_bias_of_any_broadcast_shape(program: Path, shape: tuple[int, int, int, int]) -> None:
    check(random_attention(4, (2, 65, 2, 32), bias_shape=shape), Run(program))


@pytest.mark.parametrize("softmax_scale", [4.0, -0.5, 0.0])
@pytest.mark.parametrize("type", TYPES)
def test_any_finite_scale(program: Path, type: str, softmax_scale: float) -> None:
    check(random_attention(5, (1, 70, 1, 64), type, softmax_scale=softmax_scale), Run(program))


@pytest.mark.parametrize("type", TYPES)
def test_int8_output_is_the_result_quantized(program: Path, type: str) -> None:
    """Within what the result itself may be off; some elements are beyond what int8 holds."""
    attention = random_attention(16, (3, 70, 2, 80), type, lengths=[70, 0, 33])
    scale = float(np.float32(0.0015))
    done = start(attention, Run(program, options={"output_scale": scale}))
    assert done.returncode == 0, done.stderr.decode()
    codes = np.frombuffer(done.stdout, np.int8).reshape(attention.shape)
    expected, bound = reference(attention)
    lowest, highest = (np.clip(np.rint((expected + side * bound) / scale), -128, 127) for side in (-1, 1))
    assert ((lowest <= codes) & (codes <= highest)).all()
    assert not codes[1].any()
    assert (codes == 127).any()
    assert (codes == -128).any()


LOWEST = {name: float(np.finfo(np.float16).min) if name == "half" else -3.3895314e38 for name in TYPES}


@pytest.mark.parametrize("type", TYPES)
def test_rows_with_a_finite_mask_everywhere_are_as_the_softmax_has_them(program: Path, type: str) -> None:
    attention = random_attention(6, (2, 70, 2, 64), type)
    mask = np.zeros((2, 1, 70, 70))
    mask[0, :, 3:40, :] = LOWEST[type]  # rows that see nothing
    mask[1, :, :, 20:] = LOWEST[type]  # keys that nothing sees
    check(attention.with_values(bias=mask), Run(program))


@pytest.mark.parametrize("type", TYPES)
def test_rows_masked_by_infinity_are_zero_and_others_as_without_those_keys(program: Path, type: str) -> None:
    attention = random_attention(7, (1, 70, 1, 32), type)
    mask = np.zeros((1, 1, 70, 70))
    mask[..., :64] = -np.inf  # a whole first tile of keys
    expected, bound = reference(attention.with_values(bias=mask))
    mask[:, :, 5] = -np.inf
    actual = compute(attention.with_values(bias=mask), Run(program)).astype(np.float64)
    assert (actual[:, 5] == 0).all()
    kept = np.arange(70) != 5
    assert (abs(actual - expected)[:, kept] <= bound[:, kept]).all()


def test_a_bias_of_one_value_a_row_masks_that_row_only(program: Path) -> None:
    attention = random_attention(15, (1, 70, 2, 64))
    expected = compute(attention, Run(program))
    mask = np.zeros((1, 1, 70, 1))
    mask[0, 0, 13] = -np.inf
    actual = compute(attention.with_values(bias=mask), Run(program))
    assert not actual[0, 13].any()
    assert np.delete(actual, 13, axis=1).tobytes() == np.delete(expected, 13, axis=1).tobytes()


def test_padding_is_not_read_and_its_rows_are_zero(program: Path) -> None:
    attention = random_attention(8, (4, 130, 2, 64), bias_shape=(4, 1, 1, 130), lengths=[100, 0, 64, 1])
    padded = {name: np.array(getattr(attention, name), np.float64) for name in ("q", "k", "v", "bias")}
    for sample, length in enumerate((100, 0, 64, 1)):
        for name in ("q", "k", "v"):
            padded[name][sample, length:] = np.nan
        padded["bias"][sample, ..., length:] = np.nan
    actual = compute(attention.with_values(**padded), Run(program))
    assert np.isfinite(actual.astype(np.float64)).all()
    assert actual.tobytes() == compute(attention, Run(program)).tobytes()
    for sample, length in enumerate((100, 0, 64, 1)):
        assert not actual[sample, length:].any()
        assert actual[sample, :length].all()


def test_lengths_out_of_range_are_clamped(program: Path) -> None:
    shape = (3, 20, 1, 32)
    clamped = compute(random_attention(9, shape, lengths=[0, 20, 7]), Run(program))
    given = compute(random_attention(9, shape, lengths=[-4, 1000, 7]), Run(program))
    assert given.tobytes() == clamped.tobytes()


def nan_at(attention: Attention, name: str, *index: int) -> Attention:
    array = np.array(getattr(attention, name), np.float64)
    array[index] = np.nan
    return attention.with_values(**{name: array})


@pytest.mark.parametrize("type", TYPES)
def test_nan_in_a_query_or_a_bias_row_spoils_that_row_only(program: Path, type: str) -> None:
    attention = random_attention(10, (1, 70, 2, 64), type, bias_shape=(1, 1, 70, 70))
    clean = compute(attention, Run(program))
    for spoiled, heads in (
        (nan_at(attention, "q", 0, 66, 1, 3), [1]),
        (nan_at(attention, "bias", 0, 0, 66, 9), [0, 1]),
    ):
        is_nan = np.isnan(compute(spoiled, Run(program)).astype(np.float64))
        expected = np.zeros_like(is_nan)
        expected[0, 66, heads] = True
        assert (is_nan == expected).all()
        assert (compute(spoiled, Run(program))[~expected] == clean[~expected]).all()


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_nan_in_a_key_or_value_reaches_every_row_that_sees_it(program: Path, name: str, is_causal: bool) -> None:
    attention = nan_at(random_attention(11, (1, 200, 1, 64), is_causal=is_causal), name, 0, 130, 0, 5)
    is_nan = np.isnan(compute(attention, Run(program)).astype(np.float64))[0, :, 0]
    columns = slice(None) if name == "k" else slice(5, 6)
    seen_from = 130 if is_causal else 0
    assert is_nan[seen_from:, columns].all()
    # Causal: at most the rows of its own tile of 64 are touched before it, and for a key none.
    assert not is_nan[: seen_from if name == "k" else seen_from // 64 * 64].any()


def test_infinite_scores_are_nan_as_in_the_softmax(program: Path) -> None:
    bias = np.zeros((1, 1, 5, 5))
    bias[0, 0, 2, 1] = np.inf
    actual = compute(random_attention(12, (1, 5, 1, 32)).with_values(bias=bias), Run(program)).astype(np.float64)
    assert np.isnan(actual[0, 2]).all()
    assert np.isfinite(np.delete(actual, 2, axis=1)).all()


@pytest.mark.parametrize("shape", [(2, 0, 2, 64), (0, 5, 2, 64)])
def test_nothing_is_launched_for_no_rows(program: Path, shape: tuple[int, int, int, int]) -> None:
    done = start(random_attention(13, shape), Run(program))
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


REFUSALS = {
    "null q": ({"null": "q"}, "null"),
    "null k": ({"null": "k"}, "null"),
    "null v": ({"null": "v"}, "null"),
    "null bias": ({"null": "bias"}, "one zero with strides of 0"),
    "null output": ({"null": "output"}, "null"),
    "misaligned output": ({"output_offset_bytes": 2}, "16 bytes"),
    "row stride that no copy can take": ({"row_stride": 68}, "multiple of 8"),
    "negative head stride": ({"head_stride": -64}, "negative"),
    "bias keys apart": ({"bias_key_stride": 2}, "0 or 1"),
    "negative bias rows": ({"bias_row_stride": -1}, "stride of the bias is negative"),
    "head size 48": ({"head_size": 48}, "32, 64, 80, 96 or 128"),
    "no heads": ({"num_heads": 0}, "num_heads is not positive"),
    "negative sequence": ({"sequence": -1}, "sequence is negative"),
    "int8 scale of zero": ({"output_scale": 0}, "scale of an int8 output is not positive"),
    "misaligned int8 output": ({"output_scale": 1, "output_offset_bytes": 8}, "16 bytes"),
    "infinite scale": ({"softmax_scale": "inf"}, "not finite"),
    "NaN scale": ({"softmax_scale": "nan"}, "not finite"),
    "type 2": ({"type": 2}, "unknown element type"),
    "bf16 on sm_75": ({"type": 1, "compute_capability": 75}, "sm_80 or newer"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_the_kernel_cannot_take_is_refused(program: Path, case: str) -> None:
    options, text = REFUSALS[case]
    done = start(random_attention(14, (1, 3, 1, 64)), Run(program, options=options))
    assert done.returncode > 10
    assert text in done.stderr.decode()
    assert done.stdout == b""


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_sanitizers_are_silent(sanitizer: str) -> None:
    program = build_host_program(SOURCES, sanitizer=sanitizer)
    for head_size, seed in zip(HEAD_SIZES if RUNS_ALL else (64, 80), itertools.count(1), strict=False):
        shape = (2, 65, 1, head_size)
        attention = random_attention(seed, shape, "half", (2, 1, 65, 65), is_causal=seed % 2 == 0, lengths=[9, 65])
        check(attention, Run(program, seed))


@dataclass(frozen=True)
class Compiled:
    target: int  # compute capability
    report: str  # what ptxas says of each kernel
    ptx: str


@pytest.fixture(scope="module", params=ARCHITECTURES if RUNS_ALL else [80])
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    folder = tmp_path_factory.mktemp("attention")
    options = ["-std=c++17", "-cubin", "-Xptxas", "-v", "-Werror", "all-warnings", "--keep", "--keep-dir", folder]
    command = ["nvcc", f"-arch=sm_{request.param}", *options, LAUNCHER, "-o", folder / "attention.cubin"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    (ptx,) = folder.glob("*.ptx")
    return Compiled(request.param, done.stderr, ptx.read_text())


def test_no_kernel_spills_registers(compiled: Compiled) -> None:
    kernels = re.findall(
        r"attention_kernel\S+' for.*?(\d+) bytes spill stores, (\d+) bytes", compiled.report, re.DOTALL
    )
    assert len(kernels) == len(TYPES) * len(HEAD_SIZES) * 2
    assert set(kernels) == {("0", "0")}


def test_products_are_of_tensor_cores_and_copies_run_beside_them(compiled: Compiled) -> None:
    types = ["f16"] if compiled.target == 75 else ["f16", "bf16"]
    depth = 8 if compiled.target == 75 else 16
    for type in types:
        assert f"mma.sync.aligned.m16n8k{depth}.row.col.f32.{type}.{type}.f32" in compiled.ptx
    assert "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16" in compiled.ptx
    assert ("cp.async.cg.shared.global" in compiled.ptx) == (compiled.target >= 80)


def test_no_load_may_see_what_was_there_before_the_launch(compiled: Compiled) -> None:
    # ld.global.nc reads a cache that a persistent kernel's own writes of q, k and v do not reach.
    assert "ld.global" in compiled.ptx
    assert "ld.global.nc" not in compiled.ptx
