from __future__ import annotations

import pytest

from trtforge.progress import Event, Stopwatch


def test_stage_reports_its_start_and_its_notes() -> None:
    events: list[Event] = []
    with Stopwatch(events.append).stage("calibrate") as note:
        note("8 of 16 samples")
    assert events == [Event("calibrate"), Event("calibrate", "8 of 16 samples")]


def test_counted_work_and_levels_reach_the_reporter() -> None:
    events: list[Event] = []
    with Stopwatch(events.append).stage("calibrate") as note:
        note("8 of 16 samples", 8, 16)
        note("continuing", level="notice")
    assert events[1:] == [
        Event("calibrate", "8 of 16 samples", "progress", 8, 16),
        Event("calibrate", "continuing", "notice"),
    ]


def test_seconds_of_repeated_stages_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 2.5, 10.0, 10.25])
    monkeypatch.setattr("trtforge.progress.time.perf_counter", lambda: next(times))
    watch = Stopwatch(lambda event: None)
    for _ in range(2):
        with watch.stage("build"):
            pass
    assert watch.seconds == {"build": 1.75}


def test_a_stage_that_fails_is_timed_too() -> None:
    watch = Stopwatch(lambda event: None)
    with pytest.raises(KeyError), watch.stage("build"):
        raise KeyError
    assert list(watch.seconds) == ["build"]
