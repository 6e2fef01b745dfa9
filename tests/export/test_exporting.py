"""The whole way: a source given to a command, torch in its child process."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from export_cases import write_folder, write_models

from trtforge.cli.app import run
from trtforge.errors import InputError
from trtforge.export.mark import KEY
from trtforge.export.run import choose_opset
from trtforge.export.worker import size_beside
from trtforge.exporting import export_request, exported
from trtforge.manifest import load_manifest
from trtforge.spec import BuildSpec, precision_from_name

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None or importlib.util.find_spec("onnxscript") is None,
    reason="the export extra is not installed",
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the module `export_models`."""
    write_models(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def bert(folder: Path) -> Path:
    """A BERT of one layer, as save_pretrained writes it."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=40,
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("precision", "opset"), [("fp32", 20), ("fp16", 23), ("int8", 23), ("int8+fp32", 20)])
def test_the_opset_suits_the_precision(precision: str, opset: int) -> None:
    assert choose_opset(precision_from_name(precision))[0] == opset


def test_the_profile_file_names_dims_and_ranges(here: Path) -> None:
    (here / "profiles").mkdir()
    (here / "profiles" / "net.v2.yaml").write_text(
        "dims: {b: {min: 1, opt: 4, max: 8}, s: 16}\ninputs: {x: [b, s, 3]}\n"
    )
    request = export_request(BuildSpec(source=write_folder(here / "net.v2")))
    assert (request.layout, request.ranges, request.input_names) == ({"x": ("b", 16, 3)}, {"b": (1, 4, 8)}, ("x",))


def test_a_template_that_is_not_filled_in_is_told_so(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "p.yaml").write_text("dims: {rows: {min: 1, opt: ?, max: ?}}\ninputs: {x: [rows, 4]}\n")
    assert run(["export", "export_models:mlp", "--profile", "p.yaml", "-o", "m.onnx"]) == 2
    assert "error: profile p.yaml still has a ? to fill in, in line 1" in capsys.readouterr().err
    assert not (here / "m.onnx").exists()


def test_a_shipped_profile_is_found_by_its_name(here: Path) -> None:
    request = export_request(BuildSpec(source=Path("export_models:mlp"), profile="minilm"))
    assert request.input_names == ("input_ids", "attention_mask", "token_type_ids")


def test_the_names_of_the_data_say_which_inputs_are_wanted(here: Path) -> None:
    import numpy as np

    np.savez(here / "data.npz", input_ids=np.ones((2, 4), np.int64))
    request = export_request(BuildSpec(source=write_folder(here / "net"), calib="data.npz"))
    assert (request.layout, request.input_names) == (None, ("input_ids",))


@pytest.mark.parametrize("name", ["net/model.safetensors", "net/config.json", "p.yaml"])
def test_force_does_not_write_over_what_is_exported(here: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(here / "net")
    (here / "net" / "model.safetensors").write_bytes(b"weights")
    (here / "p.yaml").write_text("dims: {}")
    before = (here / name).read_bytes()
    assert run(["export", "net", "--profile", "p.yaml", "-o", name, "--force"]) == 2
    assert f"{name} is what this command reads" in capsys.readouterr().err
    assert (here / name).read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["model.onnx"], "model.onnx needs no export"),
        (["no_folder"], "no_folder cannot be exported"),
        (["export_models:"], "export_models: cannot be exported"),
        (["export_models:mlp", "--opset", "11"], "--opset 11 cannot be used"),
        (["export_models:mlp", "-o", "there.onnx"], "there.onnx exists"),
        (["empty"], "empty is not a Hugging Face model folder"),
        (["m.pt2"], "model m.pt2 does not exist"),
        (["weights.pth"], "weights.pth is a PyTorch checkpoint"),
    ],
)
def test_what_cannot_be_exported_is_said_at_once(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], what: str
) -> None:
    (here / "there.onnx").write_bytes(b"")
    (here / "weights.pth").write_bytes(b"PK\x03\x04")
    (here / "empty").mkdir()
    before = sorted(here.iterdir())
    assert run(["export", *arguments]) == 2
    assert f"error: {what}" in capsys.readouterr().err
    assert sorted(here.iterdir()) == before


def test_commands_that_read_onnx_say_how_to_get_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", "export_models:mlp"]) == 2
    assert "fix: export it first: trtforge export export_models:mlp -o model.onnx" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "what"),
    [
        (["build", "-o", "a", "--cache", "a"], "--cache a and the artifact a cannot share a folder"),
        (["build", "--gpu", "sm_35", "--cache", "c"], "sm_35"),
        (["build", "--backend", "tensorrt-rtx", "--plugin", "p.so", "--cache", "c"], "--plugin cannot be used"),
        (["quantize", "-o", "there.onnx", "--cache", "c"], "there.onnx exists"),
        (["quantize", "-o", "out.onnx", "--metric", "m:f", "--cache", "c"], "--metric has nothing to judge"),
    ],
)
def test_what_needs_no_model_is_refused_before_the_export(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str], what: str
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("exported")

    monkeypatch.setattr("trtforge.export.run.export_model", fail)
    (here / "there.onnx").write_bytes(b"")
    before = sorted(here.iterdir())
    assert run([command[0], "export_models:mlp", *command[1:]]) == 2
    assert what in capsys.readouterr().err
    assert sorted(here.iterdir()) == before


def test_a_source_is_checked_once_and_its_model_is_loaded_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    seen: list[str] = []

    def count(name: str) -> None:
        original = getattr(importlib.import_module(name.rpartition(".")[0]), name.rpartition(".")[2])
        monkeypatch.setattr(name, lambda *args: seen.append(name) or original(*args))

    folder = bert(here / "tiny")
    count("trtforge.export.run.check_folder")
    count("trtforge.reference.ReferenceModel")
    with exported(BuildSpec(source=folder, cache=here / "cache"), lambda _: None) as ready:
        assert ready.exported is not None
        assert ready.exported.info.passed
    assert seen == ["trtforge.export.run.check_folder", "trtforge.reference.ReferenceModel"]


@needs_torch
def test_a_function_becomes_an_engine_in_one_command(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "profiles").mkdir()
    (here / "profiles" / "mlp.yaml").write_text("dims: {rows: {min: 1, opt: 4, max: 8}}\ninputs: {x: [rows, 4]}\n")
    assert run(["build", "export_models:mlp", "--fp16"]) == 0
    assert "exported   Mlp by torch" in capsys.readouterr().out
    manifest = load_manifest(here / "build" / "mlp-fp16")
    assert (manifest.model.name, manifest.io[0].shape, manifest.io[1].name) == ("mlp", ("rows", 4), "scores")
    assert manifest.export is not None
    assert manifest.export.passed
    assert (manifest.export.kind, manifest.export.architecture, manifest.export.opset) == ("function", "Mlp", 23)
    assert [run.inputs["x"] for run in manifest.export.runs] == [(2, 4), (1, 4), (3, 4)]
    assert "export" in manifest.timings_s
    assert manifest.environment["source"] == "export_models:mlp"
    assert run(["verify", "build/mlp-fp16"]) == 2
    assert "trtforge export export_models:mlp --fp16 -o mlp.onnx" in capsys.readouterr().err
    assert {path.name for path in here.iterdir()} - {"__pycache__"} == {"build", "export_models.py", "profiles"}


@needs_torch
def test_a_model_that_differs_from_torch_is_kept_marked_and_exits_1(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["export", "export_models:different", "-o", "m.onnx", "--json"]) == 1
    captured = capsys.readouterr()
    info: dict[str, Any] = json.loads(captured.out)
    assert (info["model"], info["passed"], [run["error"] for run in info["runs"]]) == ("m.onnx", False, [None] * 3)
    assert "warning: the exported model differs from torch on x [2, 4]: output" in captured.err
    assert [entry.key for entry in onnx.load("m.onnx").metadata_props] == [KEY]


@needs_torch
def test_sizes_that_the_code_treats_otherwise_are_not_those_of_the_traced_model(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "p.yaml").write_text(
        "dims: {batch: {min: 1, opt: 2, max: 8}, seq: {min: 2, opt: 6, max: 8}}\ninputs: {x: [batch, seq, 4]}\n"
    )
    assert run(["export", "export_models:branching", "--profile", "p.yaml", "-o", "m.onnx", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["dims"] == {"batch": {"min": 1, "max": 3}, "seq": {"min": 2, "max": None}}
    assert "warning: the profile gives dim 'batch' 1 to 8, and the model was traced for 1 to 3" in captured.err
    assert run(["build", "export_models:branching", "--fp32", "--profile", "p.yaml", "-o", "out"]) == 2
    assert "why: the model was traced for 1 to 3: beyond" in capsys.readouterr().err
    assert not (here / "out").exists()


@needs_torch
@pytest.mark.parametrize(
    ("function", "at"), [("parity", [3, 9, 4]), ("odd_parity", [3, 8, 4]), ("even_only", [2, 9, 4])]
)
def test_a_branch_on_the_parity_of_a_size_is_found(
    here: Path, capsys: pytest.CaptureFixture[str], function: str, at: list[int]
) -> None:
    assert run(["export", f"export_models:{function}", "-o", "m.onnx", "--json"]) == 1
    captured = capsys.readouterr()
    runs = json.loads(captured.out)["runs"]
    assert [entry["inputs"]["x"] for entry in runs if not entry["outputs"]["output"]["passed"]] == [at]
    assert (
        f"warning: the exported model differs from torch on x {at}: output (it equals torch on x [2, " in captured.err
    )
    assert "its code does something else at some sizes" in captured.err


@pytest.mark.parametrize(
    ("size", "low", "high", "beside"), [(8, 2, None, 9), (8, 2, 9, 9), (8, 2, 8, 7), (8, 8, 8, None), (2, 2, 2, None)]
)
def test_the_size_beside_another_keeps_to_bounds(size: int, low: int, high: int | None, beside: int | None) -> None:
    assert size_beside(size, low, high) == beside


@needs_torch
def test_sizes_outside_the_profile_are_not_compared(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "p.yaml").write_text("dims: {batch: {min: 1, opt: 2, max: 2}, seq: 8}\ninputs: {x: [batch, seq, 4]}\n")
    assert run(["export", "export_models:parity", "--profile", "p.yaml", "-o", "m.onnx", "--json"]) == 0
    shapes = [entry["inputs"]["x"] for entry in json.loads(capsys.readouterr().out)["runs"]]
    assert shapes == [[2, 8, 4], [1, 8, 4]]


@needs_torch
def test_an_exported_file_remembers_the_sizes_that_it_was_traced_for(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "p.yaml").write_text(
        "dims: {batch: {min: 1, opt: 2, max: 8}, seq: {min: 2, opt: 6, max: 8}}\ninputs: {x: [batch, seq, 4]}\n"
    )
    assert run(["export", "export_models:branching", "-o", "m.onnx"]) == 0
    (entry,) = onnx.load(here / "m.onnx").metadata_props
    assert (entry.key, json.loads(entry.value)) == (
        "trtforge.dims",
        {"version": 1, "dims": {"batch": {"min": 1, "max": 3}, "seq": {"min": 2, "max": None}}},
    )
    capsys.readouterr()
    assert run(["profile", "m.onnx"]) == 0
    template = capsys.readouterr().out
    assert "batch: {min: 1, opt: ?, max: 3}  # from 1 to 3: the model was traced for these sizes" in template
    assert "seq: {min: 2, opt: ?, max: ?}" in template
    for command in (["profile", "m.onnx"], ["build", "m.onnx", "--fp32", "-o", "out"]):
        assert run([*command, "--profile", "p.yaml"]) == 2
        assert "why: the model was traced for 1 to 3: beyond" in capsys.readouterr().err
    assert not (here / "out").exists()


@needs_torch
def test_the_constraints_of_a_program_go_into_the_file(here: Path) -> None:
    torch = pytest.importorskip("torch")
    dims = ({0: torch.export.Dim("rows", min=4, max=512)},)
    torch.export.save(torch.export.export(torch.nn.ReLU(), (torch.ones(8, 4),), dynamic_shapes=dims), here / "m.pt2")
    assert run(["export", "m.pt2", "-o", "m.onnx"]) == 0
    (entry,) = onnx.load(here / "m.onnx").metadata_props
    assert json.loads(entry.value)["dims"] == {"batch": {"min": 4, "max": 512}}


@needs_torch
def test_a_file_without_bounds_gets_no_entry(here: Path) -> None:
    assert run(["export", "export_models:mlp", "-o", "m.onnx"]) == 0
    assert not onnx.load(here / "m.onnx").metadata_props


@needs_torch
def test_a_child_that_dies_is_one_error_and_leaves_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "dying.py").write_text("import os\ndef make():\n    os.kill(os.getpid(), 9)\n")
    before = sorted(here.iterdir())
    assert run(["export", "dying:make", "-o", "m.onnx"]) == 2
    assert "error: the PyTorch export process was killed by signal 9" in capsys.readouterr().err
    assert sorted(path for path in here.iterdir() if path.name != "__pycache__") == before


@needs_torch
def test_a_folder_becomes_an_engine_and_the_cache_saves_the_export(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = bert(here / "tiny-v1.5")
    (here / "p.yaml").write_text(
        "dims: {batch: {min: 1, opt: 2, max: 4}, seq: {min: 1, opt: 8, max: 16}}\n"
        "inputs: {input_ids: [batch, seq], attention_mask: [batch, seq]}\n"
    )
    command = ["build", str(folder), "--fp16", "--profile", "p.yaml", "--cache", "cache", "--no-verify"]
    assert run(command) == 0
    manifest = load_manifest(here / "build" / "tiny-v1.5-fp16")
    assert [port.name for port in manifest.io] == ["input_ids", "attention_mask", "logits"]
    assert manifest.export is not None
    assert {name: dim.max for name, dim in manifest.export.dims.items()} == {"batch": None, "seq": 40}
    assert manifest.plan.fused_attention == 1

    def fail(*_: object) -> None:
        raise InputError("exported again")

    monkeypatch.setattr("trtforge.export.run.export_model", fail)
    capsys.readouterr()
    assert run(command) == 0
    assert "(up to date)" in capsys.readouterr().out
    assert run([*command, "--bf16"]) == 2
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    assert run(command) == 2
    assert "error: exported again" in capsys.readouterr().err
