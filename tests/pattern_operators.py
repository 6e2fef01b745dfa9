"""Patterns of operators that no builder takes, and of conditionals and loops."""

from __future__ import annotations

import numpy as np
from pattern_models import IMAGE, INT8, ROW, ROW_TO_6, ROW_TO_ROW, TO_IMAGE, Pattern, codes, normal

INTEGER_WEIGHTS = {"w": codes(8, 6), "ws": np.full(6, 0.02, np.float32), "wz": np.zeros(6, np.int8)}
HIDDEN = normal(10, 5, 16)
TO_HIDDEN = "g (float[b,5,16] x) => (float[b,5,16] y)"
LSTM_WEIGHTS = {
    "w": codes(1, 8, 16),
    "r": codes(1, 4, 16),
    "b": normal(1, 32),
    "ws": np.full(1, 0.02, np.float32),
    "wz": np.zeros(1, np.int8),
    "rs": np.full(1, 0.02, np.float32),
    "rz": np.zeros(1, np.int8),
}
OPERATORS = (
    Pattern("dynamic INT8 product", f"{ROW_TO_6} {{ q, s, z = DynamicQuantizeLinear(x) p = MatMulInteger(q, w, z) "
            "f = Cast<to=1>(p) t = Mul(s, ws) y = Mul(f, t) }", {"x": ROW}, weights=INTEGER_WEIGHTS),
    Pattern("dynamic INT8 product in fp32", f"{ROW_TO_6} {{ q, s, z = DynamicQuantizeLinear(x) "
            "p = MatMulInteger(q, w, z) f = Cast<to=1>(p) t = Mul(s, ws) y = Mul(f, t) }", {"x": ROW},
            ('"cosine": 1.0',), options=("--fp32",), weights=INTEGER_WEIGHTS),
    Pattern("dynamic INT8 product, calibrated anew", "g (float[b,16] x) => (float[b,16] y) { "
            "q, s, z = DynamicQuantizeLinear(x) p = MatMulInteger(q, w, z) f = Cast<to=1>(p) t = Mul(s, ws) "
            "y = Mul(f, t) }", {"x": normal(10, 16)}, ('"int8": 1.0',), options=INT8,
            weights={"w": codes(16, 16), "ws": np.full(16, 0.02, np.float32)}),
    Pattern("dynamic INT8 convolution", f"{TO_IMAGE} {{ q, s, z = DynamicQuantizeLinear(x) p = ConvInteger(q, k, z) "
            "f = Cast<to=1>(p) y = Mul(f, s) }", {"x": IMAGE}, weights={"k": codes(4, 8, 3, 3)}),
    Pattern("dynamic INT8 LSTM", "g (float[5,b,8] x) => (float[5,1,b,4] y) { y = "
            "com.microsoft.DynamicQuantizeLSTM<hidden_size=4>(x, w, r, b, , , , , ws, wz, rs, rz) }",
            {"x": normal(5, 10, 8)}, weights=LSTM_WEIGHTS, profile="inputs: {x: [5, 10, 8]}"),
    Pattern("SkipLayerNormalization", f"{TO_HIDDEN} {{ a = Neg(x) y = com.microsoft.SkipLayerNormalization(a, x, g, b) "
            "}", {"x": HIDDEN}, weights={"g": normal(16), "b": normal(16)}),
    Pattern("FastGelu", f"{TO_HIDDEN} {{ y = com.microsoft.FastGelu(x, b) }}", {"x": HIDDEN},
            weights={"b": normal(16)}),
    Pattern("BiasGelu", f"{TO_HIDDEN} {{ y = com.microsoft.BiasGelu(x, b) }}", {"x": HIDDEN},
            weights={"b": normal(16)}),
    Pattern("FusedMatMul", f"{TO_HIDDEN} {{ y = com.microsoft.FusedMatMul<transB=1, alpha=0.5>(x, w) }}", {"x": HIDDEN},
            weights={"w": normal(16, 16)}),
    Pattern("com.microsoft Attention", f"{TO_HIDDEN} {{ y = com.microsoft.Attention<num_heads=2>(x, w, b) }}",
            {"x": HIDDEN}, weights={"w": normal(16, 48), "b": normal(48)}),
    Pattern("com.microsoft operator without a standard form", f"{TO_HIDDEN} {{ a = Relu(x) "
            "[odd] y = com.microsoft.Inverse(a) }", {"x": HIDDEN}, ("'odd'", "com.microsoft.Inverse",
            "an operator of ONNX Runtime's own"), code=2),
    Pattern("weight compression through Cast and Mul", f"{ROW_TO_6} {{ f = Cast<to=1>(w) v = Mul(f, ws) "
            "y = MatMul(x, v) }", {"x": ROW}, weights=INTEGER_WEIGHTS),
    Pattern("weight compression in INT8", "g (float[b,16] x) => (float[b,16] y) { f = Cast<to=1>(w) v = Mul(f, ws) "
            "y = MatMul(x, v) }", {"x": normal(10, 16)}, ('"int8": 1',), options=INT8,
            weights={"w": codes(16, 16), "ws": np.full(16, 0.02, np.float32)}),
    Pattern("Squeeze without axes", "g (float[b,1,8] x) => (float[b,8] y) { y = Squeeze(x) }",
            {"x": ROW[:, None, :]}),
    Pattern("one dim_param for unrelated dims", "g (float[?,8] x, float[?,5] z) => (float[?,?] y) "
            "{ a = MatMul(x, w) y = MatMul(a, z) }", {"x": normal(3, 8), "z": normal(4, 5)},
            weights={"w": normal(8, 4)}),
    Pattern("ScatterElements that adds", f"{ROW_TO_ROW} {{ a = Relu(x) "
            'y = ScatterElements<axis=1, reduction="add">(a, i, u) }', {"x": ROW[:1]},
            weights={"i": np.array([[1, 1, 3]]), "u": normal(1, 3)}, profile="inputs: {x: [1, 8]}"),
    Pattern("ScatterND that adds at runtime places", "g (float[b,8] x, int64[3,1] i, float[3,8] u) => (float[b,8] y) "
            '{ a = Relu(x) y = ScatterND<reduction="add">(a, i, u) }',
            {"x": ROW, "i": np.array([[1], [1], [3]]), "u": normal(3, 8)},
            profile="inputs: {x: [10, 8], i: [3, 1], u: [3, 8]}"),
    Pattern("ScatterND that takes the larger", "g (float[b,8] x, int64[3,1] i, float[3,8] u) => (float[b,8] y) "
            '{ a = Relu(x) y = ScatterND<reduction="max">(a, i, u) }',
            {"x": ROW, "i": np.array([[1], [1], [3]]), "u": normal(3, 8)},
            profile="inputs: {x: [10, 8], i: [3, 1], u: [3, 8]}"),
    Pattern("Scaler", "g (float[b,8] x) => (float[b,8] y) "
            "{ y = ai.onnx.ml.Scaler<offset=[1.0], scale=[0.5]>(x) }", {"x": ROW}),
    Pattern("trees", f"{ROW_TO_ROW} {{ a = Relu(x) [forest] y = ai.onnx.ml.TreeEnsembleRegressor(a) }}", {"x": ROW},
            ("'forest'", "TreeEnsembleRegressor", "trees branch on each value", "keep 'a' as its outputs"),
            code=2),
    Pattern("classifier", f"{ROW_TO_ROW} {{ a = Relu(x) [labels] y = ai.onnx.ml.LinearClassifier(a) }}", {"x": ROW},
            ("'labels'", "LinearClassifier", "it gives labels"), code=2),
    Pattern("float64 outputs", "g (float[b,8] x) => (double[b,6] y) { d = Cast<to=11>(x) y = MatMul(d, w) }",
            {"x": ROW}, weights={"w": normal(8, 6).astype(np.float64)}),
    Pattern("float64 input", "g (double[b,8] x) => (double[b,6] y) { y = MatMul(x, w) }",
            {"x": ROW.astype(np.float64)}, weights={"w": normal(8, 6).astype(np.float64)}),
    Pattern("reduced axes that fold", "g (float[b,5,16] x) => (float[b,16] y) { s = Shape(x) n = Size(s) "
            "a = Sub(n, two) axes = Reshape(a, one) y = ReduceMean<keepdims=0>(x, axes) }", {"x": HIDDEN},
            weights={"two": np.array(2), "one": np.array([1])}),
    Pattern("reduced axes as an input", "g (float[4,8] x, int64[1] axes) => (float[n,m] y) "
            "{ [total] y = ReduceSum(x, axes) }", {"x": normal(4, 8), "axes": np.array([1])},
            ("'total'", "ReduceSum", "computed at run time"), code=2),
    Pattern("operator that nobody has, no node names", f"{ROW_TO_ROW} {{ a = Relu(x) y = Swirl(a) }}", {"x": ROW},
            ("node 'Swirl_1' (Swirl)", "has no operator Swirl"), code=2),
    Pattern("NonZero", "g (float[b,8] x) => (int64[2,n] y) { [where] y = NonZero(x) }", {"x": ROW},
            ("'where'", "has no operator NonZero"), code=2),
    Pattern("plugin of the builder's own", "g (float[1,4,16,16] x, float[4,4] r, int64[4] i) => (float[n,c,h,w] y) "
            "{ [crop] y = RoiAlign<output_height=4, output_width=4>(x, r, i) }", None,
            ("'crop'", "can only be made on a machine with a GPU"),
            code=2),
    Pattern("plugin in a foreign domain", f"{ROW_TO_ROW} {{ [custom] y = com.example.ROIAlign_TRT(x) }}", {"x": ROW},
            ("'custom'", "com.example.ROIAlign_TRT"), code=2, profile="inputs: {x: [2, 8]}"),
    Pattern("text", "g (string[b] x) => (string[b] y) { [lower] y = StringNormalizer(x) }", None,
            ("'lower'", "it works on text", "keep 'x' as its outputs"),
            code=2, profile="inputs: {x: [4]}"),
)  # fmt: skip
"""Operators that no builder takes."""

