"""The typed functions."""

from __future__ import annotations

from pathlib import Path

import pytest
from encoder import save_profile, save_project

import trtforge


@pytest.mark.parametrize("kind", [str, Path])
def test_paths_may_be_texts_or_paths(tmp_path: Path, kind: type) -> None:
    model = save_project(tmp_path)
    save_profile(tmp_path / "own.yaml")
    (tmp_path / "recipe.yaml").write_text("method: mse\n")
    data = kind(tmp_path / "calibration" / "encoder.npz")
    result = trtforge.build(
        kind(model),
        precision="int8",
        calib=data,
        eval=data,
        profile=kind(tmp_path / "own.yaml"),
        recipe=kind(tmp_path / "recipe.yaml"),
        output=kind(tmp_path / "out"),
        cache=kind(tmp_path / "cache"),
    )
    assert result.passed
    assert result.engine == tmp_path / "out" / "model.engine"
    assert (tmp_path / "cache" / "CACHEDIR.TAG").exists()


def test_an_option_that_is_none_has_its_default(tmp_path: Path) -> None:
    model = save_project(tmp_path)
    table = trtforge.calibrate(model, calib=None, profile=None, recipe=None, cache=None)
    assert table.to_json() == trtforge.calibrate(model).to_json()
