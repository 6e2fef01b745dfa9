"""Spellings of one block, each against the model's own numbers, and what is refused, with node and reason."""

from __future__ import annotations

import numpy as np
import pytest
from region_models import LAYOUT, MASK, POST, PRE, QKV, SCORES, changed, model_of
from region_reference import Prepare, check_block, feeds_of

from trtforge.fusion.match import match_regions
from trtforge.fusion.regions import AttentionFfnBlock

LN1 = "[norm1] h = LayerNormalization<epsilon=1e-6>(r1, g1, e1)"
LN2 = "[norm2] y = LayerNormalization<epsilon=1e-6>(r2, g2, e2)"
FUSED = "[mqkv] h0 = MatMul(x, wqkv) [bqkv_] h1 = Add(h0, bqkv) "
PACKED = FUSED + "h2 = Reshape(h1, packed) h3 = Transpose<perm=[2, 0, 3, 1, 4]>(h2) "
PACKED += "q = Gather<axis=0>(h3, i0) k = Gather<axis=0>(h3, i1) v = Gather<axis=0>(h3, i2) "
PACKED += "kt = Transpose<perm=[0, 1, 3, 2]>(k) "
INDICES = {f"i{index}": np.array(index) for index in range(3)}
CHAIN = """[mean] mu = ReduceMean<keepdims=1>(r1, last) [dev] dv = Sub(r1, mu) [sq] sq = Pow(dv, two)
    [var] va = ReduceMean<keepdims=1>(sq, last) [veps] ve = Add(va, eps) [std] sd = Sqrt(ve) [div] nd = Div(dv, sd)
    [gain] ng = Mul(nd, g1) [norm1] h = Add(ng, e1) """
TF_CHAIN = """[mean] mu = ReduceMean<keepdims=1>(r1, last) [dev] dv = Sub(r1, mu) [sq] sq = Mul(dv, dv)
    [var] va = ReduceMean<keepdims=1>(sq, last) [veps] ve = Add(va, eps) [std] sd = Sqrt(ve) [rec] rs = Reciprocal(sd)
    [gain] sg = Mul(rs, g1) [xs] xg = Mul(r1, sg) [ms] mg = Mul(mu, sg) [shift] sh = Sub(e1, mg)
    [norm1] h = Add(xg, sh) """
ROWS = """xs = Shape(x) b1 = Slice(xs, start0, start1) s1_ = Slice(xs, start1, start2)
    hd = Concat<axis=0>(b1, s1_, twoheads, size8) [torows] x2 = Reshape(x, rows) """
ROW_CONSTANTS = {
    "start0": np.array([0]),
    "start1": np.array([1]),
    "start2": np.array([2]),
    "twoheads": np.array([2]),
    "size8": np.array([8]),
    "rows": np.array([-1, 16]),
}
# What tf2onnx writes for BERT as TensorFlow has it: rows [B * S, H] all the way, and computed shapes.
TENSORFLOW = changed(
    POST,
    ("[mq] q0 = MatMul(x, wq)", ROWS + "[mq] q0 = MatMul(x2, wq)"),
    ("MatMul(x, wk)", "MatMul(x2, wk)"),
    ("MatMul(x, wv)", "MatMul(x2, wv)"),
    ("Reshape(q1, heads)", "Reshape(q1, hd)"),
    ("Reshape(k1, heads)", "Reshape(k1, hd)"),
    ("Reshape(v1, heads)", "Reshape(v1, hd)"),
    ("Reshape(c1, flat)", "Reshape(c1, rows)"),
    ("Add(o, x)", "Add(o, x2)"),
    (LN1, TF_CHAIN),
)
GEMMS = [
    (f"[m{r}] {t}0 = MatMul({x}, w{r}) [b{r}_] {y} = Add({t}0, b{r})", f"[m{r}] {y} = Gemm<transB=1>({x}, w{r}, b{r})")
    for r, t, x, y in (("q", "q", "x2", "q1"), ("k", "k", "x2", "k1"), ("v", "v", "x2", "v1"))
]
ERF = "[act] u1 = Div(u, sqrt2) u2 = Erf(u1) u3 = Add(u2, one) u4 = Mul(u, u3) a = Mul(u4, half) "
ERF_FIRST = "[act] u1 = Mul(u, invsqrt2) u2 = Erf(u1) u3 = Mul(half, u2) u4 = Add(half, u3) a = Mul(u4, u) "
TANH = """[act] u1 = Pow(u, three) u2 = Mul(cubic, u1) u3 = Add(u2, u) u4 = Mul(u3, sqrt2pi) u5 = Tanh(u4)
    u6 = Add(one, u5) u7 = Mul(u, half) a = Mul(u6, u7) """
