"""Run a command to its end and measure it: seconds of the whole process, peak memory of its whole process tree.

Memory is the proportional set size (PSS: a page shared by n processes counts 1/n in each), summed over the process and
all its descendants, read from /proc every 50 ms; a shorter peak can be missed.
"""

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

SAMPLE_INTERVAL_S = 0.05
MAX_ERROR_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one run took, and why it failed (None: it did not)."""

    seconds: float
    peak_bytes: int
    error: str | None


def list_tree(process: psutil.Process) -> list[psutil.Process]:
    """Return a process and its living descendants; none where it has ended."""
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def read_pss_bytes(processes: Sequence[psutil.Process]) -> int:
    """Sum the proportional set sizes of the processes that still run."""
    total = 0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


def read_error(log: Path) -> str:
    """Return the line of a log that says what failed: the first `error:`, else the last line with text."""
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return (errors[0] if errors else lines[-1] if lines else "no output")[:MAX_ERROR_CHARACTERS]


def run_measured(command: Sequence[str], log: Path, timeout_s: float, memory_limit_bytes: int) -> Measurement:
    """Run `command` with its output in `log`, and end it where it exceeds a limit.

    Args:
        command: program and arguments.
        log: takes stdout and stderr.
        timeout_s: seconds after which the tree is killed.
        memory_limit_bytes: PSS of the tree above which it is killed, so that it does not starve the machine.
    """
    peak_bytes = 0
    stopped: str | None = None
    with log.open("wb") as output:
        started = time.perf_counter()
        process = psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        while process.poll() is None:
            tree = list_tree(process)
            peak_bytes = max(peak_bytes, read_pss_bytes(tree))
            if peak_bytes > memory_limit_bytes:
                stopped = f"stopped at {peak_bytes / 1e9:.1f} GB of memory (limit {memory_limit_bytes / 1e9:.1f} GB)"
            elif time.perf_counter() - started > timeout_s:
                stopped = f"stopped after {timeout_s:.0f} s"
            if stopped is not None:
                for member in reversed(tree):
                    if member.is_running():
                        member.kill()
                # The next tool starts on a machine that has its memory and cores back.
                psutil.wait_procs(tree)
                break
            time.sleep(SAMPLE_INTERVAL_S)
        seconds = time.perf_counter() - started
    if stopped is None and process.returncode != 0:
        stopped = f"exit {process.returncode}: {read_error(log)}"
    return Measurement(seconds, peak_bytes, stopped)
