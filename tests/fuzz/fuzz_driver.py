"""Run damaged inputs through the command line, one after another in this process, and tell what each left.

    python tests/fuzz/fuzz_driver.py FOLDER --seed 1 --first 0 --count 25

Prints one JSON object per input: {index, damage, command, code, error, problems}. A problem is anything but: exit 0, 1
or 2; an error with what, why and fix; the input's folder as it was (apart from what exit 0 and 1 promise); no file in
the temporary folder; no child process. FOLDER keeps the inputs that had problems. The seed and the index reproduce one.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from fuzz_models import CASES, write_case
from fuzz_mutations import mutate

from trtforge.cli.app import run

TIMEOUT_S = 120
# What may lie in the folder whatever the exit code; a cache keeps the stages that went well.
INPUTS = {"cache", "model.onnx", "model.data", "profile.yaml", "data.npz"}
BUILD = ["build", "model.onnx", "--profile", "profile.yaml", "-o", "out"]
COMMANDS: tuple[list[str], ...] = (
    ["inspect", "model.onnx"],
    ["lint", "model.onnx"],
    ["lint", "model.onnx", "--fix", "-o", "out"],
    ["profile", "model.onnx"],
    ["profile", "model.onnx", "--data", "data.npz"],
    ["profile", "model.onnx", "--profile", "profile.yaml"],
    [*BUILD, "--fp16", "--no-verify"],
    [*BUILD, "--fp16", "--calib", "data.npz"],
    [*BUILD, "--no-verify"],
    [*BUILD, "--int8", "--calib", "data.npz", "--no-verify"],
    [*BUILD, "--fp16", "--explain", "--cache", "cache"],
    ["reduce", "model.onnx", "--fp16", "--profile", "profile.yaml", "-o", "out"],
    ["profile", "model.onnx", "--data", "data.npz", "--buckets", "2"],
    ["quantize", "model.onnx", "--profile", "profile.yaml", "--calib", "data.npz", "-o", "out"],
)
# What runs on a damaged profile or damaged data: the commands that read it.
READERS = {name: tuple(command for command in COMMANDS if name in command) for name in ("profile.yaml", "data.npz")}


class HangError(BaseException):
    """A command that did not end; no `except Exception` on the way may take it for a failure."""


def _alarm(number: int, frame: object) -> None:
    del number, frame
    raise HangError


def run_case(seed: str, index: int, root: Path) -> dict[str, Any]:
    """Damage one input, run one command on it and look at what is left."""
    rng = random.Random(f"{seed}/{index}")
    folder = root / f"case_{index}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_case(rng.choice(CASES), folder)
    damage = mutate(folder, rng)
    command = list(rng.choice(READERS.get(damage.split()[1], COMMANDS)))
    output, errors = io.StringIO(), io.StringIO()
    code: int | None = None
    problems = []
    os.chdir(folder)
    signal.alarm(TIMEOUT_S)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            code = run(command)
    except HangError:
        problems.append(f"no end within {TIMEOUT_S} s")
    except BaseException as err:
        problems.append(f"{type(err).__name__} reached the caller: {err}")
    finally:
        signal.alarm(0)
        os.chdir(root)
    problems += find_problems(code, errors.getvalue(), folder)
    if not problems:
        shutil.rmtree(folder)
    error = errors.getvalue().strip().splitlines()
    return {
        "index": index,
        "damage": damage,
        "command": " ".join(command),
        "code": code,
        "error": " | ".join(line for line in error if line.startswith(("error:", "  why:", "  fix:")))[:600],
        "problems": problems,
    }


def find_problems(code: int | None, errors: str, folder: Path) -> list[str]:
    """What is wrong with how a command ended: its exit code, what it wrote to stderr, what it left."""
    problems = []
    if code not in (0, 1, 2):
        problems.append(f"exit code {code}: {errors[-300:]}")
    if code == 2 and not all(f"\n{part}" in f"\n{errors}" for part in ("error: ", "  why: ", "  fix: ")):
        problems.append(f"no what, why and fix: {errors[-300:]}")
    if "Traceback" in errors:
        problems.append("a traceback")
    left = {path.name for path in folder.iterdir()} - INPUTS
    if left and (code not in (0, 1) or left != {"out"}):
        problems.append(f"left behind: {sorted(left)}")
    temporary = list(Path(tempfile.gettempdir()).iterdir())
    if temporary:
        problems.append(f"left in the temporary folder: {[path.name for path in temporary]}")
        for path in temporary:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if children := [child for child in psutil.Process().children(recursive=True) if _is_running(child)]:
        problems.append(f"left running: {children}")
        for child in children:
            child.kill()
    return problems


def _is_running(child: psutil.Process) -> bool:
    """Whether a child still runs a moment later: one that was told to end may take that long."""
    time.sleep(0.2)
    return child.is_running() and child.status() != psutil.STATUS_ZOMBIE


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    options = parser.parse_args()
    root = options.folder.absolute()
    temporary = root / f"tmp_{options.first}"
    temporary.mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = str(temporary)
    os.environ["TMPDIR"] = str(temporary)
    signal.signal(signal.SIGALRM, _alarm)
    for index in range(options.first, options.first + options.count):
        print(json.dumps(run_case(options.seed, index, root)), flush=True)


if __name__ == "__main__":
    main()
