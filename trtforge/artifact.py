"""The artifact folder: what is in it, whether it is whole, and when it may be replaced."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable
from pathlib import Path

import onnx_graphsurgeon as gs

from trtforge.errors import InputError, TrtForgeError
from trtforge.graph.save import save_model
from trtforge.hashing import sha256_of_file
from trtforge.limits import DEFAULT_LIMITS, Limits
from trtforge.manifest import LOG_NAME, MANIFEST_NAME, REPORT_NAME, FileInfo, Manifest, load_manifest
from trtforge.staging import Staging, locked, make_parents, put_in_place, translate_write_errors
from trtforge.traced_dims import KEY

# Files that hold times and words, so that two equal builds differ in them.
_FOR_READING = {MANIFEST_NAME, LOG_NAME, REPORT_NAME}


def find_artifact(target: Path, inputs_sha256: str, force: bool, limits: Limits = DEFAULT_LIMITS) -> Manifest | None:
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
        manifest = load_manifest(target, limits)
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
    own = {*manifest.files, MANIFEST_NAME, LOG_NAME, REPORT_NAME}
    others = sorted(path.name for path in target.iterdir() if path.name not in own)
    if others:
        raise InputError(
            f"{target} holds files that trtforge did not write",
            f"they would be lost: {', '.join(others[:4])}",
            "move them away, or choose another folder with -o",
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


def describe_files(directory: Path, leave_out: Iterable[str] = ()) -> dict[str, FileInfo]:
    """Hash and size of every file that is used further, by name; logs and reports are for reading only."""
    others = _FOR_READING.union(leave_out)
    return {
        path.name: FileInfo(sha256=sha256_of_file(path), bytes=path.stat().st_size)
        for path in sorted(directory.iterdir())
        if path.is_file() and path.name not in others
    }


def commit(staging: Staging, inputs_sha256: str, force: bool, limits: Limits = DEFAULT_LIMITS) -> Manifest | None:
    """Put the staged artifact in its place.

    Returns:
        The manifest of an equal artifact that another build put there in the meantime; then nothing was changed.

    Raises:
        InputError: a different one was put there in the meantime, and `force` is not given.
    """
    with locked(staging.target.parent):
        other = find_artifact(staging.target, inputs_sha256, force, limits)
        if other is None:
            put_in_place(staging)
    return other


def write_model(graph: gs.Graph, path: Path, metadata: Iterable[tuple[str, str]] = ()) -> None:
    """Write an ONNX file, with its external data where it has some, in its place once it is whole.

    Args:
        graph: what to write.
        path: the file.
        metadata: of the file that the graph was read from; what it says of a trace holds for the new file as well.

    Raises:
        UnavailableError: the place cannot be written.
    """
    path = path.absolute()
    with contextlib.ExitStack() as stack, translate_write_errors(path):
        make_parents(path.parent, stack)
        work = stack.enter_context(tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent))
        save_model(graph, Path(work) / path.name, [entry for entry in metadata if entry[0] == KEY])
        for file in sorted(Path(work).iterdir(), key=lambda file: file.name == path.name):
            file.replace(path.parent / file.name)
