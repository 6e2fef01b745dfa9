"""Regions rewritten to one packed product and `Attention`: the same numbers, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from region_models import INPUTS, LAYOUT, MASK, POST, PRE, QKV, SCORES, changed, model_of
from region_reference import Prepare, feeds_of, run

from trtforge.fusion.lower_attention import AttentionLowering
from trtforge.fusion.match import match_regions
from trtforge.fusion.regions import Attention
from trtforge.fusion.view import StoppedError

# float32 sums of at most 32 products near 1, in another order; a wrong head, scale or mask shows as 1e-2 and more.
MAX_ERROR = 2e-5
COUNT = "size = Shape<start=1, end=2>(mask) count = Squeeze(size, a0) rows = Range(i0, count, i1) "
CAUSAL = COUNT + "r1_ = Unsqueeze(rows, a1) k1_ = Unsqueeze(rows, a0) seen = LessOrEqual(k1_, r1_) "
PADDED = "m1 = Unsqueeze(mask, axes12) pad = Cast<to=9>(m1) "
TWICE = PADDED.replace("m1", "m9")
CONSTANTS = {
    "a0": np.array([0]),
    "a1": np.array([1]),
    "true": np.array(True),
    "shape": np.array([1, 1, 6, 6]),
    "i0": np.array(0),
    "i1": np.array(1),
    "triangle": np.where(np.tril(np.ones((6, 6), bool)), 0, -1e9).astype(np.float32)[None, None],
}
MASKED = "[masked] s2 = Add(s1, bias)"
# Body, number of inputs of `Attention`, whether it is causal.
SPELLINGS = {
    "additive mask of a column for each key": (POST, 4, 0),
    "pre-norm": (PRE, 4, 0),
    "no mask": (changed(POST, (MASK, ""), (MASKED, ""), ("Softmax<axis=-1>(s2)", "Softmax<axis=-1>(s1)")), 3, 0),
    "a mask that hides nothing": (
        changed(POST, (MASK, "seen = Expand(true, shape) bias = Where(seen, zero, low) ")),
        3,
        0,
    ),
    "constant triangle": (changed(POST, (MASK, "bias = Identity(triangle) ")), 3, 1),
    "compared positions": (changed(POST, (MASK, CAUSAL + "bias = Where(seen, zero, low) ")), 3, 1),
    "causal and padding": (
        changed(POST, (MASK, PADDED + CAUSAL + "both = And(seen, pad) bias = Where(both, zero, low) ")),
        4,
        0,
    ),
    "scores kept where the mask is true": (changed(POST, (MASK, PADDED), (MASKED, "s2 = Where(pad, s1, low)")), 4, 0),
    "scores hidden where the mask is true": (
        changed(POST, (MASK, PADDED + "not_ = Not(pad) "), (MASKED, "s2 = Where(not_, low, s1)")),
        4,
        0,
    ),
    "two terms": (
        changed(POST, (MASK, MASK + TWICE), (MASKED, "s3 = Add(s1, bias) s2 = Where(pad, s3, low)")),
        4,
        0,
    ),
    "two additive terms": (
        changed(POST, (MASKED, "s3 = Add(s1, bias) tilted = Identity(triangle) s2 = Add(s3, tilted)")),
        4,
        0,
    ),
    "the scale before the product": (
        changed(POST, ("MatMul(q, kt)", "MatMul(qs, kt)"), ("[scores]", "qs = Mul(q, scale) [scores]"),
                ("[scale_] s1 = Mul(s0, scale) ", ""), ("Add(s1, bias)", "Add(s0, bias)")),
        4,
        0,
    ),
    "one bias is missing": (changed(POST, ("[bk_] k1 = Add(k0, bk)", "k1 = Identity(k0)")), 4, 0),
    "one fused product": (
        changed(POST, (QKV, "h0 = MatMul(x, wqkv) h1 = Add(h0, bqkv) q1, k1, v1 = Split<axis=-1, num_outputs=3>(h1) ")),
        4,
        0,
    ),
}  # fmt: skip


def lowered(graph: gs.Graph) -> tuple[gs.Graph, list[Attention]]:
    """A copy with every attention region rewritten."""
    regions = list(match_regions(graph).attentions())
    copy = graph.copy()
    lowering = AttentionLowering(copy)
    for region in regions:
        lowering.check(region)
        lowering.lower(region)
    assert lowering.finish() == tuple(region.softmax for region in regions)
    return copy, regions


def check_equal(before: gs.Graph, after: gs.Graph, **sizes: int) -> None:
    """Compare the outputs of two graphs in ONNX Runtime, rows of padding too."""
    feeds = feeds_of(before, **sizes)
    names = [tensor.name for tensor in before.outputs]
    expected, found = run(before, feeds, names), run(after, feeds, names)
    for name in names:
        scale = max(1.0, float(np.abs(expected[name]).max()))
        assert np.abs(found[name] - expected[name]).max() / scale < MAX_ERROR


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name: str, prepare: Prepare) -> None:
    body, num_inputs, is_causal = SPELLINGS[name]
    graph = prepare(model_of(body, **CONSTANTS))
    after, regions = lowered(graph)
    assert len(regions) == 1
    (attention,) = (node for node in after.nodes if node.op == "Attention")
    assert attention.name == "softmax"
    assert len(attention.inputs) == num_inputs
    assert attention.attrs.get("is_causal", 0) == is_causal
    assert not [node for node in after.nodes if node.op in ("Softmax", "Split")]
    packed = [node for node in after.nodes if node.op == "MatMul" and node.inputs[1].shape == (16, 48)]
    assert [node.name for node in packed] == [regions[0].query.projection.linear.product]  # type: ignore[union-attr]
    assert len([node for node in after.nodes if node.op == "MatMul"]) == 4
    check_equal(graph, after)


def test_a_mask_with_rows_and_columns_is_not_expanded(prepare: Prepare) -> None:
    body = changed(POST, (MASK, "bias = Identity(own) "))
    graph = prepare(model_of(body, inputs="float[2, 6, 16] x, float[2, 1, 6, 6] own"))
    after, _ = lowered(graph)
    assert not [node for node in after.nodes if node.op in ("Expand", "Shape")]
    check_equal(graph, after)


REFUSALS = {
    "cross-attention": (
        changed(POST, ("MatMul(x, wk)", "MatMul(z, wk)"), ("MatMul(x, wv)", "MatMul(z, wv)")),
        {"inputs": f"{INPUTS}, float[batch, seq, 16] z"},
        ("mk", "query, key and value are not projections of one tensor (cross-attention)"),
    ),
    "batch and heads in one axis": (
        changed(
            POST,
            (LAYOUT, LAYOUT.replace(" q = Trans", " q9 = Trans").replace(" kt = Trans", " kt9 = Trans")
             .replace(" v = Trans", " v9 = Trans")
             + "q = Reshape(q9, bnsd) kt = Reshape(kt9, bnds) v = Reshape(v9, bnsd) "),
            (MASK, ""),
            (MASKED, ""),
            ("Softmax<axis=-1>(s2)", "Softmax<axis=-1>(s1)"),
            ("MatMul(p, v)", "MatMul(p, v) c9 = Reshape(c, back)"),
            ("<perm=[0, 2, 1, 3]>(c)", "<perm=[0, 2, 1, 3]>(c9)"),
        ),
        {"inputs": "float[2, 6, 16] x", "bnsd": np.array([4, 6, 8]), "bnds": np.array([4, 8, 6]),
         "back": np.array([2, 2, 6, 8])},
        ("scores", "batch and heads are one axis, where [batch, heads, sequence, size] is needed"),
    ),
    "a normalised query": (
        changed(POST, ("[scores]", "qn = LayerNormalization(q, eight) [scores]"), ("MatMul(q, kt)", "MatMul(qn, kt)")),
        {"eight": np.ones(8, np.float32)},
        (None, "LayerNormalization stands between the query and its projection, so the three are no one product"),
    ),
    "windows": (
        changed(
            POST,
            ("[mq] q0 = MatMul(x, wq)", "x2 = Reshape(x, twelve) [mq] q0 = MatMul(x2, wq)"),
            ("MatMul(x, wk)", "MatMul(x2, wk)"),
            ("MatMul(x, wv)", "MatMul(x2, wv)"),
            (MASK, ""),
            (MASKED, ""),
            ("Softmax<axis=-1>(s2)", "Softmax<axis=-1>(s1)"),
        ),
        {"inputs": "float[2, 6, 16] x", "twelve": np.array([12, 16]), "heads": np.array([4, 3, 2, 8]),
         "flat": np.array([2, 6, 16])},
        ("mq", "its query is not known to keep batch and sequence of what it projects"),
    ),
    "no rows": (
        POST,
        {"inputs": "float[batch, 0, 16] x, int64[batch, 0] mask"},
        ("mq", "what it projects is empty, which ONNX Runtime's operator refuses"),
    ),
    "a mask of three axes": (
        changed(POST, (MASK, "bias = Identity(own) ")),
        {"inputs": "float[2, 6, 16] x, float[2, 6, 6] own"},
        ("masked", "its mask has 3 axes, and the operator takes 2 or 4"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(name: str, prepare: Prepare) -> None:
    body, arguments, (node, reason) = REFUSALS[name]
    found = refusal_of(prepare(model_of(body, **arguments)))  # type: ignore[arg-type]
    assert found[1] == reason
    assert node is None or found[0] == node


def refusal_of(graph: gs.Graph) -> tuple[str, str]:
    """Node and reason of the only region."""
    (region,) = match_regions(graph).attentions()
    with pytest.raises(StoppedError) as caught:
        AttentionLowering(graph).check(region)
    return caught.value.node, str(caught.value)


def test_an_opset_without_the_operator_is_refused(prepare: Prepare) -> None:
    graph = prepare(model_of(POST))
    graph.opset = 22
    assert refusal_of(graph) == ("scores", "the operator needs opset 23; this model stays at 22")


OPERATOR = changed(
    POST,
    (SCORES, ""),
    ("[softmax] p = Softmax<axis=-1>(s2) [context] c = MatMul(p, v) ", "[softmax] c = Attention<scale=0.3>(q, kt, v) "),
    ("perm=[0, 2, 3, 1]", "perm=[0, 2, 1, 3]"),
    (MASK, ""),
)


def test_the_projections_of_the_operator_are_packed_once(prepare: Prepare) -> None:
    graph = prepare(model_of(OPERATOR))
    after, _ = lowered(graph)
    (attention,) = (node for node in after.nodes if node.op == "Attention")
    assert (attention.name, attention.attrs["scale"]) == ("softmax", pytest.approx(0.3))
    assert len([node for node in after.nodes if node.op == "MatMul"]) == 4
    check_equal(graph, after)
    after.toposort()
    assert refusal_of(prepare(gs.export_onnx(after))) == ("softmax", "it has this form already")


def test_an_operator_of_three_axes_stays(prepare: Prepare) -> None:
    three = "[softmax] c2 = Attention<q_num_heads=2, kv_num_heads=2>(q1, k1, v1) "
    start, end = OPERATOR.index("q2 = Reshape"), OPERATOR.index("[mo]")
    assert refusal_of(prepare(model_of(OPERATOR[:start] + three + OPERATOR[end:]))) == (
        "softmax",
        "its query has three axes, where [batch, heads, sequence, size] is needed",
    )


def test_a_bool_mask_of_the_operator_is_added(prepare: Prepare) -> None:
    mask = (
        PADDED.replace("pad =", "pad1 =") + "length = Shape<start=1, end=2>(mask) rows2 = Concat<axis=0>(length, a1) "
    )
    mask += "pad = Expand(pad1, rows2) "
    body = OPERATOR.replace(
        "[softmax] c = Attention<scale=0.3>(q, kt, v)", mask + "[softmax] c = Attention(q, kt, v, pad)"
    )
    graph = prepare(model_of(body, **CONSTANTS))
    after, _ = lowered(graph)
    (attention,) = (node for node in after.nodes if node.op == "Attention")
    assert attention.inputs[3].dtype == np.float32
    check_equal(graph, after)


def test_a_quantized_weight_is_refused(prepare: Prepare) -> None:
    body = changed(POST, ("MatMul(x, wk)", "MatMul(x, wkf)"))
    body = "wkf = DequantizeLinear(wk8, sk, zk) " + body
    constants = {"wk8": np.ones((16, 16), np.int8), "sk": np.array(0.1, np.float32), "zk": np.array(0, np.int8)}
    assert refusal_of(prepare(model_of(body, **constants))) == (
        "mk",
        "its key is quantized in another way than its query",
    )


def quantized(scale_of_key: str = "sa") -> str:
    """A body whose projections have Q/DQ, as a quantized model arrives."""
    pair = "xq = QuantizeLinear(x, sa, zk) xd = DequantizeLinear(xq, sa, zk) "
    pair += f"yq = QuantizeLinear(x, {scale_of_key}, zk) yd = DequantizeLinear(yq, {scale_of_key}, zk) "
    weights = "".join(f"w{r}f = DequantizeLinear<axis=1>(w{r}8, s{r}, zeros) " for r in "qkv")
    changes = [(f"MatMul(x, w{r})", f"MatMul({'yd' if r == 'k' else 'xd'}, w{r}f)") for r in "qkv"]
    if scale_of_key == "sa":
        pair, changes[1] = pair.partition("yq")[0], ("MatMul(x, wk)", "MatMul(xd, wkf)")
    return pair + weights + changed(POST, *changes)


CODES = {
    **{f"w{r}8": (np.random.default_rng(ord(r)).integers(-127, 128, (16, 16))).astype(np.int8) for r in "qkv"},
    **{f"s{r}": (np.arange(1, 17) * 2e-4 * (1 + ord(r) % 3)).astype(np.float32) for r in "qkv"},
    "sa": np.array(0.03, np.float32),
    "sb": np.array(0.04, np.float32),
    "zk": np.array(0, np.int8),
    "zeros": np.zeros(16, np.int8),
}


def test_quantized_projections_become_one_quantized_product(prepare: Prepare) -> None:
    graph = prepare(model_of(quantized(), **CODES))
    after, _ = lowered(graph)
    (product,) = [node for node in after.nodes if node.name == "mq"]
    dequantize = product.inputs[1].inputs[0]
    assert (dequantize.op, dequantize.inputs[0].shape, dequantize.inputs[1].shape) == (
        "DequantizeLinear",
        (16, 48),
        (48,),
    )
    assert product.inputs[0].inputs[0].op == "DequantizeLinear"
    check_equal(graph, after)


def test_a_key_with_a_scale_of_its_own_is_refused(prepare: Prepare) -> None:
    graph = prepare(model_of(quantized("sb"), **CODES))
    assert refusal_of(graph) == ("mk", "its key is quantized in another way than its query")


@pytest.mark.parametrize("name", ["bert", "vit", "gpt2"])
def test_library_model(name: str, tmp_path: Path, prepare: Prepare) -> None:
    pytest.importorskip("onnxscript", reason="the export extra is not installed")
    pytest.importorskip("transformers", reason="the export extra is not installed")
    from torch_models import export_library

    graph = prepare(export_library(name, tmp_path, 20))
    after, regions = lowered(graph)
    assert len(regions) == len([node for node in after.nodes if node.op == "Attention"]) == 2
    # One mask, expanded once, serves both.
    masks = {node.inputs[3].name for node in after.nodes if node.op == "Attention" and len(node.inputs) > 3}
    assert len(masks) == len([node for node in after.nodes if node.op == "Expand" and node.outputs[0].name in masks])
    assert len(masks) == (name != "vit")
    for seq in (2, 6):
        check_equal(graph, after, seq=seq)


def test_the_rewritten_model_is_valid(prepare: Prepare) -> None:
    after, _ = lowered(prepare(model_of(POST)))
    onnx.checker.check_model(gs.export_onnx(after), full_check=True)
