"""Write files and folders that a reader never sees half of, and that an interrupted job does not leave behind.

While a build runs, its files are in `.<name>.partial-*` beside their place, held by a file lock. A build that was
killed loses the lock, and the next build of the same name removes what it left.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from trtforge.errors import InputError, UnavailableError

# Linux renameat2(2): swap two paths in one step.
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# What a full, read-only or forbidden place answers to a write.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_PLACE_ERRORS = _FULL | {
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.EEXIST,
}


# Of a folder that is named as data or as a checkpoint, the files that are read, beside config.json.
_READ_IN_FOLDERS = (".npz", ".safetensors")


@dataclasses.dataclass(frozen=True, slots=True)
class Staging:
    """A folder to write an artifact in.

    Attributes:
        target: where it will be.
        directory: the files that will be in the artifact.
        work: files that are needed only while building.
    """

    target: Path
    directory: Path
    work: Path


@contextlib.contextmanager
def open_staging(target: Path, option: str = "-o") -> Iterator[Staging]:
    """A staging folder beside the target; it is gone afterwards, whatever happens.

    Args:
        target: what will be written.
        option: of the command line that names it.

    Raises:
        UnavailableError: the place cannot be written, or is full.
    """
    target = target.absolute()
    with contextlib.ExitStack() as stack:
        with translate_write_errors(target, option):
            make_parents(target.parent, stack)
            with locked(target.parent):
                _sweep(target)
                base = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
                stack.callback(shutil.rmtree, base, ignore_errors=True)
                stack.enter_context(locked(base))
            staging = Staging(target, base / "artifact", base / "work")
            staging.directory.mkdir()
            staging.work.mkdir()
        with translate_write_errors(target, option):
            yield staging


def put_in_place(staging: Staging) -> None:
    """Move the staged folder to its target in one step; what was there is removed. Call it under `locked`."""
    if staging.target.exists():
        _exchange(staging.directory, staging.target)
    else:
        staging.directory.rename(staging.target)


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file of an artifact in one step.

    Raises:
        UnavailableError: the place cannot be written.
    """
    with translate_write_errors(path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def check_free(path: Path, force: bool) -> None:
    """Refuse to write a file over something.

    Args:
        path: the file to write.
        force: a file may be replaced.

    Raises:
        InputError: a folder, a link or another special file is there, or a file and `force` is not given.
        UnavailableError: the place cannot be looked at.
    """
    with translate_write_errors(path):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise InputError(f"{path} cannot be written", "it is no regular file", "choose another path with -o")
        if path.exists() and not force:
            raise InputError(f"{path} exists", "it is not replaced unasked", "give --force or another path with -o")


def check_not_read(path: Path, sources: Iterable[Path | str | None]) -> None:
    """Refuse to write over what the command reads, which `--force` does not mean either.

    Args:
        path: to be written.
        sources: files, and folders of data or of a checkpoint.

    Raises:
        InputError: they are one file, or the folder's data or weights are in it.
    """
    is_content = path.suffix in _READ_IN_FOLDERS or path.name == "config.json"
    for source in sources:
        if source is None or not path.exists() or not Path(source).exists():
            continue
        is_inside = is_content and Path(source).is_dir() and path.resolve().is_relative_to(Path(source).resolve())
        if is_inside or path.samefile(source):
            raise InputError(f"{path} is what this command reads", "it would be lost", "choose another path with -o")


def write_text(path: Path, text: str, force: bool) -> None:
    """Write a result file in one step; a file with other content is replaced only with `force`.

    Raises:
        InputError: something else is there.
        UnavailableError: the place cannot be written.
    """
    path = path.absolute()
    with translate_write_errors(path):
        is_same = path.is_file() and path.read_bytes() == text.encode()
    check_free(path, force or is_same)
    with contextlib.ExitStack() as stack, translate_write_errors(path):
        make_parents(path.parent, stack)
        replace_file(path, text)


@contextlib.contextmanager
def translate_write_errors(target: Path, option: str = "-o") -> Iterator[None]:
    """Turn the system's refusal to write into an UnavailableError that names the place, and the option for another."""
    try:
        yield
    except OSError as err:
        if err.errno not in _PLACE_ERRORS or not _is_about(err.filename, target):
            raise
        raise UnavailableError(
            f"{target} cannot be written",
            err.strerror or str(err),
            f"{'free some space, or ' if err.errno in _FULL else ''}choose another folder with {option}",
        ) from err


def _is_about(filename: object, target: Path) -> bool:
    """Whether an error speaks of the target or what lies beside it; one that names no file may."""
    if not isinstance(filename, (str, bytes)):
        return True
    return Path(os.fsdecode(filename)).absolute().is_relative_to(target.absolute().parent)


def make_parents(folder: Path, stack: contextlib.ExitStack) -> None:
    """Make a folder and its parents; those made here and still empty at the end are removed again."""
    for parent in reversed([folder, *folder.parents]):
        if not parent.exists():
            parent.mkdir(exist_ok=True)
            stack.callback(_remove_if_empty, parent)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


@contextlib.contextmanager
def locked(folder: Path, wait: bool = True) -> Iterator[int]:
    """Hold the lock of a folder; the kernel frees it when the process ends, and those that it gave the handle to.

    Raises:
        BlockingIOError: another process holds it and `wait` is False.
        UnavailableError: the folder was removed while this waited.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        if wait and not folder.exists():
            raise UnavailableError(
                f"{folder} was removed while this command waited for another",
                "the other one made it, and failed",
                "run this command again",
            )
        yield handle
    finally:
        os.close(handle)


def _sweep(target: Path) -> None:
    """Remove staging folders of this target whose build is gone."""
    for leftover in target.parent.glob(f".{glob.escape(target.name)}.partial-*"):
        with contextlib.suppress(OSError), locked(leftover, wait=False):
            shutil.rmtree(leftover, ignore_errors=True)


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders in one step where the kernel can; else with a moment in which `old` is missing."""
    libc = ctypes.CDLL(None, use_errno=True)
    renameat2 = getattr(libc, "renameat2", None)
    if renameat2 is not None:
        arguments = (_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE)
        if renameat2(*arguments) == 0:
            return
    aside = new.with_name("replaced")
    old.rename(aside)
    new.rename(old)
