"""A run over many cases within a time: the most telling first, each result saved at once, continued where it was.

Two passes: everything that is quick to prepare over all cases, then what takes long (a compiler runs for each case).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trtforge.benchmark.case import BlockCase
from trtforge.benchmark.results import CaseResult, ResultFile, case_line, measured_names

# Seconds that a step is given before one like it was timed: builds of a compiled peer start worker processes.
_FIRST_GUESS_S = {False: 5.0, True: 40.0}
_MARGIN = 1.5  # of the longest step so far: later cases may be larger
SLOW_NAMES = ("compile", "tensorrt", "tensorrt+plugin")


class Budget:
    """Time that is left, by a clock that counts seconds."""

    def __init__(self, seconds: float | None, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.end = None if seconds is None else clock() + seconds

    @property
    def remaining_s(self) -> float:
        """Seconds left; infinite without a limit."""
        return float("inf") if self.end is None else self.end - self.clock()

    def can_afford(self, seconds: float) -> bool:
        """True where something that takes so long ends in time."""
        return seconds <= self.remaining_s


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """Implementations to measure on one case."""

    case: BlockCase
    names: tuple[str, ...]
    is_slow: bool


def plan(cases: Sequence[BlockCase], names: Sequence[str], done: dict[str, set[str]] | None = None) -> Iterator[Step]:
    """The steps of a run, without what is done: quick implementations of every case, then slow ones."""
    for is_slow in (False, True):
        for case in cases:
            known = (done or {}).get(case.key, set())
            chosen = tuple(name for name in names if (name in SLOW_NAMES) is is_slow and name not in known)
            if chosen:
                yield Step(case, chosen, is_slow)


def run_steps(
    steps: Sequence[Step],
    measure: Callable[[Step], CaseResult],
    budget: Budget,
    save: Callable[[CaseResult], None],
) -> tuple[Step, ...]:
    """Measure step by step until the time is over; returns the steps that were left out."""
    longest = dict(_FIRST_GUESS_S)
    has_run = {False: False, True: False}
    for place, step in enumerate(steps):
        needed = longest[step.is_slow] * (_MARGIN if has_run[step.is_slow] else 1.0)
        if not budget.can_afford(needed):
            return tuple(steps[place:])
        started = budget.clock()
        save(measure(step))
        took = budget.clock() - started
        longest[step.is_slow] = max(longest[step.is_slow], took) if has_run[step.is_slow] else took
        has_run[step.is_slow] = True
    return ()


def run_session(
    cases: Sequence[BlockCase],
    names: Sequence[str],
    measure: Callable[[Step], CaseResult],
    budget: Budget,
    file: ResultFile | None = None,
    report: Callable[[int, int, Step], None] | None = None,
) -> tuple[list[CaseResult], tuple[Step, ...]]:
    """Run what a result file does not hold yet, and save every result in it.

    Args:
        cases: the most telling first.
        names: implementations.
        measure: one step.
        budget: ends the run.
        file: where results are saved.
        report: is told before each step: how many steps are done, of how many, and the step.

    Returns:
        The new results, and the steps that time did not allow.
    """
    steps = tuple(plan(cases, names, measured_names(file.lines) if file else None))
    results: list[CaseResult] = []

    def measured(step: Step) -> CaseResult:
        if report is not None:
            report(len(results), len(steps), step)
        return measure(step)

    def save(result: CaseResult) -> None:
        results.append(result)
        if file is not None:
            file.write(case_line(result))

    left_out = run_steps(steps, measured, budget, save)
    if file is not None and left_out:
        file.write(left_out_line(left_out))
    return results, left_out


def left_out_line(steps: Sequence[Step]) -> dict[str, Any]:
    """What time did not allow, for a reader of the results."""
    return {"kind": "left_out", "steps": [{"case": step.case.key, "names": list(step.names)} for step in steps]}
