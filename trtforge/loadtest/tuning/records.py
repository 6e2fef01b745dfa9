"""`trials.jsonl`: a line for the conditions, then a line for each trial as soon as it ends, so that none is lost.

A search that was interrupted goes on where it ended: what it needs next and finds here is not measured again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from trtforge.benchmark.results import ResultFile
from trtforge.loadtest.tuning.candidate import Candidate
from trtforge.loadtest.tuning.plans import Plan
from trtforge.loadtest.tuning.search import RunTrial
from trtforge.loadtest.tuning.trial import Stage, Trial
from trtforge.textfile import FileModel, validate


class TrialFile:
    """The trials of a search.

    Args:
        path: of the file; one that exists is continued.
        conditions: of the search.
        run: makes a trial that the file does not hold.

    Raises:
        InputError: the file is of a search under other conditions.
        UnavailableError: the place cannot be written.
    """

    def __init__(self, path: Path, conditions: Mapping[str, Any], run: RunTrial) -> None:
        self._file = ResultFile(path, conditions)
        self._run = run
        lines = [line for line in self._file.lines if line.get("kind") == "trial"]
        known = [validate(_TrialLine, line, f"{path}, trial {number}") for number, line in enumerate(lines, 1)]
        self._known = {line.trial.key: line.trial for line in known}

    @property
    def num_known(self) -> int:
        """Trials that an earlier search made."""
        return len(self._known)

    def run(self, stage: Stage, candidate: Candidate, repeat: int, plan: Plan) -> Trial:
        """The trial of the file, or a new one, which is then in the file."""
        known = self._known.get((stage, candidate, repeat))
        if known is not None:
            return known
        trial = self._run(stage, candidate, repeat, plan)
        self._file.write({"kind": "trial", "trial": trial.model_dump(mode="json")})
        return trial


class _TrialLine(FileModel):
    """A line of the file."""

    kind: Literal["trial"]
    trial: Trial
