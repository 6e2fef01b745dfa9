"""Patterns of numbers: kernels that a type lacks, what overflows in float16, and quantization."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from pattern_models import (
    HEADS,
    IMAGE,
    IMAGE16,
    INT8,
    QKV,
    ROW,
    ROW_TO_6,
    ROW_TO_ROW,
    TO_IMAGE,
    TO_IMAGE16,
    Arrays,
    Pattern,
    codes,
    normal,
)

BATCH_NORM = {name: np.abs(normal(16)) + 0.5 for name in ("scale", "shift", "mean", "variance")}

KERNELS = (
    Pattern("grouped ConvTranspose in INT8", f"{TO_IMAGE16} {{ a = ConvTranspose<group=2, strides=[2,2]>(x, w) "
            "y = Conv(a, v) }", {"x": IMAGE16}, ("runs ConvTranspose in half precision",), options=INT8,
            weights={"w": normal(16, 8, 2, 2), "v": normal(16, 16, 3, 3)}),
    Pattern("ConvTranspose and BatchNormalization in INT8",
            f"{TO_IMAGE16} {{ a = ConvTranspose<strides=[2,2]>(x, w) "
            "n = BatchNormalization(a, scale, shift, mean, variance) y = Conv(n, v) }",
            {"x": IMAGE16}, ("runs ConvTranspose in half precision",), options=INT8,
            weights={"w": normal(16, 16, 2, 2), "v": normal(16, 16, 3, 3), **BATCH_NORM}),
    Pattern("ConvTranspose into Concat in INT8",
            "g (float[b,16,10,10] x, float[b,8,20,20] z) => (float[b,c,h,w] y) "
            "{ a = ConvTranspose<strides=[2,2]>(x, w) n = Concat<axis=1>(a, z) y = Conv(n, v) }",
            {"x": IMAGE16, "z": normal(10, 8, 20, 20)}, ("runs ConvTranspose in half precision",), options=INT8,
            weights={"w": normal(16, 8, 2, 2), "v": normal(16, 16, 3, 3)}),
    Pattern("only a ConvTranspose in INT8", f"{TO_IMAGE16} {{ [up] y = ConvTranspose<strides=[2,2]>(x, w) }}",
            {"x": IMAGE16}, ("nothing to quantize", "up: TensorRT-RTX", "built in fp16 as it is"), options=INT8,
            weights={"w": normal(16, 8, 2, 2)}),
    Pattern("depthwise and Swish in INT8", f"{TO_IMAGE16} {{ a = Conv<group=16, pads=[1,1,1,1]>(x, w) "
            "s = Sigmoid(a) m = Mul(a, s) y = Conv(m, v) }",
            {"x": IMAGE16}, ('"int8": 1',), options=INT8,
            weights={"w": normal(16, 1, 3, 3), "v": normal(16, 16, 1, 1)}),
    Pattern("Conv1d in INT8", "g (float[b,16,20] x) => (float[b,c,n] y) { y = Conv(x, w) }",
            {"x": normal(10, 16, 20)}, options=INT8, weights={"w": normal(16, 16, 3)}),
    Pattern("Conv3d in INT8", "g (float[b,16,6,6,6] x) => (float[b,c,d,h,w] y) { y = Conv(x, k) }",
            {"x": normal(10, 16, 6, 6, 6)}, options=INT8, weights={"k": normal(16, 16, 3, 3, 3)}),
    Pattern("dilated Conv in INT8", f"{TO_IMAGE16} {{ y = Conv<dilations=[2,2], pads=[2,2,2,2]>(x, w) }}",
            {"x": IMAGE16}, ('"int8": 1',), options=INT8, weights={"w": normal(16, 16, 3, 3)}),
    Pattern("three input channels in INT8", "g (float[b,3,10,10] x) => (float[b,c,h,w] y) "
            "{ a = Conv(x, w) r = Relu(a) y = Conv(r, v) }", {"x": normal(10, 3, 10, 10)}, ('"int8": 2',),
            options=INT8, weights={"w": normal(16, 3, 3, 3), "v": normal(16, 16, 3, 3)}),
    Pattern("grouped Conv between Casts in fp32", f"{TO_IMAGE} {{ h = Cast<to=10>(x) a = Conv<group=2>(h, w) "
            "y = Cast<to=1>(a) }", {"x": IMAGE}, weights={"w": normal(8, 4, 3, 3).astype(np.float16)},
            options=("--fp32",)),
    Pattern("grouped Conv between Casts in fp16", f"{TO_IMAGE} {{ h = Cast<to=10>(x) a = Conv<group=2>(h, w) "
            "y = Cast<to=1>(a) }", {"x": IMAGE}, weights={"w": normal(8, 4, 3, 3).astype(np.float16)}),
)  # fmt: skip
"""Nodes for which a builder was reported to have no kernel."""

MASK = (np.arange(16) < np.arange(1, 11)[:, None]).astype(np.float32)


def masked(value: float) -> Pattern:
    """Attention whose hidden keys get this bias."""
    return Pattern(
        f"mask of {value}",
        f"{QKV[:-1]}, float[b,16] mask) => (float[b,2,16,32] y) {{ t = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, t) "
        "m4 = Unsqueeze(mask, axes) visible = Cast<to=9>(m4) bias = Where(visible, zero, hidden) "
        "a = Add(s, bias) p = Softmax(a) y = MatMul(p, v) }",
        {**HEADS, "mask": MASK},
        weights={"axes": np.array([1, 2]), "zero": np.float32(0), "hidden": np.float32(value)},
    )


FLOAT16 = (
    masked(-1e9),
    masked(float(np.finfo(np.float32).min)),
    masked(float("-inf")),
    Pattern("mask by subtraction and product", f"{QKV[:-1]}, float[b,16] mask) => (float[b,2,16,32] y) {{ "
            "t = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, t) m4 = Unsqueeze(mask, axes) i = Sub(one, m4) "
            "bias = Mul(i, hidden) a = Add(s, bias) p = Softmax(a) y = MatMul(p, v) }", {**HEADS, "mask": MASK},
            weights={"axes": np.array([1, 2]), "one": np.float32(1), "hidden": np.finfo(np.float32).min}),
    Pattern("mean of squares beyond float16", f"{ROW_TO_ROW} {{ big = Mul(x, k) m = ReduceMean<keepdims=1>(big, axis) "
            "d = Sub(big, m) s = Pow(d, two) v = ReduceMean<keepdims=1>(s, axis) e = Add(v, eps) r = Sqrt(e) "
            "y = Div(d, r) }", {"x": ROW}, weights={"k": np.float32(2000), "axis": np.array([-1]),
            "two": np.float32(2), "eps": np.float32(1e-5)}),
    Pattern("LayerNormalization of large values", f"{ROW_TO_ROW} {{ big = Mul(x, k) y = LayerNormalization(big, s) }}",
            {"x": ROW}, weights={"k": np.float32(2000), "s": np.ones(8, np.float32)}),
    Pattern("RMS norm written out", f"{ROW_TO_ROW} {{ big = Mul(x, k) s = Mul(big, big) "
            "v = ReduceMean<keepdims=1>(s, axis) e = Add(v, eps) r = Sqrt(e) y = Div(big, r) }", {"x": ROW},
            weights={"k": np.float32(2000), "axis": np.array([-1]), "eps": np.float32(1e-5)}),
    Pattern("Softmax of large values", f"{ROW_TO_ROW} {{ big = Mul(x, k) y = Softmax(big) }}", {"x": ROW},
            weights={"k": np.float32(300)}),
    Pattern("float16 Resize scales", f"{TO_IMAGE} {{ h = Cast<to=10>(x) r = Resize<mode=\"nearest\">(h, roi, s) "
            "y = Cast<to=1>(r) }", {"x": IMAGE},
            weights={"s": np.array([1, 1, 2, 2], np.float16), "roi": np.array([], np.float16)}),
    Pattern("scale and input of a normalization differ in type", "g (float16[b,8] x) => (float16[b,8] y) "
            "{ f = Cast<to=1>(x) n = LayerNormalization(f, s) y = Cast<to=10>(n) }",
            {"x": ROW.astype(np.float16)}, weights={"s": np.ones(8, np.float32)}),
    Pattern("NaN in the model's own result", f"{ROW_TO_ROW} {{ r = Sqrt(x) y = Neg(r) }}", {"x": ROW}),
    Pattern("nothing but NaN", f"{ROW_TO_ROW} {{ a = Abs(x) n = Neg(a) y = Log(n) }}", {"x": ROW},
            ("the source model itself gives NaN in output 'y' on all", "give other samples with --eval"), code=2),
    Pattern("product beyond float16", f"{ROW_TO_ROW} {{ big = MatMul(x, w) y = Mul(big, small) }}", {"x": ROW},
            weights={"w": normal(8, 8, scale=60000), "small": np.float32(1e-5)}),
    Pattern("result beyond float16", f"{ROW_TO_ROW} {{ y = Mul(x, k) }}", {"x": ROW}, weights={"k": np.float32(1e6)}),
)  # fmt: skip
"""What overflows in float16."""

ARRIVED = (
    "q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) wd = DequantizeLinear<axis=1>(w, ws, wz) "
    "y = MatMul(d, wd)"
)
ARRIVED_WEIGHTS = {"w": codes(8, 6), "ws": np.full(6, 0.01, np.float32), "wz": np.zeros(6, np.int8),
                   "s": np.float32(0.03), "z": np.int8(0)}  # fmt: skip


def arrived(name: str, changes: Arrays, text: str = ARRIVED, **options: object) -> Pattern:
    """A product that comes quantized."""
    return Pattern(name, f"{ROW_TO_6} {{ {text} }}", {"x": ROW}, weights={**ARRIVED_WEIGHTS, **changes}, **options)


QUANTIZED = (
    arrived("clean Q/DQ stays INT8", {}, says=('"int8": 1.0',)),
    arrived("clean Q/DQ leaves nothing to calibrate", {}, says=("came with Q/DQ", "MatMul_3", '"int8": 1.0'),
            options=INT8),
    arrived("non-zero uint8 zero-point", {"z": np.uint8(131)}),
    arrived("non-zero int8 zero-point", {"z": np.int8(3)}),
    arrived("uint8 weight with a zero-point", {"w": codes(8, 6, low=64, high=192, dtype=np.uint8),
            "wz": np.full(6, 128, np.uint8)}),
    arrived("zero scale", {"s": np.float32(0)}, code=2, says=("QuantizeLinear_0", "scales that are not positive")),
    arrived("negative scale", {"s": np.float32(-0.1)}, says=("takes its absolute value",)),
    arrived("INT32 bias", {"bq": codes(6, dtype=np.int32), "bs": np.float32(0.0003), "bz": np.int32(0)},
            ARRIVED.replace("y =", "m =") + " b = DequantizeLinear(bq, bs, bz) y = Add(m, b)"),
    arrived("omitted zero-point", {}, ARRIVED.replace("x, s, z", "x, s").replace("q, s, z", "q, s")),
    arrived("activation scale per channel", {"s": np.full(8, 0.03, np.float32), "z": np.zeros(8, np.int8)},
            ARRIVED.replace("QuantizeLinear(x", "QuantizeLinear<axis=1>(x")
            .replace("DequantizeLinear(q", "DequantizeLinear<axis=1>(q")),
    arrived("MatMul weight on axis 0", {"ws": np.full(8, 0.01, np.float32), "wz": np.zeros(8, np.int8)},
            ARRIVED.replace("<axis=1>", "<axis=0>")),
    arrived("float16 activation with a float32 scale", {},
            "h = Cast<to=10>(x) " + ARRIVED.replace("(x,", "(h,")),
    Pattern("Conv weight on axis 1", f"{TO_IMAGE} {{ {ARRIVED.replace('MatMul', 'Conv')} }}", {"x": IMAGE},
            weights={**ARRIVED_WEIGHTS, "w": codes(6, 8, 3, 3), "ws": np.full(8, 0.01, np.float32),
                     "wz": np.zeros(8, np.int8)}),
    Pattern("Gemm with transB on axis 1", f"{ROW_TO_6} {{ {ARRIVED.replace('MatMul', 'Gemm<transB=1>')} }}", {"x": ROW},
            weights={**ARRIVED_WEIGHTS, "w": codes(6, 8), "ws": np.full(8, 0.01, np.float32),
                     "wz": np.zeros(8, np.int8)}),
    Pattern("QAT with asymmetric activations", f"{ROW_TO_6} {{ {ARRIVED} }}", {"x": np.abs(ROW)},
            weights={**ARRIVED_WEIGHTS, "z": np.int8(-128), "s": np.float32(0.015)}),
    Pattern("UINT4 weights", f"{ROW_TO_6} {{ wd = DequantizeLinear(w4, s) y = MatMul(x, wd) }}", {"x": ROW}, opset=21,
            says=("'DequantizeLinear_0'", "uint4 codes", "quantize the float model again"), code=2,
            weights={"s": np.float32(0.1), "w4": codes(8, 6, low=0, high=16, dtype=ml_dtypes.uint4)}),
    Pattern("INT4 weights in blocks that do not divide them",
            "g (float[b,200] x) => (float[b,6] y) { wd = DequantizeLinear<axis=0, block_size=128>(w4, s) "
            "y = MatMul(x, wd) }", {"x": normal(10, 200)}, opset=21,
            weights={"s": np.full((2, 6), 0.1, np.float32), "w4": codes(200, 6, low=-8, high=8, dtype=ml_dtypes.int4)}),
    Pattern("FP8 for a target without it", f"{ROW_TO_6} {{ y = MatMul(x, w) }}", {"x": ROW}, ("FP8", "sm_86"),
            code=2, options=("--fp8",), weights={"w": normal(8, 6)}),
    Pattern("INT8 without data", f"{ROW_TO_6} {{ y = MatMul(x, w) }}", None, ("needs calibration data", "x float32"),
            code=2, options=INT8, weights={"w": normal(8, 6)}),
    Pattern("masked scores while calibrating", masked(float("-inf")).text.replace("y = MatMul(p, v)",
            "o = MatMul(p, v) y = MatMul(o, w)"), masked(0).feeds, options=INT8,
            weights={**masked(float("-inf")).weights, "w": normal(32, 32)}),
    Pattern("dead channels", f"{TO_IMAGE16} {{ a = Conv(x, w) r = Relu(a) y = Conv(r, v) }}", {"x": IMAGE16},
            options=INT8, weights={"w": normal(16, 16, 1, 1) * (np.arange(16) > 3)[:, None, None, None].astype("f4"),
                                   "v": normal(16, 16, 3, 3)}),
)  # fmt: skip
"""Quantized files, and what broke calibration tools."""
