"""Builds that are killed at any moment leave a cache that is whole."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
import time
from pathlib import Path

from encoder import save_project

from trtforge.cache.folder import TAG, read_entry

KILLS = 4
COMMAND = [sys.executable, "-m", "trtforge.cli.app", "build"]


def check_whole(cache: Path) -> None:
    """Every entry reads, every file has its content, and nothing but the cache's own files is there."""
    known = {TAG, "entries", "files", "partial"}
    assert {path.name for path in cache.iterdir() if not path.name.startswith(f".{TAG}")} <= known
    for entry in (cache / "entries").glob("*/*"):
        for file in read_entry(entry).files.values():
            assert hashlib.sha256((cache / "files" / file.sha256).read_bytes()).hexdigest() == file.sha256
    for path in (cache / "files").glob("*"):
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name


def test_a_killed_build_leaves_a_whole_cache(tmp_path: Path) -> None:
    source, cache = save_project(tmp_path / "p"), tmp_path / "cache"
    arguments = [*COMMAND, str(source), "--fp16", "--json"]
    started = time.monotonic()
    plain = subprocess.run([*arguments, "-o", str(tmp_path / "plain")], capture_output=True, check=True)
    duration = time.monotonic() - started
    moments = random.Random(20).choices(range(10, 100), k=KILLS)
    for number, percent in enumerate(moments):
        output = str(tmp_path / "out" / str(number))
        process = subprocess.Popen(
            [*arguments, "-o", output, "--cache", str(cache)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(duration * percent / 100)
        process.kill()
        process.wait()
        if cache.exists():
            check_whole(cache)
    last = subprocess.run(
        [*arguments, "-o", str(tmp_path / "out" / "last"), "--cache", str(cache)], capture_output=True, check=True
    )
    assert last.stderr == plain.stderr == b""
    check_whole(cache)
    assert list((cache / "partial").iterdir()) == []
    assert (tmp_path / "out" / "last" / "model.onnx").read_bytes() == (tmp_path / "plain" / "model.onnx").read_bytes()
    assert json.loads(last.stdout)["parity"] == json.loads(plain.stdout)["parity"]
