"""Which release of Triton has which TensorRT: an engine loads in the very version that built it, and in no other.

The table `triton_releases.json` names a source for each row. For a release that it lacks, the user states the version
that the container has: `--triton-version 26.10=11.4.1.5`.
"""

from __future__ import annotations

import re
from importlib import resources
from typing import Literal

from trtforge.errors import InputError
from trtforge.textfile import FileModel, parse_json, validate

_TABLE = "triton_releases.json"
# Parts of a version that have to be stated for two to be compared.
_LEAST_PARTS = 3


class TritonRelease(FileModel):
    """A release, e.g. 24.12, and the TensorRT version of its container."""

    release: str
    tensorrt: str
    source: str


class ReleaseTable(FileModel):
    """The content of `triton_releases.json`, oldest release first."""

    schema_version: Literal[1]
    note: str
    releases: tuple[TritonRelease, ...]


def load_releases() -> tuple[TritonRelease, ...]:
    """The committed table."""
    text = resources.files("trtforge.serving").joinpath(_TABLE).read_text(encoding="utf-8")
    return validate(ReleaseTable, parse_json(text, _TABLE), _TABLE).releases


def release_for_engine(tensorrt: str, wanted: str | None, *, is_version_compatible: bool = False) -> str:
    """The release that can load an engine.

    Args:
        tensorrt: version that built the engine.
        wanted: what the user named: a release, or `release=version` for one that the table lacks; None takes the
            newest that fits.
        is_version_compatible: the engine loads in later versions of the same major one too.

    Raises:
        InputError: the release has another version, or nothing is known of it.
    """
    known = load_releases()
    fitting = [entry.release for entry in known if _loads(tensorrt, entry.tensorrt, is_version_compatible)]
    if wanted is None:
        if not fitting:
            raise InputError(
                f"no release of Triton is known that has TensorRT {tensorrt}, which built the engine",
                f"known: {_listed(known)}",
                "look up the TensorRT version of your container, and state both: "
                f"--triton-version YY.MM={tensorrt}; or build with a TensorRT version of the list",
            )
        return fitting[-1]
    release, has = _parse(wanted, known)
    if not _loads(tensorrt, has, is_version_compatible):
        fix = f"--triton-version {fitting[-1]}" if fitting else "a Triton release with that version"
        raise InputError(
            f"Triton {release} cannot load the engine: it has TensorRT {has}, and {tensorrt} built the engine",
            "an engine loads in the version that built it only",
            f"take {fix}, or build the artifact with TensorRT {has}",
        )
    return release


def _parse(wanted: str, known: tuple[TritonRelease, ...]) -> tuple[str, str]:
    """Release and TensorRT version of `25.08` or `25.08=10.13.2.6`."""
    release, _, stated = wanted.partition("=")
    is_sound = re.fullmatch(r"\d\d\.\d\d", release, re.ASCII) is not None
    if not is_sound or ("=" in wanted and re.fullmatch(r"\d+(\.\d+){2,3}", stated, re.ASCII) is None):
        raise InputError(
            f"--triton-version {wanted!r} cannot be used",
            "it is a release of Triton's container, such as 24.12, or a release and its TensorRT version",
            "--triton-version 24.12 or --triton-version 26.10=11.4.1.5",
        )
    table = {entry.release: entry.tensorrt for entry in known}
    if stated:
        return release, stated
    if release not in table:
        raise InputError(
            f"the TensorRT version of Triton {release} is not known",
            f"known: {_listed(known)}",
            f"look it up in the container and state it: --triton-version {release}=VERSION",
        )
    return release, table[release]


def _listed(known: tuple[TritonRelease, ...]) -> str:
    return ", ".join(f"{entry.release} (TensorRT {entry.tensorrt})" for entry in known)


def _loads(built: str, has: str, is_version_compatible: bool) -> bool:
    """Whether a TensorRT loads an engine that another built; the parts that both state are compared."""
    ours, theirs = built.split("."), has.split(".")
    if is_version_compatible:
        return ours[0] == theirs[0] and _numbers(theirs) >= _numbers(ours)
    length = min(len(ours), len(theirs))
    return length >= _LEAST_PARTS and ours[:length] == theirs[:length]


def _numbers(parts: list[str]) -> list[int]:
    return [int(part) if part.isdigit() else 0 for part in parts]
