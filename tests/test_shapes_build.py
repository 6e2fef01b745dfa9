"""Whole builds of models whose shapes are no plain batch of samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from shape_models import save_decoder, save_feeds, save_fixed, save_recurrent, save_u_net

from trtforge import VerifySpec, build, verify_artifact
from trtforge.errors import InputError
from trtforge.pipeline import BuildResult
from trtforge.profiling import describe_profile


def run(model: Path, **options: object) -> BuildResult:
    return build(str(model), output=model.with_suffix(".out"), **options)  # type: ignore[arg-type]


def test_feeds_with_a_state_and_a_scalar_are_calibrated_and_verified_whole(tmp_path: Path) -> None:
    model = save_recurrent(tmp_path / "m.onnx")
    result = run(model, precision="int8", calib=str(save_feeds(tmp_path / "data", 20)), budget=0.9)
    manifest = result.manifest
    assert manifest.calibration is not None
    assert manifest.calibration.samples == 12
    assert manifest.parity.verified
    assert manifest.parity.samples == 8
    assert [batch.batch for batch in manifest.parity.batches] == [1]
    assert manifest.parity.outputs["next"].cosine > 0.99
    assert manifest.precision.nodes["int8"] > 0
    assert manifest.profiles[0].inputs["state"].max == (2, 3, 32)
    again = verify_artifact(VerifySpec(artifact=result.directory, eval=str(tmp_path / "data")))
    assert again.samples == 20


def test_a_folder_of_several_shapes_is_enough(tmp_path: Path) -> None:
    model = save_u_net(tmp_path / "m.onnx")
    (tmp_path / "d").mkdir()
    random = np.random.default_rng(0)
    for index, (height, width) in enumerate([(16, 24), (32, 8), (16, 24), (8, 8)] * 3):
        x = random.standard_normal((1, 3, height, width)).astype(np.float32)
        np.savez(tmp_path / "d" / f"{index:02d}.npz", x=x)
    result = run(model, precision="fp16", calib=str(tmp_path / "d"))
    span = result.manifest.profiles[0].inputs["x"]
    assert (span.min, span.opt, span.max) == ((1, 3, 8, 8), (1, 3, 16, 24), (1, 3, 32, 24))
    assert result.passed
    described = describe_profile(model, str(tmp_path / "d"))
    (tmp_path / "p.yaml").write_text(described.yaml)
    other = build(
        str(model),
        output=tmp_path / "o2",
        precision="fp16",
        calib=str(tmp_path / "d"),
        profile=str(tmp_path / "p.yaml"),
    )
    assert other.manifest.profiles[0].inputs == result.manifest.profiles[0].inputs


def test_a_model_whose_graph_leaves_no_choice_builds_without_a_profile(tmp_path: Path) -> None:
    result = run(save_fixed(tmp_path / "m.onnx"))
    assert result.manifest.profiles[0].inputs["x"].opt == (1, 40)
    assert "the graph leaves no choice of input shapes: x [1, 40]" in result.manifest.warnings


def test_a_dim_that_is_open_is_asked_for_with_what_the_graph_says(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="dynamic dimensions without a range") as caught:
        run(save_u_net(tmp_path / "m.onnx"))
    assert "  h: {min: 4, opt: ?, max: ?}  # a multiple of 4 from 4 on: node 'skip' (Concat)" in caught.value.fix


def test_shapes_that_do_not_fit_end_a_build_before_the_builder(tmp_path: Path) -> None:
    model = save_u_net(tmp_path / "m.onnx")
    (tmp_path / "p.yaml").write_text("dims: {batch: 1, h: 30, w: 32}")
    with pytest.raises(InputError, match=r"axis 2 of input 'x' \(dim h\) is 30 at opt"):
        run(model, profile=str(tmp_path / "p.yaml"))
    assert not model.with_suffix(".out").exists()


def test_a_decoder_is_built_for_both_phases(tmp_path: Path) -> None:
    model = save_decoder(tmp_path / "m.onnx")
    text = "dims: {batch: 1, seq: {min: 1, opt: 8, max: 16}, past: {min: 1, opt: 24, max: 32},"
    (tmp_path / "p.yaml").write_text(text + " total: {min: 2, opt: 32, max: 48}}")
    phases = describe_profile(model, profile=str(tmp_path / "p.yaml"), prefill_decode=True)
    (tmp_path / "q.yaml").write_text(phases.yaml)
    result = run(model, precision="fp16", profile=str(tmp_path / "q.yaml"))
    prefill, decode = result.manifest.profiles
    assert (prefill.inputs["past_key"].max, decode.inputs["ids"].max) == ((1, 2, 0, 16), (1, 1))
    assert decode.inputs["mask"].max == (1, 33)
