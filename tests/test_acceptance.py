from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from support import save_onnx

import trtforge
from trtforge.acceptance import _open_reference
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
