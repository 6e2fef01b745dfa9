"""The build log and the progress of a build, in the build process: everything goes to standard output, which is the
log: one message per line, `[V] text`, further lines of a message indented, control characters escaped.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Any

from trtforge.backends.library import trt
from trtforge.backends.trace import BuildTrace
from trtforge.isolation import Progress

_LAYER_TABLE = "Layers:\n"
_LETTERS = {"VERBOSE": "V", "INFO": "I", "WARNING": "W", "ERROR": "E", "INTERNAL_ERROR": "E"}
# Everything that a terminal or a reader of lines acts on.
_CONTROL = {code: f"\\x{code:02x}" for code in [*range(32), *range(127, 160), 0x2028, 0x2029] if code != ord("\n")}
# Errors kept for the diagnosis; a broken model can log one per node. The same for warnings.
_MAX_KEPT = 100
# Seconds between two reports; the builder reports about a thousand steps a second.
_PROGRESS_INTERVAL_S = 0.1


class BuildLog(trt.ILogger):  # type: ignore[misc]
    """Writes every message to standard output and keeps errors, warnings and the layer table."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self.layers = ""
        self.trace = BuildTrace()

    def log(self, severity: Any, message: str) -> None:
        """Called by the builder, from any of its threads."""
        if severity <= trt.ILogger.Severity.ERROR and len(self.errors) < _MAX_KEPT:
            self.errors.append(message)
        if severity == trt.ILogger.Severity.WARNING and len(self.warnings) < _MAX_KEPT:
            self.warnings.append(message)
        if severity == trt.ILogger.Severity.VERBOSE and message.startswith(_LAYER_TABLE):
            self.layers = message
        self.trace.feed(message)
        write_log(_LETTERS[severity.name], message)


def write_log(letter: str, message: str) -> None:
    """Append one message to the build log; a full disk loses it rather than the build."""
    text = f"[{letter}] {message}".rstrip("\n").translate(_CONTROL).replace("\n", "\n    ")
    with suppress(OSError):
        os.write(1, f"{text}\n".encode("utf-8", "backslashreplace"))


class BuildMonitor(trt.IProgressMonitor):  # type: ignore[misc]
    """Passes the builder's phases on, a few times a second."""

    def __init__(self, report: Progress) -> None:
        trt.IProgressMonitor.__init__(self)
        self._report = report
        self._steps: dict[str, int] = {}
        self._last = 0.0

    def phase_start(self, name: str, parent: str | None, num_steps: int) -> None:  # noqa: ARG002
        """Called by the builder."""
        self._steps[name] = num_steps
        self._pass_on(name, 0)

    def step_complete(self, name: str, step: int) -> bool:
        """Called by the builder; True lets it go on."""
        self._pass_on(name, step)
        return True

    def phase_finish(self, name: str) -> None:
        """Called by the builder."""
        self._pass_on(name, self._steps.pop(name, 0))

    def _pass_on(self, name: str, step: int) -> None:
        now = time.monotonic()
        if now - self._last >= _PROGRESS_INTERVAL_S:
            self._last = now
            self._report({"phase": name, "step": step, "steps": self._steps.get(name, step)})
