"""What a run measures in which order, when it stops, and what is on the disk then. No GPU and no time is involved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trtforge.benchmark.case import BlockCase
from trtforge.benchmark.results import CaseResult, Measurement, ResultFile, case_line, read_lines, results_from_lines
from trtforge.benchmark.session import Budget, Step, plan, run_session, run_steps
from trtforge.errors import InputError, UnavailableError

CASES = tuple(BlockCase(1, sequence, 64, 2, 96) for sequence in (8, 16, 32))
CONDITIONS = {"card": "a card", "versions": {"numpy": "2"}, "peaks": {"fp16_tflops": 1.0}}


class Clock:
    """Seconds that pass when a step says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def result_of(step: Step) -> CaseResult:
    """Measurements that say that nothing was timed."""
    return CaseResult(step.case, tuple(Measurement(name, "call", failure="not run") for name in step.names))


def test_quick_implementations_of_all_cases_come_before_slow_ones() -> None:
    steps = list(plan(CASES, ("plugin", "eager", "compile")))
    assert [(step.case.sequence, step.names) for step in steps] == [
        *((sequence, ("plugin", "eager")) for sequence in (8, 16, 32)),
        *((sequence, ("compile",)) for sequence in (8, 16, 32)),
    ]


def test_what_is_done_is_not_planned_again() -> None:
    done = {CASES[0].key: {"plugin", "eager", "compile"}, CASES[1].key: {"plugin"}}
    steps = list(plan(CASES, ("plugin", "eager", "compile"), done))
    assert [(step.case.sequence, step.names) for step in steps] == [
        (16, ("eager",)),
        (32, ("plugin", "eager")),
        (16, ("compile",)),
        (32, ("compile",)),
    ]


def run_for(seconds: float | None, step_s: list[float]) -> tuple[int, tuple[Step, ...], float]:
    """Steps that ran, those left out, and the seconds over the end (negative: before it)."""
    clock = Clock()
    start = clock.now
    steps = [Step(BlockCase(1, 8 * (index + 1), 64, 2, 96), ("plugin",), False) for index in range(len(step_s))]
    durations = iter(step_s)
    ran: list[CaseResult] = []

    def measure(step: Step) -> CaseResult:
        clock.now += next(durations)
        return result_of(step)

    left_out = run_steps(steps, measure, Budget(seconds, clock), ran.append)
    return len(ran), left_out, clock.now - start - (seconds or 0)


def test_a_run_ends_in_time_and_says_what_it_left_out() -> None:
    ran, left_out, over = run_for(30.0, [2.0] * 50)
    assert 13 <= ran <= 14
    assert len(left_out) == 50 - ran
    assert over <= 0


def test_a_step_like_the_longest_so_far_has_to_fit_with_a_margin() -> None:
    ran, _, over = run_for(30.0, [2.0, 10.0, 2.0, 2.0, 2.0, 14.0, 1.0, 1.0])
    assert ran == 3 + 1 + 0  # at 16 s, 14 are left and 15 are asked for
    assert over <= 0


def test_without_a_limit_everything_runs() -> None:
    assert run_for(None, [100.0] * 20)[:2] == (20, ())


def test_no_time_at_all_runs_nothing() -> None:
    assert run_for(1.0, [0.5, 0.5])[0] == 0


def run_into(path: Path, seconds: float | None = None, fail_at: int | None = None) -> list[str]:
    """Keys and names of what one call of the program measured."""
    clock = Clock()
    seen: list[str] = []

    def measure(step: Step) -> CaseResult:
        if len(seen) == fail_at:
            raise KeyboardInterrupt
        seen.append(f"{step.case.sequence} {'+'.join(step.names)}")
        clock.now += 10
        return result_of(step)

    file = ResultFile(path, CONDITIONS)
    try:
        run_session(CASES, ("plugin", "compile"), measure, Budget(seconds, clock), file)
    except KeyboardInterrupt:
        seen.append("interrupted")
    return seen


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.jsonl"
    assert run_into(path, fail_at=2) == ["8 plugin", "16 plugin", "interrupted"]
    assert len(results_from_lines(read_lines(path))) == 2
    assert run_into(path) == ["32 plugin", "8 compile", "16 compile", "32 compile"]
    assert run_into(path) == []
    merged = results_from_lines(read_lines(path))
    assert [[m.implementation for m in result.measurements] for result in merged] == [["plugin", "compile"]] * 3


def test_what_time_did_not_allow_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    assert run_into(path, seconds=30.0) == ["8 plugin", "16 plugin"]
    last = list(read_lines(path))[-1]
    assert last["kind"] == "left_out"
    assert [step["case"] for step in last["steps"]] == [CASES[i].key for i in (2, 0, 1, 2)]


@pytest.mark.parametrize("cut", [1, 7, 40])
def test_a_half_written_line_is_dropped_and_its_case_measured_again(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "results.jsonl"
    run_into(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert run_into(path) == ["32 compile"]
    assert path.read_bytes() == whole


def test_each_result_is_on_the_disk_when_it_is_known(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    file = ResultFile(path, CONDITIONS)
    assert json.loads(path.read_text()) == {"kind": "run", "schema_version": 1, "conditions": CONDITIONS}
    file.write(case_line(result_of(Step(CASES[0], ("plugin",), False))))
    assert results_from_lines(read_lines(path))[0].case == CASES[0]


def test_results_of_another_card_are_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    ResultFile(path, CONDITIONS)
    with pytest.raises(InputError) as caught:
        ResultFile(path, {**CONDITIONS, "card": "another"})
    assert "it differs in card" in str(caught.value)
    ResultFile(path, {**CONDITIONS, "peaks": {"fp16_tflops": 1.1}})  # measured anew


@pytest.mark.parametrize("text", ['{"kind": "case"}\n', "[1]\n", "no json\n", "one line without an end"])
def test_another_file_is_not_written_to(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(InputError):
        ResultFile(path, CONDITIONS)
    assert path.read_text() == text


def test_a_place_that_cannot_be_written_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match="cannot be written"):
        ResultFile(tmp_path / "file" / "results.jsonl", CONDITIONS)
    binary = tmp_path / "image.png"
    binary.write_bytes(b"\x89PNG\xff\n")
    with pytest.raises(InputError, match="is no result file"):
        ResultFile(binary, CONDITIONS)
    assert binary.read_bytes() == b"\x89PNG\xff\n"