TANH_PRODUCT = """[act] u1 = Mul(u, u) u2 = Mul(u1, cubic) u3 = Add(one, u2) u4 = Mul(u, sqrt2pi) u5 = Mul(u4, u3)
    u6 = Tanh(u5) u7 = Add(u6, one) u8 = Mul(half, u7) a = Mul(u, u8) """
SILU = "[act] u1 = Sigmoid(u) a = Mul(u1, u) "
GELU = "[act] a = Gelu(u) "
SWAPPED = [
    ("Add(q0, bq)", "Add(bq, q0)"),
    ("Mul(s0, scale)", "Mul(scale, s0)"),
    ("Add(s1, bias)", "Add(bias, s1)"),
    ("Add(o0, bo)", "Add(bo, o0)"),
    ("Add(o, x)", "Add(x, o)"),
    ("Add(u0, bu)", "Add(bu, u0)"),
    ("Add(d, h)", "Add(h, d)"),
]
JOIN = "[ct] c1 = Transpose<perm=[0, 2, 1, 3]>(c) [join] c2 = Reshape(c1, flat) "
LAYOUT_TO_CONTEXT = LAYOUT + MASK + SCORES + "[softmax] p = Softmax<axis=-1>(s2) [context] c = MatMul(p, v) "
OPERATOR = LAYOUT.replace("[0, 2, 3, 1]", "[0, 2, 1, 3]") + "[softmax] c = Attention(q, kt, v) "
OPERATOR_3 = "[softmax] c2 = Attention<q_num_heads=2, kv_num_heads=2>(q1, k1, v1) "
UNMASKED = ("no mask", "Attention of four axes", "Attention of three axes")
GUARD = "[softmax] p0 = Softmax<axis=-1>(s2) [isnan] p1 = IsNaN(p0) [guard] p = Where(p1, zero, p0) "
SOFTMAX = "[softmax] p = Softmax<axis=-1>(s2) "
BIASES = [(f"[m{r}] {t}0 = MatMul({x}, w{r}) [b{r}_] {t}1 = Add({t}0, b{r})", f"[m{r}] {t}1 = MatMul({x}, w{r})")
          for r, t, x in (("q", "q", "x"), ("k", "k", "x"), ("v", "v", "x"))]  # fmt: skip
SPLIT = FUSED + "[split] q1, k1, v1 = Split<axis=-1, num_outputs=3>(h1) "
SLICES = FUSED + "q1 = Slice(h1, n0, n16, last) k1 = Slice(h1, n16, n32, last) v1 = Slice(h1, n32, n48, last) "
BMM = """q3 = Reshape(q, merged) kt3 = Reshape(kt, merged_t) s3 = MatMul(q3, kt3) [scores] s0 = Reshape(s3, parted) """
TWO_LATE = [
    ("[bo_] o = Add(o0, bo) [res1] r1 = Add(o, x)", "[res1] r0 = Add(o0, x) [bo_] r1 = Add(r0, bo)"),
    ("[bd_] d = Add(d0, bd) [res2] r2 = Add(d, h)", "[res2] r3 = Add(d0, h) [bd_] r2 = Add(r3, bd)"),
]

# What ONNX Runtime's optimizer writes; `intake` takes it apart again.
ONNXRUNTIME = """m32 = Cast<to=6>(mask) [fused] c = com.microsoft.Attention<num_heads=2>(x, wqkv, bqkv, m32)
    [mo] o0 = MatMul(c, wo) [skip1] h = com.microsoft.SkipLayerNormalization<epsilon=1e-6>(o0, x, g1, e1, bo)
    [mu] u0 = MatMul(h, wu) [gelu] a = com.microsoft.BiasGelu(u0, bu) [md] d0 = MatMul(a, wd)
    [skip2] y = com.microsoft.SkipLayerNormalization<epsilon=1e-6>(d0, h, g2, e2, bd)"""

