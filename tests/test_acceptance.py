from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import save_onnx

import trtforge
from trtforge.acceptance import _open_reference
from trtforge.cli.app import run
from trtforge.cli.build import print_summary
from trtforge.errors import InputError


def test_a_source_that_onnxruntime_cannot_load_in_any_form_is_named(tmp_path: Path) -> None:
    path = save_onnx(tmp_path / "odd.onnx", "g (float[4] x) => (float[4] y) { y = Missing(x) }")
    expected = r"neither .*odd\.onnx nor its normalised form(.|\n)*Missing(.|\n)*--no-verify"
    with pytest.raises(InputError, match=expected), _open_reference(path, path, is_emulated=False):
        pass


def test_a_missed_budget_names_the_rounding_that_a_dynamic_source_does_and_the_build_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One feature reaches 1000 and counts for nothing; the source rounds the others, below 4, to 0 or 4."""
    codes = np.random.default_rng(0).integers(-99, 99, (32, 32)).astype(np.int8)
    codes[0] = 0
    path = save_onnx(
        tmp_path / "m.onnx",
        """g (float[b, 32] x) => (float[b, 32] y) {
            q, s, z = DynamicQuantizeLinear(x)
            p = MatMulInteger(q, w, z)
            f = Cast<to=1>(p)
            t = Mul(s, ws)
            y = Mul(f, t)
        }""",
        w=codes,
        ws=np.float32(0.01),
    )
    x = np.random.default_rng(1).normal(size=(16, 32)).astype(np.float32)
    x[:, 0] = 1000.0
    np.savez(tmp_path / "eval.npz", x=x)
    (tmp_path / "profile.yaml").write_text("dims: {b: {min: 1, opt: 8, max: 8}}\ninputs: {x: [b, 32]}\n")
    result = trtforge.build(
        path,
        precision="fp16",
        gpu="sm_86",
        profile=tmp_path / "profile.yaml",
        eval=str(tmp_path / "eval.npz"),
        output=tmp_path / "out",
    )
    parity = result.manifest.parity
    worst = min(run.outputs["y"].cosine for run in parity.batches)
    assert not result.passed
    assert parity.note is not None and parity.note.startswith("The source rounds activations to 8 bits")
    alone = re.search(r"in fp32, gives a cosine of (\S+)\. A higher budget judges that rounding\.$", parity.note)
    assert alone is not None and float(alone[1]) == pytest.approx(worst, abs=1e-3)
    print_summary(result)
    assert parity.note[:40] in capsys.readouterr().out


def build_root(folder: Path, samples: list[list[float]], **options: Any) -> trtforge.BuildResult:
    """A build of y = sqrt(x), z = log(x) on these samples."""
    model = save_onnx(
        folder / "m.onnx", "g (float[b, 2] x) => (float[b, 2] y, float[b, 2] z) { y = Sqrt(x)\n z = Log(x) }"
    )
    np.savez(folder / "eval.npz", x=np.array(samples, np.float32))
    (folder / "p.yaml").write_text("dims: {b: {min: 1, opt: 4, max: 8}}\ninputs: {x: [b, 2]}\n")
    return trtforge.build(
        model, profile=folder / "p.yaml", eval=str(folder / "eval.npz"), output=folder / "out", **options
    )


@pytest.mark.parametrize(
    ("sample", "text"), [([-1.0, -2.0], "gives NaN in output 'y'"), ([0.0, 0.0], "gives Inf in output 'z'")]
)
def test_a_source_that_gives_no_number_on_any_sample_is_named_and_no_cosine_is(
    tmp_path: Path, sample: list[float], text: str
) -> None:
    with pytest.raises(InputError) as caught:
        build_root(tmp_path, [sample] * 20)
    assert f"the source model itself {text} on all 20 samples" in caught.value.what
    assert "eval.npz" in caught.value.why
    assert "give other samples with --eval" in caught.value.fix
    assert "cosine" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_a_float16_source_that_passes_its_range_is_told(tmp_path: Path, precision: str) -> None:
    model = save_onnx(
        tmp_path / "m.onnx",
        """g (float[b, 2] x) => (float[b, 2] y) { n = Neg(x) h = Cast<to = 10>(n)
           s = Mul(h, h) r = Sqrt(s) y = Cast<to = 1>(r) }""",
    )
    np.savez(tmp_path / "eval.npz", x=np.random.default_rng(0).uniform(300, 900, (20, 2)).astype(np.float32))
    (tmp_path / "p.yaml").write_text("dims: {b: {min: 1, opt: 4, max: 8}}\ninputs: {x: [b, 2]}\n")
    options: dict[str, Any] = {"profile": tmp_path / "p.yaml", "eval": str(tmp_path / "eval.npz")}
    parity = trtforge.build(model, precision=precision, output=tmp_path / "out", **options).manifest.parity
    assert not parity.passed
    rounded = "bf16 and fp16" if precision == "bf16" else "fp16"
    assert parity.candidate == f"the built graph in ONNX Runtime, {rounded} emulated"
    assert parity.note is not None and parity.note.startswith("The source itself is in float16, and a value passes")


def test_a_budget_of_0_asks_for_no_numbers(tmp_path: Path) -> None:
    result = build_root(tmp_path, [[-1.0, -2.0]] * 20, budget=0.0)
    note = result.manifest.parity.note
    assert note is not None and note.startswith("The source model itself gives NaN in 20 samples of output 'y'; NaN in")


def test_samples_that_the_source_gives_nan_for_are_told_and_the_others_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The first 16, which also run at batch 1, give nothing; of the next one half a sample counts.
    samples = [[-1.0, -2.0]] * 16 + [[-1.0, 2.0]] + [[3.0, 2.0]] * 7
    result = build_root(tmp_path, samples)
    parity = result.manifest.parity
    assert result.passed
    assert [(run.batch, run.samples) for run in parity.batches] == [(4, 24)]
    for output in parity.outputs.values():
        assert (output.cosine, output.left_out, output.nan_reference, output.nan) == (pytest.approx(1.0), 16, 17, False)
    told = "The source model itself gives NaN in 17 samples of output 'y'; NaN in 17 samples of output 'z';"
    print_summary(result)
    assert told in capsys.readouterr().out
    assert told.replace("'", "&#x27;") in (tmp_path / "out" / "report.html").read_text()
    assert run(["verify", str(tmp_path / "out"), "--eval", str(tmp_path / "eval.npz")]) == 0
    assert told in capsys.readouterr().out
