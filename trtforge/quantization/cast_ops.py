"""The operators that casting treats alike; `cast_plan` says how."""

from __future__ import annotations

# Half of float16's 65504: other data than the calibration set may reach further.
MAX_SAFE_FLOAT16 = 3e4

SUM_OPS = frozenset(("CumSum", "ReduceMean", "ReduceSum"))
FLOAT32_OPS = (
    SUM_OPS
    | {"ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceProd", "ReduceSumSquare", "LogSoftmax"}
    | {"GlobalAveragePool", "GlobalLpPool", "LpPool"}
    | {"InstanceNormalization", "LpNormalization", "MeanVarianceNormalization"}
    | {"Exp", "Log", "Pow", "Reciprocal", "Softplus", "Sqrt", "Cos", "Sin"}
    # Coordinates: float16 resolves 1/2048 of an image.
    | {"GridSample", "Range", "RoiAlign"}
    | {"Bernoulli", "EyeLike", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
LAYOUT_OPS = frozenset(("Concat", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split")) | frozenset(
    ("Squeeze", "Tile", "Transpose", "Unsqueeze")
)
QDQ_OPS = frozenset(("DequantizeLinear", "QuantizeLinear"))
NEUTRAL_OPS = (
    LAYOUT_OPS
    | {"Abs", "Add", "Cast", "Ceil", "Clip", "Div", "Floor", "Max", "Min", "Mod", "Mul", "Neg", "Pad", "Relu", "Round"}
    | {"Sign", "Sub", "Where", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"}
    | QDQ_OPS
)
STEP_OPS = frozenset(("Ceil", "Floor", "Mod", "Round", "Sign")) | frozenset(
    ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
)
# Operators that give values of their input or 0, so that what they give from afar was as far before.
PASSING_OPS = (LAYOUT_OPS - {"Concat"}) | {"Abs", "Clip", "GlobalMaxPool", "LeakyRelu", "MaxPool", "Neg", "Relu"}
# TensorRT-RTX 1.7.1 refuses to parse or build them in bfloat16.
WITHOUT_BFLOAT16 = frozenset(("ConvTranspose", "GRU", "HardSwish", "Mish"))
# Their importer masks the steps past a sequence's end with float32 zeros.
RECURRENT_OPS = frozenset(("GRU", "LSTM", "RNN"))
# Their output follows an attribute or a scale, not the type of an input of the same variable.
TYPED_OUTPUT_OPS = frozenset(("Cast", "ConstantOfShape", "DequantizeLinear"))
