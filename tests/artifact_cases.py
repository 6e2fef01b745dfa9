"""Artifacts of a few bytes, for the tests of what is written and where."""

from __future__ import annotations

from pathlib import Path

from support import make_manifest

from trtforge.artifact import commit, describe_files
from trtforge.manifest import MANIFEST_NAME, Manifest
from trtforge.staging import Staging, open_staging

A, B = "a" * 64, "b" * 64


def fill(staging: Staging, inputs: str, content: bytes = b"engine") -> None:
    (staging.directory / "model.engine").write_bytes(content)
    (staging.directory / "model.onnx").write_bytes(b"graph")
    (staging.directory / "build.log").write_text("log")
    manifest = make_manifest(inputs_sha256=inputs, files=describe_files(staging.directory))
    (staging.directory / MANIFEST_NAME).write_text(manifest.to_json())


def put(target: Path, inputs: str = A, content: bytes = b"engine", force: bool = False) -> Manifest | None:
    with open_staging(target) as staging:
        fill(staging, inputs, content)
        return commit(staging, inputs, force)


def everything_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
