"""The JSON file beside a plugin library: what it was built from and for, and what its kernels take.

`libtrtforge_plugin.so` has `libtrtforge_plugin.json`. It counts only while the library is the one that it was written
for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from trtforge.errors import InputError
from trtforge.hashing import sha256_of_file
from trtforge.plugins.resources import KernelResources
from trtforge.textfile import FileModel, kind_of, parse_json, read_text, validate

# Turing's tensor cores do not multiply bf16; launchers refuse it there.
FIRST_WITH_BF16 = 80
_BUILD_HINT = "build it with `trtforge plugin build`"


class LibraryRecord(FileModel):
    """A plugin library.

    Attributes:
        kind: "plugin" for TensorRT, or "kernels" behind a C interface.
        library_sha256: of the file.
        inputs_sha256: of all that decides what is built: sources, architectures, tools.
        sources_sha256: of the sources alone.
        architectures: compute capabilities, as in 86.
        cuda: version of the toolkit.
        tensorrt: version of the headers; None for kernels.
        kernels: in order of name and architecture.
    """

    schema_version: Literal[1] = 1
    kind: Literal["plugin", "kernels"]
    library_sha256: str
    inputs_sha256: str
    sources_sha256: str
    architectures: tuple[int, ...]
    cuda: str
    tensorrt: str | None
    kernels: tuple[KernelResources, ...]

    def dtypes(self, architecture: int) -> tuple[str, ...]:
        """What the kernels compute in on an architecture."""
        return ("fp16", "bf16", "int8") if architecture >= FIRST_WITH_BF16 else ("fp16", "int8")


def record_path(library: Path) -> Path:
    """Where the record of a library is."""
    return library.with_suffix(".json")


def read_record(library: Path) -> LibraryRecord:
    """The record of a library that is still the one that was built.

    Raises:
        InputError: the library or its record is missing or damaged, or they do not belong together.
    """
    kind = kind_of(library, "plugin library")
    if kind is None:
        raise InputError(f"plugin library {library} does not exist", "no such file", _BUILD_HINT)
    if kind != "file":
        what = "a folder" if kind == "folder" else "no regular file"
        raise InputError(f"plugin library {library} cannot be read", f"it is {what}", "give the .so file")
    path = record_path(library)
    if not path.is_file():
        raise InputError(
            f"{library} has no record", f"{path.name} is written beside a library when it is built", _BUILD_HINT
        )
    try:
        record = validate(LibraryRecord, parse_json(read_text(path, "plugin record"), str(path)), str(path))
    except InputError as err:
        raise InputError(f"the plugin record {path} is damaged", f"{err.what}: {err.why}", _BUILD_HINT) from err
    if record.library_sha256 != sha256_of_file(library):
        raise InputError(f"{path} is of another library", f"{library.name} was replaced since", _BUILD_HINT)
    return record
