"""`trtforge cache info|clear`: what a stage cache holds, and removing what is old."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from trtforge.cli import options
from trtforge.cli.render import format_bytes, plain, print_json, print_table

NAME = "cache"

app = typer.Typer(no_args_is_help=True, help="Look into a stage cache (--cache DIR), or clear it.")

_Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder given to --cache.", show_default=False)]


@app.command("info")
def info(folder: _Folder, as_json: options.AsJson = False) -> int:
    """Show how many results of each stage a cache holds, and when they were last of use."""
    from trtforge.cache.upkeep import describe_cache

    found = describe_cache(folder)
    if as_json:
        stages = {
            name: {
                "entries": stage.entries,
                "bytes": stage.bytes,
                "oldest_use": _moment(stage.oldest),
                "newest_use": _moment(stage.newest),
            }
            for name, stage in found.stages.items()
        }
        print_json({"cache": str(folder), "entries": found.entries, "bytes": found.bytes, "stages": stages})
        return 0
    sys.stdout.write(f"{plain(str(folder))}: {found.entries} results, {format_bytes(found.bytes)}\n")
    if found.stages:
        rows = [
            (name, str(stage.entries), format_bytes(stage.bytes), _moment(stage.oldest), _moment(stage.newest))
            for name, stage in found.stages.items()
        ]
        print_table([("stage", "results", "size", "oldest use", "newest use"), *rows])
    return 0


@app.command("clear")
def clear(
    folder: _Folder,
    older_than: Annotated[
        float | None,
        typer.Option("--older-than", metavar="DAYS", min=0.0, help="Only what was of no use for so many days."),
    ] = None,
    as_json: options.AsJson = False,
) -> int:
    """Remove the results in a cache; the folder stays, and nothing else in it is touched."""
    from trtforge.cache.upkeep import clear_cache

    removed = clear_cache(folder, older_than)
    if as_json:
        print_json({"cache": str(folder), "removed_entries": removed.entries, "removed_bytes": removed.bytes})
    else:
        sys.stdout.write(f"{plain(str(folder))}: removed {removed.entries} results, {format_bytes(removed.bytes)}\n")
    return 0


def _moment(seconds: float) -> str:
    """UTC, as ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
