"""The GEMM, LayerNorm and quantize kernels, compiled with g++ and run on the emulated GPU, against float64.

TRTFORGE_ALL_KERNEL_TESTS=1 runs the whole grid and compiles for every target; without it, a sample of both.
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from case_count import RUNS_ALL
from emulation_build import TYPES, build_host_program
from gemm_cases import (
    ACTIVATIONS,
    Array,
    Case,
    Operands,
    Result,
    make_operands,
    run_cases,
    run_program,
    write_operands,
)
from gemm_references import (
    gemm_reference,
    gemm_s8_reference,
    layernorm_reference,
    quantized_excess,
    rounded_excess,
)

from trtforge.plugins.compile import ARCHITECTURES

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "plugins" / "csrc" / "launch"
LAUNCHERS = [LAUNCH / "gemm.cu", LAUNCH / "gemm_s8.cu", LAUNCH / "gemm_rows.cu"]
RUNNER = ROOT / "tests" / "csrc" / "gemm"
SOURCES = [RUNNER / "runner.cpp", RUNNER / "phases.cpp", *LAUNCHERS]
SAMPLED_TARGETS = (75, 100)  # those whose register allocation is the odd one out

ROWS, COLS, DEPTHS = (1, 7, 64, 129), (8, 72, 256), (8, 64, 200)
TILES = ("small", "medium", "large")
FLAGS = (False, True)
SEEDS = range(20 if RUNS_ALL else 4)
CHOICES_PER_SIZE = 10 if RUNS_ALL else 1
A_SCALE, C_SCALE, EPSILON = 0.75, 0.03, 1e-5


@pytest.fixture(scope="session")
def program() -> Path:
    return build_host_program(SOURCES)


def excess(case: Case, operands: Operands, result: Result) -> float:
    """How far the result is from float64, over what is allowed: at most 1 where it is right."""
    assert result.status == 0, (case, result.text)
    outputs = result.outputs
    if case.op == "gemm":
        return rounded_excess(case, outputs["c"], *gemm_reference(case, operands))
    if case.op == "gemm_s8":
        value, error = gemm_s8_reference(case, operands)
        if "c_scale" in case.settings:
            return quantized_excess(outputs["c"], value, error, C_SCALE)
        return rounded_excess(case, outputs["c"], value, error)
    if case.op == "layernorm":
        value, error = layernorm_reference(case, operands)
        of_y = 0.0 if "no_y" in case.settings else rounded_excess(case, outputs["y"], value, error)
        return max(of_y, quantized_excess(outputs["y_int8"], value, error, C_SCALE))
    value = np.where(case.valid_rows()[:, None], operands["x"].astype(np.float64), 0.0)
    return quantized_excess(outputs["y_int8"], value, np.zeros_like(value), C_SCALE)


def check(program: Path, folder: Path, cases: list[Case], spoil: dict[str, Array] | None = None) -> list[Result]:
    """All cases are within their bounds. spoil: operands that replace the random ones in every case."""
    pairs = [(case, make_operands(case) | (spoil or {})) for case in cases]
    results = run_cases(program, folder, pairs)
    wrong = {
        (case.line("-"), case.bias, case.residual, case.lengths): over
        for (case, operands), result in zip(pairs, results, strict=True)
        if not (over := excess(case, operands, result)) <= 1
    }
    assert not wrong, wrong
    return results


def grid(start: int, sizes: list[tuple[int, ...]], *choices: tuple[object, ...]) -> list[tuple[object, ...]]:
    """For each size some of the combinations of other choices, taken in turn from number `start` on."""
    combinations = list(itertools.product(*choices))
    # 37 has no factor in common with the numbers of combinations: neighbours differ in every choice.
    every = [size for size in sizes for _ in range(CHOICES_PER_SIZE)]
    return [(*size, *combinations[37 * (start + i) % len(combinations)]) for i, size in enumerate(every)]


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("tile", TILES)
def test_gemm_is_right_over_the_grid(program: Path, tmp_path: Path, type: str, tile: str) -> None:
    start = 3 * TILES.index(tile) + list(TYPES).index(type)
    sizes = list(itertools.product(ROWS, COLS, DEPTHS))
    cases = [
        Case("gemm", m, n, k, type, activation, tile, bias, residual, seed=m + n)
        for m, n, k, activation, bias, residual in grid(start, sizes, ACTIVATIONS, FLAGS, FLAGS)
    ]
    check(program, tmp_path, cases)


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("tile", TILES)
def test_int8_gemm_is_right_over_the_grid(program: Path, tmp_path: Path, type: str, tile: str) -> None:
    start = 3 * TILES.index(tile) + list(TYPES).index(type)
    sizes = [*itertools.product(ROWS, COLS, DEPTHS), (7, 72, 1048), (129, 8, 1048)]
    quantized: tuple[dict[str, object], ...] = ({}, {"c_scale": C_SCALE})
    cases = [
        Case("gemm_s8", m, n, k, type, activation, tile, bias, residual, None, m + n, {"a_scale": A_SCALE} | settings)
        for m, n, k, activation, bias, residual, settings in grid(start, sizes, ACTIVATIONS, FLAGS, FLAGS, quantized)
    ]
    check(program, tmp_path, cases)


@pytest.mark.parametrize("type", TYPES)
def test_row_kernels_are_right_over_the_grid(program: Path, tmp_path: Path, type: str) -> None:
    def row_case(op: str, m: int, n: int, **others: object) -> Case:
        settings = {"epsilon": EPSILON, "y_scale": C_SCALE, **others}
        return Case(op, m, n, type=type, bias=m % 2 == 0, seed=m, settings=settings)

    sizes = list(itertools.product((1, 6, 65), (8, 256, 264, 1032)))
    cases = [row_case(op, m, n) for op in ("layernorm", "quantize") for m, n in sizes]
    check(program, tmp_path, [*cases, row_case("layernorm", 5, 72, no_y=1)])


def test_layernorm_keeps_what_a_large_mean_would_hide(program: Path, tmp_path: Path) -> None:
    """x = 60000 +- 32: float32 keeps x^2 to 256, a quarter of the variance, so E[x^2] - E[x]^2 would be noise."""
    case = Case("layernorm", 3, 768, settings={"epsilon": 0, "y_scale": C_SCALE})
    is_low = np.random.default_rng(3).random((3, 768)) < 0.5
    check(program, tmp_path, [case], {"x": np.where(is_low, 59968, 60032).astype(np.float16)})


@pytest.mark.parametrize("type", TYPES)
def test_padding_is_neither_used_nor_anything_but_zero(program: Path, tmp_path: Path, type: str) -> None:
    """Lengths of none, some and all of a sequence (and beyond both ends); whole tiles of padding, and split tiles."""
    lengths = (0, 5, 33, -2, 40, 33, 1)
    cases = [
        Case("gemm", 231, 72, 64, type, "gelu", tile, True, True, lengths, seed) for seed, tile in enumerate(TILES)
    ]
    check(program, tmp_path, cases, with_nan_padding(cases[0]))
    int8 = [
        Case("gemm_s8", 231, 72, 64, type, "silu", tile, True, True, lengths, 0, {"a_scale": A_SCALE} | settings)
        for tile in TILES
        for settings in ({}, {"c_scale": C_SCALE})
    ]
    check(program, tmp_path, int8, with_nan_padding(int8[0]))
    rows = [
        Case(op, 231, 72, type=type, lengths=lengths, settings={"epsilon": EPSILON, "y_scale": C_SCALE})
        for op in ("layernorm", "quantize")
    ]
    for case in rows:
        check(program, tmp_path, [case], with_nan_padding(case))


def with_nan_padding(case: Case) -> Operands:
    """The operands that have rows of tokens, with NaN in those of padding."""
    operands = make_operands(case)
    spoilt = {name: operands[name].copy() for name in ("a", "x", "residual") if name in operands}
    for name, array in spoilt.items():
        if array.dtype != np.int8:
            spoilt[name][~case.valid_rows()] = np.nan
    return spoilt


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("place", ["a", "b", "bias", "residual"])
def test_nan_and_infinity_propagate(program: Path, tmp_path: Path, activation: str, place: str) -> None:
    case = Case("gemm", 70, 72, 64, "half", activation, "medium", True, True)
    for value in (np.nan, np.inf):
        operands = make_operands(case)
        operands[place].reshape(-1)[67] = value
        (result,) = check(program, tmp_path, [case], {place: operands[place]})
        if np.isnan(value):
            hit = {"a": result.outputs["c"][1], "b": result.outputs["c"][:, 67], "bias": result.outputs["c"][:, 67]}
            assert np.isnan(hit.get(place, result.outputs["c"][0, 67])).all()


def test_int8_nan_becomes_zero_and_float_nan_stays(program: Path, tmp_path: Path) -> None:
    bias = np.zeros(16, np.float16)
    bias[3] = np.nan
    cases = [
        Case("gemm_s8", 4, 16, 16, settings={"a_scale": 1.0} | settings) for settings in ({"c_scale": C_SCALE}, {})
    ]
    quantized, plain = check(program, tmp_path, cases, {"bias": bias})
    assert (quantized.outputs["c"][:, 3] == 0).all()
    assert np.isnan(plain.outputs["c"][:, 3]).all()


def test_requantization_rounds_ties_to_even_and_clamps(program: Path, tmp_path: Path) -> None:
    """Row m of A is [m - 150, 0, ...], B the unit matrix and the scale of C 2: every odd sum is a tie."""
    operands = {
        "a": np.zeros((300, 16), np.int8),
        "b": np.eye(16, dtype=np.int8),
        "b_scales": np.ones(16, np.float32),
        "bias": np.repeat(np.float16(0), 16),
    }
    sums = np.arange(300) - 150
    operands["a"][:, 0], operands["a"][:, 1] = sums // 2, sums - sums // 2
    operands["b"][1, 0] = 1
    case = Case("gemm_s8", 300, 16, 16, settings={"a_scale": 1.0, "c_scale": 2.0})
    (halves,) = run_cases(program, tmp_path, [(case, operands)])
    np.testing.assert_array_equal(halves.outputs["c"][:, 0], np.rint(sums / 2))
    (quarter,) = run_cases(
        program, tmp_path, [(Case("gemm_s8", 300, 16, 16, settings=case.settings | {"c_scale": 0.5}), operands)]
    )
    np.testing.assert_array_equal(quarter.outputs["c"][:, 0], np.clip(sums * 2, -128, 127))


@pytest.mark.parametrize("op", ["gemm", "gemm_s8"])
@pytest.mark.parametrize("type", TYPES)
def test_every_tile_and_schedule_gives_the_same_bits(program: Path, tmp_path: Path, op: str, type: str) -> None:
    settings: dict[str, object] = {"a_scale": A_SCALE} if op == "gemm_s8" else {}
    cases = [
        Case(op, 150, 136, 200, type, "gelu", tile, True, True, (60, 75), seed, settings)
        for tile in TILES
        for seed in SEEDS
    ]
    assert len({result.outputs["c"].tobytes() for result in check(program, tmp_path, cases)}) == 1


def test_the_residual_may_be_the_result(program: Path, tmp_path: Path) -> None:
    case = Case("gemm", 129, 136, 64, residual=True)
    in_place = Case("gemm", 129, 136, 64, residual=True, seed=3, settings={"in_place": 1})
    apart, same = check(program, tmp_path, [case, in_place])
    assert apart.outputs["c"].tobytes() == same.outputs["c"].tobytes()


def test_phases_of_one_cooperative_kernel_equal_separate_launches(program: Path, tmp_path: Path) -> None:
    """LayerNorm(x + FFN(x)) with 3 blocks for 8 and 5 tiles: a block's tiles follow each other in its shared memory."""
    cases, results = run_phases(program, tmp_path)
    assert len({result.outputs["y"].tobytes() for result in results}) == 1, cases
    rows = {"lengths": (40, 29), "type": "half"}
    x = make_operands(Case("gemm", 80, 72, 72))["a"]
    weights = phase_weights()
    up = Case("gemm", 80, 136, 72, activation="gelu", **rows)
    down = Case("gemm", 80, 72, 136, residual=True, **rows)
    norm = Case("layernorm", 80, 72, settings={"epsilon": EPSILON}, **rows)
    lengths = {"lengths": np.asarray((40, 29), np.int32)}

    def launch(case: Case, **operands: Array) -> Result:
        return run_cases(program, tmp_path, [(case, operands | lengths)])[0]

    hidden = launch(up, a=x, b=weights["w_up"], bias=weights["b_up"]).outputs["c"]
    total = launch(down, a=hidden, b=weights["w_down"], bias=weights["b_down"], residual=x).outputs["c"]
    y = launch(norm, x=total, gamma=weights["gamma"], beta=weights["beta"]).outputs["y"]
    assert results[0].outputs["y"].tobytes() == y.tobytes()


