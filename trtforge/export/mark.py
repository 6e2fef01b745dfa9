"""Entries in the metadata of an ONNX file that an export wrote."""

from __future__ import annotations

from pathlib import Path

import onnx

KEY, VALUE = "trtforge.export", "failed: the outputs differ from the PyTorch model's"


def add_metadata(path: Path, key: str, value: str) -> None:
    """Add an entry to the model's metadata, in place.

    Protobuf reads a message that is appended to another as one with the fields of both, so nothing is parsed or copied.
    """
    addition = onnx.ModelProto(metadata_props=[onnx.StringStringEntryProto(key=key, value=value)])
    with path.open("ab") as file:
        file.write(addition.SerializeToString())


def mark_failed(path: Path) -> None:
    """Mark a file whose outputs differ from the PyTorch model's."""
    add_metadata(path, KEY, VALUE)
