"""What models are called: names that Triton, Kubernetes' labels and every file system take."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from trtforge.errors import InputError
from trtforge.manifest import Manifest

_MOST_CHARACTERS = 100
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_-]{{0,{_MOST_CHARACTERS - 1}}}", re.ASCII)


def model_names(manifests: Sequence[Manifest], name: str | None) -> list[str]:
    """The models' names: the source's; where several share it, with what sets them apart: targets, precision, or both.

    Args:
        manifests: of the artifacts.
        name: in the place of the source's.

    Raises:
        InputError: the name cannot be used.
    """
    if name is not None and _NAME.fullmatch(name) is None:
        raise InputError(
            f"--name {name!r} cannot be used",
            f"it takes {_MOST_CHARACTERS} letters, digits, _ and - at most, and begins with a letter or a digit",
            f"--name {_sanitise(name)}",
        )
    names = [name or _sanitise(manifest.model.name) for manifest in manifests]
    groups = {base: [m for m, own in zip(manifests, names, strict=True) if own == base] for base in names}
    suffixes = {base: _suffix_for(group) for base, group in groups.items()}
    return [base + suffixes[base](manifest) for base, manifest in zip(names, manifests, strict=True)]


def _suffix_for(manifests: Sequence[Manifest]) -> Callable[[Manifest], str]:
    """What sets some models apart; nothing for one alone."""
    choices: tuple[Callable[[Manifest], str], ...] = (
        lambda _: "",
        _targets,
        _precision,
        lambda manifest: _targets(manifest) + _precision(manifest),
    )
    return next((c for c in choices if len({c(m) for m in manifests}) == len(manifests)), choices[-1])


def _targets(manifest: Manifest) -> str:
    return "".join(f"_{_sanitise(target).replace('_', '')}" for target in manifest.targets)


def _precision(manifest: Manifest) -> str:
    return f"_{_sanitise(manifest.precision.requested)}"


def _sanitise(name: str) -> str:
    """A name that Triton and every file system take."""
    kept = re.sub(r"[^A-Za-z0-9_-]+", "_", name, flags=re.ASCII).strip("_-")
    return kept[:_MOST_CHARACTERS] or "model"
