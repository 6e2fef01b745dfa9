"""The emulator of plugins/csrc/emulation: it runs right kernels right, and stops at each kind of mistake."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from emulation_build import (
    ERROR_STATUS,
    KERNELS,
    REPOSITORY,
    SANITIZER_STATUS,
    build_host_program,
    sanitizer_environment,
    source_fingerprints,
)

SOURCES = REPOSITORY / "tests" / "csrc" / "emulation"
WRONG_DATA = 1
MODES = [(None, 0), (None, 1), (None, 2), ("thread", 0), ("thread", 1), ("address", 0), ("address", 1)]

ERRORS = {
    "divergent_barrier": "divergent barrier: thread 32 is at __syncthreads, thread 0 at __syncthreads, ",
    "exit_before_barrier": "divergent barrier: thread 0 waits at __syncthreads, but thread 3 has left the kernel",
    "different_collectives": "lanes at different collectives: lane 16 is at __shfl_xor_sync (mask ffffffff), lane 0 ",
    "barrier_against_collective": "lanes at different collectives: lane 16 is at __syncthreads (mask ffffffff), lane 0",
    "exited_lane_in_mask": "__syncwarp with mask ffffffff names lane 0, which has left the kernel",
    "exit_while_awaited": "__syncwarp with mask ffffffff names lane 31, which has left the kernel",
    "lane_outside_its_mask": "lane 31 calls __syncwarp with mask 7fffffff, which lacks it",
    "shuffle_from_outside": "a shuffle with mask 0000ffff reads lane 20, which is not in it",
    "deadlock_of_masks": "deadlock: no thread can run, and this one waits at __syncwarp",
    "deadlock_of_blocks": "deadlock: no thread can run, and this one waits at grid_sync",
    "copy_in_flight_at_exit": "the thread left the kernel with this copy in flight (block 0,0,0, thread 0)",
    "copy_never_committed": "the thread left the kernel with this copy in flight (block 0,0,0, thread 0)",
    "misaligned_copy_to_shared": "is not a multiple of 16",
    "misaligned_copy_from_global": "is not a multiple of 16",
    "copy_outside_shared": "cp_async16: address is outside the block's shared memory, at byte 256 of 256",
    "misaligned_ldmatrix": "is not a multiple of 16",
    "ldmatrix_outside_shared": "ldmatrix_x2_trans: address is outside the block's shared memory, at byte",
    "too_little_shared": "the kernel takes 512 bytes of shared memory; the launch gave 256",
    "grid_sync_in_plain_launch": "grid_sync in a launch that is not cooperative",
    "grid_barrier_not_zero": "grid_sync on a barrier that was not zero: arrived is 1",
    "shared_above_limit": "233472 bytes of dynamic shared memory; sm_86 has 101376",
    "partial_warp": "a block of 63 x 1 x 1 threads: blocks are one-dimensional, a multiple of 32",
}
RACES = [
    "missing_syncthreads",
    "missing_syncthreads_before_reuse",
    "missing_syncthreads_before_zero_fill",
    "missing_syncwarp",
    "missing_syncwarp_after_copy",
    "missing_grid_sync",
    "missing_threadfence",
    "blocks_write_one_place",
]
WRONG_IN_SEQUENCE = [
    "missing_syncthreads_before_reuse",
    "missing_copy_wait",
    "missing_syncwarp_after_copy",
    "unwritten_shared",
]
UNDEFINED = {
    "index_past_array": "index 32 out of bounds for type 'float [32]'",
    "misaligned_vector_load": "reference binding to misaligned address",
}
OUT_OF_BOUNDS = ["out_of_bounds_read", "out_of_bounds_copy", "out_of_bounds_shared_write"]


def run_program(
    program: Path, *arguments: str | int, seed: int | str = 0, target: int | None = None
) -> subprocess.CompletedProcess[str]:
    environment = {**sanitizer_environment(), "TRTFORGE_EMULATION_SEED": str(seed)}
    if target is not None:
        environment["TRTFORGE_EMULATION_TARGET"] = str(target)
    command = [str(program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)


def run_planted(
    name: str, sanitizer: str | None = None, seed: int = 0, target: int | None = None
) -> subprocess.CompletedProcess[str]:
    program = build_host_program([SOURCES / "planted.cpp"], sanitizer=sanitizer)
    return run_program(program, name, seed=seed, target=target)


def marked_place(name: str) -> str:
    """FILE:LINE of the mark `HERE name` in the planted kernels."""
    places = [
        f"{path.name}:{number}"
        for path in sorted(SOURCES.glob("planted*"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.endswith(f"// HERE {name}")
    ]
    assert len(places) == 1, name
    return places[0]


@pytest.mark.parametrize(("sanitizer", "seed"), MODES)
def test_correct_twins_are_silent(sanitizer: str | None, seed: int) -> None:
    result = run_planted("twins", sanitizer, seed)
    assert (result.returncode, result.stderr) == (0, "")
    names = set(re.findall(r"^(\w+): right$", result.stdout, re.MULTILINE))
    assert names >= {*RACES, *WRONG_IN_SEQUENCE, *OUT_OF_BOUNDS, *UNDEFINED, *ERRORS} - {
        "shared_above_limit",
        "partial_warp",
    }


@pytest.mark.parametrize("name", ERRORS)
def test_mistake_is_an_error_with_its_place(name: str) -> None:
    result = run_planted(name)
    assert result.returncode == ERROR_STATUS
    assert f"{marked_place(name)}: emulation error: " in result.stderr
    assert ERRORS[name] in result.stderr


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
@pytest.mark.parametrize("name", ["divergent_barrier", "deadlock_of_masks", "copy_in_flight_at_exit"])
def test_mistake_is_an_error_under_sanitizers(name: str, sanitizer: str) -> None:
    result = run_planted(name, sanitizer)
    assert result.returncode == ERROR_STATUS
    assert f"{marked_place(name)}: emulation error: " in result.stderr


@pytest.mark.parametrize("name", WRONG_IN_SEQUENCE)
def test_nan_shows_what_was_not_there_yet(name: str) -> None:
    result = run_planted(name)
    assert (result.returncode, result.stdout) == (WRONG_DATA, f"{name}: wrong data\n")


@pytest.mark.parametrize("name", ["missing_syncthreads", "missing_grid_sync"])
def test_random_order_shows_what_sequence_hides(name: str) -> None:
    assert run_planted(name).returncode == 0
    found = [run_planted(name, seed=seed).returncode for seed in range(1, 21)]
    assert set(found) == {0, WRONG_DATA}
    assert [run_planted(name, seed=seed).returncode for seed in range(1, 6)] == found[:5]  # a seed is one order


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", RACES)
def test_thread_sanitizer_finds_a_missing_barrier_in_any_order(name: str, seed: int) -> None:
    result = run_planted(name, "thread", seed)
    assert result.returncode == SANITIZER_STATUS["thread"]
    assert "ThreadSanitizer: data race" in result.stderr
    assert f"trtforge::{name}<true>" in result.stderr


@pytest.mark.parametrize("name", OUT_OF_BOUNDS)
def test_address_sanitizer_finds_an_element_too_far(name: str) -> None:
    result = run_planted(name, "address")
    assert result.returncode == SANITIZER_STATUS["address"]
    assert "heap-buffer-overflow" in result.stderr
    assert marked_place(name) in result.stderr


@pytest.mark.parametrize("name", UNDEFINED)
def test_undefined_behaviour_is_found(name: str) -> None:
    result = run_planted(name, "address")
    assert result.returncode == SANITIZER_STATUS["address"]
    assert re.search(
        rf"{re.escape(marked_place(name))}:\d+: runtime error: {re.escape(UNDEFINED[name])}", result.stderr
    )


def test_write_behind_shared_memory_is_found_without_a_sanitizer() -> None:
    result = run_planted("out_of_bounds_shared_write")
    assert result.returncode == ERROR_STATUS
    assert "block 0,0,0 wrote behind its 256 bytes of shared memory" in result.stderr


@pytest.mark.parametrize(("target", "limit"), [(75, 65536), (80, 166912), (90, 232448), (120, 101376)])
def test_shared_memory_limit_is_the_targets(target: int, limit: int) -> None:
    assert (
        f"dynamic shared memory; sm_{target} has {limit}\n" in run_planted("shared_above_limit", target=target).stderr
    )


def test_unknown_target_is_refused() -> None:
    result = run_planted("shared_above_limit", target=77)
    assert (result.returncode, "unknown target sm_77" in result.stderr) == (ERROR_STATUS, True)


def test_seed_that_is_no_number_is_refused() -> None:
    result = run_program(build_host_program([SOURCES / "planted.cpp"]), "twins", seed="two")
    assert result.returncode == ERROR_STATUS
    assert 'emulation error: TRTFORGE_EMULATION_SEED is "two", not a number' in result.stderr


def test_bf16_mma_on_sm_75_is_an_error() -> None:
    result = run_program(build_host_program([SOURCES / "gemm.cpp"]), 8, 8, 8, target=75)
    assert result.returncode == ERROR_STATUS
    assert re.search(r"gemm\.cuh:\d+: emulation error: sm_75 has no bf16 mma", result.stderr)


def test_empty_grid_is_cudas_own_error() -> None:
    assert run_planted("empty_grid").returncode == 9  # cudaErrorInvalidConfiguration


def test_fragments_are_as_cutlass_describes_them() -> None:
    result = run_program(build_host_program([SOURCES / "layouts.cpp"]))
    assert result.stdout.splitlines() == [
        "mma f16 0",
        "mma bf16 0",
        "mma s8 0",
        "parts of mma on sm_75 0",
        "ldmatrix x4 0",
        "ldmatrix x4 trans 0",
        "ldmatrix x2 0",
        "ldmatrix x2 trans 0",
    ]


@pytest.mark.parametrize(("sanitizer", "seed"), MODES)
def test_native_functions_do_what_cudas_guide_says(sanitizer: str | None, seed: int) -> None:
    result = run_program(build_host_program([SOURCES / "native.cpp"], sanitizer=sanitizer), seed=seed)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize(("sanitizer", "seed"), MODES)
def test_gemm_is_within_its_rounding(sanitizer: str | None, seed: int) -> None:
    program = build_host_program([SOURCES / "gemm.cpp"], sanitizer=sanitizer)
    for m, n, k in [(64, 64, 32), (70, 72, 104), (1, 8, 8)] if sanitizer is None else [(8, 72, 40)]:
        result = run_program(program, m, n, k, seed=seed)
        assert (result.returncode, result.stderr) == (0, ""), result.stdout


def test_ucontext_fibers_do_the_same() -> None:
    for name, arguments in (("planted", ["twins"]), ("gemm", [70, 72, 40])):
        program = build_host_program([SOURCES / f"{name}.cpp"], defines=["TRTFORGE_UCONTEXT"])
        assert run_program(program, *arguments, seed=1).returncode == 0


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("target", [75, 80, 90, 120])
def test_emulated_kernel_compiles_for_devices(target: int, tmp_path: Path) -> None:
    command = [
        "nvcc",
        "-std=c++17",
        "-Wno-deprecated-gpu-targets",
        f"-arch=sm_{target}",
        "-Xptxas",
        "-v",
        f"-I{KERNELS}",
    ]
    command += ["-c", str(SOURCES / "gemm.cu"), "-o", str(tmp_path / "gemm.o")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "warning" not in result.stderr
    assert re.findall(r"(\d+) bytes spill stores", result.stderr) == ["0", "0"]


def test_changed_header_gives_another_program(tmp_path: Path) -> None:
    source, header = tmp_path / "a b.cpp", tmp_path / "a.h"
    source.write_text('#include "a.h"\n')
    header.write_text("int x;\n")
    before = source_fingerprints([source], [])
    assert source_fingerprints([source], []) == before
    assert source_fingerprints([source], ["-O1"]) != before
    header.write_text("int y;\n")
    assert source_fingerprints([source], []) != before


def test_compiler_error_is_shown(tmp_path: Path) -> None:
    source = tmp_path / "wrong.cpp"
    source.write_text("int main() { return missing; }\n")
    with pytest.raises(AssertionError, match=r"wrong\.cpp:1.*missing"):
        build_host_program([source])
