from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_graphsurgeon as gs
import onnxruntime
import pytest

from trtforge.fusion.packed_qkv import NearMiss, pack_qkv

# B batch, S sequence, K = 12 input width, N = 2 heads, D = 4 head size.
HEADER = '<ir_version: 10, opset_import: ["" : 23]>\n'
LAYOUT = """q4 = Reshape({q}, heads) k4 = Reshape({k}, heads) v4 = Reshape({v}, heads)
    qt = Transpose<perm=[0, 2, 1, 3]>(q4) kt = Transpose<perm=[0, 2, 1, 3]>(k4) vt = Transpose<perm=[0, 2, 1, 3]>(v4)
    [attention] y = Attention(qt, kt, vt)"""
SPLIT = "[product] p = MatMul(x, w) [bias] h = Add(p, b) [split] q, k, v = Split<axis=-1, num_outputs=3>(h) "
TRIPLE = """[mq] q0 = MatMul(x, wq) q = Add(q0, bq) [mk] k0 = MatMul(x, wk) k = Add(bk, k0)
    [mv] v = MatMul(x, wv) """
RAW = """q4 = Reshape(q, heads) k4 = Reshape(k, heads) v4 = Reshape(v, heads)
    qt = Transpose<perm=[0, 2, 1, 3]>(q4) kt = Transpose<perm=[0, 2, 3, 1]>(k4) vt = Transpose<perm=[0, 2, 1, 3]>(v4)
    s = MatMul(qt, kt) pr = Softmax<axis=-1>(s) y = MatMul(pr, vt)"""
ATTENTION = LAYOUT.format(q="q", k="k", v="v")


def normal(*shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


CONSTANTS = {
    "w": normal(12, 24, seed=0),
    "b": normal(24, seed=1),
    "heads": np.array([0, 0, 2, 4]),
    **{f"w{part}": normal(12, 8, seed=index) for index, part in enumerate("qkv", 2)},
    **{f"b{part}": normal(8, seed=index) for index, part in enumerate("qk", 5)},
    "wide": normal(12, 16, seed=8),
}


def graph_of(body, io="float[b, s, 12] x", outputs="y", **changes):
    model = onnx.parser.parse_model(f"{HEADER}g ({io}) => ({outputs}) {{ {body} }}")
    constants = {name: array for name, array in (CONSTANTS | changes).items() if f"{name}" in body}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, name) for name, a in constants.items())
    for index, node in enumerate(model.graph.node):
        node.name = node.name or f"n{index}"
    return gs.import_onnx(onnx.shape_inference.infer_shapes(model, data_prop=True))


def run(graph):
    model = gs.export_onnx(graph)
    onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    return session.run(None, {"x": normal(2, 5, 12, seed=9)})


def packed(body, **changes):
    """The graph after packing, checked to compute what it computed before."""
    expected = run(graph_of(body, **changes))
    graph = graph_of(body, **changes)
    report = pack_qkv(graph)
    for actual, wanted in zip(run(graph), expected, strict=True):
        assert np.allclose(actual, wanted, rtol=1e-5, atol=1e-5)
    return graph, report


def ops(graph):
    return [node.op for node in graph.nodes]


PACKED = ["MatMul", "Add", "Reshape", "Transpose", "Gather", "Gather", "Gather", "Attention"]


def test_split_before_attention_becomes_a_packed_layout():
    graph, report = packed(SPLIT + ATTENTION)
    assert ops(graph) == PACKED
    (rewrite,) = report.rewritten
    assert (rewrite.node, rewrite.lowered_to) == ("product", "packed")
    assert {"product", "bias", "split"} < set(rewrite.replaced)
    assert report.near_misses == ()


def test_packed_layout_copies_batch_and_sequence():
    graph, _ = packed(SPLIT + ATTENTION)
    assert graph.nodes[2].inputs[1].values.tolist() == [0, 0, 3, 2, 4]
    assert list(graph.nodes[3].attrs["perm"]) == [2, 0, 3, 1, 4]


def test_bias_may_come_first_or_be_absent():
    assert ops(packed(SPLIT.replace("Add(p, b)", "Add(b, p)") + ATTENTION)[0]) == PACKED
    graph, _ = packed("[product] h = MatMul(x, w) q, k, v = Split<axis=2, num_outputs=3>(h) " + ATTENTION)
    assert ops(graph) == [op for op in PACKED if op != "Add"]


def test_parts_may_go_to_attention_in_another_order():
    graph, report = packed(SPLIT + LAYOUT.format(q="v", k="q", v="k"))
    assert ops(graph) == PACKED
    assert [entry.lowered_to for entry in report.rewritten] == ["packed"]


def test_three_products_before_attention_are_concatenated():
    graph, report = packed(TRIPLE + ATTENTION)
    assert ops(graph) == PACKED
    assert graph.nodes[0].inputs[1].values.shape == (12, 24)
    assert not graph.nodes[1].inputs[1].values[16:].any()
    assert report.rewritten[0].node == "mq"


def test_split_before_spelled_out_attention_becomes_three_products_of_one_input():
    graph, report = packed(SPLIT + RAW)
    assert report.rewritten[0].lowered_to == "sliced"
    assert report.near_misses == ()
    weighted = [node for node in graph.nodes if node.op == "MatMul" and isinstance(node.inputs[1], gs.Constant)]
    assert [node.name for node in weighted] == ["product", "product_part_1", "product_part_2"]
    assert all(node.inputs[0] is graph.inputs[0] for node in weighted)
    assert "Split" not in ops(graph)


