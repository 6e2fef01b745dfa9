from __future__ import annotations

from pathlib import Path

import pytest
from support import make_manifest, save_onnx

import trtforge
from trtforge.describe import describe_io
from trtforge.graph.load import load_model
from trtforge.manifest import IoInfo
from trtforge.report import render_report

MODEL = """
g (double[2] x, int64[2] ids, uint8[2] pixels) => (double[2] y, float[2] z) {
    twice = Add(x, x)
    wide = Cast<to=11>(ids)
    shade = Cast<to=1>(pixels)
    y = Mul(twice, wide)
    half = Cast<to=1>(x)
    z = Add(half, shade)
}
"""


def test_a_float64_port_is_float32_in_the_engine(tmp_path: Path) -> None:
    model = save_onnx(tmp_path / "m.onnx", MODEL)
    manifest = trtforge.build(model, output=tmp_path / "out").manifest
    assert [(port.name, port.mode, port.dtype, port.source_dtype) for port in manifest.io] == [
        ("x", "input", "float32", "float64"),
        ("ids", "input", "int64", None),
        ("pixels", "input", "uint8", None),
        ("y", "output", "float32", "float64"),
        ("z", "output", "float32", None),
    ]
    # What the builder itself says of every port that a kernel touches.
    compiled = {
        tensor.name: tensor.dtype for layer in manifest.plan.layers for tensor in (*layer.inputs, *layer.outputs)
    }
    assert {port.name: compiled[port.name] for port in manifest.io} == {
        "x": "fp32",
        "ids": "int64",
        "pixels": "uint8",
        "y": "fp32",
        "z": "fp32",
    }
    assert any("are float32 in the engine" in note for note in manifest.notes)
    # The graph in the artifact keeps the source's types, so that the same samples run in both.
    assert describe_io(load_model(tmp_path / "out" / "model.onnx")) == manifest.io


@pytest.mark.parametrize(("source", "cell"), [("float64", "float32 (float64 in the source)"), (None, "float32</td>")])
def test_the_report_tells_the_sources_type(source: str | None, cell: str) -> None:
    port = IoInfo(name="x", mode="input", dtype="float32", shape=("batch", 4), source_dtype=source)
    html = render_report(make_manifest(io=(port,)), None)
    assert cell in html
    assert ("in the source" in html) == (source is not None)
