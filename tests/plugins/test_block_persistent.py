"""The persistent kernel of a block: its grid, its barriers, the rule that chooses it, and what it compiles to.

TRTFORGE_ALL_KERNEL_TESTS=1 compiles for every target; without it, a sample.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from block_cases import AUTO, LAUNCHERS, LAUNCHES, PERSISTENT, ROOT, SOURCES, Case, check, prepare, run
from block_reference import Sizes
from case_count import RUNS_ALL
from emulation_build import SANITIZER_STATUS, build_host_program, sanitizer_environment

from trtforge.ops.attention_ffn import Variant
from trtforge.plugins.compile import ARCHITECTURES

LAUNCH = ROOT / "plugins" / "csrc" / "launch"
NUM_PHASES = {"float": 7, "int8": 8}  # pre-norm, and post-norm with x quantized
KERNELS = ("half", "bf16", "half_s8", "bf16_s8")
COMPILED = [(kernels, target) for kernels in KERNELS for target in ARCHITECTURES] if RUNS_ALL else [("half_s8", 75)]


@pytest.fixture(scope="session")
def program() -> Path:
    return build_host_program(SOURCES)


def test_size_of_the_grid_changes_no_bit(program: Path, tmp_path: Path) -> None:
    """One block takes every tile; then more blocks than most phases have tiles."""
    variant, sizes = Variant("post", "gelu", is_causal=True, has_lengths=True), Sizes(2, 70, 128, 2, 96)
    grids = [(1, 1), (1, 2), (3, 1), (8, 2), (200, 4)]
    cases = [
        Case(variant, sizes, strategy=PERSISTENT, settings=(("multiprocessors", count), ("resident", resident)))
        for count, resident in grids
    ]
    results = run(program, tmp_path, [prepare(Case(variant, sizes)), *map(prepare, cases)])
    assert {result.status for result in results} == {0}
    assert len({result.y.tobytes() for result in results}) == 1


# (batch, sequence, width, inner), multiprocessors -> what kAuto is. At H 768, F 3072 a large tile has 128 rows and 24
# tiles across: 108 multiprocessors are full from the fifth row of tiles on.
CHOICES = {
    ((1, 128, 768, 3072), 108): PERSISTENT,
    ((1, 512, 768, 3072), 108): PERSISTENT,
    ((1, 513, 768, 3072), 108): LAUNCHES,
    ((4, 128, 768, 3072), 108): PERSISTENT,
    ((5, 128, 768, 3072), 108): LAUNCHES,
    ((1, 513, 768, 3072), 132): PERSISTENT,
    ((32, 512, 768, 3072), 132): LAUNCHES,
    ((8, 128, 384, 512), 108): PERSISTENT,  # 3 H is wider than F: 9 tiles across, 8 down
    ((12, 128, 384, 512), 108): LAUNCHES,
}


def test_small_products_choose_the_persistent_kernel(program: Path, tmp_path: Path) -> None:
    variant = Variant("post", "gelu")
    _, operands, _ = prepare(Case(variant))
    blocks = []
    for ((batch, sequence, width, inner), multiprocessors), _ in CHOICES.items():
        words = {"batch": batch, "sequence": sequence, "width": width, "inner": inner, "num_heads": width // 64}
        settings = (*words.items(), ("multiprocessors", multiprocessors), ("null", "x"))
        blocks.append((Case(variant, strategy=AUTO, settings=settings), operands, {}))
    results = run(program, tmp_path, blocks)
    assert [result.strategy for result in results] == list(CHOICES.values())


@pytest.mark.parametrize("multiprocessors", [2, 200])
@pytest.mark.parametrize("is_int8", [False, True])
def test_auto_computes_the_same_in_a_workspace_of_the_same_size(
    program: Path, tmp_path: Path, multiprocessors: int, is_int8: bool
) -> None:
    case = Case(Variant("pre", "relu", is_int8=is_int8), settings=(("multiprocessors", multiprocessors),))
    cases = [case.with_strategy(strategy) for strategy in (AUTO, LAUNCHES, PERSISTENT)]
    auto, launches, persistent = run(program, tmp_path, [prepare(case) for case in cases])
    assert auto.strategy == (LAUNCHES if multiprocessors == 2 else PERSISTENT)
    assert {result.status for result in (auto, launches, persistent)} == {0}
    assert auto.y.tobytes() == launches.y.tobytes() == persistent.y.tobytes()
    assert auto.workspace_bytes == launches.workspace_bytes == persistent.workspace_bytes


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_sanitizers_find_nothing(tmp_path: Path, sanitizer: str) -> None:
    sizes = Sizes(2, 21, 64, 2, 48, (2, 1, 1, 21))
    cases = [
        Case(Variant("pre", "gelu", is_causal=True, has_lengths=True), sizes, "bf16", settings=(("seed", 1),)),
        Case(Variant("post", "silu", is_int8=True, has_lengths=True), sizes, settings=(("seed", 2),)),
    ]
    check(build_host_program(SOURCES, sanitizer=sanitizer), tmp_path, cases)


def run_without_sync(kind: str, phase: int, sanitizer: str | None = None) -> subprocess.CompletedProcess[str]:
    source = ROOT / "tests" / "csrc" / "block" / "skipped_sync.cpp"
    program = build_host_program([source, *LAUNCHERS], sanitizer=sanitizer)
    command = [program, kind, str(phase)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env=sanitizer_environment()
    )


@pytest.mark.parametrize("sanitizer", [None, "thread"])
@pytest.mark.parametrize("kind", NUM_PHASES)
def test_with_every_barrier_the_planted_kernel_is_right(kind: str, sanitizer: str | None) -> None:
    result = run_without_sync(kind, 0, sanitizer)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{NUM_PHASES[kind]} phases, same\n", "")


BARRIERS = [(kind, phase) for kind, count in NUM_PHASES.items() for phase in range(1, count)]


@pytest.mark.parametrize(("kind", "phase"), BARRIERS)
def test_a_missing_barrier_before_any_phase_gives_wrong_data(kind: str, phase: int) -> None:
    result = run_without_sync(kind, phase)
    assert (result.returncode, result.stdout) == (0, f"{NUM_PHASES[kind]} phases, different\n")


@pytest.mark.parametrize(("kind", "phase"), BARRIERS if RUNS_ALL else [("float", 2), ("int8", 4)])
def test_a_missing_barrier_before_any_phase_is_a_race(kind: str, phase: int) -> None:
    result = run_without_sync(kind, phase, "thread")
    assert result.returncode == SANITIZER_STATUS["thread"]
    assert "ThreadSanitizer: data race" in result.stderr


@dataclasses.dataclass(frozen=True)
class Compiled:
    kernels: str
    target: int
    report: str  # what ptxas says
    ptx: str


@pytest.fixture(scope="module", params=COMPILED, ids=lambda param: f"{param[0]}-sm_{param[1]}")
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    kernels, target = request.param
    folder = tmp_path_factory.mktemp("block")
    options = ["-std=c++17", "-cubin", "-Xptxas", "-v", "-Werror", "all-warnings", "--keep", "--keep-dir", folder]
    source = LAUNCH / f"block_persistent_{kernels}.cu"
    command = ["nvcc", f"-arch=sm_{target}", *options, source, "-o", folder / "block.cubin"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    (ptx,) = folder.glob("*.ptx")
    return Compiled(kernels, target, done.stderr, ptx.read_text())


def test_no_kernel_spills_registers_or_copies_its_plan_to_the_stack(compiled: Compiled) -> None:
    found = re.findall(
        r"block_kernel\S+\n +(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads",
        compiled.report,
    )
    assert found == [("0", "0", "0")] * 5  # one kernel a head size


def test_two_blocks_are_resident_wherever_shared_memory_admits_them(compiled: Compiled) -> None:
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", compiled.report)]
    assert len(registers) == 5
    assert max(registers) * 128 * 2 <= 65536  # threads of a block, blocks, registers of a multiprocessor


def test_products_are_of_tensor_cores(compiled: Compiled) -> None:
    is_turing = compiled.target == 75
    if "bf16" not in compiled.kernels or not is_turing:
        type = "bf16" if "bf16" in compiled.kernels else "f16"
        assert f"mma.sync.aligned.m16n8k{8 if is_turing else 16}.row.col.f32.{type}.{type}.f32" in compiled.ptx
    shape = "m8n8k16" if is_turing else "m16n8k32"
    assert (f"mma.sync.aligned.{shape}.row.col.s32.s8.s8.s32" in compiled.ptx) == compiled.kernels.endswith("_s8")
    assert ("cp.async.cg.shared.global" in compiled.ptx) == (not is_turing)


def test_no_load_may_see_what_was_there_before_the_launch(compiled: Compiled) -> None:
    # ld.global.nc reads a cache that what earlier phases wrote does not reach.
    assert "ld.global" in compiled.ptx
    assert "ld.global.nc" not in compiled.ptx
