"""Progress on stderr: lines where it is no terminal, one line with bar, rate and time left where it is."""

from __future__ import annotations

import io
import re

import pytest
import rich.progress
from rich.console import Console

from trtforge.cli import progress_bar
from trtforge.cli.progress_bar import terminal_reporter
from trtforge.cli.render import progress_reporter
from trtforge.progress import Event

DRAWN: list[rich.progress.Progress] = []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the bar reads; nothing is drawn unless asked for."""
    now = [0.0]

    class Still(rich.progress.Progress):
        def __init__(self, *columns: rich.progress.ProgressColumn, **options: object) -> None:
            super().__init__(*columns, **options, get_time=lambda: now[0], auto_refresh=False)  # type: ignore[arg-type]
            DRAWN.append(self)

    monkeypatch.setattr(progress_bar, "Progress", Still)
    return now


def draw(clock: list[float], *events: Event, step: float = 1.0) -> list[str]:
    """The line after each event, one step of the clock apart."""
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=120, color_system=None)
    lines = []
    with terminal_reporter(console) as report:
        for event in events:
            clock[0] += step
            report(event)
            output.truncate(output.seek(0))
            console.print(DRAWN[-1].get_renderable())
            lines.append(output.getvalue().rstrip("\n"))
    return lines


def samples(done: int, total: int = 2000) -> Event:
    return Event("calibrate", f"{done} of {total} samples", done=done, total=total)


def test_counted_work_has_a_bar_a_rate_and_the_time_left(clock: list[float]) -> None:
    line = draw(clock, Event("calibrate"), samples(100), samples(200), samples(300))[-1]
    assert "calibrate 300 of 2000 samples" in line
    assert "━" in line
    assert "100.0/s" in line
    assert re.search(r"0:00:0\d left 0:00:17", line)


def test_what_an_earlier_process_did_does_not_count_in_the_rate(clock: list[float]) -> None:
    line = draw(clock, Event("calibrate"), samples(1500), samples(1510), samples(1520))[-1]
    assert "10.0/s" in line
    assert "left 0:00:48" in line


def test_uncounted_work_has_only_stage_and_elapsed_time(clock: list[float]) -> None:
    first, _, last = draw(clock, Event("load"), samples(100), Event("build", "tactics"))
    for line in (first, last):
        assert "━" not in line
        assert "left" not in line
        assert "/s" not in line
    assert "build tactics" in last
    assert "0:00:00" in last


def test_warnings_and_notices_stay_above_the_bar() -> None:
    output = io.StringIO()
    with terminal_reporter(Console(file=output, force_terminal=True, width=60, color_system=None)) as report:
        report(Event("warning", "[b]odd\x1b name[/b] " + "x" * 60, "warning"))
        report(Event("calibrate", "continuing at sample 512 of 2000", "notice"))
    assert "warning: [b]odd\\x1b name[/b] " + "x" * 60 + "\n" in output.getvalue()
    assert "calibrate: continuing at sample 512 of 2000\n" in output.getvalue()


def test_without_a_terminal_only_warnings_and_notices_show(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_reporter() as report:
        report(Event("load"))
        report(samples(8))
        report(Event("calibrate", "continuing at sample 512 of 2000", "notice"))
        report(Event("warning", "few samples", "warning"))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "calibrate: continuing at sample 512 of 2000\nwarning: few samples\n"
