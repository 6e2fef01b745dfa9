"""TensorRT itself: build, inspect, run and compare. Everything here waits for a machine that has it and a GPU."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoder import save_project, save_samples
from native_stubs import run_python

import trtforge
from trtforge.backends.registry import select_backend
from trtforge.gpu import find_gpus
from trtforge.manifest import load_manifest
from trtforge.reference import ReferenceModel
from trtforge.target import BackendName

# Runs an engine on the arrays of an .npz file, refitted from an ONNX file where one is given: in a process of its own,
# as a build does.
RUN_ENGINE = """
import sys
import numpy as np
import tensorrt as trt
from polygraphy.backend.trt import EngineFromBytes, TrtRunner
with open(sys.argv[1], "rb") as file:
    engine = EngineFromBytes(file.read())()
if len(sys.argv) > 4:
    log = trt.Logger()
    refitter = trt.Refitter(engine, log)
    assert trt.OnnxParserRefitter(refitter, log).refit_from_file(sys.argv[4])
    assert refitter.refit_cuda_engine()
with TrtRunner(engine) as runner:
    outputs = runner.infer(dict(np.load(sys.argv[2])))
    np.savez(sys.argv[3], **{name: np.asarray(value) for name, value in outputs.items()})
"""


def build(folder: Path, precision: str = "fp16", **options: Any) -> trtforge.BuildResult:
    engine_options = trtforge.EngineOptions(**options)
    return trtforge.build(
        save_project(folder), precision=precision, engine_options=engine_options, output=folder / "out", force=True
    )


def cosine_with_graph(result: trtforge.BuildResult, *refit_from: Path) -> float:
    """Cosine of what the engine computes on the GPU with what model.onnx does in ONNX Runtime."""
    folder, model = result.directory.parent, result.directory / "model.onnx"
    feeds = {name: array[:8] for name, array in np.load(save_samples(folder / "feeds.npz", seed=7)).items()}
    np.savez(folder / "batch.npz", **feeds)
    run_python(RUN_ENGINE, *map(str, (result.engine, folder / "batch.npz", folder / "out.npz", *refit_from)))
    with ReferenceModel(model) as reference:
        expected = reference.run(feeds)["y"].astype(np.float64)
    found = np.load(folder / "out.npz")["y"].astype(np.float64)
    return float((found * expected).sum() / np.linalg.norm(found) / np.linalg.norm(expected))


def test_auto_is_tensorrt_for_the_gpu_that_is_here() -> None:
    backend = select_backend()
    assert backend.name == BackendName.TENSORRT
    assert backend.target(None).compute_capabilities == (find_gpus()[0].compute_capability,)


@pytest.mark.parametrize(("precision", "gemm"), [("fp32", "fp32"), ("fp16", "fp16"), ("int8", "int8")])
def test_the_plan_comes_from_the_inspector_and_the_engine_computes_what_the_graph_does(
    tmp_path: Path, precision: str, gemm: str
) -> None:
    result = build(tmp_path, precision)
    assert result.passed
    assert "the engine cannot be loaded here" not in (result.directory / "build.log").read_text()
    plan = result.manifest.plan
    assert plan.unreadable is None
    assert plan.kernels > 0
    assert set(plan.gemm) <= {gemm, "mixed", *(["fp16"] if precision == "int8" else [])}
    assert result.manifest.precision.gemm_flops_fraction.get(gemm, 0.0) > 0.9
    assert cosine_with_graph(result) > 0.999


@pytest.mark.parametrize(
    "options",
    [
        {"refit": True},
        {"version_compatible": True},
        {"hardware_compatible": "same_compute_capability"},
        {"hardware_compatible": "ampere_plus"},
        {"optimization_level": 0},
        {"optimization_level": 5},
        {"workspace": 2**30},
    ],
)
def test_every_option_builds_and_is_recorded(tmp_path: Path, options: dict[str, Any]) -> None:
    result = build(tmp_path, **options)
    assert result.passed
    recorded = load_manifest(result.directory).engine.model_dump(exclude_defaults=True)
    assert recorded == options
    assert result.manifest.plan.kernels > 0


def test_a_stripped_engine_is_smaller_and_takes_its_weights_from_the_built_graph(tmp_path: Path) -> None:
    whole, stripped = build(tmp_path), build(tmp_path, strip_weights=True)
    assert stripped.manifest.files["model.engine"].bytes < whole.manifest.files["model.engine"].bytes
    assert any("holds no weights" in text for text in stripped.manifest.warnings)
    assert cosine_with_graph(stripped, stripped.directory / "model.onnx") > 0.999


def test_a_timing_cache_is_made_and_used_again(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = build(tmp_path, timing_cache=cache)
    size = cache.stat().st_size
    assert size > 0
    second = build(tmp_path, "fp32", timing_cache=cache)
    assert cache.stat().st_size >= size
    for result in (first, second):
        assert len(str(result.manifest.environment["timing_cache_sha256"])) == 64
    assert "The timing cache will not be used" not in (second.directory / "build.log").read_text()


def test_doctor_builds_with_both(capsys: pytest.CaptureFixture[str]) -> None:
    from trtforge.doctor import examine

    checks = {check.name: dataclasses.asdict(check) for check in examine()}
    assert checks["tensorrt"]["state"] == checks["gpu"]["state"] == "ok", json.dumps(checks)
