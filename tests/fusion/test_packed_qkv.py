from __future__ import annotations

import re

import numpy as np
import onnx
import onnx.parser
import onnx_graphsurgeon as gs
import onnxruntime
import pytest

from trtforge.fusion.packed_qkv import NearMiss, PackedQkvReport, pack_qkv

# B batch, S sequence, K = 12 input width, N = 2 heads, D = 4 head size.
HEADER = '<ir_version: 10, opset_import: ["" : 23, "other" : 1]>\n'
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
# The packed layout; `t` is [3, B, N, S, D].
LINEAR = "[product] p = MatMul(x, w) [bias] h = Add(p, b) "
PACKED_LAYOUT = "[layout] r = Reshape(h, packed) t = Transpose<perm=[2, 0, 3, 1, 4]>(r) "
GATHER = "q = Gather<axis=0>(t, i0) k = Gather<axis=0>(t, i1) v = Gather<axis=0>(t, i2) "
SQUEEZE = "q = Squeeze(q1, o0) k = Squeeze(k1, o0) v = Squeeze(v1, o0) "
PARTS = {
    "gather": GATHER,
    "gather and squeeze": "q1 = Gather<axis=0>(t, o0) k1 = Gather(t, o1) v1 = Gather<axis=-5>(t, last) " + SQUEEZE,
    "slice": "q1 = Slice(t, o0, o1, o0) k1 = Slice(t, o1, last, o0, o1) v1 = Slice(t, last, o9, o0) " + SQUEEZE,
    "split": "q1, k1, v1 = Split<axis=0, num_outputs=3>(t) " + SQUEEZE,
    "split with sizes": "q1, k1, v1 = Split(t, ones) " + SQUEEZE,
}
PRODUCTS = "kt = Transpose<perm=[0, 1, 3, 2]>(k) s = MatMul(q, kt) pr = Softmax<axis=-1>(s) y = MatMul(pr, v)"


def normal(*shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


CONSTANTS = {
    "w": normal(12, 24, seed=0),
    "b": normal(24, seed=1),
    "heads": np.array([0, 0, 2, 4]),
    **{f"w{part}": normal(12, 8, seed=index) for index, part in enumerate("qkv", 2)},
    **{f"b{part}": normal(8, seed=index) for index, part in enumerate("qk", 5)},
    "wide": normal(12, 16, seed=8),
    "packed": np.array([0, 0, 3, 2, 4]),
    **{f"i{index}": np.array(index) for index in range(3)},
    **{f"o{index}": np.array([index]) for index in (0, 1, 9)},
    "last": np.array([-1]),
    "ones": np.array([1, 1, 1]),
}


def graph_of(body, io="float[b, s, 12] x", outputs="y", **changes):
    model = onnx.parser.parse_model(f"{HEADER}g ({io}) => ({outputs}) {{ {body} }}")
    constants = {name: array for name, array in (CONSTANTS | changes).items() if re.search(rf"\b{name}\b", body)}
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
            "the query does not come from Reshape and Transpose",
        ),
        (
            SPLIT + ATTENTION + " also = Neg(kt)",
            {"outputs": "y, also"},
            "attention",
            "the key is also read elsewhere",
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
            "the Split is along axis 1, not the last",
        ),
        (SPLIT + RAW + " also = Neg(h)", {"outputs": "y, also"}, "split", "the product is also read elsewhere"),
    ],
    ids=["grouped", "cross", "rotary", "read twice", "fixed shape", "axis", "product read twice"],
)
def test_near_miss_names_its_node_and_reason(body, changes, node, reason):
    _, report = packed(body, **changes)
    (miss,) = [miss for miss in report.near_misses if miss.node == node]
    assert isinstance(miss, NearMiss)
    assert (miss.pattern, reason in miss.reason) == ("packed_qkv", True), miss.reason


