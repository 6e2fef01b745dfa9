"""The folder of a run: `run.json` and `report.html`."""

from __future__ import annotations

import os
from pathlib import Path

from trtforge.errors import InputError
from trtforge.loadtest.compare import Comparison
from trtforge.loadtest.page import render_page
from trtforge.loadtest.results import RUN_NAME, Run
from trtforge.staging import locked, open_staging, put_in_place, translate_write_errors

PAGE_NAME = "report.html"
# Bytes: a run of a hundred steps with its page.
_ROOM_BYTES = 8 * 2**20


def check_folder(folder: Path, force: bool) -> None:
    """Refuse to write over what is not a run, or over a run unasked.

    Raises:
        InputError: something else is there, or a run and `force` is not given.
        UnavailableError: the place cannot be looked at.
    """
    with translate_write_errors(folder):
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise InputError(f"{folder} cannot hold a run", "it is not a folder", "choose another folder with -o")
        names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if not names:
        return
    others = sorted(names - {RUN_NAME, PAGE_NAME})
    if others or RUN_NAME not in names:
        why = f"it holds {', '.join(others[:4]) or PAGE_NAME}"
        raise InputError(f"{folder} is not the folder of a run, so it is not touched", why, "choose another with -o")
    if not force:
        raise InputError(
            f"{folder} holds a run", "it is not replaced unasked", "give --force or another folder with -o"
        )


def check_room(folder: Path) -> None:
    """Find out before a test whether its results can be written after it.

    Raises:
        UnavailableError: the place cannot be written, or is full.
    """
    with open_staging(folder) as staging, (staging.work / "room").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, _ROOM_BYTES)


def write_folder(folder: Path, run: Run, comparison: Comparison | None, force: bool) -> None:
    """Write `run.json` and `report.html` in one step.

    Raises:
        InputError: see `check_folder`.
        UnavailableError: the place cannot be written.
    """
    with open_staging(folder) as staging:
        (staging.directory / RUN_NAME).write_text(run.to_json(), encoding="utf-8")
        (staging.directory / PAGE_NAME).write_text(render_page(run, comparison), encoding="utf-8")
        with locked(staging.target.parent):
            check_folder(folder, force)
            put_in_place(staging)
