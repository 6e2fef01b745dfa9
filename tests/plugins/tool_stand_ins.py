"""Programs in the place of the tools that build the plugin."""

from __future__ import annotations

from pathlib import Path


def make_program(folder: Path, name: str, text: str) -> Path:
    """A shell script in the place of a tool."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / name
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return program
