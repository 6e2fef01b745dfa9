"""Patterns of profiles, opsets and attention."""

from __future__ import annotations

import numpy as np
from pattern_models import HEADS, IMAGE, QKV, ROW, ROW_TO_ROW, TO_IMAGE, Pattern, normal

SAME_SIZE = "g (float[b,8] x, float[b,8] z) => (float[b,8] y) { y = Add(x, z) }"
HEIGHT48 = (
    "g (float[b,3,h,40] x) => (float[b,n,m] y) { a = Conv<strides=[16,1], kernel_shape=[16,1]>(x, w) "
    "r = Reshape(a, s) y = MatMul(r, v) }"
)
HEIGHT48_WEIGHTS = {"w": normal(4, 3, 16, 1), "s": np.array([0, 40, 12]), "v": normal(12, 6)}
SHAPE_INPUT = "g (float[b,8] x, int64[2] size) => (float[n,m] y) { a = Relu(x) y = Reshape(a, size) }"
SHAPES = (
    Pattern("shape input without values", SHAPE_INPUT, None,
            ("input 'size' decides shapes", "values: {size: {min: "), code=2, profile="inputs: {x: [2, 8], size: [2]}"),
    Pattern("shape input with values", SHAPE_INPUT, {"x": normal(2, 8), "size": np.array([4, 4])},
            profile="inputs: {x: [2, 8], size: [2]}\nvalues: {size: {min: [4, 4], opt: [4, 4], max: [4, 4]}}"),
    Pattern("height that a Reshape fixes", HEIGHT48, None,
            ("axis 2 of input 'x' (dim h) is 32 at opt", "node 'Reshape_1' (Reshape) fails", "give h from 48 to 63"),
            code=2, weights=HEIGHT48_WEIGHTS,
            profile="dims: {b: {min: 1, opt: 2, max: 4}, h: {min: 32, opt: 32, max: 64}}\ninputs: {x: [b, 3, h, 40]}"),
    Pattern("height that a Reshape fixes, as it has to be", HEIGHT48, {"x": normal(10, 3, 48, 40)},
            weights=HEIGHT48_WEIGHTS),
    Pattern("opt outside of its range", ROW_TO_ROW + " { y = Relu(x) }", None,
            ("dims.b.range", "needs min <= opt <= max, got min 1, opt 9, max 4"), code=2,
            profile="dims: {b: {min: 1, opt: 9, max: 4}}\ninputs: {x: [b, 8]}"),
    Pattern("opt equal to min", ROW_TO_ROW + " { y = Relu(x) }", {"x": ROW},
            profile="dims: {b: {min: 1, opt: 1, max: 4}}\ninputs: {x: [b, 8]}"),
    Pattern("profile against a fixed dim", ROW_TO_ROW + " { y = Relu(x) }", None,
            ("axis 1 of input 'x' the size 9", "the model fixes it to 8"), code=2,
            profile="inputs: {x: [2, 9]}"),
    Pattern("profile of other rank", ROW_TO_ROW + " { y = Relu(x) }", None,
            ("input 'x' 3 dims", "x float32 [b, 8]"), code=2,
            profile="inputs: {x: [2, 8, 1]}"),
    Pattern("profile of an input that is not there", ROW_TO_ROW + " { y = Relu(x) }", None,
            ("unknown input 'z'", "the model's inputs are x"), code=2,
            profile="inputs: {x: [2, 8], z: [2, 8]}"),
    Pattern("profile with dims that have to be equal", SAME_SIZE.replace("[b,8] z", "[c,8] z"), None,
            ("axis 0 of input 'x' (dim b) is 2 and axis 0 of input 'z' is 3", "node 'Add_0' (Add) fails"),
            code=2, profile="inputs: {x: [2, 8], z: [3, 8]}"),
    Pattern("profile with two sizes for one dim", SAME_SIZE, None,
            ("axis 0 of input 'x' (dim b) is 2 and axis 0 of input 'z' is 3", "give both one range"), code=2,
            profile="inputs: {x: [2, 8], z: [3, 8]}"),
    Pattern("negative sizes in a profile", ROW_TO_ROW + " { y = Relu(x) }", None,
            ("inputs.x.0", "greater than or equal to 0, not -2"), code=2,
            profile="inputs: {x: [-2, 8]}"),
    Pattern("open dims without any range", ROW_TO_ROW + " { y = Relu(x) }", None,
            ("dynamic dimensions without a range", "b: {min: 1, opt: ?, max: ?}"), code=2),
    Pattern("scalar input", "g (float[b,8] x, float k) => (float[b,8] y) { y = Mul(x, k) }",
            {"x": ROW, "k": np.float32(0.5)}, profile="inputs: {x: [10, 8], k: []}"),
    Pattern("empty tensor", "g (float[b,8] x) => (float[b,8] y) { a = Concat<axis=0>(x, none) y = Relu(a) }",
            {"x": ROW}, weights={"none": np.zeros((0, 8), np.float32)}),
)  # fmt: skip
"""Profiles and shapes."""

