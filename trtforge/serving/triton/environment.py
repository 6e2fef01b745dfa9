"""Where Triton Inference Server is: an environment that trtforge installed, or NVIDIA's own folder `/opt/tritonserver`.

The file `triton.json` marks an environment; see install.py.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from trtforge.errors import TrtForgeError, UnavailableError
from trtforge.textfile import FileModel, parse_json, read_text, validate

RECORD_NAME = "triton.json"
# Of the server in the wheel; tests/serving asks the server itself.
TRITON_VERSION = "2.51.0"
INSTALL_COMMAND = "trtforge triton install"


class InstallRecord(FileModel):
    """The content of `triton.json`.

    Attributes:
        python: version of the interpreter, e.g. "3.11".
        packages: what pip was asked for.
        complete: False from the start of an install to its end.
    """

    schema_version: Literal[1] = 1
    triton: str
    python: str
    packages: tuple[str, ...]
    complete: bool


@dataclasses.dataclass(frozen=True, slots=True)
class TritonInstall:
    """A server that can be started.

    Attributes:
        root: the environment, or NVIDIA's folder.
        version: the server's; empty where the folder does not say.
        binary: `tritonserver`.
        backends: one folder per backend.
        caches: one folder per response cache; None where there is none.
        library_path: where the binary's libraries are, if not where the system looks.
        python: the interpreter whose packages the Python backend uses; None means the system's.
    """

    root: Path
    version: str
    binary: Path
    backends: Path
    caches: Path | None
    library_path: Path | None
    python: Path | None

    def environment(self) -> dict[str, str]:
        """The variables that the server's process needs, apart from those of this one.

        The stub of the Python backend takes the packages of the first `python` on PATH, and must not see those of
        this process.
        """
        variables = {"PYTHONPATH": "", "PYTHONHOME": "", "PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        if self.library_path is not None:
            variables["LD_LIBRARY_PATH"] = str(self.library_path)
        if self.python is not None:
            variables["PATH"] = f"{self.python.parent}{os.pathsep}{os.defpath}"
        return variables

    def backend_names(self) -> list[str]:
        """Of the backends that are there."""
        return sorted(path.name for path in self.backends.iterdir() if path.is_dir()) if self.backends.is_dir() else []

    def cache_names(self) -> list[str]:
        """Of the response caches that are there."""
        return [] if self.caches is None else sorted(path.name for path in self.caches.iterdir() if path.is_dir())

    def packages(self) -> dict[str, str]:
        """Version of each Python package of the environment; empty where it is the system's."""
        if self.python is None:
            return {}
        paths = [str(path) for path in self.root.glob("lib/python*/site-packages")]
        found = importlib.metadata.distributions(path=paths)
        return dict(sorted((entry.metadata["Name"], entry.version) for entry in found))


def cache_folder() -> Path:
    """Where the environment goes unless the user names a place."""
    return Path("~/.cache/trtforge/triton").expanduser()


def default_places() -> tuple[Path, ...]:
    """Where a server is looked for: beside this interpreter, in the user's cache, and behind `tritonserver` on PATH."""
    on_path = shutil.which("tritonserver")
    places = (Path(sys.prefix) / "triton", cache_folder())
    return places if on_path is None else (*places, Path(on_path).resolve().parent.parent)


def places_from_option(named: Path | None) -> tuple[Path, ...]:
    """Where to look for a server: only where the user says, if they do."""
    return default_places() if named is None else (named,)


def find_triton(places: Sequence[Path]) -> TritonInstall:
    """The first server among some folders.

    Raises:
        UnavailableError: there is none; says how to install it.
    """
    for place in places:
        found = read_install(place.absolute())
        if found is not None:
            return found
    raise UnavailableError(
        "there is no Triton Inference Server here",
        f"looked in {', '.join(map(str, places))}",
        f"`{INSTALL_COMMAND}` installs it in an environment of its own, or name its folder with --triton-env",
    )


def server_folder(folder: Path) -> Path:
    """What the wheel holds of the server, in an environment."""
    return _site_packages(folder) / "pytriton/tritonserver"


def library_folder(folder: Path) -> Path:
    """The shared libraries of the server, in an environment."""
    return _site_packages(folder) / "nvidia_pytriton.libs"


def _site_packages(folder: Path) -> Path:
    return next(folder.glob("lib/python*/site-packages"), folder / "lib")


def read_record(folder: Path) -> InstallRecord | None:
    """The folder's record; None where there is none that trtforge wrote."""
    path = folder / RECORD_NAME
    if not path.is_file():
        return None
    try:
        return validate(InstallRecord, parse_json(read_text(path, "record"), str(path)), str(path))
    except TrtForgeError:
        return None


def read_install(place: Path) -> TritonInstall | None:
    """The server of a folder, as trtforge or as NVIDIA lays it out; None where there is none, or half of one."""
    record = read_record(place)
    if record is not None:
        server = server_folder(place)
        install = TritonInstall(
            root=place,
            version=record.triton,
            binary=server / "bin/tritonserver",
            backends=place / "backends",
            caches=server / "caches",
            library_path=library_folder(place),
            python=place / "bin/python",
        )
        return install if record.complete and install.binary.is_file() else None
    if not (place / "bin/tritonserver").is_file():
        return None
    version = place / "TRITON_VERSION"
    return TritonInstall(
        root=place,
        version=version.read_text(encoding="utf-8").strip() if version.is_file() else "",
        binary=place / "bin/tritonserver",
        backends=place / "backends",
        caches=place / "caches" if (place / "caches").is_dir() else None,
        library_path=None,
        python=None,
    )
