"""`trtforge cache`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cache_cases import TextCodec, store

from trtforge.cli.app import run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store(tmp_path / "c", TextCodec(tmp_path / "out.txt"), "x" * 200_000)
    return tmp_path / "c"


def test_info_prints_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cache", "info", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{folder}: 1 results, 0.4 MB"
    assert lines[1].split() == ["stage", "results", "size", "oldest", "use", "newest", "use"]
    assert re.fullmatch(r"  calibrate  1        0.4 MB  20\d\d-\d\d-\d\dT\S+Z  20\d\d-\d\d-\d\dT\S+Z", lines[2])


def test_info_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cache", "info", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["cache"], found["entries"]) == (str(folder), 1)
    assert set(found["stages"]["calibrate"]) == {"entries", "bytes", "oldest_use", "newest_use"}
    assert found["stages"]["calibrate"]["bytes"] == found["bytes"] > 400_000


def test_clear_says_what_it_removed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cache", "clear", str(folder), "--older-than", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"cache": str(folder), "removed_entries": 0, "removed_bytes": 0}
    assert run(["cache", "clear", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}: removed 1 results, 0.4 MB\n"
    assert run(["cache", "info", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}: 0 results, 0.0 kB\n"


def test_a_folder_that_is_no_cache_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cache", "clear", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path} is no trtforge cache\n"
        "  why: it has no CACHEDIR.TAG\n"
        "  fix: give the folder that was given to --cache\n"
    )


def test_a_negative_age_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cache", "clear", str(folder), "--older-than", "-1"]) == 2
    assert "older-than" in capsys.readouterr().err
