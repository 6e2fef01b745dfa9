from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from shape_models import save_fixed, save_u_net

from trtforge.cli.app import run


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model and a folder of images of several sizes."""
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    for index, width in enumerate([8, 8, 8, 64]):
        np.savez(Path("data") / f"{index}.npz", x=np.zeros((1, 3, 8, width), np.float32))
    return save_u_net(Path("m.onnx"))


def test_the_yaml_to_fill_in_is_written_to_a_file(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "m.onnx", "-o", "profiles/m.yaml"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "profiles/m.yaml\n"
    assert captured.err == "fill in the ? of batch, h, w and save it as profiles/m.yaml\n"
    assert "h: {min: 4, opt: ?, max: ?}  # a multiple of 4" in Path("profiles/m.yaml").read_text()
    # As it is, it is no profile yet.
    assert run(["build", "m.onnx"]) == 2
    assert "profile profiles/m.yaml still has a ? to fill in, in line 2" in capsys.readouterr().err


def test_a_file_is_replaced_only_by_force_and_never_what_is_read(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("p.yaml").write_text("dims: {batch: 1, h: 8, w: 8}")
    assert run(["profile", "m.onnx", "-o", "p.yaml"]) == 2
    assert run(["profile", "m.onnx", "-o", "p.yaml", "--profile", "p.yaml", "--force"]) == 2
    assert "is what this command reads" in capsys.readouterr().err
    assert run(["profile", "m.onnx", "-o", "p.yaml", "--data", "data", "--force"]) == 0
    assert "x: [batch, 3, 8, w]" in Path("p.yaml").read_text()
    assert run(["profile", "m.onnx", "-o", "data/0.npz", "--data", "data", "--force"]) == 2
    assert "data/0.npz is what this command reads" in capsys.readouterr().err


def test_buckets_say_what_they_save(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "m.onnx", "--data", "data", "--buckets", "2"]) == 0
    captured = capsys.readouterr()
    assert "- {name: up_to_64, dims: {w: {min: 12, opt: 64, max: 64}}}" in captured.out
    assert captured.err.startswith("2 buckets (samples up to 8: 3, up to 64: 1): padding takes 0.0% of the work")


def test_json_holds_what_the_graph_says(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "m.onnx", "--json", "--data", "data", "--buckets", "2"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["source"] == "data"
    assert [(fact["name"], fact["kind"], fact["multiple"]) for fact in value["dims"]["dims"]] == [
        ("batch", "free", 1),
        ("h", "free", 4),
        ("w", "free", 4),
    ]
    assert value["buckets"]["caps"] == [8, 64]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--buckets", "2"], "--buckets needs data"),
        (["--buckets", "0", "--data", "data"], "--buckets 0 cannot be used"),
        (["--prefill-decode"], "--prefill-decode is for decoders with a cache"),
        (["--data", "nothing"], "data nothing cannot be used"),
    ],
)
def test_what_cannot_be_done_is_exit_2(
    model: Path, capsys: pytest.CaptureFixture[str], options: list[str], text: str
) -> None:
    assert run(["profile", "m.onnx", *options]) == 2
    assert text in capsys.readouterr().err


def test_shapes_that_the_model_cannot_take_are_exit_2(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez("odd.npz", x=np.zeros((2, 3, 8, 9), np.float32))
    assert run(["profile", "m.onnx", "--data", "odd.npz"]) == 2
    assert "axis 3 of input 'x' (dim w) is 9 at opt" in capsys.readouterr().err


def test_a_model_without_choice_prints_its_only_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", str(save_fixed(tmp_path / "f.onnx"))]) == 0
    captured = capsys.readouterr()
    assert captured.out == "inputs:\n  x: [1, 40]\n"
    assert captured.err == ""