def phase_weights() -> Operands:
    random = np.random.default_rng(5)
    shapes = {"w_up": (72, 136), "b_up": (136,), "w_down": (136, 72), "b_down": (72,), "gamma": (72,), "beta": (72,)}
    return {name: (random.normal(size=shape) / 8).astype(np.float16) for name, shape in shapes.items()}


def run_phases(program: Path, folder: Path) -> tuple[list[Case], list[Result]]:
    settings = {"h": 72, "f": 136, "num_blocks": 3, "epsilon": EPSILON}
    cases = [Case("phases", 80, 72, lengths=(40, 29), seed=seed, settings=settings) for seed in SEEDS]
    x = make_operands(Case("gemm", 80, 72, 72))["a"]
    operands = phase_weights() | {"x": x, "lengths": np.asarray((40, 29), np.int32)}
    results = run_cases(program, folder, [(case, operands) for case in cases])
    assert all(result.status == 0 for result in results), results
    return cases, results


SANITIZED = [
    Case("gemm", 33, 72, 200, "half", "gelu", "small", True, True, (33, 0, 20), 1),
    Case("gemm", 7, 8, 8, "bf16", "silu", "medium", False, False, None, 2),
    Case("gemm", 129, 136, 64, "half", "relu", "large", True, True, None, 3),
    Case("gemm_s8", 33, 72, 200, "half", "gelu_tanh", "small", True, True, (7, 11, 0), 1, {"a_scale": A_SCALE}),
    Case("gemm_s8", 65, 8, 8, "bf16", "none", "medium", True, False, None, 2, {"a_scale": 1, "c_scale": C_SCALE}),
    Case("gemm_s8", 129, 136, 64, "half", "none", "large", True, True, None, 3, {"a_scale": A_SCALE}),
    Case("layernorm", 9, 264, lengths=(3, 0, 1), seed=1, settings={"epsilon": EPSILON, "y_scale": C_SCALE}),
    Case("quantize", 9, 264, lengths=(3, 0, 1), seed=1, settings={"y_scale": C_SCALE}),
]


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_sanitizers_find_nothing(tmp_path: Path, sanitizer: str) -> None:
    """Rows of padding are poisoned for AddressSanitizer: a read of one would be an error."""
    program = build_host_program(SOURCES, sanitizer=sanitizer)
    check(program, tmp_path, SANITIZED)
    run_phases(program, tmp_path)


