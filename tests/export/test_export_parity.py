from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest

from trtforge.export.mark import KEY, mark_failed
from trtforge.export.parity import compare_run, difference
from trtforge.graph.load import load_model
from trtforge.reference import ReferenceModel

X = np.linspace(-2.0, 2.0, 12, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize(
    ("actual", "expected", "passed"),
    [
        (X + 1e-5, X, True),
        (X + 1e-2, X, False),
        (X * 1000 + 1, X * 1000, True),
        (np.where(X > 1, np.nan, X), X, False),
        (np.where(X > 1, 0, X), np.where(X > 1, np.nan, X), False),
        (np.where(X > 1, np.nan, X), np.where(X > 1, np.nan, X), True),
        (np.where(X > 1, np.inf, X), np.where(X > 1, -np.inf, X), False),
        ((X * 1.01).astype(np.float16), X.astype(np.float16), True),
        ((X * 1.01).astype(ml_dtypes.bfloat16), X.astype(ml_dtypes.bfloat16), True),
        ((X * 1.1).astype(np.float16), X.astype(np.float16), False),
        (np.arange(2000), np.arange(2000), True),
        (np.arange(2000), np.where(np.arange(2000) == 7, 8, np.arange(2000)), True),
        (np.arange(20), np.where(np.arange(20) == 7, 8, np.arange(20)), False),
        (X > 0, X > 0, True),
        (X > 0, X > 1, False),
        (np.zeros((0, 4), np.float32), np.zeros((0, 4), np.float32), True),
        (np.zeros(4, np.float32), np.zeros(4, np.float32), True),
    ],
)
def test_an_output_is_measured_against_its_largest_value(
    actual: np.ndarray, expected: np.ndarray, passed: bool
) -> None:
    assert difference(actual, expected).passed is passed


def test_runs_are_compared_in_onnx_runtime(mlp: Path) -> None:
    x = np.ones((2, 4), np.float32)
    with ReferenceModel(mlp) as model:
        scores = model.run({"x": x})["scores"]
        equal = compare_run(model, {"x": x}, {"scores": scores})
        assert (equal.passed, equal.inputs, equal.outputs["scores"].max_abs_error) == (True, {"x": (2, 4)}, 0.0)
        assert not compare_run(model, {"x": x}, {"scores": scores + 1}).passed
        shape = compare_run(model, {"x": x}, {"scores": scores[:1]})
        assert shape.error == "output 'scores' has shape [2, 3], in torch [1, 3]"
        missing = compare_run(model, {"x": x}, {"scores": scores, "more": scores})
        assert missing.error == "output 'more' is missing"
        refused = compare_run(model, {"x": x[:, :3]}, {"scores": scores})
        assert "ONNX Runtime cannot run the model" in str(refused.error)
        assert not (shape.passed or missing.passed or refused.passed)


def test_a_model_that_differs_is_marked_and_stays_readable(mlp: Path) -> None:
    before = load_model(mlp)
    mark_failed(mlp)
    assert {entry.key: entry.value for entry in onnx.load(str(mlp)).metadata_props}[KEY].startswith("failed")
    after = load_model(mlp)
    assert [node.name for node in after.graph.nodes] == [node.name for node in before.graph.nodes]
