"""Check and measure the plugin's kernels on a GPU machine that may be bare and offline.

    python tests/device/run_on_gpu.py benchmarks/results/h100.jsonl --minutes 8

Needs nvcc, a C++ compiler, numpy, cupy and torch; nothing is installed, and it runs from a checkout. In this order: the
kernels are built for the card, compared with float64 over a grid, run under compute-sanitizer where that is there, and
timed against PyTorch, the most telling cases first. Every result is a line of the file as soon as it is known. The
same command continues a run that was interrupted. `trtforge bench report FILE --html PAGE` makes a page of it, on any
machine.

Exit 0: all that was checked is right; what there was no time or no tool for is said. 1: a wrong result, or a race or a
bad access was found. 2: not possible here. 4: stopped within a step by the time limit; the same command goes on.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from trtforge.benchmark.compilers import build_for_device
from trtforge.benchmark.device import Device, card_state
from trtforge.benchmark.gpu_check import (
    check_correctness,
    correctness_cases,
    measure_all,
    measured_cases,
    run_sanitizers,
    sanitizer_cases,
    summary_lines,
    usable,
)
from trtforge.benchmark.kernels import BlockKernels
from trtforge.benchmark.measure import Bench
from trtforge.benchmark.results import ResultFile, RunResult
from trtforge.benchmark.session import Budget
from trtforge.benchmark.timing import ColdTimer
from trtforge.errors import TrtForgeError

# Of the time, kept back for the summary and for a step that takes longer than those before it.
RESERVE_S = 10
SECONDS_PER_MEASUREMENT = 0.1


class OutOfTimeError(BaseException):
    """The last resort: a step took far longer than those before it. Not an Exception, which would be a result."""


def stop(*_: object) -> None:
    raise OutOfTimeError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check and measure the plugin's kernels on this machine's GPU.")
    parser.add_argument("results", type=Path, help="file of results, one JSON object a line; continued if it exists")
    parser.add_argument("--minutes", type=float, default=8.0, help="the run ends within this time (default 8)")
    parser.add_argument("--folder", type=Path, default=Path("build/bench"), help="keeps the compiled kernels")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 60 * options.minutes)
    try:
        return run(options.results, 60 * options.minutes, options.folder)
    except OutOfTimeError:
        sys.stderr.write(f"the time was over within a step; all that was known before is in {options.results}\n")
        return 4
    except TrtForgeError as err:
        sys.stderr.write(f"error: {err.what}\n  why: {err.why}\n  fix: {err.fix}\n")
        return 2
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def run(results: Path, seconds: float, folder: Path) -> int:
    budget = Budget(seconds - RESERVE_S, time.monotonic)
    device = Device()
    say(f"{device.name}, sm_{device.size.compute_capability}")
    library, ptxas = build_for_device(folder, device.size.compute_capability)
    say(f"kernels built; {budget.remaining_s:.0f} s left")
    file = ResultFile(results, device.conditions(library, SECONDS_PER_MEASUREMENT))
    file.write({"kind": "state", "when": "start", **card_state()})
    file.write({"kind": "ptxas", "log": [line for line in ptxas.splitlines() if "Used" in line or "spill" in line]})
    bench = Bench(device, BlockKernels(library, device.size), ColdTimer(device, SECONDS_PER_MEASUREMENT))
    capability = device.size.compute_capability
    num_wrong = check_correctness(bench, usable(correctness_cases(), capability), file, budget, say)
    num_found = run_sanitizers(library, sanitizer_cases(), file, budget, say)
    measured = measure_all(bench, usable(measured_cases(), capability), file, budget, say)
    file.write({"kind": "state", "when": "end", **card_state()})
    for line in summary_lines(measured):
        say(line)
    return 1 if num_wrong or num_found or RunResult({}, measured).wrong else 0


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
