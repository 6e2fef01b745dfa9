"""The trail of `build --explain`, on stderr."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from trtforge.cli.render import plain

if TYPE_CHECKING:
    from trtforge.manifest import Manifest
    from trtforge.progress import Event


def explaining(report: Callable[[Event], None]) -> Callable[[Event], None]:
    """A reporter that shows every stage as it starts, and the steps that others leave out, each once."""
    told: set[Event] = set()

    def show(event: Event) -> None:
        is_start = event.level == "progress" and not event.detail and event.stage != "cache"
        is_new = event.level == "detail" and event not in told
        told.add(event)
        if is_new or is_start:
            report(dataclasses.replace(event, detail=event.detail or "started", level="notice"))
        if event.level != "detail":
            report(event)

    return show


def print_trail(manifest: Manifest) -> None:
    """The trail of an artifact that was there already."""
    from trtforge.trail import of_manifest

    for step in of_manifest(manifest):
        sys.stderr.write(f"{step.stage}: {plain(step.detail)}\n")
