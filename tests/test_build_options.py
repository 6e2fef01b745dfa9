"""Builder and engine options through the command line; TensorRT's path with TensorRT-RTX under the name `tensorrt`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from encoder import save_project
from native_stubs import run_python, stub_driver, tensorrt_module

from trtforge.cli.app import run
from trtforge.manifest import load_manifest

RUN = "import sys; from trtforge.cli.app import run; sys.exit(run(sys.argv[1:]))"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def nvidia(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a driver of one GPU, and TensorRT-RTX under the name `tensorrt`."""
    folder = tmp_path_factory.mktemp("nvidia")
    stub_driver(folder, 90)
    tensorrt_module(folder)
    return folder


def test_a_build_with_tensorrt_records_what_it_was_told(project: Path, nvidia: Path) -> None:
    options = ["--fp16", "--timing-cache", "cache", "--hardware-compatible", "ampere_plus", "--workspace", "1GiB"]
    arguments = ["build", "encoder.onnx", *options, "--json"]
    manifest = json.loads(run_python(RUN, *arguments, libraries=nvidia, modules=nvidia))
    assert (manifest["backend"]["name"], manifest["targets"]) == ("tensorrt", ["sm_90"])
    assert manifest["engine"] == {
        "plugins": {},
        "plugin_layers": 0,
        "refit": False,
        "strip_weights": False,
        "version_compatible": False,
        "hardware_compatible": "ampere_plus",
        "optimization_level": None,
        "workspace": 2**30,
    }
    digest = hashlib.sha256(Path("cache").read_bytes()).hexdigest()
    assert manifest["environment"]["timing_cache_sha256"] == digest
    assert manifest["parity"]["passed"] is True
    assert manifest["precision"]["gemm_flops_fraction"] == {"fp16": 1.0}
    report = Path("build/encoder-fp16/report.html").read_text()
    assert "ampere_plus" in report and "1073741824" in report
    # The cache has changed since, which makes it no other artifact.
    assert json.loads(run_python(RUN, *arguments, libraries=nvidia, modules=nvidia))["reused"] is True
    assert {path.name for path in project.iterdir()} == {"encoder.onnx", "calibration", "profiles", "build", "cache"}


def test_the_timing_cache_of_a_stage_cache_is_that_of_one_gpu_model_and_never_fails_a_build(
    project: Path, nvidia: Path
) -> None:
    options = ["build", "encoder.onnx", "--fp16", "--no-verify", "--cache", "stages", "--json"]
    run_python(RUN, *options, libraries=nvidia, modules=nvidia)
    (file,) = (project / "stages" / "timing").iterdir()
    assert file.name.startswith("tensorrt-")
    assert file.name.endswith("-NVIDIA_Stub.bin")
    content = file.read_bytes()
    file.write_bytes(b"torn" * 20)
    run_python(RUN, *options, "--no-tf32", "-o", "other", libraries=nvidia, modules=nvidia)
    assert file.read_bytes() == content
    assert f"[W] --timing-cache {file} cannot be used" in Path("other/build.log").read_text()


def test_options_that_change_the_engine_are_another_artifact(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["build", "encoder.onnx", "--fp16", "--optimization-level", "0"]) == 0
    manifest = load_manifest(Path("build/encoder-fp16"))
    assert (manifest.engine.optimization_level, manifest.engine.workspace) == (0, None)
    assert "timing_cache_sha256" not in manifest.environment
    capsys.readouterr()
    assert run(["build", "encoder.onnx", "--fp16"]) == 2
    assert "made from other inputs" in capsys.readouterr().err
    assert run(["build", "encoder.onnx", "--fp16", "--optimization-level", "0"]) == 0
    assert "up to date" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--refit"], "--refit cannot be used with tensorrt-rtx"),
        (["--strip-weights"], "--strip-weights cannot be used with tensorrt-rtx"),
        (["--version-compatible"], "--version-compatible cannot be used with tensorrt-rtx"),
        (["--hardware-compatible", "ampere_plus"], "--hardware-compatible cannot be used with tensorrt-rtx"),
        (["--timing-cache", "cache"], "--timing-cache cannot be used with tensorrt-rtx"),
        (["--plugin", "a.so", "--plugin", "b.so"], "--plugin cannot be used with tensorrt-rtx"),
        (["--hardware-compatible", "hopper"], "--hardware-compatible 'hopper' is unknown"),
        (["--optimization-level", "9"], "--optimization-level 9 cannot be used"),
        (["--workspace", "lots"], "--workspace lots cannot be used"),
        (["--backend", "tensorrt"], "--backend tensorrt is not available here"),
    ],
)
def test_what_cannot_be_done_here_is_refused_up_front(
    project: Path, capsys: pytest.CaptureFixture[str], options: list[str], error: str
) -> None:
    before = set(project.iterdir())
    assert run(["build", "encoder.onnx", *options]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {error}\n")
    assert "fix:" in captured.err
    assert captured.out == ""
    assert set(project.iterdir()) == before


def test_a_workspace_that_is_too_small_is_named(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["build", "encoder.onnx", "--fp16", "--workspace", "64"]) == 2
    error = capsys.readouterr().err
    assert "why: no kernel can do with the scratch memory that --workspace allows" in error
    assert "fix: give a larger --workspace" in error
    assert not Path("build").exists()
