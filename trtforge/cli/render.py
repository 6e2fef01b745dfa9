"""What the commands print: results on stdout, progress and warnings on stderr."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtforge.cli.signals import Terminated, raise_if_arrived

if TYPE_CHECKING:
    from trtforge.progress import Event


def print_json(value: Any) -> None:
    """The one JSON document of `--json`."""
    sys.stdout.write(json.dumps(value, indent=1, ensure_ascii=True) + "\n")


def print_table(rows: Sequence[Sequence[str]], indent: str = "  ") -> None:
    """Rows in aligned columns, fit for a terminal; the last column is not padded."""
    rows = [[plain(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows if i < len(row) - 1) for i in range(max(map(len, rows)) - 1)]
    for row in rows:
        cells = [cell.ljust(widths[i]) if i < len(row) - 1 else cell for i, cell in enumerate(row)]
        sys.stdout.write(indent + "  ".join(cells) + "\n")


def plain(name: str) -> str:
    """A name from an untrusted model, fit for a terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in name)


@contextmanager
def progress_reporter() -> Iterator[Callable[[Event], None]]:
    """A reporter that shows stage, elapsed time and, where work is counted, a bar, rate and time left on a terminal.

    Warnings and notices show everywhere. What the user's own functions print goes to stderr meanwhile: stdout carries
    the result alone.
    """
    with redirect_stdout(sys.stderr):
        if not sys.stderr.isatty():
            yield _report_lines
            return
        from trtforge.cli.progress_bar import terminal_reporter

        with terminal_reporter() as report:
            yield report


def message(event: Event) -> str:
    """The line of a warning or notice; empty for mere progress, and for details that nobody asked for."""
    if event.level in ("progress", "detail"):
        return ""
    return f"{'warning' if event.level == 'warning' else event.stage}: {plain(event.detail)}"


def _report_lines(event: Event) -> None:
    raise_if_arrived()
    if line := message(event):
        sys.stderr.write(f"{line}\n")


def format_bytes(size: int) -> str:
    """`5.1 MB`."""
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


@contextmanager
def saying_what_stays(partial: Path) -> Iterator[None]:
    """Tell of what an interrupted run saved for its next one, where there is something."""
    try:
        yield
    except (KeyboardInterrupt, Terminated) as err:
        if not partial.exists():
            raise
        sys.stderr.write(f"interrupted; run the same command again to go on from {plain(str(partial))}\n")
        raise (err if isinstance(err, Terminated) else Terminated(signal.SIGINT)) from None
