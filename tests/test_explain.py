"""`trtforge build --explain` and the diagnosis of a failed build, on the command line."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support import save_onnx

from trtforge.cli.app import run
from trtforge.cli.explain import explaining
from trtforge.progress import Event

DECODER = """decoder (float[1,4,16,16] x) => (float[1,4,a,b] y) {
    [act] h = Relu(x) [exp] e = Exp(h)
    [up] y = ConvTranspose<dilations = [2,2], strides = [2,2]>(e, w)
}"""
DETECTOR = """detector (float[1,8,4] x, float[1,1,8] s) => (int64[n,3] y) {
    [shift] b = Relu(x) [nms] y = NonMaxSuppression(b, s, most, half, half)
}"""


@pytest.fixture
def decoder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    weight = np.random.default_rng(0).normal(size=(4, 4, 3, 3)).astype(np.float32)
    save_onnx(tmp_path / "decoder.onnx", DECODER, w=weight)
    return ["build", "decoder.onnx", "--fp16", "--gpu", "sm_86", "--no-verify"]


@pytest.fixture
def detector(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_onnx(tmp_path / "detector.onnx", DETECTOR, most=np.array(3), half=np.float32(0.5))
    return ["build", "detector.onnx", "--fp16", "--gpu", "sm_86"]


def test_explain_prints_every_stage_with_its_nodes_and_reasons(decoder, capsys):
    assert run([*decoder, "--explain"]) == 0
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    starts = [line.removesuffix(": started") for line in lines if line.endswith(": started")]
    assert [stage for stage in starts if stage in ("load", "normalise", "lower", "build")] == [
        *("load", "normalise", "lower", "build"),
        *("lower", "build"),
    ]
    assert "normalise: opset 20 to 23; changed by pass: nothing" in lines
    assert "cast: exp stays float32: Exp needs float32 inside" in lines
    refused = lines.index(
        "build: TensorRT-RTX refuses node 'up' (ConvTranspose): TensorRT-RTX has no ConvTranspose with a stride and a "
        "dilation"
    )
    assert lines[refused + 1] == "build: kind of failure: deconv-dilation"
    assert lines[refused + 2].startswith("build: it reads e_float16 float16[1, 4, 16, 16]")
    remedied = next(line for line in lines[refused:] if "its dilation was written into its kernel, as zeros" in line)
    assert remedied.startswith("build: node 'up' (ConvTranspose): ")
    assert captured.out.startswith("build/decoder-fp16\n")


def test_explain_tells_what_came_from_the_cache(decoder, capsys):
    decoder += ["--explain", "--cache", "cache"]
    assert run(decoder) == 0
    assert not any(line.startswith("cache: ") for line in capsys.readouterr().err.splitlines())
    assert run([*decoder, "-o", "other", "--no-tf32"]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("cache: ")]
    assert told == [f"cache: {stage} is that of an earlier run" for stage in ("normalise", "shapes", "lower")]


def test_without_explain_only_the_remedy_is_told(decoder, capsys):
    assert run(decoder) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["build", "parity"]
    assert run([*decoder, "--explain"]) == 0
    err = capsys.readouterr().err
    assert "build: node 'up' (ConvTranspose): TensorRT-RTX has no ConvTranspose" in err, "an artifact that is there"
    assert "precision: exp stays wider: Exp needs float32 inside" in err


def test_explain_prints_the_trail_of_a_failure_too(detector, capsys):
    assert run([*detector, "--explain"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "build: kind of failure: no-kernel" in lines
    assert any(line.startswith("build: it reads ") for line in lines)
    assert any(line.startswith("build: the builder's words: ") for line in lines)
    assert lines[-3].startswith("error: TensorRT-RTX refuses node 'nms' (NonMaxSuppression)")


def test_a_failed_build_gives_its_diagnosis_as_json(detector, capsys):
    assert run([*detector, "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    found = error["diagnosis"]
    assert found["cause"] == "no-kernel"
    assert (found["node"], found["op"]) == ("nms", "NonMaxSuppression")
    assert error["why"].startswith(found["reason"])
    assert found["remedy"] == error["fix"]
    assert len(found["shapes"]) >= 2


def test_what_the_linter_refuses_has_a_diagnosis_too(tmp_path, capsys):
    source = save_onnx(tmp_path / "odd.onnx", "g (float[4,8] x) => (float[4,8] y) { a = Relu(x) [odd] y = Foo(a) }")
    assert run(["build", str(source), "--json", "--no-verify", "-o", str(tmp_path / "out")]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["diagnosis"]["node"] == "odd"
    assert error["diagnosis"]["op"] == "Foo"
    assert (error["diagnosis"]["reason"], error["diagnosis"]["remedy"]) == (error["why"], error["fix"])


def test_other_errors_have_no_diagnosis(tmp_path, capsys):
    assert run(["build", str(tmp_path / "missing.onnx"), "--json"]) == 2
    assert "diagnosis" not in json.loads(capsys.readouterr().out)["error"]


def test_details_become_notices_and_the_rest_passes():
    shown = []
    report = explaining(shown.append)
    detail = Event("cast", "one", "detail")
    for event in (Event("lower"), detail, Event("build", "3 of 4"), detail, Event("x", "y", "warning")):
        report(event)
    assert [(event.stage, event.detail, event.level) for event in shown] == [
        ("lower", "started", "notice"),
        ("lower", "", "progress"),
        ("cast", "one", "notice"),
        ("build", "3 of 4", "progress"),
        ("x", "y", "warning"),
    ]