GEMM = Case("gemm", 64, 64, 64, residual=True, lengths=(32, 32))
GEMM_S8 = Case("gemm_s8", 64, 64, 64, residual=True, settings={"a_scale": 1.0, "c_scale": 1.0})
NORM = Case("layernorm", 64, 64, settings={"epsilon": EPSILON, "y_scale": 1.0})
QUANTIZE = Case("quantize", 64, 64, settings={"y_scale": 1.0})
REFUSALS: list[tuple[Case, dict[str, object], str]] = [
    *[(GEMM, {"null": name}, "is null") for name in ("a", "b", "c")],
    *[(GEMM, {"misaligned": name}, "16 bytes") for name in ("a", "b", "c", "bias", "residual", "lengths")],
    *[(GEMM, {name: size}, "multiple of 8") for name in ("n", "k") for size in (0, -8, 12)],
    (GEMM, {"m": -1}, "negative"),
    *[(GEMM, {name: 2**30 + 8}, "over 2^30") for name in ("n", "k")],
    (GEMM, {"m": 2**30 + 1}, "over 2^30"),
    (GEMM, {"m": 2**30, "n": 2**30, "null": "lengths"}, "over 2^31 tiles"),
    *[(GEMM, {"s": s}, "sequence length") for s in (0, -1, 48)],
    *[(GEMM, {name: 9}, "unknown") for name in ("type", "tile", "activation")],
    *[(GEMM, {name: -1}, "unknown") for name in ("type", "tile", "activation")],
    (GEMM, {"num_multiprocessors": 0}, "multiprocessors"),
    *[(case, {"type": "bf16", "sm": 75}, "sm_80") for case in (GEMM, GEMM_S8, NORM, QUANTIZE)],
    *[(GEMM_S8, {"null": name}, "is null") for name in ("a", "b", "b_scales")],
    *[(GEMM_S8, {"misaligned": name}, "16 bytes") for name in ("a", "b", "b_scales", "c_int8")],
    *[(GEMM_S8, {name: scale}, "scale") for name in ("a_scale", "c_scale") for scale in (0, -1, "inf", "nan")],
    *[(NORM, {"null": name}, "is null") for name in ("x", "gamma")],
    (NORM, {"misaligned": "y"}, "16 bytes"),
    (NORM, {"epsilon": -1}, "epsilon"),
    (NORM, {"y_scale": 0}, "scale"),
    (NORM, {"n": 12}, "multiple of 8"),
    (QUANTIZE, {"null": "x"}, "is null"),
    (QUANTIZE, {"y_scale": "nan"}, "scale"),
]


