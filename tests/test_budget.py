"""Budgets end to end: nodes stay float until the outputs, or the user's metric, are good enough."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from encoder import save_project

import trtforge
from trtforge.acceptance import VerifySpec, verify_artifact
from trtforge.cli.app import run
from trtforge.errors import InputError

# Of the encoder's cosines: INT8 alone gives 0.99988; "down" and "out" in float give 0.999958.
BUDGET = 0.99995


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model, its data and a metric."""
    save_project(tmp_path)
    # Written out, so that a new default changes no figure below.
    (tmp_path / "plain.yaml").write_text(
        "{version: 1, method: percentile, percentile: 99.999, weights: per_channel, weight_range: minmax, "
        "smooth: none, shift: false, bias_correction: false, rounding: nearest}"
    )
    (tmp_path / "budget_metric.py").write_text(
        "import numpy as np\n"
        "def closeness(outputs, reference, feeds):\n"
        "    error = np.abs(outputs['y'] - reference['y']).mean() / np.abs(reference['y']).mean()\n"
        "    return {'closeness': 1 - error, 'count': len(feeds['x'])}\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def has_quantized_input(model: Path) -> set[str]:
    """The MatMuls that read a DequantizeLinear."""
    graph = onnx.load(str(model)).graph
    dequantized = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    return {node.name for node in graph.node if node.op_type == "MatMul" and dequantized & set(node.input)}


def test_quantize_keeps_what_the_budget_takes_and_says_so(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["quantize", "encoder.onnx", "--recipe", "plain.yaml", "--budget", str(BUDGET), "-o", "q.onnx", "--json"])
        == 0
    )
    value = json.loads(capsys.readouterr().out)
    found = value["sensitivity"]
    kept = {entry["node"] for entry in found["nodes"] if entry["kept"]}
    assert kept == {"down", "out"} and found["met"]
    assert {entry["node"] for entry in value["kept_float"]} >= kept and not kept & set(value["quantized"])
    assert has_quantized_input(Path("q.onnx")) == set(value["quantized"]) == {"qkv", "qkv_part_1", "qkv_part_2", "up"}
    reasons = {entry["node"]: entry["reason"] for entry in value["kept_float"]}
    assert reasons["down"].startswith("kept float to meet the budget: INT8 here alone takes 5.7e-05 off")
    assert found["tried"][-1]["lowered_flops_share"] < found["tried"][0]["lowered_flops_share"] == 1.0


def test_quantize_prints_every_node(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["quantize", "encoder.onnx", "--recipe", "plain.yaml", "--budget", str(BUDGET), "-o", "q.onnx"]) == 0
    lines = capsys.readouterr().out.splitlines()
    note = next(line for line in lines if "budget" in line and "met with" in line)
    assert note.strip().startswith("budget 0.99995 met with 2 of 6 nodes kept float (41.7% of the FLOPs): mean cosine")
    rows = {line.split()[0]: line.split() for line in lines[lines.index(note) + 1 :]}
    assert list(rows) == ["node", "qkv", "qkv_part_1", "qkv_part_2", "out", "up", "down"]
    assert rows["qkv_part_1"][1:3] == ["qkv", "8.3%"] and "lowered" in rows["qkv_part_1"]
    assert "kept" in rows["down"] and rows["down"][4] == "dB"


def test_quantize_beyond_reach_exits_1_and_leaves_the_best(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["quantize", "encoder.onnx", "--budget", "1", "-o", "q.onnx"]) == 1
    captured = capsys.readouterr()
    assert "budget 1 not met; the best set tried has 6 of 6 nodes kept float" in captured.out
    assert (
        captured.err.startswith("warning: budget 1 not met")
        and "the float type alone does not reach it" in captured.err
    )
    assert has_quantized_input(Path("q.onnx")) == set()