def test_unequal_parts_are_sliced_too():
    body = """[product] h = MatMul(x, w) q, k, v = Split<axis=-1>(h, sizes) a = Relu(q) b2 = Mul(k, v) c = ReduceSum(b2)
        y = Add(a, c)"""
    graph, report = packed(body, sizes=np.array([16, 4, 4]))
    assert [entry.lowered_to for entry in report.rewritten] == ["sliced"]
    assert [n.inputs[1].shape[1] for n in graph.nodes if n.op == "MatMul"] == [16, 4, 4]


def test_three_products_before_spelled_out_attention_stay():
    graph, report = packed(TRIPLE + RAW)
    assert (report.rewritten, report.near_misses) == ((), ())
    assert ops(graph) == ops(graph_of(TRIPLE + RAW))


def test_every_block_is_rewritten_in_its_own_way():
    encoder = "[m1] p = MatMul(x, w) [s1] q, k, v = Split<axis=-1, num_outputs=3>(p) " + RAW.replace("y = ", "y1 = ")
    body = encoder + " z = Transpose<perm=[0, 2, 1, 3]>(y1) x2 = Reshape(z, flat) [m2] p2 = MatMul(x2, w2) "
    body += "[s2] a, c, d = Split<axis=-1, num_outputs=3>(p2) q5 = Reshape(a, heads) k5 = Reshape(c, heads) "
    body += "v5 = Reshape(d, heads) q6 = Transpose<perm=[0, 2, 1, 3]>(q5) k6 = Transpose<perm=[0, 2, 1, 3]>(k5) "
    body += "v6 = Transpose<perm=[0, 2, 1, 3]>(v5) [attention] y = Attention(q6, k6, v6)"
    _, report = packed(body, flat=np.array([0, 0, 8]), w2=normal(8, 24, seed=11))
    assert {(entry.node, entry.lowered_to) for entry in report.rewritten} == {("m1", "sliced"), ("m2", "packed")}


@pytest.mark.parametrize(
    ("body", "changes", "node", "reason"),
    [
        (
            "q = MatMul(x, wide) k = MatMul(x, wk) v = MatMul(x, wv) "
            + ATTENTION.replace("Reshape(q, heads)", "Reshape(q, four)"),
            {"four": np.array([0, 0, 4, 4])},
            "attention",
            "the parts have [16, 8, 8] columns; packing needs equal ones (grouped queries)",
        ),
        (
            "z = Relu(x) " + TRIPLE.replace("MatMul(x, wk)", "MatMul(z, wk)") + ATTENTION,
            {},
            "attention",
            "query, key and value are not projections of one tensor",
        ),
        (
            TRIPLE
            + ATTENTION.replace("Attention(qt,", "Attention(rope,").replace(
                "[attention]", "rope = Neg(qt) [attention]"
            ),
            {},
            "attention",
            "'rope' does not come from a Transpose",
        ),
        (
            SPLIT + ATTENTION + " also = Neg(kt)",
            {"outputs": "y, also"},
            "attention",
            "'kt' is also read elsewhere",
        ),
        (
            TRIPLE + ATTENTION.replace("Reshape(v, heads)", "Reshape(v, fixed)"),
            {"fixed": np.array([2, 5, 2, 4])},
            "attention",
            "is not known to keep ['b', 's']",
        ),
        (
            SPLIT.replace("Split<axis=-1, num_outputs=3>(h)", "Split<axis=1>(h, sizes)")
            + "y = Concat<axis=1>(q, k, v)",
            {"sizes": np.array([1, 2, 2])},
            "split",
            "the Split 'split' is along axis 1, not the last",
        ),
        (SPLIT + RAW + " also = Neg(h)", {"outputs": "y, also"}, "split", "'h' is also read elsewhere"),
    ],
    ids=["grouped", "cross", "rotary", "read twice", "fixed shape", "axis", "product read twice"],
)
def test_near_miss_names_its_node_and_reason(body, changes, node, reason):
    _, report = packed(body, **changes)
    (miss,) = [miss for miss in report.near_misses if miss.node == node]
    assert isinstance(miss, NearMiss)
    assert (miss.pattern, reason in miss.reason) == ("packed_qkv", True), miss.reason


def test_equal_symbols_do_not_prove_the_layout():
    body = SPLIT + "s0 = Shape<start=0, end=2>(x) hs = Concat<axis=0>(s0, tail) " + ATTENTION.replace("heads", "hs")
    graph, report = packed(body, io="float[n, n, 12] x", tail=np.array([2, 4]))
    assert "is not known to keep" in report.near_misses[0].reason
    assert report.rewritten[0].lowered_to == "sliced"
    assert "Split" not in ops(graph)


def test_inferred_sizes_prove_the_layout():
    body = "s0 = Shape<start=0, end=2>(x) hs = Concat<axis=0>(s0, tail) " + SPLIT + ATTENTION.replace("heads", "hs")
    _, report = packed(body, tail=np.array([2, 4]))
    assert report.rewritten[0].lowered_to == "packed"


def test_part_that_is_a_graph_output_stays_readable():
    graph, _ = packed(SPLIT + RAW, outputs="y, q")
    assert [tensor.name for tensor in graph.outputs] == ["y", "q"]


def test_packing_twice_changes_nothing_more():
    graph, _ = packed(SPLIT + RAW)
    before = gs.export_onnx(graph).SerializeToString(deterministic=True)
    assert pack_qkv(graph).rewritten == ()
    assert gs.export_onnx(graph).SerializeToString(deterministic=True) == before
