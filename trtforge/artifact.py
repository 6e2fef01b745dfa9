"""The artifact folder: written beside its place and renamed into it, so that a reader never sees half of one.

While a build runs, its files are in `.<name>.partial-*` beside the artifact, held by a file lock. A build that was
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
from collections.abc import Iterator
from pathlib import Path

import onnx_graphsurgeon as gs

from trtforge.errors import InputError, TrtForgeError, UnavailableError
from trtforge.graph.save import save_model
from trtforge.hashing import sha256_of_file
from trtforge.manifest import MANIFEST_NAME, FileInfo, Manifest, load_manifest

# Linux renameat2(2): swap two paths in one step.
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# Files that hold times and words, so that two equal builds differ in them.
_FOR_READING = {MANIFEST_NAME, "build.log", "report.html"}
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


def check_place(target: Path) -> None:
    """Refuse a place that no artifact can ever take.

    Raises:
        InputError: a file, a link, or a folder that is not an artifact.
    """
    find_artifact(target, "", force=True)


def find_artifact(target: Path, inputs_sha256: str, force: bool) -> Manifest | None:
    """The manifest of an artifact made from the same inputs, or None when the place is free to be written.

    Raises:
        InputError: a file or a folder that is not an artifact is there, or an artifact made from other inputs.
        UnavailableError: the place cannot be looked at.
    """
    with translate_write_errors(target):
        if target.is_symlink() or (target.exists() and not target.is_dir()):
            raise InputError(
                f"{target} cannot become an artifact", "it is not a folder", "choose another folder with -o"
            )
        if not target.is_dir() or not any(target.iterdir()):
            return None
    try:
        manifest = load_manifest(target)
    except TrtForgeError as err:
        raise InputError(
            f"{target} is no artifact, so it is not touched", err.why or err.what, "choose another folder with -o"
        ) from err
    if manifest.inputs_sha256 == inputs_sha256 and damaged_files(target, manifest) == []:
        return None if force else manifest
    if not force:
        changed = manifest.inputs_sha256 != inputs_sha256
        raise InputError(
            f"{target} holds {'an artifact made from other inputs' if changed else 'a damaged artifact'}",
            "model, data, profile, recipe, options or versions differ"
            if changed
            else "its files do not match its manifest",
            "give --force to replace it, or another folder with -o",
        )
    return None


def damaged_files(directory: Path, manifest: Manifest) -> list[str]:
    """Names of the artifact's files that are missing or do not have the recorded hash."""
    bad = []
    for name, info in manifest.files.items():
        path = directory / name
        sound = Path(name).name == name and path.is_file() and path.stat().st_size == info.bytes
        if not sound or sha256_of_file(path) != info.sha256:
            bad.append(name)
    return bad


def describe_files(directory: Path) -> dict[str, FileInfo]:
    """Hash and size of every file that is used further, by name; logs and reports are for reading only."""
    return {
        path.name: FileInfo(sha256=sha256_of_file(path), bytes=path.stat().st_size)
        for path in sorted(directory.iterdir())
        if path.is_file() and path.name not in _FOR_READING
    }


@contextlib.contextmanager
def open_staging(target: Path) -> Iterator[Staging]:
    """A staging folder beside the target; it is gone afterwards, whatever happens.

    Raises:
        UnavailableError: the place cannot be written, or is full.
    """
    target = target.absolute()
    with contextlib.ExitStack() as stack:
        with translate_write_errors(target):
            _make_parents(target.parent, stack)
            with _locked(target.parent):
                _sweep(target)
                base = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
                stack.callback(shutil.rmtree, base, ignore_errors=True)
                stack.enter_context(_locked(base))
            staging = Staging(target, base / "artifact", base / "work")
            staging.directory.mkdir()
            staging.work.mkdir()
        with translate_write_errors(target):
            yield staging


def commit(staging: Staging, inputs_sha256: str, force: bool) -> Manifest | None:
    """Put the staged artifact in its place.

    Returns:
        The manifest of an equal artifact that another build put there in the meantime; then nothing was changed.

    Raises:
        InputError: a different one was put there in the meantime, and `force` is not given.
    """
    with _locked(staging.target.parent) as parent:
        other = find_artifact(staging.target, inputs_sha256, force)
        if other is not None:
            return other
        if staging.target.exists():
            _exchange(staging.directory, staging.target)
        else:
            staging.directory.rename(staging.target)
        os.fsync(parent)
    return None


def replace_file(path: Path, text: str) -> None:
    """Write a file of an artifact in one step.

    Raises:
        UnavailableError: the place cannot be written.
    """
    with translate_write_errors(path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def write_text(path: Path, text: str, force: bool) -> None:
    """Write a result file in one step; a file with other content is replaced only with `force`.

    Raises:
        InputError: something else is there.
        UnavailableError: the place cannot be written.
    """
    path = path.absolute()
    if path.exists() and not force and (not path.is_file() or path.read_bytes() != text.encode()):
        raise InputError(f"{path} exists", "it is not replaced unasked", "give --force or another path with -o")
    with contextlib.ExitStack() as stack, translate_write_errors(path):
        _make_parents(path.parent, stack)
        replace_file(path, text)


def write_model(graph: gs.Graph, path: Path) -> None:
    """Write an ONNX file, with its external data where it has some, in its place once it is whole.

    Raises:
        UnavailableError: the place cannot be written.
    """
    path = path.absolute()
    with contextlib.ExitStack() as stack, translate_write_errors(path):
        _make_parents(path.parent, stack)
        work = stack.enter_context(tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent))
        save_model(graph, Path(work) / path.name)
        for file in sorted(Path(work).iterdir(), key=lambda file: file.name == path.name):
            file.replace(path.parent / file.name)


@contextlib.contextmanager
def translate_write_errors(target: Path) -> Iterator[None]:
    """Turn the system's refusal to write into an UnavailableError that names the place."""
    try:
        yield
    except OSError as err:
        if err.errno not in _PLACE_ERRORS:
            raise
        raise UnavailableError(
            f"{target} cannot be written",
            err.strerror or str(err),
            "free some space, or choose another folder with -o"
            if err.errno in _FULL
            else "choose another folder with -o",
        ) from err


def _make_parents(folder: Path, stack: contextlib.ExitStack) -> None:
    """Make a folder and its parents; those made here and still empty at the end are removed again."""
    for parent in reversed([folder, *folder.parents]):
        if not parent.exists():
            parent.mkdir(exist_ok=True)
            stack.callback(_remove_if_empty, parent)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


@contextlib.contextmanager
def _locked(folder: Path, wait: bool = True) -> Iterator[int]:
    """Hold the lock of a folder; the kernel frees it when the process ends.

    Raises:
        BlockingIOError: another process holds it and `wait` is False.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield handle
    finally:
        os.close(handle)


def _sweep(target: Path) -> None:
    """Remove staging folders of this target whose build is gone."""
    for leftover in target.parent.glob(f".{glob.escape(target.name)}.partial-*"):
        with contextlib.suppress(OSError), _locked(leftover, wait=False):
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
