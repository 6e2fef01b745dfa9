"""The run of tests/device/run_on_gpu.py: build, check, look for races, then measure - within a time, saved as it goes.

Every part takes a share of the time that is left, so that a slow one does not cost the later ones all of it.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from trtforge.benchmark.case import DTYPES, MASKS, BlockCase, Dtype, Grid
from trtforge.benchmark.implementations import MODES
from trtforge.benchmark.measure import PLUGIN_NAMES, Bench, measure_case
from trtforge.benchmark.results import (
    PLUGIN,
    CaseResult,
    ResultFile,
    RunResult,
    case_line,
    read_lines,
    results_from_lines,
)
from trtforge.benchmark.session import Budget, run_session
from trtforge.benchmark.torch_peers import TORCH_PEERS
from trtforge.ops.attention_ffn import ACTIVATIONS, HEAD_SIZES, ORDERS
from trtforge.plugins.toolkit import find_beside, find_toolkit
from trtforge.processes import run_with_children

NAMES = (*PLUGIN_NAMES, *TORCH_PEERS)
CORRECTNESS_SHARE = 0.2
SANITIZER_SHARE = 0.15  # each
SANITIZERS = ("racecheck", "memcheck")
SANITIZER_STATUS = 86  # of a run in which it found something
_MIN_SANITIZER_S = 20
_FIRST_TELLING = 9
_TURING = 75
_LOG_LINES = 30

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class SanitizerResult:
    """What compute-sanitizer said; `status` is "passed", "failed", "late" or "missing"."""

    tool: str
    status: str
    log: str

    def line(self) -> dict[str, Any]:
        """For a result file."""
        return {"kind": "sanitizer", **dataclasses.asdict(self)}


def usable(cases: Iterable[BlockCase], compute_capability: int) -> tuple[BlockCase, ...]:
    """The cases that a card computes: Turing has no bf16."""
    return tuple(case for case in cases if case.dtype != "bf16" or compute_capability > _TURING)


def correctness_cases() -> tuple[BlockCase, ...]:
    """Every head size with every type and mask, every activation in both orders, and sizes with tails of all kinds."""
    cases = [
        BlockCase(2, 133, 3 * size, 3, 304, dtype, mask, "pre" if mask == "causal" else "post")
        for dtype, size, mask in itertools.product(DTYPES, HEAD_SIZES, MASKS)
        if dtype != "int8" or 3 * size % 16 == 0
    ]
    cases += [
        BlockCase(3, 70, 256, 4, 1024, dtype, "none", order, activation)
        for dtype, order, activation in itertools.product(DTYPES, ORDERS, ACTIVATIONS)
    ]
    for dtype in DTYPES:
        cases += [BlockCase(1, length, 384, 12, 1536, dtype) for length in (1, 15, 16, 17, 63, 64, 65, 127, 513)]
        cases += [
            BlockCase(32, 64, 768, 12, 3072, dtype, "lengths"),
            BlockCase(1, 2048, 1024, 16, 4096, dtype, "causal"),
        ]
    return tuple(dict.fromkeys(cases))


def sanitizer_cases() -> tuple[BlockCase, ...]:
    """Few and small: every instruction is watched."""
    return (
        BlockCase(1, 70, 128, 2, 144, "fp16", "lengths"),
        BlockCase(2, 33, 96, 3, 112, "int8", "causal", "pre", "silu"),
        BlockCase(1, 65, 160, 2, 80, "fp16", "bias"),
    )


def measured_cases() -> tuple[BlockCase, ...]:
    """The grid of the benchmark, the most telling first; types and masks between its first and its other cases."""
    grid = Grid().cases()
    dtypes: tuple[Dtype, ...] = ("bf16", "int8")
    others = Grid((8, 1), (512, 128), (768,), dtypes=dtypes).cases()
    masked = Grid((8,), (512,), (768,), masks=("causal", "lengths", "bias")).cases()
    return (*grid[:_FIRST_TELLING], *masked, *others, *grid[_FIRST_TELLING:])


def check_correctness(bench: Bench, cases: Sequence[BlockCase], file: ResultFile, budget: Budget, say: Say) -> int:
    """Compare every case with the reference and save it; returns how many were wrong."""
    done = {BlockCase(**line["case"]) for line in file.lines if line.get("kind") == "correctness"}
    wrong = sum(bool(line["is_wrong"]) for line in file.lines if line.get("kind") == "correctness")
    until = budget.remaining_s * (1 - CORRECTNESS_SHARE)
    checker = dataclasses.replace(bench, timer=None)
    left = [case for case in cases if case not in done]
    for place, case in enumerate(left):
        if budget.remaining_s < until:
            say(f"correctness: {len(left) - place} cases left out for want of time")
            left = left[:place]
            break
        result = measure_case(checker, case, PLUGIN_NAMES)
        found = RunResult({}, (result,)).wrong
        file.write({**case_line(result), "kind": "correctness", "is_wrong": bool(found)})
        wrong += bool(found)
        for text in found:
            say(f"WRONG {text}")
    say(f"correctness: {len(done) + len(left)} cases, {wrong} wrong")
    return wrong


def run_sanitizers(library: Path, cases: Sequence[BlockCase], file: ResultFile, budget: Budget, say: Say) -> int:
    """Run small cases under each tool of compute-sanitizer; returns how many tools found something."""
    done = {line["tool"]: line["status"] for line in file.lines if line.get("kind") == "sanitizer"}
    for tool in SANITIZERS:
        if done.get(tool) in ("passed", "failed"):
            continue
        result = _sanitize(tool, library, cases, max(_MIN_SANITIZER_S, SANITIZER_SHARE * budget.remaining_s))
        file.write(result.line())
        done[tool] = result.status
        say(f"{tool}: {result.status}")
    return sum(status == "failed" for status in done.values())


def measure_all(
    bench: Bench, cases: Sequence[BlockCase], file: ResultFile, budget: Budget, say: Say
) -> tuple[CaseResult, ...]:
    """Measure what time allows; returns all results of the file."""
    _, left_out = run_session(
        cases,
        NAMES,
        lambda step: measure_case(bench, step.case, step.names),
        budget,
        file,
        lambda done, total, step: say(f"[{done + 1} of {total}] {step.case.key}: {', '.join(step.names)}"),
    )
    if left_out:
        say(f"left out for want of time: {len(left_out)} steps, from {left_out[0].case.key} on")
    return results_from_lines(read_lines(file.path))


def summary_lines(results: Sequence[CaseResult]) -> list[str]:
    """One line a case and mode: median times, and how many times faster the plugin is."""
    lines = []
    for result in results:
        for mode in MODES:
            own = result.find(PLUGIN, mode)
            if own is None or own.summary is None:
                continue
            peers = (f"{name} {ratio:.2f} x" for name in TORCH_PEERS if (ratio := result.speedup(name, mode)))
            lines.append(f"{result.case.key} {mode}: {own.summary.median_us:.1f} us; faster than {', '.join(peers)}")
    return lines


def find_sanitizer() -> Path | None:
    """compute-sanitizer on PATH or in nvcc's toolkit.

    Raises:
        UnavailableError: it is not on PATH, and there is no nvcc.
    """
    found = shutil.which("compute-sanitizer")
    return Path(found) if found else find_beside(find_toolkit().nvcc, "bin/compute-sanitizer")


def _sanitize(tool: str, library: Path, cases: Sequence[BlockCase], seconds: float) -> SanitizerResult:
    program = find_sanitizer()
    if program is None:
        return SanitizerResult(tool, "missing", "compute-sanitizer is not on PATH nor beside nvcc")
    command = [str(program), "--tool", tool, "--error-exitcode", str(SANITIZER_STATUS)]
    command += [sys.executable, "-m", "trtforge.benchmark.sanitized", str(library), *(case.key for case in cases)]
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    with tempfile.TemporaryFile() as output:
        try:
            status = run_with_children(command, environment, output, seconds)
        except subprocess.TimeoutExpired:
            return SanitizerResult(tool, "late", f"it was ended after {seconds:.0f} s")
        output.seek(0)
        lines = output.read().decode("utf-8", "replace").splitlines()[-_LOG_LINES:]
    return SanitizerResult(tool, "passed" if status == 0 else "failed", "\n".join(lines))
