"""What a job starts from: an ONNX file, or something that is exported to one first."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from trtforge.errors import InputError

SourceKind = Literal["onnx", "program", "folder", "function"]

# `package.module:function`
_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_CHECKPOINTS = {".pt", ".pth", ".bin", ".ckpt", ".pkl"}
# First bytes of a zip archive and of a pickle.
_PICKLES = (b"PK\x03\x04", b"\x80")


def source_kind(source: Path) -> SourceKind:
    """Which kind of source this is, as far as its name and its first bytes tell.

    Raises:
        InputError: a checkpoint, which would have to be unpickled, or a file of weights alone.
    """
    kind = _kind(source)
    if kind == "folder":
        return "folder"
    if kind is None and _FUNCTION.fullmatch(str(source)):
        return "function"
    suffix = source.suffix.lower()
    if suffix == ".pt2":
        return "program"
    if suffix == ".safetensors" and kind == "file":
        raise InputError(
            f"{source} holds weights only",
            "a model is weights and the code or the config.json that says what to do with them",
            "give the Hugging Face folder with its config.json, or package.module:function that returns the model",
        )
    if suffix in _CHECKPOINTS and kind == "file" and _starts_with(source, _PICKLES):
        raise InputError(
            f"{source} is a PyTorch checkpoint, which would have to be unpickled",
            "unpickling a file runs whatever code it holds, so trtforge never does",
            "load it in code that you trust: write a function that returns (model.eval(), example_inputs) and give it "
            "as package.module:function; or save the model with torch.export.save as .pt2",
        )
    return "onnx"


def source_name(source: Path) -> str:
    """What the model is called: the file's stem, the folder's name, or the function's name."""
    kind = source_kind(source)
    if kind == "folder":
        return source.name if source.name not in {"", ".."} else source.resolve().name
    return str(source).rpartition(":")[2] if kind == "function" else source.stem


def _kind(path: Path) -> str | None:
    """What lies there, without loading the parsers that textfile.py needs; what cannot be looked at is told later."""
    try:
        return "folder" if path.is_dir() else "file" if path.exists() else None
    except (OSError, ValueError):
        return "file"


def _starts_with(path: Path, prefixes: tuple[bytes, ...]) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4).startswith(prefixes)
    except OSError:
        return False