MATCHED: dict[str, tuple[str, dict[str, np.ndarray]]] = {
    "post": (POST, {}),
    "pre": (PRE, {}),
    "operands swapped": (changed(POST, *SWAPPED), {}),
    "no biases": (changed(PRE, *((a.replace("(x,", "(n,"), b.replace("(x,", "(n,")) for a, b in BIASES)), {}),
    "biases behind residuals": (changed(POST, *TWO_LATE), {}),
    "split": (changed(POST, (QKV, SPLIT)), {}),
    "slices": (
        changed(POST, (QKV, SLICES)),
        {f"n{i}": np.array([i]) for i in (0, 16, 32, 48)},
    ),
    "packed": (changed(POST, (QKV + LAYOUT, PACKED)), {"packed": np.array([0, 0, 3, 2, 8]), **INDICES}),
    "scale by division": (changed(POST, ("Mul(s0, scale)", "Div(s0, root)")), {}),
    "scale of the query": (
        changed(
            POST,
            ("Add(q0, bq)", "Add(q0, bq) qs = Mul(q1, scale)"),
            ("Reshape(q1,", "Reshape(qs,"),
            ("[scale_] s1 = Mul(s0, scale) ", ""),
            ("Add(s1, bias)", "Add(s0, bias)"),
        ),
        {},
    ),
    "onnxruntime": (ONNXRUNTIME, {}),
    "Attention of four axes": (changed(POST, (LAYOUT_TO_CONTEXT, OPERATOR)), {}),
    "Attention of three axes": (changed(POST, (LAYOUT_TO_CONTEXT + JOIN, OPERATOR_3)), {}),
    "no mask": (
        changed(POST, ("[masked] s2 = Add(s1, bias) ", ""), (MASK, ""), ("(s2) [context]", "(s1) [context]")),
        {},
    ),
    "guard": (changed(POST, (SOFTMAX, GUARD)), {}),
    "bool mask": (
        changed(
            POST, (MASK, "m1 = Unsqueeze(mask, axes12) m2 = Cast<to=9>(m1) "), ("Add(s1, bias)", "Where(m2, s1, low)")
        ),
        {},
    ),
    "bool mask that hides": (
        changed(
            POST, (MASK, "m1 = Unsqueeze(mask, axes12) m2 = Equal(m1, izero) "), ("Add(s1, bias)", "Where(m2, low, s1)")
        ),
        {"izero": np.array(0)},
    ),
    "gelu by erf": (changed(POST, (GELU, ERF)), {}),
    "gelu by erf, halves first": (changed(POST, (GELU, ERF_FIRST)), {"invsqrt2": np.array(2**-0.5, np.float32)}),
    "gelu by tanh": (changed(PRE, (GELU, TANH)), {}),
    "gelu by tanh of products": (changed(PRE, (GELU, TANH_PRODUCT)), {}),
    "silu": (changed(POST, (GELU, SILU)), {}),
    "relu": (changed(POST, (GELU, "[act] a = Relu(u) ")), {}),
    "norm as a chain": (changed(POST, (LN1, CHAIN)), {}),
    "tf2onnx": (TENSORFLOW, ROW_CONSTANTS),
    "gemm": (changed(TENSORFLOW, *GEMMS), ROW_CONSTANTS),
    "three axes": (
        changed(POST, ("[scores] s0 = MatMul(q, kt) ", BMM)),
        {"merged": np.array([-1, 6, 8]), "merged_t": np.array([-1, 8, 6]), "parted": np.array([-1, 2, 6, 6])},
    ),
}
KINDS = {"gelu by tanh": "gelu_tanh", "gelu by tanh of products": "gelu_tanh", "silu": "silu", "relu": "relu"}