def test_equal_symbols_do_not_prove_the_layout():
    # The target is [S, B, 2, 4], and all that inference says of B and S is n.
    sizes = "xt = Transpose<perm=[1, 0, 2]>(x) s0 = Shape<start=0, end=2>(xt) hs = Concat<axis=0>(s0, tail) "
    body = SPLIT + sizes + ATTENTION.replace("heads", "hs")
    graph, report = packed(body, io="float[n, n, 12] x", tail=np.array([2, 4]))
    assert report.near_misses[0].reason == "the reshape to ['n', 'n', 2, 4] is not known to keep ['n', 'n']"
    assert report.rewritten[0].lowered_to == "sliced"
    assert "Split" not in ops(graph)


def test_inferred_sizes_prove_the_layout():
    body = "s0 = Shape<start=0, end=2>(x) hs = Concat<axis=0>(s0, tail) " + SPLIT + ATTENTION.replace("heads", "hs")
    _, report = packed(body, tail=np.array([2, 4]))
    assert report.rewritten[0].lowered_to == "packed"


def weighted_products(graph):
    return [node for node in graph.nodes if node.op == "MatMul" and isinstance(node.inputs[1], gs.Constant)]


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_packed_layout_before_spelled_out_attention_becomes_three_products(parts):
    graph, report = packed(LINEAR + PACKED_LAYOUT + parts + PRODUCTS)
    one = ["MatMul", "Add", "Reshape", "Transpose"]
    assert ops(graph) == [*one * 3, "Transpose", "MatMul", "Softmax", "MatMul"]
    assert report.near_misses == ()
    (rewrite,) = report.rewritten
    assert (rewrite.node, rewrite.lowered_to) == ("product", "sliced")
    assert {"product", "bias", "layout"} < set(rewrite.replaced)
    products = weighted_products(graph)
    assert [node.name for node in products] == ["product", "product_part_1", "product_part_2"]
    assert all(node.inputs[0] is graph.inputs[0] for node in products)
    reshapes = [node for node in graph.nodes if node.op == "Reshape"]
    assert [node.inputs[1].values.tolist() for node in reshapes] == [[0, 0, 2, 4]] * 3


@pytest.mark.parametrize(
    ("before", "num_adds"),
    [(LINEAR.replace("Add(p, b)", "Add(b, p)"), 3), ("[product] h = MatMul(x, w) ", 0)],
    ids=["bias first", "no bias"],
)
def test_bias_of_a_packed_layout_may_come_first_or_be_absent(before, num_adds):
    graph, report = packed(before + PACKED_LAYOUT + GATHER + PRODUCTS)
    assert ops(graph).count("Add") == num_adds
    assert [entry.lowered_to for entry in report.rewritten] == ["sliced"]


@pytest.mark.parametrize(
    ("sizes", "layout", "axis", "perm"),
    [
        ([0, 0, 3, 2, 4], "t = Transpose<perm=[2, 0, 1, 3, 4]>(r)", 0, None),
        ([0, 0, 2, 3, 4], "t = Transpose<perm=[3, 0, 2, 1, 4]>(r)", 0, [0, 2, 1, 3]),
        ([0, 0, 2, 4, 3], "t = Transpose<perm=[0, 4, 2, 1, 3]>(r)", 1, [0, 2, 1, 3]),
        ([0, 0, 3, 2, 4], "t = Transpose(r)", 2, [3, 2, 1, 0]),
        ([0, 0, 2, 3, 4], "t = Identity(r)", 3, None),
    ],
    ids=["sequence before heads", "heads before parts", "parts last", "reversed", "no transpose"],
)
def test_parts_may_lie_in_any_order(sizes, layout, axis, perm):
    layout = layout if "Transpose" in layout else ""
    gather = GATHER.replace("axis=0", f"axis={axis}")
    body = f"{LINEAR} r = Reshape(h, packed) {layout} {gather if layout else gather.replace('(t', '(r')}"
    graph, report = packed(f"{body} y0 = Mul(q, k) y = Add(y0, v)", packed=np.array(sizes))
    assert [entry.lowered_to for entry in report.rewritten] == ["sliced"]
    assert [list(node.attrs["perm"]) for node in graph.nodes if node.op == "Transpose"] == [perm] * (3 if perm else 0)
    assert len(weighted_products(graph)) == 3


