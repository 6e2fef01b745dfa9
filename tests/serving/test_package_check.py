"""`trtforge package --check`: the digits ViT in fp16, packaged, proved by the real server, and deployed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging_cases import make_artifact

from trtforge import build
from trtforge.cli.app import run
from trtforge.manifest import ParityInfo
from trtforge.serving.repository import load_repository
from trtforge.serving.triton.environment import TritonInstall

DIGITS = Path(__file__).parents[2] / "examples/digits_vit"


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("digits")
    build(DIGITS / "model.onnx", precision="fp16", verify="off", output=folder / "digits")
    yield folder / "digits"


def package(capsys: pytest.CaptureFixture[str], install: TritonInstall, *arguments: str) -> tuple[int, Any]:
    code = run(["package", *arguments, "--cpu", "--check", "--triton-env", str(install.root), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_digits_vit_passes_and_is_deployed(
    digits: Path, triton_install: TritonInstall, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = ("--triton", str(tmp_path / "models"), "--k8s", str(tmp_path / "k8s"), "--compose", str(tmp_path / "one"))
    # The delay in which 64 requests meet, however busy the machine is.
    code, result = package(capsys, triton_install, str(digits), *places, "--name", "digits", "--queue-delay", "200000")
    assert (code, result["passed"]) == (0, True)
    (check,) = result["check"]["models"]
    assert {request["place"] for request in check["requests"]} == {"min", "opt", "max", "outside"}
    load = check["load"]
    assert (load["answered"], load["wrong"]) == (load["sent"], 0)
    assert max(map(int, load["batches"])) > 1
    assert [Path(entry["folder"]).name for entry in result["deployments"]] == ["k8s", "one"]
    assert (tmp_path / "k8s/deployment.yaml").exists() and (tmp_path / "one/compose.yaml").exists()


def test_a_model_that_fails_is_kept_and_marked_and_not_deployed(
    triton_install: TritonInstall, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = ParityInfo(reference="fp32", candidate="c", verified=True, passed=True, budget=0.9)
    make_artifact(tmp_path / "a", parity=passed)
    # Code that cannot load, in the place of the package's own.
    monkeypatch.setattr("trtforge.serving.model_folder.python_model", lambda name: b"raise RuntimeError('broken')\n")
    places = ("--triton", str(tmp_path / "models"), "--k8s", str(tmp_path / "k8s"))
    code, result = package(capsys, triton_install, str(tmp_path / "a"), *places)
    assert (code, result["passed"], result["deployments"]) == (1, False, [])
    assert "broken" in result["check"]["models"][0]["failure"]
    assert [model.name for model in load_repository(tmp_path / "models").models] == ["m"]
    assert not (tmp_path / "k8s").exists()


def test_without_a_server_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_artifact(tmp_path / "a")
    place = ["--triton", str(tmp_path / "models"), "--triton-env", str(tmp_path / "nothing")]
    assert run(["package", str(tmp_path / "a"), "--cpu", "--check", *place]) == 2
    assert "trtforge triton install" in capsys.readouterr().err
    assert not (tmp_path / "models").exists()


def test_an_engine_is_not_checked_without_a_gpu_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from trtforge.errors import UnavailableError
    from trtforge.gpu import find_gpus

    try:
        find_gpus()
    except UnavailableError:
        make_artifact(tmp_path / "a")
        assert run(["package", str(tmp_path / "a"), "--check", "--triton", str(tmp_path / "models")]) == 2
        err = capsys.readouterr().err
        assert f"{tmp_path / 'a'} cannot be checked here" in err
        assert "package with --cpu" in err
        assert not (tmp_path / "models").exists()
    else:
        pytest.skip("there is a GPU")
