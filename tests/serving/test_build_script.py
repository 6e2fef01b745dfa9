"""`build_engine.py`, which a package with `--from-onnx` carries: it builds the engine with no trtforge at hand."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging_cases import PROFILES, SHAPES, Case, build_case

from trtforge.packaging import PackageSpec, package
from trtforge.serving.model_folder import ServingOptions
from trtforge.serving.repository import damaged_models, load_repository


@pytest.fixture
def packaged(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    case: Case = request.param
    artifact = build_case(tmp_path, case, "m").directory
    package(PackageSpec(artifacts=(artifact,), repository=tmp_path / "models", from_onnx=True))
    return tmp_path / "models"


def run_script(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Isolated: what is beside the script and what pip installed is all that it sees.
    command = [sys.executable, "-I", str(folder / "build_engine.py"), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd="/")


@pytest.mark.parametrize("packaged", [PROFILES, SHAPES], indirect=True, ids=["profiles", "shapes"])
def test_the_script_builds_the_engine_and_the_package_stays_whole(packaged: Path) -> None:
    folder = packaged / "m/1"
    assert json.loads((folder / "model.json").read_text())["version"] == ""
    result = run_script(folder, "--portable")
    assert result.returncode == 0, result.stderr
    assert f"{folder}/model.engine: built with TensorRT-RTX" in result.stdout
    assert (folder / "model.engine").stat().st_size > 10_000
    assert not (folder / "model.engine.partial").exists()
    assert damaged_models(packaged, load_repository(packaged)) == []
    # Another version beside it keeps the engine that was built here.
    engine = (folder / "model.engine").read_bytes()
    options = ServingOptions(version=2)
    artifact = packaged.parent / "m"
    package(PackageSpec(artifacts=(artifact,), repository=packaged, from_onnx=True, options=options))
    assert (folder / "model.engine").read_bytes() == engine
    assert damaged_models(packaged, load_repository(packaged)) == []


@pytest.mark.parametrize("packaged", [SHAPES], indirect=True, ids=["shapes"])
def test_a_graph_that_is_refused_leaves_no_engine(packaged: Path) -> None:
    folder = packaged / "m/1"
    (folder / "model.onnx").write_bytes(b"no graph")
    result = run_script(folder, "--portable")
    assert result.returncode == 1
    assert "error: TensorRT-RTX did not build the engine" in result.stderr
    assert not list(folder.glob("model.engine*"))


def test_without_tensorrt_rtx_it_names_the_packages(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "trtforge/serving/python_models/build_engine.py"
    shutil.copy(script, tmp_path)
    # Without site-packages there is no TensorRT-RTX.
    command = [sys.executable, "-I", "-S", str(tmp_path / "build_engine.py")]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 2
    assert "fix: pip install -r requirements.txt" in result.stderr
