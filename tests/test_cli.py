"""The command line: exit codes, stdout and stderr, and what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import psutil
import pytest
from encoder import save_encoder, save_project

import trtforge
from trtforge.cli.app import run


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model, data and profile."""
    save_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def entries(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_build_prints_the_result_on_stdout_and_exits_0(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["build", "encoder.onnx", "--int8", "--gpu", "sm_86"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("build/encoder-int8\n")
    assert "int8 100.0%" in captured.out
    assert "the built graph in ONNX Runtime" in captured.out
    assert captured.err == ""
    assert run(["build", "encoder.onnx", "--int8", "--gpu", "sm_86"]) == 0
    assert "up to date" in capsys.readouterr().out


def test_build_json_is_one_document(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["build", "encoder.onnx", "--fp16", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["artifact"] == "build/encoder-fp16"
    assert value["parity"]["passed"] is True


def test_a_missed_budget_exits_1_and_keeps_the_artifact(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["build", "encoder.onnx", "--int8", "--budget", "1"]) == 1
    out = capsys.readouterr().out
    assert "FAILED" in out
    assert "worst node" in out
    assert Path("build/encoder-int8/model.engine").exists()
    assert run(["build", "encoder.onnx", "--int8", "--budget", "1"]) == 1, "a reused artifact is still a failed one"


def test_without_data_stderr_says_not_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_project(tmp_path)
    (tmp_path / "calibration" / "encoder.npz").unlink()
    arguments = ["build", str(tmp_path / "encoder.onnx"), "--fp16", "-o", str(tmp_path / "out")]
    assert run(arguments) == 0
    assert "parity: not verified" in capsys.readouterr().err
    assert run([*arguments, "--require-verify", "--force"]) == 1


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["build", "missing.onnx"], "missing.onnx"),
        (["build", "encoder.onnx", "--gpu", "sm_42"], "sm_42"),
        (["build", "encoder.onnx", "--gpu", "sm_75,sm_86"], "sm_75"),
        (["build", "encoder.onnx", "--gpu", "sm_90"], "sm_90"),
        (["build", "encoder.onnx", "--gpu", "sm_100"], "sm_100"),
        (["build", "encoder.onnx", "--fp16", "--bf16"], "--bf16"),
        (["build", "encoder.onnx", "--no-verify", "--require-verify"], "--no-verify"),
        (["build", "encoder.onnx", "--backend", "magic"], "magic"),
        (["build", "encoder.onnx", "--backend", "tensorrt"], "tensorrt"),
        (["build", "encoder.onnx", "--budget", "2"], "--budget"),
        (["build", "encoder.onnx", "--int8", "--recipe", "nope"], "nope"),
        (["build", "encoder.onnx", "--profile", "nope.yaml"], "nope.yaml"),
        (["build", "encoder.onnx", "--int8", "--calib", "nope.npz"], "nope.npz"),
        (["build", "encoder.onnx", "--limit", "model_nodes=few"], "--limit"),
        (["build", "encoder.onnx", "--limit", "model_nodes=3"], "nodes"),
        (["build", "encoder.onnx", "--frobnicate"], "--frobnicate"),
        (["build", "encoder.onnx", "-o", "calibration"], "calibration"),
        (["build", "encoder.onnx", "-o", "encoder.onnx"], "encoder.onnx"),
        (["build", "encoder.onnx", "-o", "encoder.onnx/below"], "encoder.onnx/below"),
        (["build", "profiles"], "profiles"),
        (["build", "profiles/encoder.yaml"], "profiles/encoder.yaml"),
        (["inspect", "calibration"], "calibration"),
        (["verify", "calibration"], "calibration"),
        (["calibrate", "missing.onnx"], "missing.onnx"),
        (["quantize", "encoder.onnx", "-o", "encoder.onnx"], "encoder.onnx"),
        (["profile", "missing.onnx"], "missing.onnx"),
    ],
)
def test_bad_input_exits_2_with_one_error_and_leaves_nothing(
    arguments: list[str], what: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = entries(project)
    assert run([*arguments, "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("error:") == 1
    assert "Traceback" not in captured.err
    error = json.loads(captured.out)["error"]
    assert error["exit_code"] == 2
    assert what in error["what"]
    assert entries(project) == before


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"wrong": np.zeros((9, 16, 32), np.float32)}, "no array for input"),
        ({"x": np.zeros((9, 16, 32), np.float64)}, "the model takes float32"),
        ({"x": np.zeros((9, 16), np.float32)}, "axes"),
        ({"x": np.zeros((0, 16, 32), np.float32), "attention_mask": np.ones((0, 16), np.int64)}, "no samples"),
        ({"x": np.full((9, 16, 32), np.nan, np.float32)}, "NaN"),
        ({"x": np.zeros((9, 16, 32), object)}, "pickled"),
        ({"x": np.zeros((9, 64, 32), np.float32), "attention_mask": np.ones((9, 64), np.int64)}, "profile"),
    ],
)
def test_bad_data_exits_2_and_says_why(
    content: dict[str, np.ndarray], why: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez("bad.npz", **({"attention_mask": np.ones((9, 16), np.int64)} | content))
    assert run(["build", "encoder.onnx", "--int8", "--calib", "bad.npz"]) == 2
    assert why in capsys.readouterr().err
    assert not Path("build").exists()


def test_data_larger_than_the_limit_when_unpacked_is_refused(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez_compressed("big.npz", x=np.zeros((64, 16, 32), np.float32), attention_mask=np.ones((64, 16), np.int64))
    arguments = ["build", "encoder.onnx", "--int8", "--calib", "big.npz", "--limit", "data_bytes=100000"]
    assert run(arguments) == 2
    assert "--limit data_bytes=" in capsys.readouterr().err


def test_a_truncated_model_exits_2(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = Path("encoder.onnx").read_bytes()
    Path("cut.onnx").write_bytes(data[: len(data) // 2])
    assert run(["build", "cut.onnx"]) == 2
    assert "cut.onnx" in capsys.readouterr().err


def test_no_command_prints_the_help_and_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert "doctor" in "".join(capsys.readouterr())
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"trtforge {trtforge.__version__}\n"


def test_debug_shows_the_traceback(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--debug", "build", "missing.onnx"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_an_internal_error_is_one_line_and_a_log(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr("trtforge.pipeline.select_backend", fail)
    assert run(["build", "encoder.onnx"]) == 3
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    log = Path(err.rpartition("details in ")[2].strip())
    assert "boom" in log.read_text()
    log.unlink()


def test_inspect_profile_calibrate_quantize_verify_and_doctor_speak_json(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(*arguments: str) -> dict[str, object]:
        assert run([*arguments, "--json"]) == 0
        value = json.loads(capsys.readouterr().out)
        return value if isinstance(value, dict) else {check["name"]: check for check in value}

    assert ask("inspect", "encoder.onnx")["opset"] == 20
    assert "batch: {min: 1, opt: 8, max: 16}" in str(ask("profile", "encoder.onnx")["yaml"])
    assert ask("calibrate", "encoder.onnx")["samples"] == 48
    assert Path("build/encoder-calibration.json").exists()
    assert len(ask("quantize", "encoder.onnx")["quantized"]) == 6  # type: ignore[arg-type]
    ask("build", "encoder.onnx", "--int8")
    assert ask("verify", "build/encoder-int8")["passed"] is True
    assert ask("inspect", "build/encoder-int8")["schema_version"] == 1
    checks = ask("doctor")
    assert checks["onnxruntime"]["state"] == checks["tensorrt-rtx"]["state"] == "ok"  # type: ignore[index]


def test_inspect_tells_of_a_damaged_artifact(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["build", "encoder.onnx", "--fp16", "--no-verify"]) == 0
    engine = project / "build" / "encoder-fp16" / "model.engine"
    capsys.readouterr()
    assert run(["inspect", "build/encoder-fp16"]) == 0
    assert capsys.readouterr().err == ""
    engine.write_bytes(engine.read_bytes()[:-1])
    assert run(["inspect", "build/encoder-fp16", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("warning: model.engine is missing or not as the manifest records")
    assert json.loads(captured.out)["schema_version"] == 1


def test_inspect_prints_the_plan(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["build", "encoder.onnx", "--int8", "--gpu", "sm_86"])
    capsys.readouterr()
    assert run(["inspect", "build/encoder-int8"]) == 0
    out = capsys.readouterr().out
    assert "int8 x int8" in out
    assert "_gemm_mha" in out


def test_profile_prints_the_yaml_to_fill_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_encoder(tmp_path / "encoder.onnx")
    assert run(["profile", str(tmp_path / "encoder.onnx")]) == 0
    captured = capsys.readouterr()
    assert "seq: {min: 1, opt: ?, max: ?}" in captured.out
    assert "profiles/encoder.yaml" in captured.err


def test_a_missing_builder_names_its_install_line(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    assert run(["build", "encoder.onnx"]) == 2
    assert "pip install 'trtforge[rtx]'" in capsys.readouterr().err


def test_help_and_import_load_no_heavy_package() -> None:
    code = "import sys, trtforge, trtforge.cli.app; print([m for m in sys.modules if m in sys.argv[1:]])"
    heavy = ["torch", "tensorrt", "tensorrt_rtx", "onnxruntime", "onnx", "numpy", "pydantic"]
    found = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.fixture
def running_build(project: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A build in its own process, once its builder child runs."""
    slow = "import time, trtforge.acceptance as p; old = p.verify_build\n"
    slow += "def wait(*a):\n    time.sleep(60)\n    return old(*a)\n"
    slow += "p.verify_build = wait\nfrom trtforge.cli.app import main; main()"
    command = [sys.executable, "-c", slow, "build", "encoder.onnx", "--int8"]
    process = subprocess.Popen(command, cwd=project, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    yield process
    process.kill()
    process.wait()


def _children(process: subprocess.Popen[bytes], service: str) -> list[psutil.Process]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = [child for child in psutil.Process(process.pid).children() if service in _command(child)]
        if found:
            return found
        time.sleep(0.01)
    pytest.fail(f"no child process for {service}")


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _is_gone(process: psutil.Process) -> bool:
    try:
        process.wait(20)
    except psutil.TimeoutExpired:
        return False
    return True


def test_a_killed_child_is_an_error_and_leaves_nothing(running_build: subprocess.Popen[bytes], project: Path) -> None:
    before = entries(project)
    _children(running_build, "backends.worker")[0].send_signal(signal.SIGKILL)
    _, err = running_build.communicate(timeout=60)
    assert running_build.returncode == 2
    assert b"SIGKILL" in err or b"signal 9" in err
    assert b"memory" in err
    assert entries(project) == before


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_an_interrupted_build_leaves_no_partial_artifact_and_no_orphan(
    sent: signal.Signals, code: int, running_build: subprocess.Popen[bytes], project: Path
) -> None:
    before = entries(project)
    children = _children(running_build, "backends.worker")
    running_build.send_signal(sent)
    assert running_build.wait(60) == code
    assert all(_is_gone(child) for child in children)
    assert entries(project) == before


def test_children_end_when_the_parent_is_killed_and_the_next_build_sweeps(
    running_build: subprocess.Popen[bytes], project: Path
) -> None:
    children = _children(running_build, "backends.worker")
    os.kill(running_build.pid, signal.SIGKILL)
    running_build.wait()
    assert all(_is_gone(child) for child in children)
    assert run(["build", "encoder.onnx", "--int8"]) == 0
    assert {path.name for path in Path("build").iterdir()} == {"encoder-int8"}


def test_external_data_outside_the_folder_is_refused(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = onnx.load("encoder.onnx")
    onnx.save(model, "external.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    Path("inner").mkdir()
    Path("external.onnx").rename("inner/external.onnx")
    assert run(["build", "inner/external.onnx"]) == 2
    assert "w.bin" in capsys.readouterr().err
    Path("inner/w.bin").symlink_to("../w.bin")
    assert run(["build", "inner/external.onnx"]) == 2
    assert "outside" in capsys.readouterr().err


def test_a_model_with_external_data_builds(project: Path) -> None:
    onnx.save(
        onnx.load("encoder.onnx"), "external.onnx", save_as_external_data=True, location="w.bin", size_threshold=0
    )
    result = trtforge.build(
        "external.onnx",
        precision="int8",
        calib="calibration/encoder.npz",
        profile="profiles/encoder.yaml",
        output=Path("out"),
    )
    assert result.passed
    assert result.manifest.precision.gemm_flops_fraction == {"int8": 1.0}


def test_a_closed_stdout_changes_nothing_but_the_output(project: Path) -> None:
    command = f"{sys.executable} -m trtforge.cli.app build encoder.onnx --fp16 --no-verify >&-"
    done = subprocess.run(["bash", "-c", command], cwd=project, capture_output=True, check=False)
    assert done.returncode == 0
    assert (project / "build" / "encoder-fp16" / "model.engine").exists()


@pytest.mark.parametrize("redirection", ["| true", ">/dev/full"])
def test_an_error_keeps_its_exit_code_when_nobody_reads_stdout(redirection: str, project: Path) -> None:
    command = f"set -o pipefail; {sys.executable} -m trtforge.cli.app inspect nope.onnx --json {redirection}"
    done = subprocess.run(["bash", "-c", command], cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_a_full_stdout_is_exit_2(project: Path) -> None:
    command = f"{sys.executable} -m trtforge.cli.app inspect encoder.onnx >/dev/full"
    done = subprocess.run(["bash", "-c", command], cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "stdout cannot be written" in done.stderr


def test_what_a_metric_prints_is_not_on_stdout(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("loud.py").write_text("def f(outputs, reference, feeds):\n    print('hello')\n    return 1.0\n")
    assert run(["build", "encoder.onnx", "--fp16", "--metric", "loud:f", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["parity"]["metrics"]["metric"]["candidate"] == 1.0
    assert "hello" in captured.err


def test_an_interrupt_says_that_nothing_was_left(running_build: subprocess.Popen[bytes]) -> None:
    _children(running_build, "backends.worker")
    running_build.send_signal(signal.SIGINT)
    _, err = running_build.communicate(timeout=60)
    assert err == b"interrupted; nothing was left behind\n"


def test_a_hostile_manifest_cannot_drive_the_terminal(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["build", "encoder.onnx", "--fp16", "--no-verify"])
    path = Path("build/encoder-fp16/manifest.json")
    value = json.loads(path.read_text())
    value["targets"] = ["\x1b[2Jsm_86"]
    value["backend"]["name"] = "x\nfake line"
    path.write_text(json.dumps(value))
    capsys.readouterr()
    assert run(["inspect", "build/encoder-fp16"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\nfake line" not in out


def test_a_reused_artifact_is_judged_by_this_builds_budget(project: Path) -> None:
    assert run(["build", "encoder.onnx", "--int8", "--budget", "1"]) == 1
    assert run(["verify", "build/encoder-int8", "--budget", "0.5"]) == 0
    assert run(["build", "encoder.onnx", "--int8", "--budget", "1"]) == 1


def test_force_does_not_delete_files_of_the_user(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["build", "encoder.onnx", "--fp16", "--no-verify"]) == 0
    note = Path("build/encoder-fp16/notes.txt")
    note.write_text("mine")
    assert run(["build", "encoder.onnx", "--fp16", "--no-verify", "--no-tf32", "--force"]) == 2
    assert "notes.txt" in capsys.readouterr().err
    assert note.read_text() == "mine"


@pytest.mark.parametrize("command", ["calibrate", "quantize"])
def test_force_does_not_replace_a_folder_by_a_file(
    command: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, "encoder.onnx", "-o", "profiles", "--force"]) == 2
    assert "no regular file" in capsys.readouterr().err
    assert Path("profiles/encoder.yaml").exists()


def test_debug_works_anywhere_on_the_line(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["build", "missing.onnx", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--metric", "m:f"], ["--eval", "calibration/encoder.npz"]])
def test_options_that_nothing_would_use_are_refused(
    option: list[str], project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["build", "encoder.onnx", "--no-verify", *option]) == 2
    assert "exclude each other" in capsys.readouterr().err
