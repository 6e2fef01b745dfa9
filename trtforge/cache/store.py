"""Stage results that later builds take instead of making them again.

A key is a fingerprint of everything that the result depends on (reuse.py). Files are written aside and renamed into
place, content first, so that no reader sees half of one, whoever is killed, and builds need no lock. What is read is
compared with its SHA-256: a damaged entry is dropped, and the stage runs. A folder that is full or may not be written
costs the cache, not the build. Nothing is unpickled; whoever can write the folder decides what builds take from it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Generic, Protocol, TypeVar

from trtforge.cache.folder import (
    ENTRIES,
    FILES,
    TIMING,
    DamagedError,
    EntryRecord,
    FileRecord,
    MissingError,
    make_folder,
    open_scratch,
    open_stored,
    read_entry,
)
from trtforge.cache.upkeep import trim_cache
from trtforge.errors import TrtForgeError, UnavailableError
from trtforge.progress import Event, Reporter

T = TypeVar("T")

_CHUNK_BYTES = 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """An entry that was found.

    Attributes:
        record: what it says.
        folder: the cache.
    """

    record: EntryRecord
    folder: Path

    @property
    def value(self) -> Any:
        """The stage's value as JSON."""
        return self.record.value

    def file(self, name: str) -> FileRecord:
        """Size and SHA-256 of a file.

        Raises:
            DamagedError: the entry has no such file.
        """
        if name not in self.record.files:
            raise DamagedError(f"it has no {name}")
        return self.record.files[name]

    def path(self, name: str) -> Path:
        """The place of a file, of which the caller has to check the content, and which may be gone at any time.

        Raises:
            MissingError: it is gone.
            DamagedError: it is no file.
        """
        path = self.folder / FILES / self.file(name).sha256
        open_stored(path).close()
        return path

    def open(self, name: str) -> io.FileIO:
        """A file for reading.

        Raises:
            MissingError: it is gone.
            DamagedError: its content is not what was stored, or cannot be read.
        """
        file = open_stored(self.folder / FILES / self.file(name).sha256)
        try:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as err:
            file.close()
            raise DamagedError(f"{name} cannot be read: {err.strerror}") from err
        if digest != self.file(name).sha256:
            file.close()
            raise DamagedError(f"the content of {name} changed")
        raw = file.detach()
        assert isinstance(raw, io.FileIO)
        raw.seek(0)
        return raw

    def fetch(self, name: str, target: Path) -> None:
        """Copy a file out of the cache, replacing what is at the target.

        Raises:
            MissingError: it is gone.
            DamagedError: its content is not what was stored, or cannot be read.
            OSError: the target cannot be written.
        """

        def read(size: int) -> bytes:
            try:
                return source.read(size)
            except OSError as err:
                raise DamagedError(f"{name} cannot be read: {err.strerror}") from err

        with open_stored(self.folder / FILES / self.file(name).sha256) as source:
            target.unlink(missing_ok=True)
            try:
                with target.open("xb") as copy:
                    found = _copy(read, copy)
                if found != self.file(name):
                    raise DamagedError(f"the content of {name} changed")
            except DamagedError:
                target.unlink()
                raise


class Codec(Protocol[T]):
    """How a stage's result is written into an entry, and read back."""

    def save(self, value: T, scratch: Path) -> tuple[Any, dict[str, Path]] | None:
        """The result as JSON, and the files that belong to it: new ones in `scratch`, or any that are there.

        None where storing it gains nothing.
        """

    def load(self, entry: Entry) -> T:
        """The result of an entry.

        Raises:
            DamagedError, TrtForgeError, ValueError, KeyError, TypeError: it is none of this codec.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class Found(Generic[T]):
    """A stage's result from the cache, and what the user was told when it was made."""

    value: T
    warnings: tuple[str, ...]


