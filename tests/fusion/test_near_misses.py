"""What is refused, with the nearest pattern, the node where it stopped and the reason."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from region_models import POST, SCORES, changed, model_of
from region_reference import Prepare

from trtforge.fusion.match import match_regions
from trtforge.fusion.regions import Matches

GELU = "[act] a = Gelu(u) "
NORM1 = "[norm1] h = LayerNormalization<epsilon=1e-6>(r1, g1, e1)"
NORM2 = "[norm2] y = LayerNormalization<epsilon=1e-6>(r2, g2, e2)"
PROBABILITIES = "[context] c = MatMul(p, v)"
ROTATED = """qa = Mul(q, cos) qr = Neg(q) qb = Mul(qr, sin) [rope] q9 = Add(qa, qb) [scores] s0 = MatMul(q9, kt)"""
SWAPPED_SIZES = """xs = Shape(x) b1 = Slice(xs, n0, n1) c1_ = Slice(xs, n1, n2) hd = Concat<axis=0>(c1_, b1, n2, n8)
    [cut] q2 = Reshape(q1, hd)"""
WIDE = [
    (f"[m{r}] {r}0 = MatMul(x, w{r}) [b{r}_] {r}1 = Add({r}0, b{r})", f"[m{r}] {r}1 = MatMul(x, wide_{r})")
    for r in "qkv"
]
WIDE += [(f"Reshape({r}1, heads)", f"Reshape({r}1, big)") for r in "qkv"]
WIDE += [("Reshape(c1, flat)", "Reshape(c1, flat24)"), ("MatMul(c2, wo)", "MatMul(c2, wide_o)")]

GROUPED = [
    (f"[m{r}] {r}0 = MatMul(x, w{r}) [b{r}_] {r}1 = Add({r}0, b{r})", f"[m{r}] {r}1 = MatMul(x, narrow_{r})")
    for r in "kv"
]
GROUPED += [(f"Reshape({r}1, heads)", f"Reshape({r}1, single)") for r in "kv"]
INPUTS = "float[batch, seq, 16] x, int64[batch, seq] mask, float[batch, seq, 16] other, int64[4] given"
ATTENTION, FFN, BLOCK = "attention", "ffn", "attention_ffn_block"


@dataclasses.dataclass(frozen=True)
class Refused:
    """What is changed in the post-norm block, and the near miss that this makes."""

    pattern: str
    node: str
    reason: str
    changes: tuple[tuple[str, str], ...] = ()
    outputs: str = "y"
    more: str = ""
    inputs: str = INPUTS


REFUSED = {
    "another activation": Refused(
        BLOCK,
        "act",
        "Elu is none of the activations gelu, gelu_tanh, gelu_sigmoid, relu, silu",
        ((GELU, "[act] a = Elu(u) "),),
    ),
    "relu6": Refused(BLOCK, "act", "Clip is none of the activations", ((GELU, "[act] a = Clip(u, nothing, six) "),)),
    "attention in windows": Refused(
        BLOCK,
        "mq",
        "attention is not known to see batch and sequence as the block has them (windows)",
        (
            ("[mq] q0 = MatMul(x, wq)", "xw = Reshape(x, windows) [mq] q0 = MatMul(xw, wq)"),
            ("MatMul(x, wk)", "MatMul(xw, wk)"),
            ("MatMul(x, wv)", "MatMul(xw, wv)"),
            ("[masked] s2 = Add(s1, bias)", "[masked] s2 = Identity(s1)"),
            ("Reshape(c1, flat)", "Reshape(c1, whole)"),
        ),
        inputs="float[batch, 6, 16] x, int64[batch, 6] mask",
    ),
    "a residual that broadcasts": Refused(
        BLOCK,
        "res1",
        "its two operands are not known to have the same batch and sequence",
        (("[bo_] o = Add(o0, bo)", "[bo_] o1 = Add(o0, bo) o = Reshape(o1, column)"),),
        inputs="float[1, 6, 16] x, int64[1, 6] mask",
    ),
    "a result of another shape": Refused(
        BLOCK,
        "res2",
        "its result is not known to have the batch and sequence of its start",
        (("[res1] r1 = Add(o, x)", "o9 = Reshape(o, column) x9 = Reshape(x, column) [res1] r1 = Add(o9, x9)"),),
        inputs="float[1, 6, 16] x, int64[1, 6] mask",
    ),
    "gelu by sigmoid": Refused(
        BLOCK,
        "act",
        "its activation is gelu_sigmoid; the block takes gelu, gelu_tanh, relu, silu",
        ((GELU, "t = Mul(u, quick) s = Sigmoid(t) [act] a = Mul(u, s) "),),
    ),
    "gated ffn": Refused(
        BLOCK,
        "act",
        "the FFN is gated: two projections are multiplied",
        ((GELU, "[mg] gg = MatMul(h, wgate) t = Sigmoid(u) [act] a = Mul(t, gg) "),),
    ),
    "rms norm": Refused(
        BLOCK,
        "norm1",
        "RMSNormalization: the block takes LayerNormalization",
        ((NORM1, "[norm1] h = RMSNormalization<epsilon=1e-6>(r1, g1) "),),
    ),
    "two epsilons": Refused(
        BLOCK, "norm2", "its epsilon is 1e-05, that of the first 1e-06", ((NORM2, NORM2.replace("1e-6", "1e-5")),)
    ),
    "no residual": Refused(BLOCK, "res1", "no residual connection", (("Add(o, x)", "Add(o, other)"),)),
    "layer scale": Refused(
        BLOCK,
        "gamma",
        "Mul (a layer scale) stands between attention and its residual Add",
        (("[bo_] o = Add(o0, bo)", "[bo_] o1 = Add(o0, bo) [gamma] o = Mul(o1, g2)"),),
    ),
    "no norm": Refused(
        BLOCK,
        "res1",
        "no LayerNormalization reads the residual sum (its readers: Tanh)",
        ((NORM1, "[norm1] h = Tanh(r1)"),),
    ),
    "softcap": Refused(
        ATTENTION,
        "cap",
        "softcap (Tanh) stands between Q K^T and its Softmax",
        (("Mul(s0, scale)", "Mul(s0, scale) [cap] s9 = Tanh(s1)"), ("Add(s1,", "Add(s9,")),
    ),
    "mask before the scale": Refused(
        ATTENTION,
        "masked",
        "its mask is added before the scale, and is scaled with the scores",
        ((SCORES, "[scores] s0 = MatMul(q, kt) [masked] s1 = Add(s0, bias) s2 = Mul(s1, scale) "),),
    ),
    "masked with a mild number": Refused(
        ATTENTION,
        "masked",
        "Where stands between Q K^T and its Softmax",
        (("[masked] s2 = Add(s1, bias)", "seen = Cast<to=9>(m2) [masked] s2 = Where(seen, s1, half)"),),
    ),
    "softmax along another axis": Refused(
        ATTENTION, "softmax", "its Softmax is along axis 2, not the last", (("Softmax<axis=-1>", "Softmax<axis=2>"),)
    ),
    "head mask": Refused(
        ATTENTION,
        "hm",
        "Mul stands between its Softmax and the product with the value",
        ((PROBABILITIES, "[hm] p9 = Mul(p, half) [context] c = MatMul(p9, v)"),),
    ),
    "weights are an output": Refused(
        ATTENTION, "softmax", "its attention weights are also read elsewhere, or are an output", outputs="y, p"
    ),
    "scores are read": Refused(ATTENTION, "masked", "its scores are also read elsewhere", outputs="y, s2"),
    "scaled value": Refused(
        ATTENTION,
        "context",
        "its value is scaled by 0.5",
        (("Add(v0, bv)", "Add(v0, bv) vs = Mul(v1, half)"), ("Reshape(v1,", "Reshape(vs,")),
    ),
    "something after the layout": Refused(
        BLOCK,
        "qn",
        "Tanh stands between the query and its projection",
        (("[scores] s0 = MatMul(q, kt)", "[qn] q9 = Tanh(q) [scores] s0 = MatMul(q9, kt)"),),
    ),
    "rotary embedding": Refused(
        BLOCK,
        "rope",
        "a rotary embedding (Add) stands between the query and its projection",
        (("[scores] s0 = MatMul(q, kt)", ROTATED),),
    ),
    "cross-attention": Refused(
        BLOCK,
        "mk",
        "query and key or value are projections of different tensors (cross-attention)",
        (("MatMul(x, wk)", "MatMul(other, wk)"), ("MatMul(x, wv)", "MatMul(other, wv)")),
    ),
    "grouped queries": Refused(BLOCK, "mk", "grouped queries: 2 heads of the query, 1 of the key", tuple(GROUPED)),
    "sizes that only the run tells": Refused(
        ATTENTION,
        "scores",
        "the query: the Reshape from [batch, seq, 16] to [?, ?, ?, ?] is not known to keep batch and sequence",
        (("Reshape(q1, heads)", "Reshape(q1, given)"),),
    ),
    "batch and sequence swapped": Refused(
        BLOCK,
        "cut",
        "the query: the Reshape from [batch, seq, 16] to [seq, batch, 2, 8] is not known to keep batch and sequence",
        (("q2 = Reshape(q1, heads)", SWAPPED_SIZES),),
    ),
    "scores cut to integers": Refused(
        ATTENTION,
        "cut",
        "Cast stands between Q K^T and its Softmax",
        (("s2 = Add(s1, bias)", "s9 = Add(s1, bias) [cut] s8 = Cast<to=7>(s9) s2 = Cast<to=1>(s8)"),),
    ),
    "weights cut to integers": Refused(
        ATTENTION,
        "cut",
        "Cast stands between its Softmax and the product with the value",
        ((PROBABILITIES, "[cut] p8 = Cast<to=7>(p) p9 = Cast<to=1>(p8) [context] c = MatMul(p9, v)"),),
    ),
    "a result cut to integers": Refused(
        BLOCK,
        "cut",
        "Cast stands between attention and its output projection",
        ((PROBABILITIES, "[context] c8 = MatMul(p, v) [cut] c9 = Cast<to=7>(c8) c = Cast<to=1>(c9)"),),
    ),
    "a mask for other heads": Refused(
        ATTENTION,
        "back_",
        "it is not known to part its 2 heads from the batch",
        (
            (
                "[masked] s2 = Add(s1, bias)",
                "s7 = Reshape(s1, swapped) s8 = Add(s7, own) [back_] s2 = Reshape(s8, back)",
            ),
        ),
        inputs="float[4, 6, 16] x, int64[4, 6] mask, float[1, 4, 6, 6] own",
    ),
    "repeated heads of the query": Refused(
        BLOCK,
        "mk",
        "heads of the query are shared: key and value have 2",
        (
            ("[mq] q0 = MatMul(x, wq) [bq_] q1 = Add(q0, bq)", "[mq] q1 = MatMul(x, narrow_k)"),
            ("Reshape(q1, heads)", "Reshape(q1, single)"),
            ("q = Transpose<perm=[0, 2, 1, 3]>(q2)", "q3 = Transpose<perm=[0, 2, 1, 3]>(q2)"),
            ("[scores]", "q4 = Unsqueeze(q3, n2) q5 = Expand(q4, twice) q = Reshape(q5, joined) [scores]"),
        ),
    ),
    "a weight that is an input": Refused(
        BLOCK,
        "bq_",
        "MatMul with 'own', which is no constant matrix, stands between the query and its projection",
        (("MatMul(x, wq)", "MatMul(x, own)"),),
        inputs=f"{INPUTS}, float[16, 16] own",
    ),
    "a product in another type": Refused(
        BLOCK,
        "bq_",
        "Cast stands between the query and its projection",
        (("[mq] q0 = MatMul(x, wq)", "x8 = Cast<to=10>(x) [mq] q8 = MatMul(x8, narrow) q0 = Cast<to=1>(q8)"),),
    ),
    "a bias of one number": Refused(
        BLOCK,
        "bq_",
        "Add of [], which is no bias of one number for each column, stands between the query and its projection",
        (("Add(q0, bq)", "Add(q0, half)"),),
    ),
    "an inner result that a subgraph reads": Refused(
        BLOCK,
        "norm1",
        "its result 'h' is read in a subgraph",
        outputs="y, z",
        more="z = If(cond) <then_branch = t () => (float[batch, seq, 16] t1) { t1 = Neg(h) }, "
        "else_branch = e () => (float[batch, seq, 16] e1) { e1 = Neg(x) }>",
        inputs=f"{INPUTS}, bool cond",
    ),
    "attention in a subgraph": Refused(
        ATTENTION,
        "branch",
        "1 in its subgraphs, where nothing is fused",
        (
            (
                PROBABILITIES,
                "[branch] c = If(cond) <then_branch = t () => (float[batch, 2, seq, 8] t1) "
                "{ tp = Softmax<axis=-1>(s2) t1 = MatMul(tp, v) }, "
                "else_branch = e () => (float[batch, 2, seq, 8] e1) { e1 = Neg(v) }>",
            ),
        ),
        inputs=f"{INPUTS}, bool cond",
    ),
    "an inner result is an output": Refused(BLOCK, "bu_", "its result 'u' is an output", outputs="y, u"),
    "an ffn without residual": Refused(
        BLOCK,
        "res2",
        "it does not add what the FFN started from: no residual connection",
        (("Add(d, h)", "Add(d, x)"),),
    ),
    "a layout inside is read": Refused(
        BLOCK, "spy", "it reads 'q2', which is inside the block", outputs="y, z", more="[spy] z = Neg(q2)"
    ),
    "the activation is read": Refused(FFN, "act", "its activation is also read elsewhere", outputs="y, a"),
    "an inner result is read": Refused(
        BLOCK,
        "md",
        "the result of the FFN is an output, or has several readers",
        outputs="y, z",
        more="[spy] z = Neg(d0)",
    ),
    "heads wider than the block": Refused(BLOCK, "mo", "2 heads of 12 are 24 wide, the block 16", tuple(WIDE)),
}
CONSTANTS = {
    **{f"narrow_{role}": np.ones((16, 8), np.float32) for role in "kv"},
    "single": np.array([0, 0, 1, 8]),
    "narrow": np.ones((16, 16), np.float16),
    "swapped": np.array([2, 4, 6, 6]),
    "back": np.array([4, 2, 6, 6]),
    "twice": np.array([1, 1, 2, 1, 1]),
    "joined": np.array([0, 2, -1, 8]),
    "column": np.array([6, 1, 16]),
    "nothing": np.array(0.0, np.float32),
    "six": np.array(6.0, np.float32),
    "windows": np.array([-1, 3, 16]),
    "whole": np.array([-1, 6, 16]),
    "quick": np.array(1.702, np.float32),
    "wgate": np.ones((16, 32), np.float32),
    **{f"wide_{role}": np.ones((16, 24), np.float32) for role in "qkv"},
    "wide_o": np.ones((24, 16), np.float32),
    "big": np.array([0, 0, 2, 12]),
    "flat24": np.array([0, 0, 24]),
    "cos": np.full((6, 8), 0.5, np.float32),
    "sin": np.full((6, 8), 0.5, np.float32),
    **{f"n{number}": np.array([number]) for number in (0, 1, 2, 8)},
}


def matches_of(case: Refused, prepare: Prepare) -> Matches:
    body = changed(POST, *case.changes) + case.more
    return match_regions(prepare(model_of(body, case.inputs, case.outputs, **CONSTANTS)))


@pytest.mark.parametrize("name", REFUSED)
def test_a_near_miss_says_where_and_why(name: str, prepare: Prepare) -> None:
    case = REFUSED[name]
    matches = matches_of(case, prepare)
    assert matches.blocks() == ()
    found = [(miss.pattern, miss.node, miss.reason) for miss in matches.near_misses]
    assert any(miss[:2] == (case.pattern, case.node) and case.reason in miss[2] for miss in found), found


def test_an_axis_of_scores_of_unknown_rank_is_not_taken_for_the_last(prepare: Prepare) -> None:
    body = changed(POST, ("s2 = Add(s1, bias)", "s9 = Add(s1, bias) s2 = Add(s9, own)"), ("<axis=-1>", "<axis=-2>"))
    model = model_of(body, f"{INPUTS}, float own")
    model.graph.input[-1].type.tensor_type.ClearField("shape")
    matches = match_regions(prepare(model))
    assert matches.attentions() == ()
    assert [miss.reason for miss in matches.near_misses] == ["its Softmax is along axis -2, not the last"]


def test_what_is_not_refused_is_still_found(prepare: Prepare) -> None:
    for name, left in (
        ("two epsilons", ["attention", "ffn"]),
        ("softcap", ["ffn"]),
        ("another activation", ["attention"]),
    ):
        assert [region.pattern for region in matches_of(REFUSED[name], prepare).regions] == left


def test_the_plain_block_has_no_near_miss(prepare: Prepare) -> None:
    matches = match_regions(prepare(model_of(POST, INPUTS)))
    assert matches.near_misses == ()
    assert len(matches.blocks()) == 1
