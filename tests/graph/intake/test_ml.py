"""Classical machine learning operators: arithmetic ones rewritten, the others refused."""

from __future__ import annotations

import numpy as np
import pytest
from intake_checks import Feeds, check_equal, codes, floats, rewritten, weights
from lint_build import RtxBuild

from trtforge.graph.intake import refused_operators
from trtforge.graph.lint import lint
from trtforge.graph.native import OnnxNative

X = {"x": floats(4, 3)}
WITH_ZEROS = {"x": floats(4, 3) * np.array([[1], [0], [1], [1]], np.float32)}
SAME = "g (float[b,3] x) => (float[b,3] y)"
CASES: dict[str, tuple[str, Feeds]] = {
    "Scaler": (f"{SAME} {{ y = ai.onnx.ml.Scaler<offset=[1.0,2.0,3.0], scale=[0.5,0.25,2.0]>(x) }}", X),
    "Scaler of integers": (
        "g (int64[b,3] x) => (float[b,3] y) { y = ai.onnx.ml.Scaler<offset=[1.0], scale=[0.5]>(x) }",
        {"x": codes(4, 3, dtype=np.int64)},
    ),
    "largest value": (f'{SAME} {{ y = ai.onnx.ml.Normalizer<norm="MAX">(x) }}', WITH_ZEROS),
    "sum": (f'{SAME} {{ y = ai.onnx.ml.Normalizer<norm="L1">(x) }}', WITH_ZEROS),
    "length": (f'{SAME} {{ y = ai.onnx.ml.Normalizer<norm="L2">(x) }}', WITH_ZEROS),
    "Binarizer": (f"{SAME} {{ y = ai.onnx.ml.Binarizer<threshold=0.2>(x) }}", X),
    "Imputer": (
        f"{SAME} {{ y = ai.onnx.ml.Imputer<imputed_value_floats=[1.0,2.0,3.0], replaced_value_float=0.5>(x) }}",
        {"x": np.where(floats(4, 3) > 0, 0.5, 1).astype(np.float32)},
    ),
    "FeatureVectorizer": (
        "g (float[b,3] x, float[b,2] z) => (float[b,5] y) "
        "{ y = ai.onnx.ml.FeatureVectorizer<inputdimensions=[3,2]>(x, z) }",
        {**X, "z": floats(4, 2)},
    ),
    "ArrayFeatureExtractor": (
        f"g (float[b,3] x) => (float[b,2] y) {weights(i=np.array([2, 0]))} "
        "{ y = ai.onnx.ml.ArrayFeatureExtractor(x, i) }",
        X,
    ),
    "LinearRegressor": (
        "g (float[b,3] x) => (float[b,2] y) { y = ai.onnx.ml.LinearRegressor<targets=2, "
        "coefficients=[1.0,2.0,3.0,4.0,5.0,6.0], intercepts=[0.5,0.25]>(x) }",
        X,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_arithmetic_is_rewritten(name: str, native: OnnxNative, rtx_build: RtxBuild) -> None:
    graph = check_equal(*CASES[name], native)
    if name in ("Scaler", "length"):
        assert rtx_build(graph).unreadable is None


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        ("TreeEnsembleRegressor", "trees branch on each value"),
        ("SVMRegressor", "it compares with support vectors"),
        ("LinearClassifier", "it gives labels"),
        ("LabelEncoder", "it looks values up in a dictionary"),
        ("ZipMap", "its result is a list of dictionaries"),
        ("NoSuchOp", "TensorRT has no classical machine learning operators"),
    ],
)
def test_the_others_say_where_to_cut_the_model(op: str, reason: str, native: OnnxNative) -> None:
    graph = rewritten(f"{SAME} {{ a = Relu(x) [n] y = ai.onnx.ml.{op}(a) }}", native)
    (refused,) = refused_operators(graph)
    assert (refused.node, refused.op, refused.reason) == ("n", f"ai.onnx.ml.{op}", reason)
    assert refused.fix == "it runs outside TensorRT: cut the model there, and keep 'a' as its outputs"
    (finding,) = [finding for finding in lint(graph) if finding.severity == "error"]
    assert finding.what == f"TensorRT has no operator ai.onnx.ml.{op} (node 'n')"
    assert (finding.rule, finding.why, finding.fix) == ("missing-op", reason, refused.fix)


def test_text_is_refused(native: OnnxNative) -> None:
    graph = rewritten(f"{SAME} {{ [n] y = StringNormalizer(x) }}", native)
    (refused,) = refused_operators(graph)
    assert refused.reason == "it works on text"
    (finding,) = lint(graph)
    assert finding.what == "TensorRT has no operator StringNormalizer, or not in this form (node 'n')"


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ('Normalizer<norm="L3">', "its norm L3"),
        ("Imputer", "it has no values to fill in"),
        ('LinearRegressor<coefficients=[1.0,2.0,3.0], post_transform="PROBIT">', "it transforms its result"),
        ("LinearRegressor", "its inputs or attributes do not fit the operator"),
    ],
)
def test_forms_that_are_not_known_are_refused(call: str, reason: str, native: OnnxNative) -> None:
    (refused,) = refused_operators(
        rewritten(f"g (float[b,3] x) => (float[b,n] y) {{ y = ai.onnx.ml.{call}(x) }}", native)
    )
    assert refused.reason.startswith(reason)
