"""What a stage cache holds, and removing what is old.

Only names that a cache has itself are removed, and no symbolic link inside the folder is followed. A file that a build
puts back at that very moment may be lost; its entry then counts as missing, and the stage runs once more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from trtforge.cache.folder import (
    ENTRIES,
    FILES,
    PARTIAL,
    TIMING,
    DamagedError,
    MissingError,
    check_folder,
    names_in,
    opened,
    read_entry,
    sweep,
)
from trtforge.errors import UnavailableError

_STAGE = re.compile(r"[a-z-]{1,32}")
_ENTRY = re.compile(r"[0-9a-f]{64}\.json")
_FILE = re.compile(r"[0-9a-f]{64}")
_TIMING = re.compile(r"[\w.+-]{1,200}\.bin", re.ASCII)
# A file is stored before the entry that names it: one that no entry names is left alone for this long.
_GRACE_S = 600.0
_DAY_S = 86400.0


@dataclasses.dataclass(frozen=True, slots=True)
class StageInfo:
    """What a cache holds of one stage.

    Attributes:
        entries: how many results.
        bytes: of the entries and their files; a file that several entries share counts for each.
        oldest, newest: when a result was last of use, in seconds since the epoch.
    """

    entries: int
    bytes: int
    oldest: float
    newest: float


@dataclasses.dataclass(frozen=True, slots=True)
class CacheInfo:
    """What a cache holds.

    Attributes:
        bytes: of everything, each file once.
        stages: by name.
    """

    bytes: int
    stages: dict[str, StageInfo]

    @property
    def entries(self) -> int:
        """How many results."""
        return sum(stage.entries for stage in self.stages.values())


@dataclasses.dataclass(frozen=True, slots=True)
class Removed:
    """What was removed: results, and bytes of everything."""

    entries: int
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Listed:
    """A file of the cache: name, size, and when it was last of use."""

    name: str
    bytes: int
    used: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    """An entry, and the files that it names, with their sizes; none where it is damaged."""

    stage: str
    name: str
    bytes: int
    used: float
    files: dict[str, int]


def describe_cache(folder: Path) -> CacheInfo:
    """What a cache holds.

    Raises:
        InputError: the folder is no cache.
    """
    check_folder(folder)
    stages: dict[str, StageInfo] = {}
    for entry in sorted(_entries(folder), key=lambda entry: entry.stage):
        known = stages.get(entry.stage, StageInfo(0, 0, entry.used, entry.used))
        stages[entry.stage] = StageInfo(
            known.entries + 1,
            known.bytes + entry.bytes + sum(entry.files.values()),
            min(known.oldest, entry.used),
            max(known.newest, entry.used),
        )
    return CacheInfo(_total_bytes(folder), stages)


def clear_cache(folder: Path, older_than_days: float | None = None) -> Removed:
    """Remove results, and what none of the others needs; builds that run keep what they are writing.

    Args:
        folder: the cache.
        older_than_days: only what was of no use for so long; None removes everything.

    Raises:
        InputError: the folder is no cache.
        UnavailableError: something in it cannot be removed.
    """
    check_folder(folder)
    before = _total_bytes(folder)
    limit = None if older_than_days is None else time.time() - older_than_days * _DAY_S
    try:
        doomed = [entry for entry in _entries(folder) if limit is None or entry.used < limit]
        _remove_entries(folder, doomed)
        _remove_unnamed(folder, 0.0 if limit is None else _GRACE_S)
        with opened(folder, TIMING) as handle:
            _unlink(handle, [file.name for file in _listed(handle, _TIMING) if limit is None or file.used < limit])
        with opened(folder, PARTIAL) as handle:
            if handle is not None:
                fcntl.flock(handle, fcntl.LOCK_EX)
                sweep(folder)
    except OSError as err:
        raise UnavailableError(
            f"the cache {folder} cannot be cleared", err.strerror or str(err), "check who may write to it"
        ) from err
    return Removed(len(doomed), before - _total_bytes(folder))


def trim_cache(folder: Path, max_bytes: int) -> None:
    """Bring a cache under its bound: results that were of no use for longest go first.

    Raises:
        OSError: something in it cannot be removed.
    """
    if _total_bytes(folder) <= max_bytes:
        return
    doomed = []
    kept: set[str] = set()
    total = 0
    for entry in sorted(_entries(folder), key=lambda entry: -entry.used):
        total += entry.bytes + sum(size for name, size in entry.files.items() if name not in kept)
        if total > max_bytes:
            doomed.append(entry)
        else:
            kept |= set(entry.files)
    _remove_entries(folder, doomed)
    _remove_unnamed(folder, _GRACE_S)


def _entries(folder: Path) -> Iterator[_Entry]:
    for stage, file in _entry_files(folder):
        named: dict[str, int] = {}
        with contextlib.suppress(DamagedError, MissingError):
            record = read_entry(folder / ENTRIES / stage / file.name)
            named = {entry.sha256: entry.bytes for entry in record.files.values()}
        yield _Entry(stage, file.name, file.bytes, file.used, named)


def _entry_files(folder: Path) -> Iterator[tuple[str, _Listed]]:
    """The stage and the file of every entry."""
    with opened(folder, ENTRIES) as handle:
        stages = [name for name in names_in(handle) if _STAGE.fullmatch(name)]
    for stage in stages:
        with opened(folder, f"{ENTRIES}/{stage}") as handle:
            for file in _listed(handle, _ENTRY):
                yield stage, file


def _remove_entries(folder: Path, entries: list[_Entry]) -> None:
    for stage in sorted({entry.stage for entry in entries}):
        with opened(folder, f"{ENTRIES}/{stage}") as handle:
            _unlink(handle, [entry.name for entry in entries if entry.stage == stage])


def _remove_unnamed(folder: Path, grace_s: float) -> None:
    """Remove the files that no entry names, unless they are younger than this."""
    named = {name for entry in _entries(folder) for name in entry.files}
    limit = time.time() - grace_s
    with opened(folder, FILES) as handle:
        _unlink(handle, [f.name for f in _listed(handle, _FILE) if f.name not in named and f.used <= limit])


def _total_bytes(folder: Path) -> int:
    total = sum(file.bytes for _, file in _entry_files(folder))
    for name, pattern in ((FILES, _FILE), (TIMING, _TIMING)):
        with opened(folder, name) as handle:
            total += sum(file.bytes for file in _listed(handle, pattern))
    return total


def _listed(handle: int | None, pattern: re.Pattern[str]) -> list[_Listed]:
    """The regular files of a folder whose name is one of the cache's."""
    found = []
    for name in names_in(handle):
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=handle, follow_symlinks=False)
            if pattern.fullmatch(name) and stat.S_ISREG(status.st_mode):
                found.append(_Listed(name, status.st_size, status.st_mtime))
    return found


def _unlink(handle: int | None, names: list[str]) -> None:
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=handle)
