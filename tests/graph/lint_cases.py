"""One small graph for each form that breaks a rule of the linter.

Scales are powers of two where no tolerance is given, so that products are exact and numbers must stay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

STEP = 0.0625
# int8 codes [4, 3] with scales per output channel; no output moves by more than GAIN times what its input moves by.
WEIGHT = "int8[4, 3] w = {-127, 5, 90, 33, -60, 12, 127, 8, -3, -100, 127, 64}"
WEIGHT_SCALES = "float[3] ws = {0.5, 0.25, 1}, int8[3] wz = {0, 0, 0}"
GAIN = 300.0
PARAMS = f"float s = {{{STEP}}}, int8 z = {{0}}, {WEIGHT}, {WEIGHT_SCALES}"
TURNED_WEIGHT = WEIGHT.replace("[4, 3]", "[3, 4]")
ROW_SCALES = "float[4] ws = {0.5, 0.25, 1, 0.125}, int8[4] wz = {0, 0, 0, 0}"
FLOATS = "v0 = {-3.03, 0.5, 8, 2.01, -4.7, 1.1, 0.09375, 0.25, -0.51, -2.2, 4.4, 6.3}"
FLOAT_SCALES = "float[3] ws = {0.0625, 0.03125, 0.125}, int8[3] wz = {0, 0, 0}"
UINT8_WEIGHT = "uint8[4, 3] u = {1, 133, 255, 160, 68, 140, 255, 136, 125, 28, 255, 192}, float us = {0.03125}"
# ONNX text gives float16 by its bits.
HALF = "float16 h = {11264}"
UNSIGNED = frozenset(["nonzero-zero-point", "unsigned-zero-point"])
# Half a step of the largest scale for each of four inputs, which reach 8.
WRONG_AXIS = {"y": 4 * 8 * 0.5}


@dataclasses.dataclass(frozen=True)
class Case:
    """A graph that breaks rules.

    Attributes:
        body: ONNX text.
        found: the rules that it breaks.
        tolerance: by output, in its own unit; 0 where numbers stay.
        fixes: the rules that the fixer names; those found by default.
        left: the rules that are still broken afterwards.
    """

    body: str
    found: frozenset[str]
    tolerance: Mapping[str, float] = dataclasses.field(default_factory=dict)
    fixes: frozenset[str] | None = None
    left: frozenset[str] = frozenset()


def rules(*names: str) -> frozenset[str]:
    return frozenset(names)


def pair(inits: str, chain: str) -> str:
    """x -> what `chain` computes as d -> MatMul with an int8 weight."""
    return f"""g (float[N, 4] x) => (float[N, 3] y, float[N, 4] d) <{PARAMS}, {inits}> {{
        {chain} wd = DequantizeLinear<axis = 1>(w, ws, wz) y = MatMul(d, wd) }}"""


def weight(inits: str, chain: str, product: str = "MatMul(d, v)") -> str:
    """x -> Q -> DQ -> product with what `chain` computes as v."""
    return f"""g (float[N, 4] x) => (float[N, 3] y) <float s = {{{STEP}}}, int8 z = {{0}}, {inits}> {{
        q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) {chain} y = {product} }}"""


def layout(shape: str, chain: str, inits: str = "float unused = {0}") -> str:
    """A uint8 image of which `chain` makes m between Q and DQ."""
    return f"""g (float[N, 4, 4, 4] p) => (float{shape} y) <float s = {{{STEP}}}, uint8 z = {{128}}, {inits}> {{
        q = QuantizeLinear(p, s, z) {chain} y = DequantizeLinear(m, s, z) }}"""


def covering(low: float, high: float) -> dict[str, float]:
    """One step of the symmetric int8 scale that covers a range."""
    step = max(high / 127, low / -128) * 1.0001
    return {"d": step, "y": step * GAIN}


def one_pair(zero_point: str) -> str:
    return pair(f"{zero_point}", "q = QuantizeLinear(x, s, m) d = DequantizeLinear(q, s, m)")


LAYOUT = UNSIGNED | {"layout-between-qdq"}
LAYOUT_FIXES = rules("layout-between-qdq", "unsigned-zero-point")

CASES: dict[str, Case] = {
    "uint8 around 128": Case(one_pair("uint8 m = {128}"), UNSIGNED, fixes=rules("unsigned-zero-point")),
    "uint8 from 0 clamps like a Relu": Case(
        one_pair("uint8 m = {0}"), rules("unsigned-zero-point"), covering(0, 255 * STEP)
    ),
    "uint8 with another zero-point": Case(
        one_pair("uint8 m = {100}"), UNSIGNED, covering(-100 * STEP, 155 * STEP), rules("unsigned-zero-point")
    ),
    "int8 with a zero-point at one end": Case(
        one_pair("int8 m = {-128}"), rules("nonzero-zero-point"), covering(0, 255 * STEP)
    ),
    "int8 with a zero-point at the other end": Case(
        one_pair("int8 m = {127}"), rules("nonzero-zero-point"), covering(-255 * STEP, 0)
    ),
    "omitted zero-points mean uint8": Case(
        pair("float unused = {0}", "q = QuantizeLinear(x, s) d = DequantizeLinear(q, s)"),
        rules("omitted-zero-point"),
        covering(0, 255 * STEP),
        rules("omitted-zero-point", "unsigned-zero-point"),
    ),
    "scales per channel of an activation": Case(
        pair(
            "float[4] c = {0.0625, 0.03, 0.01, 0.02}, int8[4] m = {0, 0, 0, 0}",
            "q = QuantizeLinear<axis = 1>(x, c, m) d = DequantizeLinear<axis = 1>(q, c, m)",
        ),
        rules("activation-scale-per-channel"),
        {"d": STEP, "y": STEP * GAIN},
    ),
    "uint8 scales per channel of an activation": Case(
        pair(
            "float[4] c = {0.0625, 0.03, 0.01, 0.02}, uint8[4] m = {0, 100, 128, 255}",
            "q = QuantizeLinear<axis = -1>(x, c, m) d = DequantizeLinear<axis = -1>(q, c, m)",
        ),
        UNSIGNED | {"activation-scale-per-channel"},
        covering(0, 255 * STEP),
        rules("activation-scale-per-channel"),
    ),
    "a negative scale of an activation": Case(
        pair(f"float n = {{-{STEP}}}", "q = QuantizeLinear(x, n, z) d = DequantizeLinear(q, n, z)"),
        rules("invalid-scale"),
        {"d": STEP, "y": STEP * GAIN},
    ),
    "other scales at the two ends": Case(
        pair("float t = {0.25}", "q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, t, z)"), rules("unequal-pair")
    ),
    "other scales and zero-points at the two ends": Case(
        pair("float t = {0.25}, int8 m = {3}", "q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, t, m)"),
        rules("unequal-pair", "nonzero-zero-point"),
        fixes=rules("unequal-pair"),
    ),
    "scales that differ by rounding": Case(
        pair(f"float t = {{{STEP * 1.001}}}", "q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, t, z)"),
        rules("unequal-pair"),
        {"d": STEP / 2, "y": STEP / 2 * GAIN},
    ),
    "the same pair twice": Case(
        pair(
            "float unused = {0}",
            """q = QuantizeLinear(x, s, z) e = DequantizeLinear(q, s, z)
            r = QuantizeLinear(e, s, z) d = DequantizeLinear(r, s, z)""",
        ),
        rules("double-qdq"),
    ),
    "another pair behind the first": Case(
        pair(
            "float t = {0.25}",
            """q = QuantizeLinear(x, s, z) e = DequantizeLinear(q, s, z)
            r = QuantizeLinear(e, t, z) d = DequantizeLinear(r, t, z)""",
        ),
        rules("double-qdq"),
        fixes=rules(),
        left=rules("double-qdq"),
    ),
    "one QuantizeLinear for each reader": Case(
        f"""g (float[N, 4] x) => (float[N, 3] y, float[N, 3] y2) <{PARAMS}, float s2 = {{{STEP}}}> {{
            q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z)
            q2 = QuantizeLinear(x, s2, z) d2 = DequantizeLinear(q2, s2, z)
            wd = DequantizeLinear<axis = 1>(w, ws, wz) y = MatMul(d, wd) y2 = MatMul(d2, wd) }}""",
        rules("duplicate-quantize"),
    ),
    "16-bit codes": Case(
        pair("int16 m = {0}, float f = {0.001}", "q = QuantizeLinear(x, f, m) d = DequantizeLinear(q, f, m)"),
        rules("unsupported-type"),
        {"d": 0.001, "y": 0.001 * GAIN},
    ),
    "unsigned 16-bit codes": Case(
        pair("uint16 m = {100}, float f = {0.001}", "q = QuantizeLinear(x, f, m) d = DequantizeLinear(q, f, m)"),
        rules("unsupported-type", "nonzero-zero-point"),
        {"d": 0.001, "y": 0.001 * GAIN},
        rules("unsupported-type"),
    ),
    "codes as an output": Case(
        f"g (float[N, 4] x) => (int8[N, 4] y) <{PARAMS}> {{ y = QuantizeLinear(x, s, z) }}",
        rules("lone-quantize"),
        fixes=rules(),
        left=rules("lone-quantize"),
    ),
    "uint8 codes as an output and in a pair": Case(
        f"""g (float[N, 4] x) => (uint8[N, 4] q, float[N, 4] d) <{PARAMS}, uint8 m = {{100}}> {{
            q = QuantizeLinear(x, s, m) d = DequantizeLinear(q, s, m) }}""",
        UNSIGNED | {"lone-quantize"},
        covering(-100 * STEP, 155 * STEP),
        rules("unsigned-zero-point"),
    ),
    "a uint8 input": Case(
        f"""g (uint8[N, 4] k) => (float[N, 3] y) <{PARAMS}, uint8 m = {{100}}> {{
            d = DequantizeLinear(k, s, m) wd = DequantizeLinear<axis = 1>(w, ws, wz) y = MatMul(d, wd) }}""",
        UNSIGNED,
        fixes=rules("unsigned-zero-point"),
    ),
    "an int32 input": Case(
        f"g (int32[N, 4] a) => (float[N, 4] y) <{PARAMS}> {{ y = DequantizeLinear(a, s) }}",
        rules("int32-dequantize"),
    ),
    "a quantized bias": Case(
        weight(
            f"{WEIGHT}, {WEIGHT_SCALES}, int32[3] b = {{1000, -2000, 77777}}, float[3] bs = {{0.5, 0.25, 1}}",
            "v = DequantizeLinear<axis = 1>(w, ws, wz) c = DequantizeLinear<axis = 0>(b, bs)",
            "Gemm(d, v, c)",
        ),
        rules("int32-dequantize"),
    ),
    "a float weight behind Q/DQ": Case(
        weight(
            f"float[4, 3] {FLOATS}, {FLOAT_SCALES}",
            "v1 = QuantizeLinear<axis = 1>(v0, ws, wz) v = DequantizeLinear<axis = 1>(v1, ws, wz)",
        ),
        rules("float-weight"),
    ),
    "a float weight behind Q, Transpose and DQ": Case(
        weight(
            f"float[3, 4] {FLOATS}, {FLOAT_SCALES}",
            """v1 = QuantizeLinear<axis = 0>(v0, ws, wz) v2 = Transpose(v1)
            v = DequantizeLinear<axis = 1>(v2, ws, wz)""",
        ),
        rules("float-weight", "layout-between-qdq"),
        fixes=rules("float-weight"),
    ),
    "a uint8 weight around 128": Case(
        weight(f"{UINT8_WEIGHT}, uint8 uz = {{128}}", "v = DequantizeLinear(u, us, uz)"),
        UNSIGNED,
        fixes=rules("unsigned-zero-point"),
    ),
    "a uint8 weight whose codes fit int8": Case(
        weight(f"{UINT8_WEIGHT}, uint8 uz = {{129}}", "v = DequantizeLinear(u, us, uz)"),
        UNSIGNED,
        fixes=rules("unsigned-zero-point"),
    ),
    "a uint8 weight whose codes do not": Case(
        weight(f"{UINT8_WEIGHT}, uint8 uz = {{3}}", "v = DequantizeLinear(u, us, uz)"),
        UNSIGNED,
        {"y": 4 * 8 * 0.5 * 252 * 0.03125 / 127},
        rules("unsigned-zero-point"),
    ),
    "a weight scaled along the wrong axis": Case(
        weight(f"{WEIGHT}, {ROW_SCALES}", "v = DequantizeLinear<axis = 0>(w, ws, wz)"),
        rules("weight-axis"),
        WRONG_AXIS,
    ),
    "a Gemm weight scaled along the wrong axis": Case(
        weight(
            f"{TURNED_WEIGHT}, {ROW_SCALES}", "v = DequantizeLinear<axis = -1>(w, ws, wz)", "Gemm<transB = 1>(d, v)"
        ),
        rules("weight-axis"),
        WRONG_AXIS,
    ),
    "a transposed weight scaled along the wrong axis": Case(
        weight(f"{TURNED_WEIGHT}, {ROW_SCALES}", "v1 = DequantizeLinear(w, ws, wz) v = Transpose(v1)"),
        rules("weight-axis"),
        WRONG_AXIS,
    ),
    "one weight for products that expect two axes": Case(
        f"""g (float[N, 4] x) => (float[N, 4] y, float[N, 4] y2) <float s = {{{STEP}}}, int8 z = {{0}},
            int8[4, 4] w = {{-127, 5, 90, 33, -60, 12, 127, 8, -3, -100, 127, 64, 1, 2, -127, 3}}, {ROW_SCALES}> {{
            q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) v = DequantizeLinear(w, ws, wz)
            y = MatMul(d, v) y2 = Gemm<transB = 1>(d, v) }}""",
        rules("weight-axis"),
        {"y": 4 * 8 * 0.5, "y2": 4 * 8 * 0.5},
    ),
    "channels of a weight that are 0 or negative": Case(
        weight(
            f"{WEIGHT}, float[3] ws = {{0, -0.25, 1}}, int8[3] wz = {{0, 0, 0}}",
            "v = DequantizeLinear<axis = 1>(w, ws, wz)",
        ),
        rules("invalid-scale"),
    ),
    "codes that Gather and Reshape read": Case(
        f"""g (int64[N] i) => (float[N, 3] y)
            <{WEIGHT}, float s = {{{STEP}}}, int8 z = {{0}}, int64[2] to = {{-1, 3}}> {{
            e = Gather(w, i) r = Reshape(e, to) y = DequantizeLinear(r, s, z) }}""",
        rules("layout-between-qdq"),
    ),
    "Reshape between Q and DQ": Case(
        layout("[N, 4, 16]", "m = Reshape(q, to)", "int64[3] to = {0, 4, 16}"), LAYOUT, fixes=LAYOUT_FIXES
    ),
    "Transpose and Flatten between Q and DQ": Case(
        layout("[N, 64]", "t = Transpose<perm = [0, 2, 3, 1]>(q) m = Flatten(t)"), LAYOUT, fixes=LAYOUT_FIXES
    ),
    "MaxPool between Q and DQ": Case(
        layout("[N, 4, 4, 4]", "m = MaxPool<kernel_shape = [2, 2], pads = [1, 1, 0, 0]>(q)"), LAYOUT, fixes=LAYOUT_FIXES
    ),
    "Pad between Q and DQ": Case(
        layout("[N, 4, 5, 5]", "m = Pad(q, pads, c)", "int64[8] pads = {0, 0, 1, 0, 0, 0, 0, 1}, uint8 c = {7}"),
        LAYOUT,
        fixes=LAYOUT_FIXES,
    ),
    "Pad without a value between Q and DQ": Case(
        layout("[N, 4, 5, 5]", "m = Pad(q, pads)", "int64[8] pads = {0, 0, 1, 0, 0, 0, 0, 1}"),
        LAYOUT,
        fixes=LAYOUT_FIXES,
    ),
    "Resize between Q and DQ": Case(
        layout("[N, 4, 8, 8]", 'm = Resize<mode = "nearest">(q, , r)', "float[4] r = {1, 1, 2, 2}"),
        LAYOUT,
        fixes=LAYOUT_FIXES,
    ),
    "Split and Concat between Q and DQ": Case(
        layout("[N, 4, 4, 4]", "a, b = Split<axis = 1, num_outputs = 2>(q) m = Concat<axis = 1>(b, a)"),
        LAYOUT,
        fixes=LAYOUT_FIXES,
    ),
    "a pair in the body of an If": Case(
        f"""g (float[N, 4] x) => (float[N, 4] d) <{PARAMS}, uint8 m = {{0}}, bool c = {{1}}> {{
            k = ReduceMax<keepdims = 0>(x) f = Cast<to = 9>(k)
            d = If (f) <
                then_branch = a () => (float[N, 4] t) {{ q = QuantizeLinear(x, s, m) t = DequantizeLinear(q, s, m) }},
                else_branch = b () => (float[N, 4] e) {{ e = Neg(x) }}> }}""",
        rules("unsigned-zero-point"),
        covering(0, 255 * STEP),
    ),
    "a stored scalar in codes": Case(
        f"""g (float[N, 4, 4, 4] p) => (float[N, 4, 5, 5] y) <float s = {{{STEP}}}, uint8 z = {{128}}, uint8 k = {{7}},
            int64[8] pads = {{0, 0, 1, 0, 0, 0, 0, 1}}> {{
            c = DequantizeLinear(k, s, z) y = Pad(p, pads, c) }}""",
        UNSIGNED | {"quantized-scalar"},
        fixes=rules("quantized-scalar"),
    ),
    "ONNX Runtime's own Q/DQ": Case(
        pair(
            "uint8 m = {128}", "q = com.microsoft.QuantizeLinear(x, s, m) d = com.microsoft.DequantizeLinear(q, s, m)"
        ),
        UNSIGNED | {"microsoft-qdq"},
        fixes=rules("microsoft-qdq", "unsigned-zero-point"),
    ),
    "a float32 scale for a float16 tensor": Case(
        f"""g (float16[N, 4] x) => (float16[N, 4] d) <float s = {{0.0626}}, int8 z = {{0}}, {HALF}> {{
            q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, h, z) }}""",
        rules("scale-type"),
        {"d": STEP},
    ),
    "a scale too small for float16": Case(
        """g (float16[N, 4] x) => (float[N, 4] d) <float s = {0.00000001}, int8 z = {0}> {
            q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) }""",
        rules("scale-type"),
    ),
    "uint8 codes of a float16 tensor": Case(
        f"""g (float16[N, 4] x) => (float16[N, 4] d) <uint8 m = {{100}}, {HALF}> {{
            q = QuantizeLinear(x, h, m) d = DequantizeLinear(q, h, m) }}""",
        UNSIGNED,
        {"d": 1.01 * 155 * STEP / 127},
        rules("unsigned-zero-point"),
    ),
    "scales computed at run time": Case(
        pair(
            "float k = {0.01}",
            """a = ReduceMax<keepdims = 0>(x) t = Mul(a, k)
            q = QuantizeLinear(x, t, z) d = DequantizeLinear(q, t, z)""",
        ),
        rules("runtime-scale"),
        fixes=rules(),
        left=rules("runtime-scale"),
    ),
}
