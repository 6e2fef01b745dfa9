"""What a run gives: lines of JSON, each written when it is known, so that an interrupted run loses nothing.

The first line is {"kind": "run"} with the conditions; {"kind": "case"} lines follow, each with the measurements of one
case. A case may have several lines; what the later ones measured is added. Other kinds are notes for a reader.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trtforge.benchmark.case import BlockCase
from trtforge.benchmark.implementations import Mode
from trtforge.benchmark.samples import Summary, summarize
from trtforge.errors import InputError
from trtforge.staging import translate_write_errors

SCHEMA_VERSION = 1
PLUGIN = "plugin"
_HEAD = b'{"kind": "run"'  # how the first line begins
_NO_RUN = "its first line, which is none of a run"


@dataclasses.dataclass(frozen=True, slots=True)
class Measurement:
    """One implementation on one case.

    Attributes:
        implementation: its name.
        mode: see `Mode`.
        samples_us: every sample, in the order in which they were taken; empty where it was not timed.
        rms_ratio, max_ratio: of its error, see reference.py; None where nothing was computed.
        failure: why it was not timed: it cannot compute the block, or computes it wrongly.
        is_wrong: it computed something else.
    """

    implementation: str
    mode: Mode
    samples_us: tuple[float, ...] = ()
    rms_ratio: float | None = None
    max_ratio: float | None = None
    failure: str | None = None
    is_wrong: bool = False

    @property
    def summary(self) -> Summary | None:
        """Of the samples; None where there are none."""
        return summarize(self.samples_us) if self.samples_us else None


@dataclasses.dataclass(frozen=True, slots=True)
class CaseResult:
    """What was measured of one case."""

    case: BlockCase
    measurements: tuple[Measurement, ...]

    def find(self, implementation: str, mode: Mode) -> Measurement | None:
        """One measurement, if it was made."""
        matching = (m for m in self.measurements if (m.implementation, m.mode) == (implementation, mode))
        return next(matching, None)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return dataclasses.asdict(self)

    def speedup(self, peer: str, mode: Mode) -> float | None:
        """Median time of a peer over that of the plugin, both in one mode; None where one has no time."""
        times = [found.summary if (found := self.find(name, mode)) else None for name in (peer, PLUGIN)]
        return times[0].median_us / times[1].median_us if times[0] and times[1] else None


@dataclasses.dataclass(frozen=True, slots=True)
class RunResult:
    """A run.

    Attributes:
        conditions: card, versions, settings, as JSON.
        cases: in the order in which they were first measured.
    """

    conditions: Mapping[str, Any]
    cases: tuple[CaseResult, ...]

    @property
    def wrong(self) -> tuple[str, ...]:
        """Where the plugin's result was not right, or where it gave none; a strategy may refuse a block."""
        return tuple(
            f"{result.case.key}, {measured.implementation}, {measured.mode}: {measured.failure}"
            for result in self.cases
            for measured in result.measurements
            if (measured.implementation == PLUGIN and measured.failure is not None)
            or (measured.implementation.startswith(f"{PLUGIN} (") and measured.is_wrong)
        )

    def to_dict(self) -> dict[str, Any]:
        """One JSON document."""
        return {
            "schema_version": SCHEMA_VERSION,
            "conditions": dict(self.conditions),
            "cases": [result.to_dict() for result in self.cases],
        }


def merge(results: Iterable[CaseResult]) -> tuple[CaseResult, ...]:
    """One result a case. Of two equal measurements the later one counts: a run may be repeated for a case."""
    merged: dict[BlockCase, dict[tuple[str, str], Measurement]] = {}
    for result in results:
        known = merged.setdefault(result.case, {})
        known.update({(m.implementation, m.mode): m for m in result.measurements})
    return tuple(CaseResult(case, tuple(measured.values())) for case, measured in merged.items())


class ResultFile:
    """Lines of JSON that are on the disk when `write` returns.

    Args:
        path: the file; one that exists is continued.

    Raises:
        InputError: what is there is of another run.
        UnavailableError: the place cannot be written.
    """

    def __init__(self, path: Path, conditions: Mapping[str, Any]) -> None:
        self.path = path
        with translate_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a", encoding="utf-8").close()
        self.lines = tuple(read_lines(path))
        differing = _differences(self.lines[0], conditions) if self.lines else _foreign_text(path)
        if differing:
            why = f"it differs in {', '.join(differing)}"
            raise InputError(
                f"{path} holds the results of another run", why, "give another file, or move that one away"
            )
        _drop_half_line(path)
        if not self.lines:
            self.write({"kind": "run", "schema_version": SCHEMA_VERSION, "conditions": dict(conditions)})

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())


def case_line(result: CaseResult) -> dict[str, Any]:
    """The line of a case."""
    return {"kind": "case", **result.to_dict()}


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a result file; a last one that was cut off by a crash is left out.

    Raises:
        InputError: another line is no JSON object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as err:
        raise InputError(f"{path} is no result file", "it is not UTF-8 text", "give another file") from err
    lines = text.split("\n")
    if lines and not text.endswith("\n"):
        lines.pop()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as err:
            raise InputError(
                f"line {number} of {path} is no JSON", str(err), "give another file, or move that one away"
            ) from err
        if not isinstance(value, dict):
            raise InputError(
                f"line {number} of {path} is no JSON object", line[:60], "give another file, or move that one away"
            )
        yield value


def results_from_lines(lines: Iterable[Mapping[str, Any]]) -> tuple[CaseResult, ...]:
    """The cases of lines that this program wrote."""
    return merge(
        CaseResult(BlockCase(**line["case"]), tuple(Measurement(**measured) for measured in line["measurements"]))
        for line in lines
        if line.get("kind") == "case"
    )


def measured_names(lines: Sequence[Mapping[str, Any]]) -> dict[str, set[str]]:
    """What a result file holds already: implementations by the key of their case."""
    results = results_from_lines(lines)
    return {result.case.key: {measured.implementation for measured in result.measurements} for result in results}


def _differences(head: Mapping[str, Any], conditions: Mapping[str, Any]) -> list[str]:
    """The conditions that are not those of a file's first line. Peaks may be measured, and are never twice the same."""
    before = head.get("conditions")
    if head.get("kind") != "run" or not isinstance(before, dict):
        return [_NO_RUN]
    now = json.loads(json.dumps(conditions))
    return sorted(key for key in {*before, *now} - {"peaks"} if before.get(key) != now.get(key))


def _foreign_text(path: Path) -> list[str]:
    """Of a file without a whole line: nothing where it is empty or the beginning of a first line that was cut off."""
    with path.open("rb") as file:
        start = file.read(len(_HEAD))
    return [] if _HEAD.startswith(start) else [_NO_RUN]


def _drop_half_line(path: Path) -> None:
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole != len(content):
        os.truncate(path, whole)
