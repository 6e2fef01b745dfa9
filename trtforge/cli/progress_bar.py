"""Progress on a terminal: one line that says what a job is at, with a bar, rate and time left where work is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from trtforge.cli.render import message, plain
from trtforge.cli.signals import raise_if_arrived
from trtforge.progress import Event


class _WhenCounted(ProgressColumn):
    """Another column, empty where the stage does not count its work.

    Args:
        column: the other.
    """

    def __init__(self, column: ProgressColumn) -> None:
        super().__init__()
        self._column = column

    def render(self, task: Task) -> RenderableType:
        """The column's content."""
        return Text() if task.total is None else self._column.render(task)


class _Rate(ProgressColumn):
    """Units of work per second."""

    def render(self, task: Task) -> Text:
        """The column's content."""
        return Text(f"{task.speed:.1f}/s" if task.speed else "", style="progress.data.speed")


@contextmanager
def terminal_reporter(console: Console | None = None) -> Iterator[Callable[[Event], None]]:
    """A reporter that draws on a console, by default that of stderr."""
    console = console or Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        _WhenCounted(BarColumn(bar_width=20)),
        _WhenCounted(_Rate()),
        TimeElapsedColumn(),
        _WhenCounted(TextColumn("left", markup=False)),
        _WhenCounted(TimeRemainingColumn()),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        stage = ""
        task = progress.add_task("", total=None)

        def report(event: Event) -> None:
            nonlocal stage, task
            raise_if_arrived()
            if line := message(event):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
                return
            if event.stage != stage:
                stage = event.stage
                progress.remove_task(task)
                task = progress.add_task("", total=None)
            progress.update(task, description=f"{stage} {plain(event.detail)}".strip())
            if event.total:
                # The speed leaves the first update out, so that what an earlier process did does not count.
                progress.update(task, total=event.total, completed=event.done)

        yield report
