"""FP8, INT4 and INT8 weights through the whole job, with the real builder and the real ONNX Runtime."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import onnx_graphsurgeon as gs
import pytest
from encoder import WIDTH, save_encoder, save_profile, save_project

import trtforge
from trtforge.acceptance import VerifySpec, verify_artifact
from trtforge.cli.app import run
from trtforge.errors import InputError
from trtforge.spec import Precision
from trtforge.stages import check_opset

NUMBERS = 3 * WIDTH * WIDTH + WIDTH * WIDTH + 2 * 4 * WIDTH * WIDTH
DOWN = 4 * WIDTH * WIDTH


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the encoder, with data and profile."""
    folder = tmp_path_factory.mktemp("project")
    save_project(folder)
    return folder


@pytest.mark.parametrize(
    ("precision", "gpu", "shares", "weights"),
    [
        # Query, key and value are one product in half precision.
        ("fp8", "sm_89,sm_120", {"fp8": 1.0}, {"fp8": (4, NUMBERS)}),
        ("fp8+bf16", "sm_89", {"fp8": 1.0}, {"fp8": (4, NUMBERS)}),
        ("fp8+fp32", "sm_120", {"fp8": 1.0}, {"fp8": (6, NUMBERS)}),
        ("int4", None, {"fp16": 1.0}, {"int4": (1, DOWN)}),
        ("int4+bf16", "sm_86", {"bf16": 1.0}, {"int4": (1, DOWN)}),
        ("int8-weights", None, {"fp16": 1.0}, {"int8": (4, NUMBERS)}),
        ("int8-weights+fp32", "sm_86", {"fp32": 1.0}, {"int8": (6, NUMBERS)}),
        ("int8-weights", "sm_75", {"fp16": 1.0}, {"int8": (4, NUMBERS)}),
    ],
)
def test_build_is_what_was_asked_for_and_passes(
    project: Path,
    tmp_path: Path,
    precision: str,
    gpu: str | None,
    shares: dict[str, float],
    weights: dict[str, tuple[int, int]],
) -> None:
    result = trtforge.build(project / "encoder.onnx", precision=precision, gpu=gpu, output=tmp_path / "out")
    manifest = result.manifest
    assert result.passed
    assert manifest.parity.verified
    emulated = {"bf16": ", bf16 emulated", "fp32": ""}.get(precision.partition("+")[2], ", fp16 emulated")
    assert manifest.parity.candidate == f"the built graph in ONNX Runtime{emulated}"
    assert manifest.precision.requested == precision
    assert manifest.precision.gemm_flops_fraction == shares
    assert manifest.plan.fused_attention == (0 if precision.endswith("fp32") else 1)
    assert manifest.warnings == ()
    width = 4 if precision.endswith("fp32") else 2
    found = {name: (entry.count, entry.float_bytes // width) for name, entry in manifest.precision.weights.items()}
    assert found == weights
    assert all(entry.bytes < entry.float_bytes for entry in manifest.precision.weights.values())


def test_int4_says_why_the_other_weights_stay_float(project: Path, tmp_path: Path) -> None:
    manifest = trtforge.build(project / "encoder.onnx", precision="int4", gpu="sm_86", output=tmp_path / "out").manifest
    kept = {entry.node: entry.reason for entry in manifest.precision.kept_float}
    assert kept["up"] == "K is 32, not a multiple of the INT4 block of 128"
    assert "down" not in kept
    assert any("chosen by the layers' outputs" in note for note in manifest.notes)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Weights in INT4" in page
    assert "K is 32, not a multiple" in page


def test_weight_only_needs_no_data_and_says_what_it_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_encoder(tmp_path / "encoder.onnx")
    save_profile(tmp_path / "profiles" / "encoder.yaml")
    assert run(["build", str(model), "--int4", "--gpu", "sm_86", "-o", str(tmp_path / "out"), "--json"]) == 0
    captured = capsys.readouterr()
    value = json.loads(captured.out)
    assert "parity: not verified" in captured.err
    assert value["calibration"] is None
    assert any(note.startswith("int4 weights are rounded to nearest") for note in value["notes"])


def test_fp8_without_data_is_refused_by_its_own_name(tmp_path: Path) -> None:
    model = save_encoder(tmp_path / "encoder.onnx")
    with pytest.raises(InputError, match="--fp8 needs calibration data, and there is none"):
        trtforge.build(model, precision="fp8", gpu="sm_89", output=tmp_path / "out")


def test_a_table_is_no_data_to_choose_weights_by(project: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--int4 takes calibration data, not a calibration table") as caught:
        trtforge.build(project / "encoder.onnx", precision="int4", calib="table.json", output=tmp_path / "out")
    assert "leave it out" in caught.value.fix


def test_target_that_cannot_is_refused_before_anything_is_done(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["build", str(project / "encoder.onnx"), "--fp8", "-o", str(tmp_path / "out")]) == 2
    assert "--fp8 cannot be built for sm_80, sm_86" in capsys.readouterr().err
    assert run(["build", str(project / "encoder.onnx"), "--int4", "--gpu", "sm_75", "-o", str(tmp_path / "out")]) == 2
    assert "--int4 cannot be built for sm_75" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_two_quantizations_are_an_error(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("build", "quantize"):
        assert run([command, str(project / "encoder.onnx"), "--int4", "--int8-weights"]) == 2
        assert "--int4 and --int8-weights exclude each other" in capsys.readouterr().err


def test_nothing_to_store_is_an_error(project: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("exclude: ['*']\n")
    with pytest.raises(InputError, match="--int4 has nothing to quantize in this model") as caught:
        trtforge.build(project / "encoder.onnx", precision="int4", recipe=str(recipe), output=tmp_path / "out")
    assert "excluded by the recipe's pattern" in caught.value.why


def test_summary_shows_what_the_weights_take(project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "build",
        str(project / "encoder.onnx"),
        "--int8-weights",
        "--gpu",
        "sm_86",
        "-o",
        str(tmp_path / "out"),
    ]
    assert run(arguments) == 0
    assert "weights    4 in int8, " in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--fp8", "--int4", "--int8-weights"])
def test_quantize_writes_a_valid_graph_in_the_format(
    project: Path, tmp_path: Path, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.onnx"
    assert run(["quantize", str(project / "encoder.onnx"), flag, "-o", str(path), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["precision"] == flag.removeprefix("--")
    assert "down" in value["quantized"]
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    types = {tensor.data_type for tensor in model.graph.initializer}
    expected = {"--fp8": "FLOAT8E4M3FN", "--int4": "INT4", "--int8-weights": "INT8"}[flag]
    assert onnx.TensorProto.DataType.Value(expected) in types


def test_equal_inputs_give_equal_bytes(project: Path, tmp_path: Path) -> None:
    for name in ("first", "second"):
        trtforge.quantize(project / "encoder.onnx", tmp_path / f"{name}.onnx", precision="int4")
    assert (tmp_path / "first.onnx").read_bytes() == (tmp_path / "second.onnx").read_bytes()


def test_verify_scores_an_artifact_again(project: Path, tmp_path: Path) -> None:
    built = trtforge.build(project / "encoder.onnx", precision="fp8+bf16", gpu="sm_89", output=tmp_path / "out")
    parity = verify_artifact(VerifySpec(tmp_path / "out"))
    assert parity.candidate == "the built graph in ONNX Runtime, bf16 emulated"
    assert parity.outputs["y"].cosine == pytest.approx(built.manifest.parity.outputs["y"].cosine, abs=1e-6)


def test_opset_that_could_not_be_raised_lacks_the_format() -> None:
    graph = gs.Graph(opset=20)
    check_opset(graph, Precision("fp8", "fp16"))
    with pytest.raises(InputError, match="--int4 needs opset 21; this model stays at opset 20") as caught:
        check_opset(graph, Precision("int4", "fp16"))
    assert caught.value.fix == "export the model with opset 21 or newer"


def test_fp8_does_not_complete_a_model_that_came_quantized(project: Path, tmp_path: Path) -> None:
    source, calib = project / "encoder.onnx", str(project / "calibration" / "encoder.npz")
    trtforge.quantize(source, tmp_path / "int8.onnx", precision="int8+fp32")
    with pytest.raises(InputError, match="--fp8 cannot complete a model that came with Q/DQ") as caught:
        trtforge.quantize(tmp_path / "int8.onnx", tmp_path / "fp8.onnx", precision="fp8", calib=calib)
    assert "start from the float model" in caught.value.fix


def test_fp8_keeps_the_largest_values_unless_the_recipe_names_a_method(project: Path, tmp_path: Path) -> None:
    source = project / "encoder.onnx"
    recipe = tmp_path / "recipe.yaml"
    methods = []
    for text in ("exclude: [down]", "method: percentile"):
        recipe.write_text(f"{text}\n")
        result = trtforge.quantize(source, tmp_path / "fp8.onnx", precision="fp8", recipe=str(recipe), force=True)
        assert result.table is not None
        methods.append(result.table.method)
    assert methods == ["minmax", "percentile"]
    result = trtforge.quantize(source, tmp_path / "fp8.onnx", precision="fp8", force=True)
    assert result.table is not None
    assert all(entry.amax == max(abs(entry.min), abs(entry.max)) for entry in result.table.tensors.values())