def test_packed_key_and_value_become_two_products():
    body = LINEAR + PACKED_LAYOUT + "k = Gather<axis=0>(t, i0) v = Gather<axis=0>(t, i1) "
    body += "q = Neg(k) " + PRODUCTS
    graph, report = packed(body, w=normal(12, 16, seed=0), b=normal(16, seed=1), packed=np.array([0, 0, 2, 2, 4]))
    assert [entry.lowered_to for entry in report.rewritten] == ["sliced"]
    assert [node.inputs[1].shape[1] for node in weighted_products(graph)] == [8, 8]


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_packed_layout_before_attention_stays(parts):
    body = LINEAR + PACKED_LAYOUT + parts + "[attention] y = Attention(q, k, v)"
    graph, report = packed(body)
    assert (report.rewritten, report.near_misses) == ((), ())
    assert ops(graph) == ops(graph_of(body))


def test_the_layout_that_packing_makes_is_not_a_near_miss():
    graph, _ = packed(SPLIT + ATTENTION)
    again = gs.import_onnx(onnx.shape_inference.infer_shapes(gs.export_onnx(graph), data_prop=True))
    report = pack_qkv(again)
    assert (report.rewritten, report.near_misses) == ((), ())


@pytest.mark.parametrize(
    ("target", "io"),
    [
        ("hs = Concat<axis=0>(o0, s1, tail)", "float[n, n, 12] x"),
        ("hs = Concat<axis=0>(front, tail)", "float[n, n, 12] x"),
        ("hs = Concat<axis=0>(front, tail)", "float[n, 5, 12] x"),
        ("b0 = Gather(sx, i0) b1 = Unsqueeze(b0, o0) hs = Concat<axis=0>(b1, last, tail)", "float[n, n, 12] x"),
        ("b1 = Slice(sx, o0, o1) hs = Concat<axis=0>(b1, last, tail)", "float[n, n, 12] x"),
        ("b1 = Shape<end=1>(x) hs = Concat<axis=0>(b1, last, tail)", "float[n, n, 12] x"),
        ("z = Neg(x) b1 = Shape<end=2>(z) hs = Concat<axis=0>(b1, tail)", "float[b, s, 12] x"),
    ],
    ids=["copied batch", "copied sequence", "number", "gathered", "cut", "shape", "symbols"],
)
def test_kept_batch_or_sequence_proves_a_packed_layout(target, io):
    front = np.array([-1, 5 if "5" in io else 0])
    body = f"{LINEAR} sx = Shape(x) s1 = Shape<start=1, end=2>(x) {target} {PACKED_LAYOUT.replace('packed', 'hs')}"
    _, report = packed(body + GATHER + PRODUCTS, io=io, tail=np.array([3, 2, 4]), front=front)
    assert report.near_misses == ()
    assert [entry.lowered_to for entry in report.rewritten] == ["sliced"]


@pytest.mark.parametrize(
    ("sizes", "first"),
    [
        ("z = Transpose<perm=[1, 0, 2]>(x) s1 = Shape<end=1>(z)", "s1"),
        ("s1 = Shape<start=1, end=2>(x)", "s1"),
        ("sx = Shape(x) s1 = Gather(sx, o1)", "s1"),
        ("none = Shape<end=0>(x) s1 = Shape<start=1, end=2>(x)", "none, s1"),
        ("sx = Shape(x) none = Slice(sx, o0, o0) s1 = Shape<start=1, end=2>(x)", "none, s1"),
    ],
    ids=["of another tensor", "from another axis", "another index", "empty shape", "empty slice"],
)
def test_another_first_size_proves_nothing(sizes, first):
    target = f"{sizes} hs = Concat<axis=0>({first}, last, tail)"
    body = f"{LINEAR} {target} {PACKED_LAYOUT.replace('packed', 'hs')} {GATHER} {PRODUCTS}"
    _, report = packed(body, io="float[n, n, 12] x", tail=np.array([3, 2, 4]))
    assert report.rewritten == ()
    assert "is not known to keep ['n', 'n']" in report.near_misses[0].reason


