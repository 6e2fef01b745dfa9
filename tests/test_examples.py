"""The two examples, built for real: the committed digits model, and MiniLM exported here from its package."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

import trtforge

ROOT = Path(__file__).parent.parent
DIGITS = ROOT / "examples" / "digits_vit"
MINILM = ROOT / "examples" / "minilm"
EVAL_SAMPLES = 48


def test_digits_int8_loses_at_most_two_images_and_shrinks_the_engine(tmp_path: Path) -> None:
    def build(precision: str) -> trtforge.BuildResult:
        return trtforge.build(
            DIGITS / "model.onnx",
            precision=precision,
            recipe=str(DIGITS / "recipe.yaml"),
            eval=str(DIGITS / "eval.npz"),
            output=tmp_path / precision,
        )

    fp32, int8 = build("fp32"), build("int8")
    assert fp32.passed
    assert int8.passed
    assert int8.manifest.parity.samples == 360
    top1 = int8.manifest.parity.metrics["top1"]
    assert top1["fp32"] >= 0.97
    assert round((top1["fp32"] - top1["candidate"]) * 360) <= 2
    assert int8.manifest.precision.gemm_flops_fraction["int8"] >= 0.95
    assert int8.engine.stat().st_size < 0.6 * fp32.engine.stat().st_size


def test_digits_data_is_held_out() -> None:
    seen = np.load(DIGITS / "calibration" / "model.npz")["image"]
    held_out = np.load(DIGITS / "eval.npz")
    assert len(held_out["image"]) == len(held_out["labels"]) == 360
    hashes = {image.tobytes() for image in seen}
    assert not any(image.tobytes() in hashes for image in held_out["image"])
    assert (DIGITS / "model.onnx").stat().st_size < 8e6
    assert onnx.load(str(DIGITS / "model.onnx")).graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "onnxscript", "transformers")),
    reason="exporting MiniLM needs the extra 'export'",
)
def test_minilm_int8_beats_the_floor_of_0_98_and_all_its_gemms_are_int8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "minilm.onnx"
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, MINILM / "export.py", model], check=True, env=offline)
    subprocess.run([sys.executable, MINILM / "make_data.py", tmp_path], check=True, env=offline)
    with np.load(tmp_path / "eval.npz") as data:
        np.savez(tmp_path / "few.npz", **{name: data[name][:EVAL_SAMPLES] for name in data})
    monkeypatch.syspath_prepend(str(MINILM))
    result = trtforge.build(
        model,
        precision="int8",
        gpu="sm_86,sm_89,sm_120",
        calib=str(tmp_path / "calib.npz"),
        eval=str(tmp_path / "few.npz"),
        profile="minilm",
        recipe="minilm",
        metric="metric:pooled_cosine",
        output=tmp_path / "out",
    )
    assert result.passed
    assert result.manifest.warnings == ()
    assert result.manifest.precision.gemm_flops_fraction["int8"] >= 0.90
    assert result.manifest.plan.fused_attention == 6
    assert result.manifest.parity.metrics["pooled_cosine"]["candidate"] >= 0.98
    assert result.manifest.parity.metrics["pooled_cosine"]["before_qdq"] >= 0.9999
