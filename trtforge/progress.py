"""What a long job says of itself while it runs; the command line renders it, the library only reports."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One report.

    Attributes:
        stage: e.g. "calibrate".
        detail: what it is at, e.g. "64 of 256 samples"; empty at the start of a stage.
        level: "progress", or "notice" or "warning" for what the user is told whatever the display, or "detail" for a
            step of the trail that `build --explain` prints.
        done: units of work done so far, of `total`.
        total: units of work of the stage; 0 where it is not known.
    """

    stage: str
    detail: str = ""
    level: str = "progress"
    done: int = 0
    total: int = 0


Reporter = Callable[[Event], None]


class Note(Protocol):
    """Reports what a stage is at; the arguments are those of `Event`."""

    def __call__(self, detail: str, done: int = 0, total: int = 0, level: str = "progress") -> None:
        """Report once."""


def ignore(_: Event) -> None:
    """The reporter of a caller that wants none."""


class Stopwatch:
    """Seconds per stage, reported as the stages start."""

    def __init__(self, report: Reporter) -> None:
        self.report = report
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Note]:
        """Time a stage; yields a function that reports what the stage is at."""

        def note(detail: str, done: int = 0, total: int = 0, level: str = "progress") -> None:
            self.report(Event(name, detail, level, done, total))

        self.report(Event(name))
        started = time.perf_counter()
        try:
            yield note
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - started, 3)
