"""`trtforge fuse` and its function: what is shown, why not, and bad input."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_checks import Watch
from encoder import save_encoder, save_profile
from support import save_onnx

import trtforge
from trtforge.cli.app import run
from trtforge.errors import InputError

sys.path.insert(0, str(Path(__file__).parent / "fusion"))
from region_models import POST, changed, model_of

GATED = changed(
    POST, ("[act] a = Gelu(u) ", "[gate] gg = MatMul(h, wg) sg = Sigmoid(u) [act] a = Mul(sg, gg) ")
)  # fmt: skip


@pytest.fixture
def block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A post-norm block with key padding, in the working directory."""
    monkeypatch.chdir(tmp_path)
    onnx.save(model_of(POST), "net.onnx")
    return Path("net.onnx")


@pytest.fixture
def gated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same with a gated FFN."""
    monkeypatch.chdir(tmp_path)
    onnx.save(model_of(GATED, wg=np.ones((16, 32), np.float32)), "gated.onnx")
    return Path("gated.onnx")


def test_a_block_is_shown_with_its_roles(block: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fuse", str(block)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "attention_ffn_block softmax: post-norm, 2 heads of 8, scale 0.3536, key padding by mask, gelu of 32, "
        "epsilon 1e-06"
    )
    roles = dict(line.split() for line in lines[1:-3])
    assert (roles["query"], roles["query_bias"], roles["down"], roles["residual1"]) == ("mq", "bq_", "md", "res1")
    assert lines[-3:] == [
        "tensorrt-rtx, tensorrt: 1 attention as Attention-23 where the plan is not worse",
        "tensorrt --plugin: 1 attention_ffn_block unchanged: its heads are 8 wide; "
        "the plugin takes 32, 64, 80, 96, 128",
        "net.onnx: 1 blocks, 1 attentions, 1 FFNs in 34 nodes; 0 near misses",
    ]


def test_a_block_that_the_plugin_takes_is_shown_with_its_op_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = {"heads": np.array([0, 0, 1, 32]), "flat": np.array([0, 0, 32]), "scale": np.array(0.25, np.float32)}
    wide |= {f"w{name}": np.ones((32, 32), np.float32) for name in "qkvod"} | {"wu": np.ones((32, 32), np.float32)}
    wide |= {name: np.ones(32, np.float32) for name in ("bq", "bk", "bv", "bo", "bu", "bd", "g1", "g2", "e1", "e2")}
    path = tmp_path / "wide.onnx"
    onnx.save(model_of(POST, inputs="float[batch, seq, 32] x, int64[batch, seq] mask", **wide), path)
    assert run(["fuse", str(path), "--json"]) == 0
    forms = json.loads(capsys.readouterr().out)["forms"]
    assert [(form["target"], form["region"], form["lowered_to"], form["reason"]) for form in forms] == [
        ("tensorrt-rtx, tensorrt", "softmax", "Attention-23", None),
        ("tensorrt --plugin", "softmax", "trtforge::AttentionFFN_post_gelu_lengths", None),
    ]


def test_without_explain_near_misses_are_counted(gated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fuse", str(gated)]) == 0
    out = capsys.readouterr().out
    assert "2 near misses (--explain tells why)" in out
    assert "gated:" not in out


def test_explain_says_why_not(gated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fuse", str(gated), "--explain"]) == 0
    out = capsys.readouterr().out
    assert (
        "no attention_ffn_block: the FFN is gated: two projections are multiplied\n  softmax: stopped at act\n" in out
    )
    assert "no ffn: the FFN is gated: two projections are multiplied\n  md: stopped at act\n" in out
    assert out.endswith("gated.onnx: 0 blocks, 1 attentions, 0 FFNs in 36 nodes; 2 near misses\n")


def test_json_holds_regions_and_near_misses(gated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fuse", str(gated), "--json"]) == 0
    captured = capsys.readouterr()
    value = json.loads(captured.out)
    assert captured.err == ""
    assert value["counts"] == {"attention_ffn_block": 0, "attention": 1, "ffn": 0}
    (region,) = value["regions"]
    assert (region["pattern"], region["roles"]["scores"], region["num_heads"]) == ("attention", "scores", 2)
    assert region["mask"]["key_padding"] == {"tensor": "mask", "is_padding_zero": True}
    assert value["near_misses"][0] == {
        "pattern": "attention_ffn_block",
        "anchor": "softmax",
        "node": "act",
        "reason": "the FFN is gated: two projections are multiplied",
    }


def test_many_places_of_one_reason_are_cut_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = " ".join(f"u{i} = MatMul(h{i}, wu) a{i} = Tanh(u{i}) h{i + 1} = MatMul(a{i}, wd)" for i in range(12))
    onnx.save(model_of(f"h0 = Neg(x) {layers} y = Neg(h12)"), tmp_path / "net.onnx")
    assert run(["fuse", str(tmp_path / "net.onnx"), "--explain"]) == 0
    out = capsys.readouterr().out
    assert out.count("stopped at") == 10
    assert "  ... and 2 more (--json shows all)\n" in out


def test_the_profile_of_the_conventions_fixes_what_the_model_leaves_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_encoder(tmp_path / "encoder.onnx")
    assert trtforge.find_fusions(model).profile is None
    path = save_profile(tmp_path / "profiles" / "encoder.yaml", "inputs: {x: [2, 16, 32], attention_mask: [2, 16]}\n")
    result = trtforge.find_fusions(model)
    assert result.profile == path
    assert len(result.matches.attentions()) == 1
    other = save_profile(tmp_path / "other.yaml")
    assert trtforge.find_fusions(model, str(other)).profile == other
    assert run(["fuse", str(model), "--profile", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err


def test_an_ffn_alone_is_shown(mlp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fuse", str(mlp)]) == 0
    out = capsys.readouterr().out
    assert "ffn down: relu of 8\n" in out
    assert out.endswith("0 blocks, 0 attentions, 1 FFNs in 3 nodes; 0 near misses\n")


def test_names_cannot_write_on_the_terminal(gated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = onnx.load(gated)
    for node in model.graph.node:
        node.name += "\x1b[31m\nerror"
    onnx.save(model, gated)
    assert run(["fuse", str(gated), "--explain"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\nerror" not in out


def test_bad_input_is_named_and_leaves_nothing(watch: Watch) -> None:
    assert "absent.onnx does not exist" in watch.refusal(["fuse", "absent.onnx"])
    save_onnx(watch.folder / "m.onnx", "g (float[2] x) => (float[2] y) { h = Neg(x) y = Neg(h) }")
    assert "--limit model_nodes=2" in watch.refusal(["fuse", "m.onnx", "--limit", "model_nodes=1"])
    (watch.folder / "model").mkdir()
    assert "trtforge export model" in watch.refusal(["fuse", "model"])


def test_find_fusions_raises_for_a_broken_file(tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(b"no model")
    with pytest.raises(InputError, match="not an ONNX file"):
        trtforge.find_fusions(tmp_path / "net.onnx")
