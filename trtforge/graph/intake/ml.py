"""Operators of ai.onnx.ml: arithmetic ones in standard ONNX, the others refused with the reason.

Definitions: onnx/docs/Operators-ml.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.graph.intake.emit import BOOL, FLOAT32, Emitter, dtype_of, rank_of
from trtforge.graph.intake.rewrites import RefusedError

Results = Sequence[gs.Tensor | None]
Rule = Callable[[gs.Node, Emitter], Results]


def _floats(emit: Emitter, tensor: gs.Tensor) -> gs.Tensor:
    return emit.cast(tensor, FLOAT32) if dtype_of(tensor) != FLOAT32 else tensor


def scaler(node: gs.Node, emit: Emitter) -> Results:
    """Sub and Mul."""
    x = _floats(emit, node.inputs[0])
    result: gs.Tensor = x
    for op, name in (("Sub", "offset"), ("Mul", "scale")):
        values = node.attrs.get(name)
        if values:
            result = emit(op, result, emit.constant(values, FLOAT32), dtype=FLOAT32, shape=x.shape)
    return [result]


def normalizer(node: gs.Node, emit: Emitter) -> Results:
    """A reduction over the columns, and Div; rows of zeros stay zeros."""
    ops = {"MAX": "ReduceMax", "L1": "ReduceL1", "L2": "ReduceL2"}
    norm = str(node.attrs.get("norm", "MAX"))
    if norm not in ops or rank_of(node.inputs[0]) != 2:
        raise RefusedError(f"its norm {norm} or the shape of its input is not known", "export the model again")
    x = _floats(emit, node.inputs[0])
    size = emit(ops[norm], x, emit.ints(1), dtype=FLOAT32, keepdims=1)
    zero, one = emit.constant(0, FLOAT32), emit.constant(1, FLOAT32)
    divisor = emit("Where", emit("Equal", size, zero, dtype=BOOL), one, size, dtype=FLOAT32)
    return [emit("Div", x, divisor, dtype=FLOAT32, shape=x.shape)]


def binarizer(node: gs.Node, emit: Emitter) -> Results:
    """Greater and Cast."""
    x, threshold = node.inputs[0], node.attrs.get("threshold", 0.0)
    dtype = dtype_of(x)
    return [emit.cast(emit("Greater", x, emit.constant(threshold, dtype), dtype=BOOL, shape=x.shape), dtype)]


def imputer(node: gs.Node, emit: Emitter) -> Results:
    """IsNaN or Equal, and Where."""
    x, attrs = node.inputs[0], node.attrs
    dtype = dtype_of(x)
    kind = "floats" if dtype.kind == "f" else "int64s"
    filled = attrs.get("imputed_value_floats") if kind == "floats" else attrs.get("imputed_value_int64s")
    name = "replaced_value_float" if kind == "floats" else "replaced_value_int64"
    replaced = attrs.get(name, 0)
    if not filled:
        raise RefusedError("it has no values to fill in", "export the model again")
    if isinstance(replaced, float) and np.isnan(replaced):
        missing = emit("IsNaN", x, dtype=BOOL, shape=x.shape)
    else:
        missing = emit("Equal", x, emit.constant(replaced, dtype), dtype=BOOL, shape=x.shape)
    return [emit("Where", missing, emit.constant(filled, dtype), x, dtype=dtype, shape=x.shape)]


def feature_vectorizer(node: gs.Node, emit: Emitter) -> Results:
    """Casts and Concat."""
    for tensor in node.inputs:
        if rank_of(tensor) != 2:
            raise RefusedError("its inputs are not all matrices", "export the model again")
    parts = [_floats(emit, tensor) for tensor in node.inputs]
    return [emit("Concat", *parts, dtype=FLOAT32, axis=1)]


def array_feature_extractor(node: gs.Node, emit: Emitter) -> Results:
    """Gather from the last axis."""
    x, columns = node.inputs
    if rank_of(x) < 2:
        raise RefusedError("its input is a vector", "export the model again")
    return [emit("Gather", x, emit.reshape(columns, -1), dtype=x.dtype, axis=-1)]


def linear_regressor(node: gs.Node, emit: Emitter) -> Results:
    """MatMul and Add."""
    attrs = node.attrs
    if attrs.get("post_transform", "NONE") != "NONE" or rank_of(node.inputs[0]) != 2:
        raise RefusedError("it transforms its result or reads a vector", "export the model again")
    weights = np.array(attrs["coefficients"], np.float32).reshape(int(attrs.get("targets", 1)), -1)
    product = emit("MatMul", _floats(emit, node.inputs[0]), emit.constant(weights.T, FLOAT32), dtype=FLOAT32)
    bias = attrs.get("intercepts")
    return [emit("Add", product, emit.constant(bias, FLOAT32), dtype=FLOAT32) if bias else product]


RULES: Mapping[str, Rule] = {
    "Scaler": scaler,
    "Normalizer": normalizer,
    "Binarizer": binarizer,
    "Imputer": imputer,
    "FeatureVectorizer": feature_vectorizer,
    "ArrayFeatureExtractor": array_feature_extractor,
    "LinearRegressor": linear_regressor,
}
"""By operator of ai.onnx.ml."""
REASONS: Mapping[str, str] = {
    "TreeEnsemble": "trees branch on each value",
    "TreeEnsembleClassifier": "trees branch on each value, and it gives labels",
    "TreeEnsembleRegressor": "trees branch on each value",
    "SVMClassifier": "it gives labels of support vectors",
    "SVMRegressor": "it compares with support vectors",
    "LinearClassifier": "it gives labels",
    "ZipMap": "its result is a list of dictionaries",
    "LabelEncoder": "it looks values up in a dictionary",
    "CategoryMapper": "it maps text",
    "DictVectorizer": "its input is a dictionary",
    "CastMap": "its input is a dictionary",
    "OneHotEncoder": "it looks values up in a list",
}
"""Why an operator of ai.onnx.ml has no form in TensorRT."""