PACKED_BODY = LINEAR + PACKED_LAYOUT + GATHER


@pytest.mark.parametrize(
    ("body", "changes", "reason"),
    [
        (
            PACKED_BODY + PRODUCTS,
            {"packed": np.array([2, 5, 3, 2, 4])},
            "the reshape to [2, 5, 3, 2, 4] is not known to keep ['b', 's']",
        ),
        (
            PACKED_BODY.replace("Reshape(", "Reshape<allowzero=1>(") + PRODUCTS,
            {},
            "the reshape to [0, 0, 3, 2, 4] is not known to keep ['b', 's']",
        ),
        (PACKED_BODY + PRODUCTS + " also = Neg(h)", {"outputs": "y, also"}, "the product is also read elsewhere"),
        (PACKED_BODY + PRODUCTS, {"outputs": "y, t"}, "the product is also read elsewhere"),
        (
            PACKED_BODY + PRODUCTS + " also = Shape(t)",
            {"outputs": "y, also"},
            "a Shape of the product does not take one constant index at a time",
        ),
        (
            PACKED_BODY.replace("Gather<axis=0>(t, i2)", "Neg(k)") + PRODUCTS,
            {},
            "the product has parts of [3, 'b', 2, 's', 4]; 2 are read, of 2 or 3 in all",
        ),
        (
            PACKED_BODY.replace("(t, i2)", "(t, i1)") + PRODUCTS,
            {},
            "the parts are not each index of one axis, taken once",
        ),
        (
            LINEAR
            + PACKED_LAYOUT
            + PARTS["slice"].replace("Slice(t, o0, o1, o0)", "Slice(t, o0, o9, o0)")
            + "y=Neg(k)",
            {"outputs": "y"},
            "a Slice of the product does not take one constant index at a time",
        ),
        (
            LINEAR
            + PACKED_LAYOUT
            + PARTS["gather and squeeze"].replace("Gather(t, o1)", "Gather(t, nested)")
            + "y=Neg(k)",
            {"nested": np.array([[1]])},
            "a Gather of the product does not take one constant index at a time",
        ),
        (
            LINEAR
            + PACKED_LAYOUT
            + GATHER.replace("q = Gather<axis=0>(t, i0)", "")
            + """y = If(flag) <then_branch = then () => (float q) { q = Gather<axis=0>(t, i0) },
                else_branch = other () => (float z) { z = Neg(k) }>""",
            {"flag": np.array(True)},
            "a part is taken inside a subgraph",
        ),
        (
            LINEAR + PACKED_LAYOUT + "q1, k1, v1 = Split<axis=0, num_outputs=3>(t) y0 = Add(q1, k1) y = Add(y0, v1)",
            {},
            "a part keeps its axis of size 1",
        ),
        (
            LINEAR + PACKED_LAYOUT + PARTS["split"].replace("Squeeze(k1", "Unsqueeze(k1") + "y = Neg(k)",
            {},
            "a part keeps its axis of size 1",
        ),
        (
            LINEAR
            + PACKED_LAYOUT
            + "sizes = Abs(ones) "
            + PARTS["split with sizes"].replace("ones", "sizes")
            + PRODUCTS,
            {},
            "a Split of the product does not take one constant index at a time",
        ),
        (
            LINEAR
            + PACKED_LAYOUT
            + "step = Abs(o1) "
            + PARTS["slice"].replace("last, o0, o1", "last, o0, step")
            + PRODUCTS,
            {},
            "a Slice of the product does not take one constant index at a time",
        ),
        (
            LINEAR + PACKED_LAYOUT + GATHER.replace("axis=0", "axis=3") + "y0 = Add(q, k) y = Add(y0, v)",
            {"io": "float[b, 3, 12] x"},
            "the parts are taken from batch or sequence of ['b', 3, 3, 2, 4]",
        ),
    ],
    ids=[
        "fixed shape",
        "zero is a size",
        "product read twice",
        "layout is an output",
        "shape read",
        "part missing",
        "part twice",
        "long slice",
        "nested index",
        "subgraph",
        "axis kept",
        "axis added",
        "computed sizes",
        "computed step",
        "sequence",
    ],
)
def test_near_miss_of_a_packed_layout_names_its_node_and_reason(body, changes, reason):
    graph = graph_of(body, **changes)
    before = ops(graph)
    report = pack_qkv(graph)
    assert report == PackedQkvReport((), (NearMiss("packed_qkv", "layout", reason),))
    assert ops(graph) == before


