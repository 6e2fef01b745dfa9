"""`trtforge calibrate`: a run that is interrupted or killed goes on where it was, and ends in the same table."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support import save_onnx

from trtforge.cli.app import run

SAMPLES = 4000
TABLE, PARTIAL = Path("t.json"), Path("t.json.partial")
COMMAND = ["calibrate", "m.onnx", "--calib", "data.npz", "-o", str(TABLE)]
# The command, saving its state after every batch instead of every few seconds.
SAVING = """
import sys
from trtforge.cli import app
from trtforge.quantization import checkpoint

checkpoint._INTERVAL_S = checkpoint._PAUSE_PER_SAVE = 0.0
app.main()
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a small model and more samples than a second takes."""
    random = np.random.default_rng(0)
    save_onnx(
        tmp_path / "m.onnx",
        """g (float[b, s, 32] x, int64[b, s] mask) => (float[b, s, 32] y, float[b, s] z) {
            h = MatMul(x, w1)
            r = Relu(h)
            y = MatMul(r, w2)
            z = Cast <to = 1> (mask)
        }""",
        w1=random.normal(size=(32, 64)).astype(np.float32),
        w2=random.normal(size=(64, 32)).astype(np.float32),
    )
    x = random.normal(size=(SAMPLES, 16, 32)).astype(np.float32)
    x[: SAMPLES // 2] *= 3
    np.savez(tmp_path / "data.npz", x=x, mask=np.ones((SAMPLES, 16), np.int64))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def saved() -> int:
    """When the state was last saved, in nanoseconds; 0 for never."""
    return PARTIAL.stat().st_mtime_ns if PARTIAL.exists() else 0


def start() -> subprocess.Popen[str]:
    """The command in a process of its own, once it has saved its state."""
    before = saved()
    process = subprocess.Popen(
        [sys.executable, "-c", SAVING, *COMMAND], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while saved() == before:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return process


def test_a_killed_run_goes_on_and_ends_in_the_same_table(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*COMMAND[:-1], "whole.json"]) == 0
    done: list[int] = []
    for pause in (0.0, 0.1):
        with start() as process:
            time.sleep(pause)
            process.kill()
            _, err = process.communicate()
        done += [int(line.split()[-3]) for line in err.splitlines() if "continuing" in line]
        assert process.returncode == -signal.SIGKILL
        assert not TABLE.exists()
    capsys.readouterr()
    assert run(COMMAND) == 0
    err = capsys.readouterr().err
    assert err.startswith("calibrate: continuing at sample ")
    assert err.endswith(f" of {SAMPLES}\n")
    done.append(int(err.split()[-3]))
    assert done == sorted(done)
    assert 0 < done[0] < done[-1] < SAMPLES
    assert TABLE.read_bytes() == Path("whole.json").read_bytes()
    assert {path.name for path in project.iterdir()} == {"m.onnx", "data.npz", "t.json", "whole.json"}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_says_what_it_keeps(project: Path, number: int, code: int) -> None:
    with start() as process:
        os.kill(process.pid, number)
        _, err = process.communicate()
    assert process.returncode == code
    assert err == f"interrupted; run the same command again to go on from {PARTIAL}\n"
    assert PARTIAL.exists()


def test_a_partial_file_of_something_else_is_replaced_with_a_warning(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    PARTIAL.write_bytes(b"PK\3\4 no zip")
    assert run(COMMAND) == 0
    err = capsys.readouterr().err
    assert err.startswith(f"warning: {project / PARTIAL} is ignored and removed: it is no .npz file")
    assert not PARTIAL.exists()


def test_other_data_does_not_go_on_from_the_state(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with start() as process:
        process.kill()
    with np.load("data.npz") as file:
        changed = {name: file[name][:100] for name in file.files}
    np.savez("data.npz", **changed)
    assert run(COMMAND) == 0
    assert "it belongs to another calibration" in capsys.readouterr().err


def test_bad_input_leaves_nothing(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("recipe.yaml").write_text("version: 1\nmask: masc\n")
    before = sorted(path.name for path in project.iterdir())
    output = ["-o", "new/t.json"]
    assert run([*COMMAND[:-2], "--recipe", "recipe.yaml", *output]) == 2
    err = capsys.readouterr().err
    assert "error: the recipe's mask 'masc' cannot be used" in err
    assert "fix: did you mean mask?" in err
    assert sorted(path.name for path in project.iterdir()) == before


@pytest.mark.parametrize("method", ["entropy", "mse"])
def test_methods_and_mask_of_a_recipe_make_a_table(
    method: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("recipe.yaml").write_text(f"version: 1\nmethod: {method}\nmask: mask\n")
    with np.load("data.npz") as file:
        few = {name: file[name][:64] for name in file.files}
    np.savez("data.npz", **few)
    assert run([*COMMAND, "--recipe", "recipe.yaml"]) == 0
    assert f"{method}, 64 samples" in capsys.readouterr().out


def test_force_does_not_replace_what_the_command_reads(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = Path("data.npz").read_bytes()
    assert run(["calibrate", COMMAND[1], "--calib", "data.npz", "-o", "data.npz", "--force"]) == 2
    assert "error: data.npz is what this command reads" in capsys.readouterr().err
    assert Path("data.npz").read_bytes() == data
    model = Path(COMMAND[1])
    source = model.read_bytes()
    assert run(["quantize", COMMAND[1], "--calib", "data.npz", "-o", COMMAND[1], "--force"]) == 2
    assert f"error: {model} is what this command reads" in capsys.readouterr().err
    assert model.read_bytes() == source
