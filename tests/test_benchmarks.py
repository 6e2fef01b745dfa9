"""The comparison with peers: what it measures, how it scores, what it writes, and that a failure keeps its row."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
Loader = Callable[[str], ModuleType]
NO_LIMIT_S, NO_LIMIT_BYTES = 600.0, 10**12


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Loader:
    """Imports a module of the folder, which is no package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def load_module(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load_module


def run_comparison(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, BENCHMARKS / "quantization.py", *arguments], capture_output=True, text=True, check=False
    )


def test_digits_by_trtforge_and_onnxruntime_with_modelopt_absent(tmp_path: Path) -> None:
    tools = ["trtforge", "modelopt-max", "onnxruntime-minmax-per_channel"]
    done = run_comparison(tmp_path, "--models", "digits", "--tools", *tools, "--output", tmp_path / "results")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "results" / "quantization.json").read_text())
    assert result["conditions"]["cores"] >= 1
    assert set(result["conditions"]["peers"]) == {"onnxruntime"}
    entry = result["models"]["digits"]
    assert (entry["calibration_samples"], entry["evaluation_samples"]) == (256, 360)
    assert entry["fp32"]["top1"] >= 0.97
    trtforge, table, modelopt, onnxruntime = entry["tools"]
    assert trtforge["cosine"] >= 0.99
    assert trtforge["top1"] >= entry["fp32"]["top1"] - 2 / 360
    assert trtforge["int8_gemm_share"] >= 0.95
    assert trtforge["fused_attention"] == 4
    assert table.keys() == {"tool", "seconds", "peak_mb"}
    assert modelopt == {
        "tool": "ModelOpt, max",
        "error": "not run: it needs an environment of its own, give --setup DIR",
    }
    assert onnxruntime["cosine"] >= 0.99
    assert "error" not in onnxruntime
    for row in (trtforge, table, onnxruntime):
        assert row["seconds"] > 0
        assert row["peak_mb"] > 40

    lines = (tmp_path / "results" / "quantization.md").read_text().splitlines()
    rows = [line.strip("| ").split("|") for line in lines if line.startswith("|")]
    assert [row[0].strip() for row in rows] == [
        "tool",
        "--",
        "trtforge",
        "trtforge, calibration only",
        "ModelOpt, max",
        "ONNX Runtime, minmax, per channel",
    ]
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    assert [cell.strip() for cell in rows[0]] == [
        *("tool", "cosine", "top1", "INT8 GEMM FLOPs", "kernels"),
        *("fused attention", "seconds", "peak MB", "notes"),
    ]


def test_options_that_fail_keep_their_row_with_the_reason(tmp_path: Path) -> None:
    done = run_comparison(
        *(tmp_path, "--models", "digits", "--variant", "--recipe nowhere.yaml"),
        *("--tools", "trtforge --recipe", "--output", tmp_path),
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "quantization.json").read_text())["models"]["digits"]["tools"]
    assert row["tool"] == "trtforge --recipe nowhere.yaml"
    assert row["error"].startswith("exit 2: error: ")
    assert "nowhere.yaml" in row["error"]
    assert "| exit 2: error: " in (tmp_path / "quantization.md").read_text()


def test_an_unknown_tool_is_refused_with_those_that_exist(tmp_path: Path) -> None:
    done = run_comparison(tmp_path, "--tools", "tensorflow", "--output", tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("no tool begins with tensorflow; there are trtforge, trtforge-calibrate, modelopt")


def test_peak_memory_counts_the_whole_tree_and_success_has_no_error(load: Loader, tmp_path: Path) -> None:
    process = load("process")
    child = "import time; block = b'x' * 150_000_000; time.sleep(0.5)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    measured = process.run_measured([sys.executable, "-c", parent], tmp_path / "log", NO_LIMIT_S, NO_LIMIT_BYTES)
    assert measured.error is None
    assert 150e6 < measured.peak_bytes < 400e6
    assert measured.seconds >= 0.5


def test_a_tree_over_its_memory_limit_is_stopped_as_a_whole(load: Loader, tmp_path: Path) -> None:
    process = load("process")
    pid_file = tmp_path / "pid"
    child = (
        f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); block = b'x' * 200_000_000; "
        "time.sleep(600)"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    measured = process.run_measured([sys.executable, "-c", parent], tmp_path / "log", NO_LIMIT_S, 150_000_000)
    assert measured.error is not None
    assert measured.error.startswith("stopped at 0.")
    assert measured.error.endswith("GB of memory (limit 0.1 GB)") or measured.error.endswith("(limit 0.2 GB)")
    state = Path(f"/proc/{pid_file.read_text()}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_tool_that_takes_too_long_is_stopped(load: Loader, tmp_path: Path) -> None:
    process = load("process")
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert process.run_measured(command, tmp_path / "log", 0.2, NO_LIMIT_BYTES).error == "stopped after 0 s"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("raise ValueError('Too many bins for data range')", "exit 1: ValueError: Too many bins for data range"),
        ("print('error: no data\\n  why: none\\n  fix: give some'); raise SystemExit(2)", "exit 2: error: no data"),
        ("raise SystemExit(3)", "exit 3: no output"),
        ("import os; os.kill(os.getpid(), 9)", "exit -9: no output"),
    ],
)
def test_a_failure_is_recorded_by_its_line(load: Loader, tmp_path: Path, code: str, error: str) -> None:
    process = load("process")
    measured = process.run_measured([sys.executable, "-c", code], tmp_path / "log", NO_LIMIT_S, NO_LIMIT_BYTES)
    assert measured.error == error


