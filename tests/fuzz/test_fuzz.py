"""Damaged models, profiles and data: every one ends with an exit code and one clear error, and leaves nothing.

200 inputs by default; FUZZ_COUNT=2000 runs more, FUZZ_SEED another series. `fuzz_driver.py` runs a single one again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from fuzz_driver import find_problems

SEED = os.environ.get("FUZZ_SEED", "1")
COUNT = int(os.environ.get("FUZZ_COUNT", "200"))
CHUNK = 25
GOOD = "error: it\n  why: so\n  fix: this\n"


@pytest.mark.parametrize("first", range(0, COUNT, CHUNK))
def test_damaged_inputs_are_refused_or_harmless(first: int, tmp_path: Path) -> None:
    driver = Path(__file__).with_name("fuzz_driver.py")
    command = [sys.executable, str(driver), str(tmp_path), "--seed", SEED, "--first", str(first), "--count", str(CHUNK)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=CHUNK * 150)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert (done.returncode, len(results)) == (0, CHUNK), (
        f"ended at input {first + len(results)}: {done.stderr[-2000:]}"
    )
    assert [result for result in results if result["problems"]] == []
    codes = Counter(result["code"] for result in results)
    # The inputs are neither all refused at the door nor all harmless.
    assert codes[0] > 0 and codes[2] > 0


@pytest.mark.parametrize(
    ("code", "errors", "left", "expected"),
    [
        (3, "error: internal error", None, "exit code 3"),
        (None, "", None, "exit code None"),
        (2, "error: it failed\n", None, "no what, why and fix"),
        (0, "Traceback (most recent call last):", None, "a traceback"),
        (2, GOOD, "out", "left behind: ['out']"),
        (0, "", ".out.partial", "left behind: ['.out.partial']"),
        (2, GOOD, None, None),
        (0, "", "out", None),
    ],
)
def test_the_driver_sees_what_goes_wrong(
    code: int | None,
    errors: str,
    left: str | None,
    expected: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "case").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    if left is not None:
        (tmp_path / "case" / left).write_text("")
    problems = find_problems(code, errors, tmp_path / "case")
    assert len(problems) == (expected is not None)
    assert expected is None or problems[0].startswith(expected)
