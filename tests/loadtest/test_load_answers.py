"""The right answers to requests, and what counts as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from trtforge.errors import InputError
from trtforge.loadtest.answers import difference, open_answers
from trtforge.loadtest.payloads import RequestMaker
from trtforge.loadtest.signature import Signature, signature_from_metadata
from trtforge.loadtest.traffic import Traffic


def served(x: str, **outputs: str) -> Signature:
    """A model with a batch axis, one input x and outputs by name; all have one element a sample."""
    ports = [{"name": name, "datatype": datatype, "shape": [-1, 1]} for name, datatype in outputs.items()]
    inputs = [{"name": "x", "datatype": x, "shape": [-1, 1]}]
    return signature_from_metadata({"name": "m", "inputs": inputs, "outputs": ports}, {"max_batch_size": 8})


ONE = served("FP32", y="FP32", z="FP32")
CLASSIFIER = served("FP32", label="BYTES", score="FP32")


def save_classifier(path: Path) -> None:
    """`CLASSIFIER` as an ONNX file: score = 2 x."""
    text = """
        <ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 2]>
        classifier (float[n, 1] x) => (string[n, 1] label, float[n, 1] score) {
            label = ai.onnx.ml.LabelEncoder <keys_floats = [1.0], values_strings = ["one"]> (x)
            score = Add (x, x)
        }
    """
    onnx.save(onnx.parser.parse_model(text), str(path))


def test_expected_rows_follow_the_samples(tmp_path: Path) -> None:
    np.savez(tmp_path / "s.npz", x=np.arange(5, dtype=np.float32).reshape(5, 1))
    np.savez(tmp_path / "e.npz", y=10 * np.arange(5, dtype=np.float32).reshape(5, 1))
    samples = [{"file": "s.npz", "expect": "e.npz"}]
    traffic = Traffic.model_validate({"model": "m", "samples": samples, "distinct": 3})
    (cell,) = RequestMaker(traffic, ONE, tmp_path).cells(2)
    with open_answers(traffic, ONE, tmp_path) as book:
        answers = list(book.answers(cell))
    assert [answer["y"].ravel().tolist() for answer in answers] == [[10 * row for row in d.rows] for d in cell.drafts]


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"y": np.zeros((4, 1))}, "it has 4 rows; there are 5 samples"),
        ({"q": np.zeros((5, 1))}, "hold q"),
        ({"y": np.array(["a"] * 5)}, "only numbers are compared"),
    ],
)
def test_expected_answers_that_do_not_fit_are_refused(tmp_path: Path, arrays: dict[str, Any], words: str) -> None:
    np.savez(tmp_path / "s.npz", x=np.zeros((5, 1), np.float32))
    np.savez(tmp_path / "e.npz", **arrays)
    traffic = Traffic.model_validate({"model": "m", "samples": [{"file": "s.npz", "expect": "e.npz"}]})
    with (
        pytest.raises(InputError) as caught,
        open_answers(traffic, ONE, tmp_path),
    ):
        pass
    assert words in str(caught.value)


def test_text_of_the_served_model_is_not_compared_with_numbers(tmp_path: Path) -> None:
    np.savez(tmp_path / "s.npz", x=np.zeros((5, 1), np.float32))
    np.savez(tmp_path / "e.npz", label=np.zeros((5, 1), np.float32))
    traffic = Traffic.model_validate({"model": "m", "samples": [{"file": "s.npz", "expect": "e.npz"}]})
    with (
        pytest.raises(InputError, match="only numbers are compared"),
        open_answers(traffic, CLASSIFIER, tmp_path),
    ):
        pass


def test_answers_of_a_model_leave_its_text_out(tmp_path: Path) -> None:
    save_classifier(tmp_path / "c.onnx")
    traffic = Traffic.model_validate({"model": "c", "expect": {"model": "c.onnx"}, "distinct": 1})
    (cell,) = RequestMaker(traffic, CLASSIFIER, tmp_path).cells(1)
    with open_answers(traffic, CLASSIFIER, tmp_path) as book:
        (answer,) = book.answers(cell)
    assert list(answer) == ["score"]
    assert np.array_equal(answer["score"], 2 * cell.drafts[0].feeds["x"])


@pytest.mark.parametrize(
    ("signature", "words"),
    [
        (served("BYTES", score="FP32"), "the served model takes text: x"),
        (ONE, "it has label, score; the served model gives y, z"),
    ],
)
def test_model_that_can_give_no_answers_is_refused(tmp_path: Path, signature: Signature, words: str) -> None:
    save_classifier(tmp_path / "c.onnx")
    traffic = Traffic.model_validate({"model": "c", "expect": {"model": "c.onnx"}})
    with pytest.raises(InputError) as caught, open_answers(traffic, signature, tmp_path):
        pass
    assert words in str(caught.value)


ROWS = np.array([[3.0, 4.0], [30.0, 40.0]], np.float32)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (ROWS, None),
        (ROWS.astype(np.float16), None),
        (ROWS * np.float32(1.009), None),
        # The first sample is off by 20 % of its own norm, though by only 2 % of that of both.
        (ROWS + np.array([[1, 0], [0, 0]]), "relative error of 0.2"),
        (ROWS[::-1], "relative error of 9"),
        (np.where(ROWS == 4, np.nan, ROWS), "relative error of nan"),
        (np.where(ROWS == 4, np.inf, ROWS), "relative error of inf"),
        (ROWS[:1], "has shape [1, 2], not [2, 2]"),
    ],
)
def test_float_answers_are_judged_sample_by_sample(given: np.ndarray, why: str | None) -> None:
    found = difference({"y": given}, {"y": ROWS}, 0.01, has_batch_axis=True)
    assert found is None if why is None else found is not None and why in found


def test_integers_must_be_equal_and_outputs_present() -> None:
    right = {"y": np.array([1, 2, 3])}
    assert difference(right, right, 0.01, True) is None
    assert difference({"y": np.array([1, 2, 4])}, right, 0.01, True) == "output y differs in 1 of 3 elements"
    assert difference({}, right, 0.01, True) == "output y is missing"
    nothing = {"y": np.zeros((0, 3))}
    assert difference(nothing, nothing, 0.01, True) is None
    zeros = {"y": np.zeros((2, 3))}
    assert difference(zeros, zeros, 0.01, True) is None
    assert difference({"y": np.full((2, 3), 1e-9)}, zeros, 0.01, True) is not None