def test_quantize_without_a_budget_judges_nothing(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["quantize", "encoder.onnx", "-o", "q.onnx", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sensitivity"] is None


def test_build_keeps_nodes_float_and_passes(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["build", "encoder.onnx", "--int8", "--gpu", "sm_86", "--recipe", "plain.yaml", "--budget", str(BUDGET)])
        == 0
    )
    captured = capsys.readouterr()
    assert f"INT8 alone misses the budget of {BUDGET}: looking for nodes to keep float" in captured.err
    assert f"search     budget {BUDGET} met with " in captured.out
    manifest = json.loads(Path("build/encoder-int8/manifest.json").read_text())
    found = manifest["sensitivity"]
    kept = {entry["node"] for entry in found["nodes"] if entry["kept"]}
    assert manifest["parity"]["passed"] and found["met"] and "down" in kept
    assert found["chosen_on"].endswith("calibration samples") and found["confirmed_on"].endswith("held-out samples")
    assert {entry["node"] for entry in manifest["precision"]["kept_float"]} >= kept
    assert all(manifest["precision"]["node_types"][node] == "fp16" for node in kept)
    assert 0.0 < manifest["precision"]["gemm_flops_fraction"]["int8"] < 1.0
    page = Path("build/encoder-int8/report.html").read_text()
    assert "What each region costs in low precision" in page and "Sets tried, by mean cosine of every output" in page


def test_equal_builds_give_equal_graphs_and_stories(project: Path) -> None:
    def build(name: str) -> tuple[bytes, object]:
        output = Path(name)
        result = trtforge.build(
            "encoder.onnx", precision="int8", gpu="sm_86", recipe="plain.yaml", budget=BUDGET, output=output
        )
        return (output / "model.onnx").read_bytes(), result.manifest.sensitivity

    assert build("a") == build("b")


def test_no_search_fails_as_it_is(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(
            [
                "build",
                "encoder.onnx",
                "--int8",
                "--gpu",
                "sm_86",
                "--recipe",
                "plain.yaml",
                "--budget",
                str(BUDGET),
                "--no-search",
            ]
        )
        == 1
    )
    assert capsys.readouterr().err == ""
    manifest = json.loads(Path("build/encoder-int8/manifest.json").read_text())
    assert manifest["sensitivity"] is None and manifest["precision"]["gemm_flops_fraction"]["int8"] == 1.0


def test_a_budget_on_the_metric_is_judged_by_its_first_figure(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--int8", "--recipe", "plain.yaml", "--gpu", "sm_86", "--metric", "budget_metric:closeness"]
    assert run(["build", "encoder.onnx", *options, "--budget", "0.99"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "closeness: " in line)
    assert "candidate 0.99" in line and line.endswith(", budget 0.99")
    manifest = json.loads(Path("build/encoder-int8/manifest.json").read_text())
    assert manifest["parity"]["figure"] == manifest["sensitivity"]["criterion"] == "closeness"
    assert manifest["parity"]["metrics"]["closeness"]["candidate"] >= 0.99 and manifest["parity"]["passed"]
    assert "The budget is 0.99 on closeness, which is 0.99" in Path("build/encoder-int8/report.html").read_text()


def test_verify_of_a_budget_on_a_metric_needs_the_metric(project: Path) -> None:
    artifact = Path("a")
    trtforge.build(
        "encoder.onnx", precision="int8", gpu="sm_86", metric="budget_metric:closeness", budget=0.9, output=artifact
    )
    with pytest.raises(InputError, match="is on the metric's figure 'closeness'") as error:
        verify_artifact(VerifySpec(artifact))
    assert "--metric" in error.value.fix
    assert verify_artifact(VerifySpec(artifact, metric="budget_metric:closeness")).figure == "closeness"
    assert verify_artifact(VerifySpec(artifact, metric="budget_metric:closeness", budget=0.9999)).passed is False
    assert verify_artifact(VerifySpec(artifact, budget=0.99)).figure is None


def test_a_metric_without_a_budget_is_only_shown(project: Path) -> None:
    result = trtforge.build(
        "encoder.onnx", precision="int8", gpu="sm_86", metric="budget_metric:closeness", output=Path("a")
    )
    assert result.passed and result.manifest.parity.figure is None and result.manifest.sensitivity is None


@pytest.mark.parametrize(
    ("options", "what", "fix"),
    [
        (["--metric", "budget_metric:closeness"], "--metric has nothing to judge", "give --budget"),
        (["--int8-weights", "--budget", "0.9"], "--budget and --int8-weights exclude each other", "trtforge build"),
        (["--budget", "0.9", "--calib", "t.json"], "a budget needs samples to judge by", "--calib"),
    ],
)
def test_what_quantize_cannot_judge_is_refused(
    project: Path, capsys: pytest.CaptureFixture[str], options: list[str], what: str, fix: str
) -> None:
    assert run(["calibrate", "encoder.onnx", "-o", "t.json"]) == 0
    capsys.readouterr()
    assert run(["quantize", "encoder.onnx", "-o", "q.onnx", *options]) == 2
    error = capsys.readouterr().err
    assert what in error and fix in error.split("fix:")[1]
    assert not Path("q.onnx").exists()


def test_the_search_serves_fp8_as_well(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(
            [
                "quantize",
                "encoder.onnx",
                "--fp8",
                "--recipe",
                "plain.yaml",
                "--budget",
                "0.9998",
                "-o",
                "q.onnx",
                "--json",
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)["sensitivity"]
    assert found["number_format"] == "fp8" and any(entry["kept"] for entry in found["nodes"])
    assert all(entry["why"].split(": ")[-1].startswith("FP8 here alone takes ") for entry in found["nodes"])
