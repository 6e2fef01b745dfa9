"""Builds that miss their budget at first: float16 that overflows, and remedies that cost accuracy. Engines are real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import save_onnx

import trtforge
from trtforge.backends.builder import NativeBuilder
from trtforge.errors import BuildError, ChildDiedError, Diagnosis
from trtforge.manifest import Manifest
from trtforge.quantization import overflow

RNG = np.random.default_rng(3)
BINS, WIDTH = 32, 64
SPECTROGRAM = f"""spectrogram (float[batch, {WIDTH}] x) => (float[batch, {BINS}] y) {{
    [real] re = MatMul (x, cosines) [imaginary] im = MatMul (x, sines)
    [re_squared] re2 = Mul (re, re) [im_squared] im2 = Mul (im, im)
    [power] p = Add (re2, im2) [floor] pf = Add (p, one) [log] y = Log (pf)
}}"""
# The same up to the power, of which INT8 takes the products: no Log reads it.
MAGNITUDE = SPECTROGRAM.replace("[log] y = Log (pf)", "[root] y = Sqrt (pf)").replace("spectrogram (", "magnitude (")

# It came with a ConvTranspose that is quantized per channel; the Conv is still to be quantized.
UPSCALER = """upscaler (float[batch, 16, 6, 6] x) => (float[batch, 16, a, b] y) {
    [q] xq = QuantizeLinear (x, scale, zero) [dq] xd = DequantizeLinear (xq, scale, zero)
    [wdq] wd = DequantizeLinear <axis = 1> (codes, scales, zeros)
    [up] u = ConvTranspose <strides = [2, 2]> (xd, wd)
    [smooth] s = Conv <pads = [1, 1, 1, 1]> (u, kernel)
    [rest] y = Sub (u, s)
}"""

# Mean cosines: INT8 as it comes gives 0.999978, after the remedy 0.999959, and with "smooth" in float 0.999979.
BUDGET = 0.99997


def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (RNG.normal(size=shape) * scale).astype(np.float32)


def save_project(folder: Path, text: str, amplitude: float, count: int = 48) -> Path:
    """A model with its data; samples of amplitude 100 give powers beyond 65504, those of 1 do not."""
    (folder / "calibration").mkdir()
    np.savez(folder / "calibration" / "m.npz", x=normal(count, WIDTH, scale=amplitude))
    time = np.arange(WIDTH)[:, None] * np.arange(BINS)[None] * (2 * np.pi / WIDTH)
    waves = {"cosines": np.cos(time).astype(np.float32), "sines": np.sin(time).astype(np.float32)}
    return save_onnx(folder / "m.onnx", text, **waves, one=np.float32(1))


def build(source: Path, **options: Any) -> tuple[trtforge.BuildResult, list[str]]:
    events: list[Any] = []
    output = source.parent / f"out{len(list(source.parent.iterdir()))}"
    result = trtforge.build(source, gpu="sm_86", output=output, report=events.append, **options)
    return result, [event.detail for event in events if event.level in ("notice", "warning")]


def reasons(manifest: Manifest) -> dict[str, str]:
    return {entry.node: entry.reason for entry in manifest.precision.kept_float}


def test_what_overflows_float16_stays_float32(tmp_path: Path) -> None:
    source = save_project(tmp_path, SPECTROGRAM, amplitude=100)
    result, told = build(source, precision="fp16")
    assert result.passed
    assert not any(output.nan for output in result.manifest.parity.outputs.values())
    kept = reasons(result.manifest)
    # Held-out samples judge; they are not those that were observed.
    assert kept["power"].startswith("'p' reached ")
    assert kept["power"].endswith(" on 39 calibration samples; float16 ends at 65504")
    assert {"re_squared", "im_squared", "floor"} <= set(kept)
    # The products themselves reach some thousands.
    assert not {"real", "imaginary"} & set(kept)
    assert result.manifest.timings_s["find overflow"] > 0
    assert [text for text in told if "too large for float16 on 39 calibration samples" in text]


def test_without_calibration_data_the_evaluation_samples_are_observed(tmp_path: Path) -> None:
    source = save_project(tmp_path, SPECTROGRAM, amplitude=100)
    data = (tmp_path / "calibration" / "m.npz").rename(tmp_path / "eval.npz")
    result, _ = build(source, precision="fp16", eval=str(data))
    assert result.passed
    assert reasons(result.manifest)["power"].endswith(" on 48 evaluation samples; float16 ends at 65504")


def test_nothing_is_observed_where_the_budget_is_met(tmp_path: Path) -> None:
    result, told = build(save_project(tmp_path, SPECTROGRAM, amplitude=1), precision="fp16")
    assert result.passed
    assert "find overflow" not in result.manifest.timings_s
    assert "power" not in reasons(result.manifest)
    assert told == []


def test_a_missed_budget_without_overflow_changes_nothing(tmp_path: Path) -> None:
    result, told = build(save_project(tmp_path, SPECTROGRAM, amplitude=1), precision="fp16", budget=1.0)
    assert not result.passed
    assert "find overflow" in result.manifest.timings_s
    assert not any("reached" in reason for reason in reasons(result.manifest).values())
    assert told == []


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_types_of_float32s_range_are_not_observed(tmp_path: Path, precision: str) -> None:
    result, _ = build(save_project(tmp_path, SPECTROGRAM, amplitude=100), precision=precision, budget=1.0)
    assert "find overflow" not in result.manifest.timings_s


def test_an_int8_build_keeps_its_products_and_searches_for_nothing(tmp_path: Path) -> None:
    source = save_project(tmp_path, MAGNITUDE, amplitude=100)
    result, told = build(source, precision="int8")
    manifest = result.manifest
    assert result.passed
    assert {"power", "re_squared", "im_squared"} <= set(reasons(manifest))
    assert manifest.precision.gemm_flops_fraction == {"int8": 1.0}
    assert manifest.sensitivity is None
    assert len(told) == 1
    # The same graph before Q/DQ is finite as well.
    assert manifest.parity.before_qdq["y"].cosine > 0.9999
    assert not manifest.parity.before_qdq["y"].nan


def test_a_quantized_input_that_overflows_is_dequantized_in_float32(tmp_path: Path) -> None:
    source = save_project(tmp_path, MAGNITUDE, amplitude=1e5)
    result, _ = build(source, precision="int8")
    assert result.passed
    kept = reasons(result.manifest)
    assert any(name.startswith("x") and "Dequantize" in name and "'x' reached" in kept[name] for name in kept)


def test_the_search_goes_on_from_the_overflow(tmp_path: Path) -> None:
    """Graphs that the search judges keep the same nodes in float32: with NaN no set would ever do."""
    source = save_project(tmp_path, MAGNITUDE, amplitude=100)
    result, _ = build(source, precision="int8", budget=0.99998)
    assert result.passed
    assert result.manifest.sensitivity is not None
    assert result.manifest.sensitivity.met
    assert {"power", "re_squared"} <= set(reasons(result.manifest))


def test_a_graph_that_cannot_be_observed_is_built_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: Any) -> None:
        raise ChildDiedError("the process was killed", "usually the system ran out of memory")

    monkeypatch.setattr(overflow, "observe_model", die)
    result, told = build(save_project(tmp_path, SPECTROGRAM, amplitude=100), precision="fp16", budget=0.0)
    assert not result.passed  # NaN meets no budget
    assert result.manifest.parity.outputs["y"].nan
    assert told == [
        "nothing tells whether values are too large for float16: the process was killed "
        "(usually the system ran out of memory)"
    ]


def test_another_build_takes_what_overflows_from_the_cache(tmp_path: Path) -> None:
    source, cache = save_project(tmp_path, SPECTROGRAM, amplitude=100), tmp_path / "cache"
    first, _ = build(source, precision="fp16", cache=cache)
    second, told = build(source, precision="fp16", cache=cache, budget=0.99)
    again, _ = build(source, precision="fp16", cache=cache)
    assert "overflow" in first.manifest.environment["cache"]["made"]
    assert "overflow" in second.manifest.environment["cache"]["reused"]
    assert "find overflow" not in second.manifest.timings_s
    assert len(told) == 1
    assert "artifact" in again.manifest.environment["cache"]["reused"]
    files = [(result.directory / "model.onnx").read_bytes() for result in (first, second, again)]
    assert files[0] == files[1] == files[2]
    # Samples of another amplitude are another observation.
    np.savez(tmp_path / "calibration" / "m.npz", x=normal(48, WIDTH, scale=200))
    other, _ = build(source, precision="fp16", cache=cache)
    assert "overflow" in other.manifest.environment["cache"]["made"]


def save_upscaler(folder: Path) -> Path:
    (folder / "calibration").mkdir()
    np.savez(folder / "calibration" / "m.npz", x=normal(40, 16, 6, 6))
    return save_onnx(
        folder / "m.onnx",
        UPSCALER,
        scale=np.float32(0.03),
        zero=np.int8(0),
        codes=RNG.integers(-127, 128, (16, 16, 3, 3), np.int8),
        scales=np.geomspace(0.001, 0.004, 16).astype(np.float32),
        zeros=np.zeros(16, np.int8),
        kernel=normal(16, 16, 3, 3, scale=0.024),
    )


def refuse_first(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let the real builder refuse the first graph, as TensorRT refuses some that RTX takes; returns the calls."""
    calls: list[Any] = []
    original = NativeBuilder.build

    def build_or_refuse(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1:
            diagnosis = Diagnosis("no-kernel", "no kernel", "", "up", "ConvTranspose")
            raise BuildError("refused", "no kernel", "", node="up", diagnosis=diagnosis)
        return original(*arguments)

    monkeypatch.setattr(NativeBuilder, "build", build_or_refuse)
    return calls


def test_a_budget_that_a_remedy_misses_is_searched_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_upscaler(tmp_path)
    plain, _ = build(source, precision="int8", budget=BUDGET)
    assert plain.passed
    assert plain.manifest.sensitivity is None
    calls = refuse_first(monkeypatch)
    failed, _ = build(source, precision="int8", budget=BUDGET, search=False)
    assert not failed.passed
    assert len(calls) == 2
    calls.clear()
    mended, _ = build(source, precision="int8", budget=BUDGET)
    assert len(calls) == 3  # refused, built, and built once more with what the search found
    assert mended.passed
    manifest = mended.manifest
    assert [entry.remedy for entry in manifest.remedies] == [
        "its weight was quantized again with one scale for all channels"
    ]
    assert manifest.sensitivity is not None
    assert [entry.node for entry in manifest.sensitivity.nodes if entry.kept] == ["smooth"]
    assert reasons(manifest)["smooth"].startswith("kept float to meet the budget")
    # The engine is that of the last graph.
    assert manifest.precision.node_types["smooth"] == "fp16"
    assert {"meet budget", "find overflow"} <= set(manifest.timings_s)
