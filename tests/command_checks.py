"""Commands run in this process, with an eye on what they leave behind."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import psutil
import pytest

from trtforge.cli.app import run


@dataclasses.dataclass(frozen=True)
class Watch:
    """A folder for a command's inputs, and a temporary folder of its own.

    Attributes:
        folder: the working directory.
        temporary: what TMPDIR names.
        capsys: takes what commands print.
    """

    folder: Path
    temporary: Path
    capsys: pytest.CaptureFixture[str]

    def run(self, arguments: list[str]) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of a command; nothing of it may stay in the temporary folder, nor any child."""
        children = set(psutil.Process().children())
        code = run(arguments)
        captured = self.capsys.readouterr()
        assert [path.name for path in self.temporary.iterdir()] == [], captured.err
        assert not [child for child in set(psutil.Process().children()) - children if _still_runs(child)]
        return code, captured.out, captured.err

    def refusal(self, arguments: list[str]) -> str:
        """The one error of a command that exits with 2, says what, why and how to mend it, and leaves nothing."""
        before = self.entries()
        code, _, err = self.run(arguments)
        assert code == 2, err
        lines = [line for line in err.splitlines() if not line.startswith("warning: ")]
        assert lines[0].startswith("error: "), err
        assert [sum(line.startswith(part) for line in lines) for part in ("error: ", "  why: ", "  fix: ")] == [1, 1, 1]
        assert "Traceback" not in err
        assert self.entries() == before
        return err

    def entries(self) -> set[str]:
        """Names in the folder."""
        return {path.name for path in self.folder.iterdir()}


def _still_runs(child: psutil.Process) -> bool:
    """Whether a child that was told to end has not, a while later."""
    try:
        child.wait(5)
    except psutil.TimeoutExpired:
        return True
    return False