class StageCache:
    """The cache of one build; made by `open_cache`.

    Args:
        folder: the cache.
        scratch: a folder inside it for files that are being written; None where it may only be read.
        warn: takes what the user should know of the cache itself.

    Attributes:
        reused: stages whose result came from the cache, in order.
        made: stages that ran, in the order in which they ended.
    """

    def __init__(self, folder: Path, scratch: Path | None, warn: Callable[[str], None]) -> None:
        self.folder = folder
        self.reused: list[str] = []
        self.made: list[str] = []
        self._scratch = scratch
        self._warn = warn

    def find(self, stage: str, key: str, codec: Codec[T]) -> Found[T] | None:
        """The stored result of a stage; None where there is none.

        Args:
            stage: name of the stage.
            key: fingerprint of all that the result depends on.
            codec: reads it.
        """
        path = self._entry_path(stage, key)
        try:
            entry = Entry(read_entry(path), self.folder)
            value = codec.load(entry)
        except MissingError:
            return None
        except (DamagedError, TrtForgeError, ValueError, KeyError, TypeError) as err:
            self._warn(f"the result of {stage} in {self.folder} is damaged ({_first_line(err)}); it is made again")
            self._drop(path)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # when it was last of use, by which entries are removed
        self.reused.append(stage)
        return Found(value, entry.record.warnings)

    def store(self, stage: str, key: str, value: T, codec: Codec[T], warnings: Sequence[str]) -> None:
        """Keep the result of a stage; where that is not possible the user is told, and nothing more is stored.

        Args:
            stage: name of the stage.
            key: fingerprint of all that the result depends on.
            value: the result.
            codec: writes it.
            warnings: what the user was told when the stage ran.
        """
        self.made.append(stage)
        if self._scratch is None:
            return
        try:
            work = Path(tempfile.mkdtemp(dir=self._scratch))
            saved = codec.save(value, work)
            if saved is None:
                return
            content, files = saved
            records = {name: self._put_file(path, work) for name, path in files.items()}
            record = EntryRecord(stage=stage, key=key, value=content, warnings=tuple(warnings), files=records)
            staged = work / "entry"
            staged.write_bytes(record.to_bytes())
            path = self._entry_path(stage, key)
            path.parent.mkdir(parents=True, exist_ok=True)
            staged.replace(path)
        except (OSError, UnavailableError) as err:
            reason = err.why if isinstance(err, UnavailableError) else err.strerror
            self._warn(f"the cache {self.folder} cannot be written ({reason}); the build goes on without storing in it")
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def timing_file(self, name: str) -> Path | None:
        """The place of a builder's timing cache; None where the cache may only be read.

        Args:
            name: of the builder, its version and the target: a file name.
        """
        if self._scratch is None:
            return None
        with contextlib.suppress(OSError):
            (self.folder / TIMING).mkdir(exist_ok=True)
        return self.folder / TIMING / f"{name}.bin"

    def describe(self) -> dict[str, list[str]]:
        """What came from the cache and what was made, as the manifest's environment holds it."""
        return {"reused": list(self.reused), "made": list(self.made)}

    def _entry_path(self, stage: str, key: str) -> Path:
        return self.folder / ENTRIES / stage / f"{key}.json"

    def _put_file(self, path: Path, work: Path) -> FileRecord:
        """Store the content of a file; one that lies in `work` is moved."""
        content = path
        if path.is_relative_to(work):
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            record = FileRecord(sha256=digest, bytes=path.stat().st_size)
        else:
            # Copied before it is hashed: a build log may grow meanwhile.
            content = work / "copy"
            with path.open("rb") as source, content.open("wb") as copy:
                record = _copy(source.read, copy)
        place = self.folder / FILES / record.sha256
        place.parent.mkdir(exist_ok=True)
        if place.is_file() and not place.is_symlink() and place.stat().st_size == record.bytes:
            os.utime(place)  # young files are not removed while their entry is still to come
        else:
            content.replace(place)
        return record

    def _drop(self, entry: Path) -> None:
        """Remove a damaged entry and its files: another entry that shares one makes it again."""
        with contextlib.suppress(DamagedError, MissingError, TrtForgeError, OSError):
            record = read_entry(entry)
            for file in record.files.values():
                (self.folder / FILES / file.sha256).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            entry.unlink()


@contextlib.contextmanager
def open_cache(folder: Path | None, max_bytes: int, report: Reporter) -> Iterator[StageCache | None]:
    """The cache in a folder, which is made where it is missing; None without a folder.

    Args:
        folder: the cache; missing, empty, or a cache already.
        max_bytes: its bound, to which it is brought at the end.
        report: takes what the user should know of the cache itself: no part of the build's own warnings, which are the
            same with and without a cache.

    Raises:
        InputError: something else is there.
        UnavailableError: it cannot be made or read.
    """
    if folder is None:
        yield None
        return

    def warn(text: str) -> None:
        report(Event("cache", text, "warning"))

    folder = folder.absolute()
    make_folder(folder)
    with contextlib.ExitStack() as stack:
        try:
            scratch = open_scratch(folder, stack)
        except OSError as err:
            warn(f"the cache {folder} cannot be written ({err.strerror}); it is only read")
            scratch = None
        cache = StageCache(folder, scratch, warn)
        yield cache
        if cache.made and scratch is not None:
            with contextlib.suppress(OSError):
                trim_cache(folder, max_bytes)


def _copy(read: Callable[[int], bytes], copy: BinaryIO) -> FileRecord:
    digest, size = hashlib.sha256(), 0
    while chunk := read(_CHUNK_BYTES):
        digest.update(chunk)
        copy.write(chunk)
        size += len(chunk)
    return FileRecord(sha256=digest.hexdigest(), bytes=size)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]