def test_reshape_of_a_product_to_five_sizes_is_no_near_miss_by_itself():
    _, report = packed(LINEAR + PACKED_LAYOUT + "y = Neg(t)")
    assert (report.rewritten, report.near_misses) == ((), ())


def test_packing_a_sliced_layout_twice_changes_nothing_more():
    graph, _ = packed(LINEAR + PACKED_LAYOUT + GATHER + PRODUCTS)
    again = gs.import_onnx(onnx.shape_inference.infer_shapes(gs.export_onnx(graph), data_prop=True))
    before = gs.export_onnx(again).SerializeToString(deterministic=True)
    report = pack_qkv(again)
    assert (report.rewritten, report.near_misses) == ((), ())
    assert gs.export_onnx(again).SerializeToString(deterministic=True) == before


def test_part_of_a_packed_layout_that_is_a_graph_output_stays_readable():
    graph, _ = packed(LINEAR + PACKED_LAYOUT + GATHER + PRODUCTS, outputs="y, q")
    assert [tensor.name for tensor in graph.outputs] == ["y", "q"]


def test_part_that_is_a_graph_output_stays_readable():
    graph, _ = packed(SPLIT + RAW, outputs="y, q")
    assert [tensor.name for tensor in graph.outputs] == ["y", "q"]


def test_packing_twice_changes_nothing_more():
    graph, _ = packed(SPLIT + RAW)
    before = gs.export_onnx(graph).SerializeToString(deterministic=True)
    assert pack_qkv(graph).rewritten == ()
    assert gs.export_onnx(graph).SerializeToString(deterministic=True) == before


@pytest.mark.parametrize(
    ("body", "changes"),
    [
        (SPLIT.replace("MatMul", "other.MatMul"), {}),
        (SPLIT.replace("MatMul(x, w)", "other.MatMul(x)"), {}),
        (SPLIT.replace("Add(", "other.Add("), {}),
        (SPLIT.replace("Split<", "other.Split<"), {}),
        (SPLIT.replace(", num_outputs=3>(h)", ">(h, sizes)"), {"sizes": np.array([8, 8, 4])}),
        (SPLIT.replace(", num_outputs=3>(h)", ">(h, sizes)"), {"sizes": np.array([12, 12])}),
        (SPLIT.replace(", num_outputs=3>(h)", ">(h, sizes)"), {"sizes": np.array([0, 12, 12])}),
        (SPLIT.replace(", num_outputs=3>(h)", ">(h, sizes)"), {"sizes": np.array([np.nan, 8, 8], np.float32)}),
        (PACKED_BODY.replace("Gather<", "other.Gather<"), {}),
        (PACKED_BODY.replace("Gather<axis=0>", "Gather<axis=7>"), {}),
        (PACKED_BODY.replace("Reshape(", "other.Reshape("), {}),
        (PACKED_BODY.replace("perm=[2, 0, 3, 1, 4]", "perm=[7, 0, 3, 1, 4]"), {}),
        (PACKED_BODY.replace("perm=[2, 0, 3, 1, 4]", "perm=[2, 0]"), {}),
        (PACKED_BODY, {"i2": np.array(np.nan, np.float32)}),
        (PACKED_BODY, {"i2": np.array("2", object)}),
    ],
)
def test_what_onnx_does_not_define_is_left_alone(body, changes):
    graph = graph_of(body + "a = Add(q, k) y = Add(a, v)", **changes)
    before = ops(graph)
    assert pack_qkv(graph).rewritten == ()
    assert ops(graph) == before