OPSETS = (
    Pattern("opset 7", "g (float[b,8] x) => (float[b,16] y) { a = Unsqueeze<axes=[1]>(x) c = Concat<axis=2>(a, a) "
            "d = Dropout(c) y = Squeeze<axes=[1]>(d) }", {"x": ROW}, opset=7, ir=3),
    Pattern("opset 9 Upsample", f"{TO_IMAGE} {{ y = Upsample<mode=\"nearest\">(x, s) }}", {"x": IMAGE}, opset=9, ir=4,
            weights={"s": np.array([1, 1, 2, 2], np.float32)}),
    Pattern("opset 18 GroupNormalization", f"{TO_IMAGE} {{ y = GroupNormalization<num_groups=2>(x, s, c) }}",
            {"x": IMAGE}, opset=18, ir=8, weights={"s": normal(2), "c": normal(2)}),
    Pattern("Attention before its opset", f"{QKV} => (float[b,2,16,32] y) {{ y = Attention(q, k, v) }}", HEADS,
            opset=20),
    Pattern("opset of the future", f"{ROW_TO_ROW} {{ y = Relu(x) }}", {"x": ROW},
            ("the model uses opset 99", "knows opsets up to"), code=2, opset=99),
    Pattern("newer IR version", f"{ROW_TO_ROW} {{ y = Relu(x) }}", {"x": ROW}, ir=13),
    Pattern("Identity chain", f"{ROW_TO_ROW} {{ a = Identity(x) c = Identity(a) d = Identity(c) y = Relu(d) }}",
            {"x": ROW}),
    Pattern("NHWC converter's Transposes and Casts", f"{TO_IMAGE} {{ t = Transpose<perm=[0,2,3,1]>(x) "
            "c = Cast<to=1>(t) u = Transpose<perm=[0,3,1,2]>(c) a = Conv(u, k) v = Transpose<perm=[0,2,3,1]>(a) "
            "r = Relu(v) d = Cast<to=1>(r) y = Transpose<perm=[0,3,1,2]>(d) }", {"x": IMAGE},
            weights={"k": normal(8, 8, 3, 3)}),
)  # fmt: skip
"""Opsets, IR versions and leftovers of converters."""

CACHED = f"{QKV[:-1]}, float[b,2,6,32] pk, float[b,2,6,32] pv)"
WITH_CACHE = {**HEADS, "pk": normal(10, 2, 6, 32), "pv": normal(10, 2, 6, 32)}
ATTENTION = (
    Pattern("Attention in fp16", f"{QKV} => (float[b,2,16,32] y) {{ y = Attention(q, k, v) }}", HEADS,
            ('"fused_attention": 1',), opset=23),
    Pattern("Attention in fp32", f"{QKV} => (float[b,2,16,32] y) {{ y = Attention(q, k, v) }}", HEADS,
            ("taken apart into products and Softmax",), opset=23, options=("--fp32",)),
    Pattern("Attention with heads of 512", "g (float[b,2,4,512] q, float[b,2,4,512] k, float[b,2,4,512] v) => "
            "(float[b,2,4,512] y) { y = Attention(q, k, v) }", {name: normal(10, 2, 4, 512) for name in "qkv"},
            opset=23),
    Pattern("Attention with a past", f"{CACHED} => (float[b,2,16,32] y, float[b,2,22,32] nk, float[b,2,22,32] nv) "
            "{ y, nk, nv = Attention(q, k, v, , pk, pv) }", WITH_CACHE, opset=23),
    Pattern("causal Attention with a past", f"{CACHED} => (float[b,2,16,32] y, float[b,2,22,32] nk, "
            "float[b,2,22,32] nv) { y, nk, nv = Attention<is_causal=1>(q, k, v, , pk, pv) }", WITH_CACHE, opset=23),
    Pattern("causal Attention over a concatenated cache", "g (float[b,2,1,32] q, float[b,2,16,32] k, "
            "float[b,2,16,32] v) => (float[b,2,1,32] y) { y = Attention<is_causal=1>(q, k, v) }",
            {**HEADS, "q": normal(10, 2, 1, 32)}, opset=23),
    Pattern("Attention with softcap", f"{QKV} => (float[b,2,16,32] y) {{ y = Attention<softcap=2.0>(q, k, v) }}",
            HEADS, opset=23),
    Pattern("Attention with lengths of keys", f"{QKV[:-1]}, int64[b] n) => (float[b,2,16,32] y) "
            "{ y = Attention(q, k, v, , , , n) }", {**HEADS, "n": np.arange(1, 11)}, opset=24),
    Pattern("TensorScatter into no cache", "g (float[2,3,4,5] x, float[2,3,1,5] z, int64[2] i) => (float[2,3,4,5] y) "
            "{ a = Relu(x) [cache] y = TensorScatter(a, z, i) }", None,
            ("'cache'", "TensorScatter of TensorRT-RTX takes a cache", "or use ScatterElements"), code=2, opset=24),
    Pattern("RMSNormalization", f"{ROW_TO_ROW} {{ y = RMSNormalization(x, s) }}", {"x": ROW * 2000}, opset=23,
            weights={"s": normal(8)}),
)  # fmt: skip
"""Attention, caches and norms of opset 23 and 24."""