def test_bad_parameters_are_refused_with_the_reason(program: Path, tmp_path: Path) -> None:
    lines = []
    for number, (case, bad, _) in enumerate(REFUSALS):
        write_operands(tmp_path, str(number), make_operands(case))
        lines.append(case.line(str(number)) + "".join(f" {key}={value}" for key, value in bad.items()))
    finished = run_program(program, tmp_path, lines)
    assert finished.returncode == 0, finished.stderr
    answers = finished.stdout.splitlines()
    for (case, bad, reason), answer in zip(REFUSALS, answers, strict=True):
        _, status, text = answer.split(" ", 2)
        assert status != "0", (case.op, bad)
        assert reason in text, (case.op, bad, text)


def test_no_rows_is_no_launch(program: Path, tmp_path: Path) -> None:
    """S = 0: nothing to do is no error, and the pointers may be null then."""
    cases = [
        Case("gemm", 0, 64, 64),
        Case("gemm_s8", 0, 64, 64, settings={"a_scale": 1.0}),
        Case("layernorm", 0, 64, settings={"epsilon": EPSILON}),
        Case("quantize", 0, 64, settings={"y_scale": 1.0}),
    ]
    results = run_cases(program, tmp_path, [(case, make_operands(case)) for case in cases])
    assert [result.status for result in results] == [0] * len(cases)


