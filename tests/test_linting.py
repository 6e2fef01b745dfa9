"""`trtforge lint` and `trtforge.lint_model`: exit codes, what is printed, what is written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from support import save_onnx

import trtforge
from trtforge.cli.app import run
from trtforge.errors import InputError
from trtforge.graph import save

PAIR = """g (float[N, 4] x) => (float[N, 2] y) <float s = {0.5}, uint8 z = {128}> {
    [q] a = QuantizeLinear(x, s, z) [d] b = DequantizeLinear(a, s, z) [m] y = MatMul(b, w) }"""
WEIGHT = np.arange(8, dtype=np.float32).reshape(4, 2)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with uint8 Q/DQ, in the working directory."""
    monkeypatch.chdir(tmp_path)
    return save_onnx(tmp_path / "net.onnx", PAIR, w=WEIGHT)


def test_errors_are_explained_and_exit_1(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lint", "net.onnx"]) == 1
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out == (
        "error nonzero-zero-point: QuantizeLinear 'q' has a zero-point other than 0: [128]\n"
        "error nonzero-zero-point: DequantizeLinear 'd' has a zero-point other than 0: [128]\n"
        "  why: TensorRT supports only symmetric quantization with constant zero-points of 0\n"
        "  fix: use a symmetric int8 scale that covers the range, as trtforge lint --fix does\n"
        "error unsigned-zero-point: QuantizeLinear 'q' has uint8 codes\n"
        "error unsigned-zero-point: DequantizeLinear 'd' has uint8 codes\n"
        "  why: TensorRT takes them for int8, which ends at 127 instead of 255, or refuses them\n"
        "  fix: use int8 with a symmetric scale that covers the range, as trtforge lint --fix does\n"
        "net.onnx: 4 errors, 0 warnings\n"
    )
    assert sorted(path.name for path in model.parent.iterdir()) == ["net.onnx"]


def test_fix_writes_a_clean_model_beside_the_source(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = model.read_bytes()
    assert run(["lint", "net.onnx", "--fix", "-o", "out/fixed.onnx"]) == 0
    out = capsys.readouterr().out
    assert "  fixed: int8 codes are the uint8 ones less 128; same numbers\n" in out
    assert out.endswith("out/fixed.onnx: 4 errors, 0 warnings, 1 fixes; 0 errors and 0 warnings are left\n")
    assert model.read_bytes() == source
    assert run(["lint", "out/fixed.onnx"]) == 0
    assert capsys.readouterr().out == "out/fixed.onnx: clean\n"


def test_fix_has_a_default_place_and_gives_equal_bytes(model: Path) -> None:
    assert run(["lint", "net.onnx", "--fix"]) == 0
    assert run(["lint", "net.onnx", "--fix", "-o", "again.onnx"]) == 0
    assert Path("build/net-fixed.onnx").read_bytes() == Path("again.onnx").read_bytes()


def test_an_existing_file_needs_force(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lint", "net.onnx", "--fix", "-o", "net.onnx"]) == 2
    assert "--force" in capsys.readouterr().err
    assert run(["lint", "net.onnx", "--fix", "-o", "net.onnx", "--force"]) == 0
    assert run(["lint", "net.onnx"]) == 0


def test_json_is_one_document(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lint", "net.onnx", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["passed"], found["output"], found["fixed"]) == (False, None, [])
    assert [entry["fixed"] for entry in found["findings"]] == [None] * 4
    assert found["remaining"] == [{k: v for k, v in entry.items() if k != "fixed"} for entry in found["findings"]]

    assert run(["lint", "net.onnx", "--fix", "--json"]) == 0
    mended = json.loads(capsys.readouterr().out)
    what = "int8 codes are the uint8 ones less 128; same numbers"
    assert mended["fixed"] == [{"rule": "unsigned-zero-point", "nodes": ["q", "d"], "what": what}]
    assert [(entry["rule"], entry["node"], entry["fixed"]) for entry in mended["findings"]] == [
        ("nonzero-zero-point", "q", what),
        ("nonzero-zero-point", "d", what),
        ("unsigned-zero-point", "q", what),
        ("unsigned-zero-point", "d", what),
    ]
    assert (mended["passed"], mended["remaining"], mended["output"]) == (True, [], "build/net-fixed.onnx")


def test_what_cannot_be_mended_exits_1_and_the_rest_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    body = PAIR.replace("[q]", "[dyn] c, e, f = DynamicQuantizeLinear(x) g = DequantizeLinear(c, e, f) [q]")
    save_onnx(tmp_path / "net.onnx", body.replace("(x, s, z) [d]", "(g, s, z) [d]"), w=WEIGHT)
    assert run(["lint", "net.onnx", "--fix"]) == 1
    out = capsys.readouterr().out
    assert "error dynamic-quantization: TensorRT has no operator DynamicQuantizeLinear (node 'dyn')\n  why: " in out
    assert "trtforge quantize MODEL --calib DATA" in out
    assert "3 errors and 2 warnings are left" in out
    written = onnx.load("build/net-fixed.onnx")
    assert [t.data_type for t in written.graph.initializer if "zero_point" in t.name] == [onnx.TensorProto.INT8]


def test_warnings_alone_exit_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = """g (float[N, 4] x) => (float[N, 2] y) <float s = {0.5}, int8 z = {0}> {
        a = QuantizeLinear(w, s, z) b = DequantizeLinear(a, s, z) y = MatMul(x, b) }"""
    path = save_onnx(tmp_path / "net.onnx", body, w=WEIGHT)
    assert run(["lint", str(path)]) == 0
    assert capsys.readouterr().out.endswith("net.onnx: 0 errors, 1 warnings\n")


def test_many_findings_are_cut_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = " ".join(f"a{i} = com.microsoft.FastGelu(x)" for i in range(12))
    total = ", ".join(f"a{i}" for i in range(12))
    text = f"g (float[4] x) => (float[4] y) {{ {calls} y = Sum({total}) }}"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20, "com.microsoft": 1]>\n{text}')
    onnx.save(model, tmp_path / "net.onnx")
    assert run(["lint", str(tmp_path / "net.onnx")]) == 1
    out = capsys.readouterr().out
    assert out.count("error missing-op") == 10
    assert "  ... and 2 more (--json shows all)\n" in out


def test_names_cannot_write_on_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_onnx(tmp_path / "net.onnx", PAIR, w=WEIGHT)
    model = onnx.load(path)
    model.graph.node[0].name = "q\x1b[31m\nerror"
    onnx.save(model, path)
    run(["lint", str(path)])
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lint"], ["no model was given", "lint --rules"]),
        (["lint", "net.onnx", "-o", "x.onnx"], ["-o was given without --fix", "add --fix"]),
        (["lint", "absent.onnx"], ["absent.onnx does not exist"]),
        (["lint", "net.onnx", "--fix", "-o", "."], ["cannot be written", "no regular file"]),
        (["lint", "net.onnx", "--limit", "model_nodes=1"], ["has 3 nodes", "--limit model_nodes=3"]),
    ],
)
def test_bad_input_is_named_and_exits_2(
    arguments: list[str], words: list[str], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert all(word in captured.err for word in words), captured.err
    assert sorted(path.name for path in model.parent.iterdir()) == ["net.onnx"]


def test_operators_are_judged_by_the_opset_that_a_build_raises_to(tmp_path: Path) -> None:
    body = "g (float[N, 4] x) => (float[N, 4] y) { y = com.microsoft.Gelu(x) }"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> {body}')
    onnx.save(model, tmp_path / "m.onnx")
    described = trtforge.inspect_model(tmp_path / "m.onnx").findings
    for findings in (trtforge.lint_model(tmp_path / "m.onnx").findings, described):
        assert [finding.why for finding in findings] == ["only ONNX Runtime and others run it"]


def test_an_opset_that_is_too_old_is_raised(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 7, opset_import: ["": 10]>\n{PAIR}'.replace("w)", "b)")), path)
    result = trtforge.lint_model(path, tmp_path / "out.onnx")
    assert result.passed
    assert onnx.load(tmp_path / "out.onnx").opset_import[0].version == 13


def test_rules_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lint", "--rules"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "weight-axis" in [line.split()[0] for line in lines]
    assert run(["lint", "--rules", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(lines)


def test_external_data_is_read_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_onnx(tmp_path / "net.onnx", PAIR, external=True, w=np.ones((4, 2), np.float32))
    monkeypatch.setattr(save, "EMBED_BYTES", 16)
    monkeypatch.setattr(save, "WEIGHT_BYTES", 16)
    result = trtforge.lint_model(path, tmp_path / "out.onnx")
    assert result.passed
    assert (tmp_path / "out.onnx.data").exists()
    onnx.checker.check_model(str(tmp_path / "out.onnx"))
    assert trtforge.lint_model(tmp_path / "out.onnx").findings == ()


def test_lint_model_raises_for_a_broken_file(tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(b"no model")
    with pytest.raises(InputError, match="not an ONNX file"):
        trtforge.lint_model(tmp_path / "net.onnx")
