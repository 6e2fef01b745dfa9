"""`trtforge.runtime` on a GPU: an engine answers as its graph does in ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import save_onnx

import trtforge
from trtforge.reference import ReferenceModel
from trtforge.runtime import Engine, EngineError

PROFILES = """dims: {batch: {min: 1, opt: 4, max: 8}, seq: {min: 1, opt: 4, max: 8}}
inputs: {x: [batch, seq, 4]}
profiles:
  - {name: short}
  - {name: long, dims: {seq: {min: 8, opt: 24, max: 32}}}
"""
# `places` has as many columns as there are positive values, which only the run knows.
GRAPH = """runtime (float[batch,seq,4] x) => (float[batch,seq,3] y, int64[rank,count] places) {
    y = MatMul(x, w)  positive = Greater(x, zero)  places = NonZero(positive)
}"""


@pytest.fixture
def built(tmp_path: Path) -> trtforge.BuildResult:
    weights = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    model = save_onnx(tmp_path / "runtime.onnx", GRAPH, w=weights, zero=np.float32(0))
    (tmp_path / "profile.yaml").write_text(PROFILES)
    return trtforge.build(
        model, output=tmp_path / "out", verify="off", tf32=False, profile=str(tmp_path / "profile.yaml")
    )


def open_engine(built: trtforge.BuildResult) -> Engine:
    backend = built.manifest.backend
    return Engine(built.engine, backend.name, version=backend.version)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_each_profile_and_shape_answers_as_onnx_runtime(built: trtforge.BuildResult, on_gpu: bool) -> None:
    cupy = pytest.importorskip("cupy")
    engine = open_engine(built)
    assert [port.name for port in engine.ports] == ["x", "y", "places"]
    assert len(engine.profiles) == 2
    random = np.random.default_rng(1)
    with ReferenceModel(built.directory / "model.onnx") as reference:
        for shape in ((1, 1, 4), (4, 4, 4), (8, 32, 4), (2, 8, 4), (1, 1, 4)):
            x = random.normal(size=shape).astype(np.float32)
            expected = reference.run({"x": x})
            answer = engine.run({"x": cupy.asarray(x) if on_gpu else x})
            # Sums of 4 products in fp32, whose order may differ.
            np.testing.assert_allclose(answer["y"].get(), expected["y"], rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(answer["places"].get(), expected["places"])


def test_what_the_engine_does_not_take_is_refused(built: trtforge.BuildResult) -> None:
    pytest.importorskip("cupy")
    engine = open_engine(built)
    with pytest.raises(EngineError, match=r"takes \[1, 1, 4\] to \[8, 8, 4\]"):
        engine.run({"x": np.zeros((9, 4, 4), np.float32)})
    with pytest.raises(EngineError, match="float64"):
        engine.run({"x": np.zeros((1, 4, 4))})
    with pytest.raises(EngineError, match="input x is missing"):
        engine.run({})
