"""The folder of a stage cache: its layout, and how an entry is written and read.

DIR/CACHEDIR.TAG             says that the folder is a trtforge cache; backup programs leave such folders out
DIR/entries/STAGE/KEY.json   what a stage gave: a JSON value, and the files that belong to it
DIR/files/SHA256             their content, each once
DIR/partial/*                what running builds write, each held by a lock
DIR/timing/*.bin             the builders' own timing caches
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pydantic

from trtforge.errors import InputError, TrtForgeError, UnavailableError
from trtforge.staging import locked
from trtforge.textfile import FileModel, kind_of, parse_json, validate

TAG, ENTRIES, FILES, PARTIAL, TIMING = "CACHEDIR.TAG", "entries", "files", "partial", "timing"
# The first line is that of the Cache Directory Tagging Specification (bford.info/cachedir).
_TAG_TEXT = b"Signature: 8a477f597d28d172789f06886806bc55\n# A trtforge stage cache, layout 1: trtforge cache info\n"
_SCRATCH = "build-"
# Bytes of one entry without its files; the largest hold plans of 200,000 nodes.
_ENTRY_BYTES = 256 * 2**20

Sha256 = Annotated[str, pydantic.Field(pattern="^[0-9a-f]{64}$")]


class DamagedError(Exception):
    """What an entry holds is not what was stored."""


class MissingError(Exception):
    """The entry, or a file of it, is not there or was removed."""


class FileRecord(FileModel):
    """A file of an entry."""

    sha256: Sha256
    bytes: Annotated[int, pydantic.Field(ge=0)]


class EntryRecord(FileModel):
    """An entry as it is written.

    Attributes:
        stage, key: its place, so that a file that was moved is no entry.
        value: of the stage, as its codec writes it.
        warnings: what the user was told when the stage ran.
        files: by the name that they have in the stage.
    """

    stage: str
    key: Sha256
    value: Any
    warnings: tuple[str, ...]
    files: dict[str, FileRecord]

    def to_bytes(self) -> bytes:
        """The SHA-256 of the text, a newline, and the text, whose keys keep their order."""
        text = json.dumps(self.model_dump(mode="json"), separators=(",", ":"), allow_nan=False).encode()
        return hashlib.sha256(text).hexdigest().encode() + b"\n" + text


def read_entry(path: Path) -> EntryRecord:
    """The entry in a file.

    Raises:
        MissingError: there is none.
        DamagedError: it is not what was stored.
    """
    try:
        with open_stored(path) as file:
            data = file.read(_ENTRY_BYTES)
        digest, _, text = data.partition(b"\n")
        if hashlib.sha256(text).hexdigest().encode() != digest:
            raise DamagedError("its content changed")
        record = validate(EntryRecord, parse_json(text.decode(), path.name), path.name)
    except (TrtForgeError, ValueError, OSError) as err:
        raise DamagedError(str(err)) from err
    if (record.stage, record.key) != (path.parent.name, path.stem):
        raise DamagedError("it belongs to another place")
    return record


def open_stored(path: Path) -> io.BufferedReader:
    """A file of the cache for reading: no link, and no device or pipe that would never end.

    Raises:
        MissingError: it is not there.
        DamagedError: it is something else, or cannot be read.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError as err:
        raise MissingError(path.name) from err
    except OSError as err:
        raise DamagedError(err.strerror or str(err)) from err
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DamagedError("it is no regular file")
    return os.fdopen(handle, "rb")


def make_folder(folder: Path) -> None:
    """Make a cache's folder, or check that what is there is one.

    Raises:
        InputError: something else is there.
        UnavailableError: it cannot be made.
    """
    fix = "give another folder with --cache"
    if kind_of(folder, "cache") not in {"folder", None}:
        raise InputError(f"{folder} cannot be a cache", "it is not a folder", fix)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            if (folder / TAG).exists():
                check_folder(folder)
                return
            others = sorted(path.name for path in folder.iterdir() if not path.name.startswith(f".{TAG}"))
            if others:
                raise InputError(
                    f"{folder} is no trtforge cache, so it is not used as one",
                    f"it has no {TAG}, and holds {', '.join(others[:4])}",
                    "give a new or empty folder with --cache",
                )
            staged = folder / f".{TAG}"
            staged.write_bytes(_TAG_TEXT)
            staged.replace(folder / TAG)
    except OSError as err:
        raise UnavailableError(f"the cache {folder} cannot be used", err.strerror or str(err), fix) from err


def check_folder(folder: Path) -> None:
    """Refuse a folder that is no trtforge cache of this layout.

    Raises:
        InputError: it is none.
    """
    fix = "give the folder that was given to --cache"
    if kind_of(folder, "cache") != "folder":
        raise InputError(f"{folder} is no trtforge cache", "there is no such folder", fix)
    try:
        with open_stored(folder / TAG) as file:
            text = file.read(len(_TAG_TEXT) + 1)
    except MissingError as err:
        raise InputError(f"{folder} is no trtforge cache", f"it has no {TAG}", fix) from err
    except (DamagedError, OSError) as err:
        raise InputError(f"{folder} is no trtforge cache", f"its {TAG} cannot be read: {err}", fix) from err
    if text != _TAG_TEXT:
        raise InputError(
            f"{folder} is no trtforge cache of this version", f"its {TAG} says otherwise", "give another folder"
        )


def open_scratch(folder: Path, stack: contextlib.ExitStack) -> Path:
    """A folder inside the cache that is this build's own until the stack ends; what killed builds left is removed.

    Raises:
        OSError: the cache cannot be written.
    """
    parent = folder / PARTIAL
    parent.mkdir(exist_ok=True)
    with locked(parent):
        sweep(folder)
        scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=parent))
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        stack.enter_context(locked(scratch))
    return scratch


def sweep(folder: Path) -> None:
    """Remove the scratch folders of builds that are gone. Call it under the lock of their parent."""
    with opened(folder, PARTIAL) as handle:
        for name in names_in(handle):
            if not name.startswith(_SCRATCH):
                continue
            with contextlib.suppress(OSError):
                leftover = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=handle)
                try:
                    fcntl.flock(leftover, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(name, ignore_errors=True, dir_fd=handle)
                finally:
                    os.close(leftover)


@contextlib.contextmanager
def opened(folder: Path, inside: str) -> Iterator[int | None]:
    """A handle of a folder inside the cache that is reached through no link; None where there is none."""
    handle: int | None = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in inside.split("/"):
            outer, handle = handle, None
            try:
                handle = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=outer)
            except (FileNotFoundError, NotADirectoryError):
                break
            finally:
                os.close(outer)  # type: ignore[arg-type]
        yield handle
    finally:
        if handle is not None:
            os.close(handle)


def names_in(handle: int | None) -> list[str]:
    """What is in a folder that `opened` gave, sorted."""
    if handle is None:
        return []
    with os.scandir(handle) as entries:
        return sorted(entry.name for entry in entries)
