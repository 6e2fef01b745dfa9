"""Scales of Resize in another type than ONNX's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import pytest
from graph_models import model_of, parse, run

from trtforge.graph.load import graph_from_model
from trtforge.graph.native import OnnxNative
from trtforge.graph.normalise import normalise

FEEDS = {"x": np.random.default_rng(0).normal(size=(1, 2, 4, 4)).astype(np.float32)}
NEAREST = 'Resize<mode="nearest">(a, , s)'


@pytest.fixture(scope="module")
def native() -> Iterator[OnnxNative]:
    with OnnxNative() as child:
        yield child


def resized(dtype: str, operator: str = NEAREST, opset: int = 20) -> onnx.ModelProto:
    """A model that resizes by scales of this type."""
    model = parse(f"g (float[1,2,4,4] x) => (float[1,2,h,w] y) {{ a = Neg(x) [up] y = {operator} }}", opset=opset)
    scales = np.array([1, 1, 2, 3], dtype)
    model.graph.initializer.append(onnx.numpy_helper.from_array(scales, "s"))
    return model


@pytest.mark.parametrize(
    ("dtype", "operator", "opset"),
    [
        ("float16", NEAREST, 20),
        ("float64", 'Resize<mode="linear">(a, , s)', 13),
        ("float16", 'Resize<mode="nearest">(a, s)', 10),
        ("float16", 'Upsample<mode="nearest">(a, s)', 9),
    ],
)
def test_scales_become_float32(dtype: str, operator: str, opset: int, native: OnnxNative) -> None:
    graph, report = normalise(graph_from_model(resized(dtype, operator, opset)), native=native)
    (y,) = run(model_of(graph), FEEDS)
    assert y.shape == (1, 2, 8, 12)
    np.testing.assert_array_equal(y, run(resized("float32", operator, opset), FEEDS)[0])
    name = operator.partition("<")[0]
    assert f"the scales of {name} 'up' are float32, as ONNX has them; they came as {dtype}" in report.notes


def test_right_scales_and_a_second_run_change_nothing(native: OnnxNative) -> None:
    graph, report = normalise(graph_from_model(resized("float32")), native=native)
    assert not any("scales" in note for note in report.notes)
    again, _ = normalise(graph_from_model(model_of(graph)), native=native)
    assert model_of(again) == model_of(graph)