def test_cosine_is_the_mean_over_samples_and_leaves_padding_out(load: Loader) -> None:
    scoring = load("scoring")
    expected = np.array([[[1.0, 0.0], [0.0, 2.0]], [[3.0, 0.0], [0.0, 4.0]]])
    actual = np.array([[[1.0, 0.0], [0.0, 2.0]], [[4.0, 3.0], [0.0, -4.0]]])
    # Second sample: (3 * 4 - 4 * 4) / (5 * sqrt(41)); with its last position masked 12 / (3 * 5).
    assert scoring.mean_cosine(actual, expected, None) == pytest.approx((1 - 4 / (5 * 41**0.5)) / 2)
    assert scoring.mean_cosine(actual, expected, np.array([[1, 1], [1, 0]])) == pytest.approx((1 + 0.8) / 2)


def test_a_model_that_cannot_be_made_says_which_script_failed(load: Loader, tmp_path: Path) -> None:
    cases = load("cases")
    case = dataclasses.replace(cases.CASES["minilm"], scripts=(("absent.py", "."),))
    with pytest.raises(cases.PreparationError, match=r"^minilm/absent\.py: .*No such file"):
        cases.prepare_case(case, tmp_path)


def test_peers_that_are_set_up_are_left_alone_and_others_are_made(
    load: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantizers = load("quantizers")
    # pip installs nothing here, all else is real.
    monkeypatch.setitem(quantizers.REQUIREMENTS, "modelopt", ("--help",))
    stamp = tmp_path / "modelopt" / "requirements.json"
    stamp.parent.mkdir()
    stamp.write_text('["of another version"]')
    quantizers.set_up_peers(["modelopt"], tmp_path)
    python = quantizers.locate_python("modelopt", tmp_path)
    assert os.access(python, os.X_OK)
    assert json.loads(stamp.read_text()) == ["--help"]
    python.unlink()
    quantizers.set_up_peers(["modelopt"], tmp_path)
    assert not python.exists()


def test_each_peer_runs_in_its_own_environment(load: Loader, tmp_path: Path) -> None:
    quantizers = load("quantizers")
    assert quantizers.find_python(None, tmp_path) == sys.executable
    assert quantizers.find_python("modelopt", tmp_path) == str(tmp_path / "modelopt" / "bin" / "python")
    assert quantizers.find_python("onnxruntime", tmp_path) == str(tmp_path / "onnxruntime" / "bin" / "python")
    assert quantizers.find_python("modelopt", None) is None
    assert quantizers.find_python("onnxruntime", None) == sys.executable


def test_a_model_that_was_not_made_has_a_section_that_says_so(load: Loader) -> None:
    tables = load("tables")
    entry = {"title": "EfficientNet-Lite0", "error": "export.py: No module named 'torch'", "tools": []}
    assert tables.format_model(entry) == ("## EfficientNet-Lite0\n\nNot run: export.py: No module named 'torch'\n")


def test_a_table_has_empty_cells_for_what_a_tool_has_not_and_no_stray_bars(load: Loader) -> None:
    tables = load("tables")
    entry = {
        "title": "M",
        "calibration_samples": 4,
        "evaluation_samples": 8,
        "fp32": {"top1": 1.0},
        "tools": [
            {"tool": "a", "seconds": 1.25, "peak_mb": 90, "cosine": 0.5, "top1": 0.25, "build_error": "x | y"},
            {"tool": "b", "seconds": 2.0, "peak_mb": 80, "error": "exit 1: E"},
        ],
    }
    assert tables.format_model(entry).splitlines()[4:] == [
        "| tool | cosine | top1 | INT8 GEMM FLOPs | kernels | fused attention | seconds | peak MB | notes |",
        "| -- | -- | -- | -- | -- | -- | -- | -- | -- |",
        "| a | 0.5000 | 0.2500 |  |  |  | 1.2 | 90 | TensorRT-RTX does not build it: x / y |",
        "| b |  |  |  |  |  | 2.0 | 80 | exit 1: E |",
    ]
