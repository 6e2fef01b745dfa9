"""What a long job says of itself while it runs; the command line renders it, the library only reports."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One report.

    Attributes:
        stage: e.g. "calibrate".
        detail: what it is at, e.g. "64 of 256 samples"; empty at the start of a stage.
        level: "progress", or "warning" for what the user must be told whatever the display.
    """

    stage: str
    detail: str = ""
    level: str = "progress"


Reporter = Callable[[Event], None]


def ignore(_: Event) -> None:
    """The reporter of a caller that wants none."""


class Stopwatch:
    """Seconds per stage, reported as the stages start."""

    def __init__(self, report: Reporter) -> None:
        self.report = report
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Callable[[str], None]]:
        """Time a stage; yields a function that reports what the stage is at."""
        self.report(Event(name))
        started = time.perf_counter()
        try:
            yield lambda detail: self.report(Event(name, detail))
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - started, 3)
