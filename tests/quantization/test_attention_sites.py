from __future__ import annotations

import numpy as np
import pytest
from quant_cases import graph_from_text, normal

from trtforge.graph.passes.cleanup import remove_identities
from trtforge.quantization.placement import ActivationSite, plan_placement
from trtforge.recipe import QuantRecipe

PRODUCTS = "[scores] s = MatMul(qt, kt) {} [softmax] p = Softmax<axis=-1>(sm) {} [context] a = MatMul(p2, vt)"
SCALED = "c = Mul(s, scale) sm = Add(c, m)"
OUT = "at = Transpose<perm=[0, 2, 1, 3]>(a) f = Reshape(at, flat) [out] y = MatMul(f, wo)"
CONSTANTS = {
    **{name: normal(64, 64, seed=index) for index, name in enumerate(("wq", "wk", "wv", "wo"))},
    "scale": np.float32(0.2),
    "low": np.float32(-1e4),
    "flat": np.array([0, 0, 64]),
}


def attention(score=SCALED, guard="p2 = Identity(p)", out=OUT, head=32, rows=16, keys=16, outputs="y", **more):
    """Two heads on x [2, rows, 64], keys and values from z [2, keys, 64]; m is the mask."""
    text = f"""g (float[2, {rows}, 64] x, float[2, {keys}, 64] z, float[2, 1, 1, {keys}] m) => ({outputs}) {{
        [q] q0 = MatMul(x, wq) [k] k0 = MatMul(z, wk) [v] v0 = MatMul(z, wv)
        q4 = Reshape(q0, heads) k4 = Reshape(k0, heads) v4 = Reshape(v0, value_heads)
        qt = Transpose<perm=[0, 2, 1, 3]>(q4) kt = Transpose<perm=[0, 2, 3, 1]>(k4)
        vt = Transpose<perm=[0, 2, 1, 3]>(v4) {PRODUCTS.format(score, guard)} {out} }}"""
    heads = np.array([0, 0, 64 // head, head])
    constants = {**CONSTANTS, "heads": heads, "value_heads": heads, **more}
    graph = graph_from_text(text, **{name: array for name, array in constants.items() if name in text})
    remove_identities(graph)
    return graph


def products_of(placement):
    return [(site.node, site.input_index) for site in placement.activations if site.node in ("scores", "context")]


def reason_of(graph, largest=None, **recipe):
    """Why both products stay float."""
    placement = plan_placement(graph, {}, QuantRecipe(**{"attention": True} | recipe), largest=largest)
    assert products_of(placement) == []
    reasons = {kept.node: kept.reason for kept in placement.kept_float}
    assert reasons["scores"] == reasons["context"]
    return reasons["scores"]


ALL = [("scores", 0), ("scores", 1), ("context", 0), ("context", 1)]


def test_all_four_operands_are_quantized_and_stand_or_fall_with_the_projection():
    placement = plan_placement(attention(), {}, QuantRecipe(attention=True))
    assert products_of(placement) == ALL
    assert ActivationSite("context", 0, "p") in placement.activations
    assert {kept.node for kept in placement.kept_float} == set()
    assert placement.without({"out": "too loud"}).nodes == ("q", "k", "v")
    assert placement.without({"scores": "too loud"}).nodes == ("q", "k", "v", "out")


def test_attention_stays_float_by_default():
    assert products_of(plan_placement(attention(), {}, QuantRecipe())) == []
    assert "can end its fusion" in reason_of(attention(), attention=False)


@pytest.mark.parametrize("head", [16, 32, 64])
def test_head_sizes_that_fuse(head):
    assert products_of(plan_placement(attention(head=head), {}, QuantRecipe(attention=True))) == ALL


@pytest.mark.parametrize(
    "score",
    [
        "sm = Identity(s)",
        "sm = Div(s, scale)",
        "c = Mul(s, scale) sm = Add(m, c)",
        "b = Cast<to=9>(m) c = Mul(s, scale) sm = Where(b, c, low)",
        "n = Sub(low, m) bias = Mul(n, low) c = Mul(s, scale) sm = Add(bias, c)",
    ],
    ids=["plain", "div", "mask-first", "where", "mask-arithmetic"],
)
def test_spellings_of_scale_and_mask(score):
    assert products_of(plan_placement(attention(score), {}, QuantRecipe(attention=True))) == ALL


def test_the_number_of_queries_is_free():
    assert products_of(plan_placement(attention(rows=600), {}, QuantRecipe(attention=True))) == ALL


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (attention(head=8), "its head sizes are 8 and 8; INT8 attention needs one of 16, 32 or 64"),
        (
            attention(
                wv=normal(64, 128), value_heads=np.array([0, 0, 2, 64]), wo=normal(128, 64), flat=np.array([0, 0, 128])
            ),
            "its head sizes are 32 and 64; INT8 attention needs one of 16, 32 or 64",
        ),
        (attention(keys=513), "it has up to 513 keys; INT8 attention takes 512"),
        (attention(rows=1), "it has a single query"),
        (attention(rows='"t"'), "its sizes are unknown"),
        (
            attention(guard="bad = IsNaN(p) [guard] p2 = Where(bad, scale, p)"),
            "Where 'guard' stands between its Softmax and the second product",
        ),
        (attention(outputs="y, p"), "its Softmax is read by others as well"),
        (attention(outputs="y, a"), "its result is an output of the model, in the float type"),
        (attention(out="[neg] y = Neg(a)"), "Neg 'neg' reads its result in the float type"),
    ],
)
def test_attention_that_would_not_fuse_stays_float(graph, reason):
    assert reason_of(graph) == reason


def test_keys_are_counted_at_the_largest_shapes():
    largest = {"vt": (2, 2, 1024, 32)}
    assert reason_of(attention(), largest) == "it has up to 1024 keys; INT8 attention takes 512"


def test_excluded_projection_keeps_attention_float():
    assert reason_of(attention(), exclude=("out",)) == "MatMul 'out' reads its result in the float type"


def test_excluded_product_keeps_both_float():
    assert reason_of(attention(), exclude=("context",)) == "excluded by the recipe's pattern 'context'"


def test_product_outside_attention_stays_float():
    graph = graph_from_text("g (float[2, 32, 32] x) => (y) { [bmm] s = MatMul(x, x) [r] y = Relu(s) }")
    placement = plan_placement(graph, {}, QuantRecipe(attention=True))
    assert placement.nodes == ()
    assert [kept.node for kept in placement.kept_float] == ["bmm"]
