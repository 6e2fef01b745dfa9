"""Where the plugin's sources are, and their fingerprint."""

from __future__ import annotations

import dataclasses
import hashlib
from importlib import resources
from pathlib import Path

from trtforge.errors import UnavailableError

# Of the source tree, what a library is built from; the emulator runs kernels on the host and is not part of it.
_PARTS = ("CMakeLists.txt", "cmake/**/*.cmake", "plugins/csrc/**/*")
_NOT_BUILT = ("plugins", "csrc", "emulation")


@dataclasses.dataclass(frozen=True, slots=True)
class SourceTree:
    """The sources.

    Attributes:
        root: the folder of CMakeLists.txt.
        sha256: of every file's name and content, in order.
    """

    root: Path
    sha256: str


def find_sources() -> SourceTree:
    """The sources that come with trtforge: in the installed package, else in the source tree.

    Raises:
        UnavailableError: they are in neither.
    """
    package = Path(str(resources.files("trtforge")))
    for root in (package / "shipped" / "plugin", package.parent):
        if (root / "CMakeLists.txt").is_file() and (root / "plugins" / "csrc").is_dir():
            return SourceTree(root, _hash_sources(root))
    raise UnavailableError(
        "the plugin's sources are not installed",
        f"{package / 'shipped' / 'plugin'} holds none",
        "pip install --force-reinstall trtforge",
    )


def _hash_sources(root: Path) -> str:
    digest = hashlib.sha256()
    files = {path for part in _PARTS for path in root.glob(part) if path.is_file()}
    for path in sorted(files, key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root)
        if name.parts[: len(_NOT_BUILT)] == _NOT_BUILT:
            continue
        content = path.read_bytes()
        digest.update(f"{name.as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