@pytest.mark.parametrize("name", MATCHED)
def test_block_is_matched(name: str, prepare: Prepare) -> None:
    body, constants = MATCHED[name]
    inputs = "float[batch, 6, 16] x, int64[batch, 6] mask" if name == "three axes" else None
    graph = prepare(model_of(body, **({"inputs": inputs} if inputs else {}), **constants))
    matches = match_regions(graph)
    assert matches.near_misses == ()
    (block,) = matches.regions
    assert isinstance(block, AttentionFfnBlock)
    assert block.attention.softmax_scale == pytest.approx(8**-0.5)
    assert block.ffn.activation.kind == KINDS.get(name, "gelu")
    assert block.norm1.epsilon == block.norm2.epsilon == pytest.approx(1e-6)
    padding = block.attention.mask.key_padding
    assert (None if padding is None else padding.tensor) == (None if name in UNMASKED else "mask")
    check_block(graph, block, feeds_of(graph))


def test_every_role_has_its_node(prepare: Prepare) -> None:
    (block,) = match_regions(prepare(model_of(POST))).blocks()
    assert block.roles() == {
        "query": "mq", "query_bias": "bq_", "key": "mk", "key_bias": "bk_", "value": "mv", "value_bias": "bv_",
        "scores": "scores", "softmax": "softmax", "context": "context", "out": "mo", "out_bias": "bo_",
        "up": "mu", "up_bias": "bu_", "activation": "act", "down": "md", "down_bias": "bd_",
        "residual1": "res1", "residual2": "res2", "norm1": "norm1", "norm2": "norm2",
    }  # fmt: skip
    assert (block.x, block.output) == ("x", "y")
    assert {"qt", "kt", "vt", "ct", "join"} < set(block.nodes)


def test_a_quantized_weight_is_named_by_its_floats(prepare: Prepare) -> None:
    codes = {"codes": np.random.default_rng(3).integers(-9, 9, (16, 16)).astype(np.int8)}
    pair = ("[mk] k0 = MatMul(x, wk)", "x_q = QuantizeLinear(x, fine, z) x_f = DequantizeLinear(x_q, fine, z) "
            "w_f = DequantizeLinear(codes, one_step, z) [mk] k0 = MatMul(x_f, w_f)")  # fmt: skip
    more = {"fine": np.array(0.001, np.float32), "one_step": np.array(0.05, np.float32), "z": np.array(0, np.int8)}
    graph = prepare(model_of(changed(POST, pair), **(codes | more)))
    (block,) = match_regions(graph).blocks()
    assert block.attention.key.projection is not None
    assert block.attention.key.projection.linear.weight == "w_f"
    assert block.attention.key.projection.linear.x == block.x == "x"


def test_sizes_may_be_read_inside(prepare: Prepare) -> None:
    target = "[sizes] cs = Shape(c1) cb = Slice(cs, n0, n2) cf = Concat<axis=0>(cb, n16) [join] c2 = Reshape(c1, cf)"
    numbers = {f"n{number}": np.array([number]) for number in (0, 2, 16)}
    graph = prepare(model_of(changed(POST, ("[join] c2 = Reshape(c1, flat)", target)), **numbers))
    (block,) = match_regions(graph).blocks()
    assert block.size_readers == ("sizes",)
    check_block(graph, block, feeds_of(graph))


def test_an_output_may_have_names_of_its_own_for_its_sizes(prepare: Prepare) -> None:
    model = model_of(POST)
    for name in ("rows", "columns", "width"):
        model.graph.output[0].type.tensor_type.shape.dim.add().dim_param = name
    assert len(match_regions(prepare(model)).blocks()) == 1


def test_mask_terms_come_in_the_order_in_which_they_are_applied(prepare: Prepare) -> None:
    both = (
        "[masked] s2 = Add(s1, bias)",
        "seen = Cast<to=9>(m2) [first] s9 = Where(seen, s1, low) [end] s2 = Add(s9, bias)",
    )
    graph = prepare(model_of(changed(POST, both)))
    (block,) = match_regions(graph).blocks()
    assert [(term.node, term.kind) for term in block.attention.mask.terms] == [("first", "keep"), ("end", "additive")]
    check_block(graph, block, feeds_of(graph))


def test_a_fused_projection_has_its_columns(prepare: Prepare) -> None:
    body, constants = MATCHED["packed"]
    (attention,) = match_regions(prepare(model_of(body, **constants))).attentions()
    parts = (attention.query, attention.key, attention.value)
    columns = [part.projection.columns() for part in parts if part.projection is not None]
    assert columns == [list(range(0, 16)), list(range(16, 32)), list(range(32, 48))]