LSTM = {"w": normal(1, 16, 8), "r": normal(1, 16, 4)}
CONTROL = (
    Pattern("If on a rank that is known", "g (float[b,8] x) => (float[p,q] y) { s = Shape(x) n = Size(s) "
            "c = Equal(n, two) y = If(c) <then_branch = t () => (float[b,8] u) { u = Relu(x) }, "
            "else_branch = e () => (float[b,8,1] v) { v = Unsqueeze(x, two1) }> }", {"x": ROW},
            weights={"two": np.array(2), "two1": np.array([2])}),
    Pattern("TorchScript's LSTM in nested Ifs of different rank",
            "g (float[b,5,8] x) => (float[b,n,4] y) { s = Shape(x) n = Size(s) c = Equal(n, three) "
            "t3 = If(c) <then_branch = t () => (float[p,q,r] u) { c2 = Equal(n, three) u = If(c2) "
            "<then_branch = t2 () => (float[p,q,r] u2) { u2 = Transpose<perm=[1,0,2]>(x) }, "
            "else_branch = e2 () => (float[q,r] v2) { v2 = Squeeze(x, zero1) }> }, "
            "else_branch = e () => (float[q,r] v) { v = Squeeze(x, zero1) }> "
            "o = LSTM<hidden_size=4>(t3, w, r) d = Squeeze(o, one1) y = Transpose<perm=[1,0,2]>(d) }",
            {"x": normal(10, 5, 8)}, weights={**LSTM, "three": np.array(3), "zero1": np.array([0]),
            "one1": np.array([1])}),
    Pattern("If whose other branch nobody could build", "g (float[b,n,8] x) => (float[b,p,q] y) { s = Shape(x) "
            "k = Gather(s, one) c = Less(k, ten) y = If(c) <then_branch = t () => (float[b,n,8] u) { u = Relu(x) }, "
            "else_branch = e () => (float[b,n,8] v) { v = com.example.Crop(x) }> }", {"x": normal(10, 5, 8)},
            weights={"one": np.array(1), "ten": np.array(10)}),
    Pattern("If on a size that the profile fixes", "g (float[b,n,8] x) => (float[p,q] y) { s = Shape(x) "
            "k = Gather(s, one) c = Less(k, ten) y = If(c) <then_branch = t () => (float[b,8] u) "
            "{ u = ReduceMax<keepdims=0>(x, one1) }, else_branch = e () => (float[b,n,8] v) { v = Neg(x) }> }",
            {"x": normal(10, 5, 8)}, weights={"one": np.array(1), "ten": np.array(10), "one1": np.array([1])}),
    Pattern("If on a value at run time", "g (float[b,8] x) => (float[b,8] y) { m = ReduceMax<keepdims=0>(x) "
            "c = Greater(m, zero) y = If(c) <then_branch = t () => (float[b,8] u) { u = Relu(x) }, "
            "else_branch = e () => (float[b,8] v) { v = Neg(x) }> }", {"x": ROW}, weights={"zero": np.float32(0)}),
    Pattern("If at run time with branches of different rank", "g (float[b,8] x) => (float[p,q] y) "
            "{ m = ReduceMax<keepdims=0>(x) c = Greater(m, zero) [pick] y = If(c) <then_branch = t () => "
            "(float[b,8] u) { u = Relu(x) }, else_branch = e () => (float[b,8,1] v) { v = Unsqueeze(x, two1) }> }",
            {"x": ROW}, ("If 'pick'", "2 and 3 dims", "the condition follows from input 'x'"), code=2,
            weights={"zero": np.float32(0), "two1": np.array([2])}),
    Pattern("Loop with a constant trip count", "g (float[b,8] x) => (float[b,8] y) { y = Loop(three, yes, x) "
            "<body = bd (int64 i, bool ci, float[b,8] si) => (bool co, float[b,8] so) "
            "{ co = Identity(ci) so = Relu(si) }> }", {"x": ROW},
            weights={"three": np.array(3), "yes": np.array(True)}),
    Pattern("Loop without a trip count that ends after a known number of rounds",
            "g (float[b,8] x) => (float[b,8] y) { n, y = Loop(, yes, zero, x) <body = bd (int64 i, bool ci, "
            "int64 k, float[b,8] si) => (bool co, int64 k1, float[b,8] so) { k1 = Add(k, one) co = Less(k1, three) "
            "so = Sin(si) }> }", {"x": ROW}, weights={"three": np.array(3), "yes": np.array(True),
            "zero": np.array(0), "one": np.array(1)}),
    Pattern("Loop without a trip count that runs until a value is small",
            "g (float[b,8] x) => (float[n,b,8] y) { [again] s, y = Loop(, yes, x) <body = bd (int64 i, bool ci, "
            "float[b,8] si) => (bool co, float[b,8] so, float[b,8] out) { so = Mul(si, half) "
            "m = ReduceMax<keepdims=0>(so) co = Greater(m, half) out = Neg(so) }> }", {"x": ROW},
            ("'again'", "Loop", "no trip count"), code=2,
            weights={"yes": np.array(True), "half": np.float32(0.5)}),
    Pattern("Scan", "g (float[5,8] x) => (float[8] s, float[5,8] y) { s, y = Scan<num_scan_inputs=1, body = bd "
            "(float[8] a, float[8] xi) => (float[8] b, float[8] o) { b = Add(a, xi) o = Tanh(b) }>(zero, x) }",
            {"x": normal(5, 8)}, weights={"zero": np.zeros(8, np.float32)}, profile="inputs: {x: [5, 8]}"),
)  # fmt: skip
"""Conditionals and loops."""
