"""Options of an engine builder that do not change the graph, checked as far as that needs no file."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, Literal, cast, get_args

from trtforge.errors import InputError
from trtforge.hashing import sha256_of_file

HardwareCompatibility = Literal["none", "ampere_plus", "same_compute_capability"]
MAX_OPTIMIZATION_LEVEL = 5
# How the command line spells a field, where that is not the field's name.
_SPELLINGS = {"plugins": "--plugin"}
_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How the builder makes the engine. Not every backend can do all of it: see `Backend.check`.

    Attributes:
        plugins: plugin libraries, loaded in the build process: they are the user's own code.
        refit: the engine's weights can be replaced later.
        strip_weights: leave weights out of the engine; it has to be refitted before it runs.
        version_compatible: later releases of the builder can load the engine.
        hardware_compatible: GPUs besides the present one that can load the engine.
        optimization_level: from 0 (builds fastest) to 5; None is the builder's own default.
        workspace: most bytes of scratch memory that a kernel may use on the GPU; None is all of the GPU's.
        timing_cache: file of measured kernel times; read where it exists, written after the build.
    """

    plugins: tuple[Path, ...] = ()
    refit: bool = False
    strip_weights: bool = False
    version_compatible: bool = False
    hardware_compatible: HardwareCompatibility = "none"
    optimization_level: int | None = None
    workspace: int | None = None
    timing_cache: Path | None = None

    def __post_init__(self) -> None:
        level = self.optimization_level
        if level is not None and not 0 <= level <= MAX_OPTIMIZATION_LEVEL:
            raise InputError(
                f"--optimization-level {level} cannot be used",
                f"builders know levels from 0 (builds fastest) to {MAX_OPTIMIZATION_LEVEL} (searches longest)",
                f"give a number from 0 to {MAX_OPTIMIZATION_LEVEL}",
            )
        hardware_compatibility(self.hardware_compatible)
        if self.workspace is not None and not 0 < self.workspace < 2**63:
            raise _bad_workspace(str(self.workspace))

    def given(self) -> dict[str, str]:
        """The options that are not at their default, as field -> how the command line spells it."""
        changed = [
            field.name for field in dataclasses.fields(self) if getattr(self, field.name) not in (field.default, None)
        ]
        return {name: _SPELLINGS.get(name, f"--{name.replace('_', '-')}") for name in changed}

    def identity(self) -> dict[str, Any]:
        """What of them changes the engine, as JSON: plugin libraries by their content, without the timing cache, which
        only saves time, and which every build changes.

        Raises:
            InputError: a plugin library cannot be read.
        """
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del values["timing_cache"]
        return values | {"plugins": list(hash_plugins(self.plugins).items())}


def hardware_compatibility(name: str) -> HardwareCompatibility:
    """The level of that name.

    Raises:
        InputError: unknown name.
    """
    for level in get_args(HardwareCompatibility):
        if name == level:
            return cast(HardwareCompatibility, level)
    raise InputError(
        f"--hardware-compatible {name!r} is unknown",
        f"it takes {', '.join(get_args(HardwareCompatibility))}",
        "correct it, or leave it out for an engine that only this GPU's model loads",
    )


def size_from_text(text: str) -> int:
    """Bytes from `2GiB`, `512MiB`, `1.5GB` or `1048576`.

    Raises:
        InputError: it is no size.
    """
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?) ?([KMG]i?B)?", text.strip(), re.ASCII)
    size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if not 0 < size < 2**63:
        raise _bad_workspace(text)
    return size


def hash_plugins(plugins: tuple[Path, ...]) -> dict[str, str]:
    """File name -> SHA-256 of each plugin library.

    Raises:
        InputError: one of them is no file or cannot be read, or two have one name.
    """
    from trtforge.textfile import kind_of  # loads pydantic, which is to come after the worker's start

    found: dict[str, str] = {}
    for path in plugins:
        if kind_of(path, "plugin library") != "file":
            raise InputError(
                f"--plugin {path} cannot be loaded", "there is no such file", "give the path of a shared library (.so)"
            )
        if path.name in found:
            raise InputError(
                f"--plugin names two libraries {path.name}",
                "the manifest tells them apart by their file names",
                "rename one of them",
            )
        try:
            found[path.name] = sha256_of_file(path)
        except OSError as err:
            raise InputError(f"--plugin {path} cannot be read", err.strerror or str(err), "check the file") from err
    return found


def _bad_workspace(text: str) -> InputError:
    return InputError(
        f"--workspace {text} cannot be used",
        "it is the most GPU memory that a kernel may use for scratch data",
        "give a size such as 2GiB or 512MiB",
    )


DEFAULT_OPTIONS = EngineOptions()