def test_ldmatrix_has_no_bank_conflicts(program: Path, tmp_path: Path) -> None:
    finished = run_program(program, tmp_path, [Case("count_conflicts", 0, 0).line("0")])
    assert finished.stdout.split(" ")[:2] == ["0", "0"]


def test_the_largest_tile_that_fills_the_device_is_chosen(program: Path, tmp_path: Path) -> None:
    # 108 multiprocessors: 12 x 9 = 108 large tiles; 12 x 9 = 108 medium ones; then fewer.
    sizes = {(1536, 1152): 3, (1536, 1024): 2, (768, 576): 2, (768, 512): 1, (1, 8): 1}
    lines = [
        Case("choose_tile", m, n, settings={"num_multiprocessors": 108}).line(str(i)) for i, (m, n) in enumerate(sizes)
    ]
    finished = run_program(program, tmp_path, lines)
    assert [int(line.split(" ")[1]) for line in finished.stdout.splitlines()] == list(sizes.values())


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("source", LAUNCHERS, ids=lambda path: path.name)
@pytest.mark.parametrize("target", ARCHITECTURES if RUNS_ALL else SAMPLED_TARGETS)
def test_kernels_compile_without_spills(tmp_path: Path, source: Path, target: int) -> None:
    command = ["nvcc", "-std=c++17", f"-arch=sm_{target}", "-cubin", "-Xptxas", "-v", "-Werror", "all-warnings"]
    compiled = subprocess.run(
        [*command, str(source), "-o", str(tmp_path / "kernels.cubin")], capture_output=True, text=True, check=False
    )
    assert compiled.returncode == 0, compiled.stderr
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", compiled.stderr)
    assert len(spills) == {"gemm.cu": 6, "gemm_s8.cu": 6, "gemm_rows.cu": 4}[source.name]
    assert set(spills) == {("0", "0")}, compiled.stderr
