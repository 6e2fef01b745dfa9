"""Every fact that is claimed of a dimension is checked against ONNX Runtime, which is the judge of what runs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnxruntime
import pytest
from graph_models import graph_of, parse

from trtforge.graph.dims.find import analyse_dims
from trtforge.graph.save import skeleton_from_graph
from trtforge.profile import DimFact, DimReport

# A position table, MatMul weights and a mask that is added to attention scores.
ENCODER = """g (int64[a, b] ids, float[c, d] mask) => (float[a, b, 8] y) <float[20, 8] table, float[16, 8] positions,
    int64 one = {1}, int64[1] zero = {0}, int64[1] axis = {1}, int64[1] last = {2}> {
    x = Gather(table, ids) s = Shape(ids) n = Gather(s, one) n1 = Unsqueeze(n, zero)
    p = Slice(positions, zero, n1, zero) e = Add(x, p) t = Transpose<perm = [0, 2, 1]>(e) q = MatMul(e, t)
    m = Unsqueeze(mask, axis) w = Add(q, m) f = Softmax(w) y = MatMul(f, e) }"""
U_NET = """g (float[b, 3, h, w] x) => (float[b, 7, i, j] y) <float[4, 3, 3, 3] k, float[1] roi, float[4] scales> {
    c = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2]>(x, k)
    d = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(c) u = Resize<mode = "nearest">(d, roi, scales)
    y = Concat<axis = 1>(x, u) }"""
DECODER = """g (int64[batch, seq] ids, float[batch, 2, past, 4] past_key, int64[batch, total] mask) =>
    (float[batch, 2, seq, 4] y, float[batch, 2, p, 4] present) <float[9, 8] table, int64[4] shape = {0, 0, 2, 4},
    int64[2] axes = {1, 2}> {
    x = Gather(table, ids) r = Reshape(x, shape) q = Transpose<perm = [0, 2, 1, 3]>(r)
    present = Concat<axis = 2>(past_key, q) k = Transpose<perm = [0, 1, 3, 2]>(present) s = MatMul(q, k)
    f = Cast<to = 1>(mask) m = Unsqueeze(f, axes) b = Add(s, m) p1 = Softmax(b) y = MatMul(p1, present) }"""


def weights(model: onnx.ModelProto, **values: np.ndarray) -> None:
    for name, value in values.items():
        info = next(v for v in model.graph.value_info if v.name == name)
        model.graph.value_info.remove(info)
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))


def model_of(text: str, **values: np.ndarray) -> onnx.ModelProto:
    """The model of ONNX text with inferred types, and values for what its angle brackets declare without one."""
    model = parse(text)
    weights(model, **values)
    return onnx.shape_inference.infer_shapes(model)


def facts_of(report: DimReport) -> dict[str, DimFact]:
    return {fact.name: fact for fact in report.dims}


def runs(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]], source: onnx.ModelProto | None = None) -> bool:
    """Whether ONNX Runtime runs the model on zeros of these shapes."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession((source or model).SerializeToString(), options)
    types = {"tensor(float)": np.float32, "tensor(int64)": np.int64}
    feeds = {port.name: np.zeros(shapes[port.name], types[port.type]) for port in session.get_inputs()}
    try:
        session.run(None, feeds)
    except Exception:
        return False
    return True


def encoder() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    return model_of(
        ENCODER,
        table=rng.standard_normal((20, 8)).astype(np.float32),
        positions=rng.standard_normal((16, 8)).astype(np.float32),
    )


def test_dims_that_are_added_are_one_and_a_position_table_caps_them() -> None:
    model = encoder()
    report = analyse_dims(model)
    facts = facts_of(report)
    assert {name: (fact.axes, fact.kind, fact.low, fact.high) for name, fact in facts.items()} == {
        "a": ((("ids", 0), ("mask", 0)), "free", 1, None),
        "b": ((("ids", 1), ("mask", 1)), "free", 1, 16),
    }
    assert "(Add)" in facts["b"].reason
    assert report.note == ""
    assert runs(model, {"ids": (3, 16), "mask": (3, 16)})
    assert not runs(model, {"ids": (3, 17), "mask": (3, 17)})
    assert not runs(model, {"ids": (3, 5), "mask": (3, 6)})


def u_net() -> onnx.ModelProto:
    return model_of(
        U_NET,
        k=np.ones((4, 3, 3, 3), np.float32),
        roi=np.zeros(1, np.float32),
        scales=np.array([1, 1, 4, 4], np.float32),
    )


def test_strides_and_a_skip_connection_force_a_multiple() -> None:
    model = u_net()
    facts = facts_of(analyse_dims(model))
    assert (facts["h"].multiple, facts["h"].low, facts["h"].high) == (4, 4, None)
    assert (facts["w"].multiple, facts["w"].low, facts["w"].high) == (4, 4, None)
    assert facts["b"].multiple == 1
    assert "(Concat)" in facts["h"].reason
    assert runs(model, {"x": (2, 3, 12, 20)})
    assert not runs(model, {"x": (2, 3, 14, 20)})


def test_a_cache_and_new_tokens_add_up_to_the_mask() -> None:
    model = model_of(DECODER, table=np.ones((9, 8), np.float32))
    report = analyse_dims(model)
    total = facts_of(report)["total"]
    assert (total.kind, total.formula, total.offset) == ("derived", "seq + past", 0)
    assert report.caches == {"past_key": "past"}
    assert runs(model, {"ids": (2, 3), "past_key": (2, 2, 5, 4), "mask": (2, 8)})
    assert runs(model, {"ids": (2, 3), "past_key": (2, 2, 0, 4), "mask": (2, 3)})
    assert not runs(model, {"ids": (2, 3), "past_key": (2, 2, 5, 4), "mask": (2, 7)})


@pytest.mark.parametrize(
    ("text", "values", "name", "size"),
    [
        ("g (float[b, n] x) => (float[b, 5] y) <float[7, 5] w> { y = MatMul(x, w) }", {"w": (7, 5)}, "n", 7),
        ("g (float[b, n] x) => (float[b, 5] y) <float[5, 7] w> { y = Gemm<transB = 1>(x, w) }", {"w": (5, 7)}, "n", 7),
        (
            "g (float[b, n, l] x) => (float[b, 4, m] y) <float[4, 6, 3] w> { y = Conv(x, w) }",
            {"w": (4, 6, 3)},
            "n",
            6,
        ),
        (
            "g (float[b, n] x) => (float[b, 4, 6] y) <int64[3] s = {0, 4, 6}> { y = Reshape(x, s) }",
            {},
            "n",
            24,
        ),
        ("g (float[b, 4] x) => (float[1, 4] y) <int64[2] s = {1, 4}> { y = Reshape(x, s) }", {}, "b", 1),
        ("g (float[b, n] x) => (float[b] y) <int64[1] s = {1}> { y = Squeeze(x, s) }", {}, "n", 1),
    ],
    ids=["matmul", "gemm", "conv-channels", "reshape", "reshape-batch", "squeeze"],
)
def test_a_size_that_the_graph_leaves_no_choice_of_is_fixed(
    text: str, values: dict[str, tuple[int, ...]], name: str, size: int
) -> None:
    model = model_of(text, **{key: np.ones(shape, np.float32) for key, shape in values.items()})
    fact = facts_of(analyse_dims(model))[name]
    assert (fact.kind, fact.suggestion, fact.limits) == ("fixed", size, str(size))
    assert "node" in fact.reason


def test_a_recurrent_state_of_one_sample_fixes_the_batch() -> None:
    rng = np.random.default_rng(0)
    text = """g (float[t, b, 4] x, float[1, 1, 3] h) => (float[t, 1, b2, 3] y)
        <float[1, 9, 4] w, float[1, 9, 3] r> { y = GRU<hidden_size = 3>(x, w, r, , , h) }"""
    model = model_of(
        text,
        w=rng.standard_normal((1, 9, 4)).astype(np.float32),
        r=rng.standard_normal((1, 9, 3)).astype(np.float32),
    )
    facts = facts_of(analyse_dims(model))
    assert (facts["b"].kind, facts["b"].suggestion) == ("fixed", 1)
    assert facts["t"].kind == "free"
    assert "(GRU)" in facts["b"].reason


def test_features_of_a_recurrent_operator_are_fixed() -> None:
    text = """g (float[t, b, n] x) => (float[t, 1, b, 3] y) <float[1, 12, 4] w, float[1, 12, 3] r> {
        y = LSTM<hidden_size = 3>(x, w, r) }"""
    model = model_of(text, w=np.ones((1, 12, 4), np.float32), r=np.ones((1, 12, 3), np.float32))
    facts = facts_of(analyse_dims(model))
    assert [(name, fact.kind, fact.suggestion) for name, fact in facts.items()] == [
        ("t", "free", None),
        ("b", "free", None),
        ("n", "fixed", 4),
    ]


def test_one_that_is_broadcast_is_no_choice() -> None:
    model = model_of("g (float[b, n] x) => (float[b, 32] y) <float[32] w> { y = Add(x, w) }", w=np.ones(32, np.float32))
    fact = facts_of(analyse_dims(model))["n"]
    assert (fact.kind, fact.suggestion) == ("fixed", 32)
    # The second dim starts at 7, so that nothing is in conflict and only trying other sizes tells.
    model = model_of(
        "g (float[b, n, k] x) => (float[b, 7, k] y) <float[7, 1] w> { y = Mul(x, w) }", w=np.ones((7, 1), np.float32)
    )
    fact = facts_of(analyse_dims(model))["n"]
    assert (fact.kind, fact.low, fact.high) == ("fixed", 7, 7)


def test_a_window_gives_the_least_size() -> None:
    text = "g (float[b, 1, n] x) => (float[b, 1, m] y) <float[1, 1, 9] w> { c = Conv<strides = [2]>(x, w) y = Relu(c) }"
    model = model_of(text, w=np.ones((1, 1, 9), np.float32))
    fact = facts_of(analyse_dims(model))["n"]
    assert (fact.low, fact.high, fact.multiple) == (9, None, 1)
    assert runs(model, {"x": (1, 1, 9)})
    assert not runs(model, {"x": (1, 1, 8)})


def test_patches_of_a_fixed_number_suggest_a_square_and_no_broadcast_of_one_patch() -> None:
    text = """g (float[b, 3, h, w] x) => (float[b, 196, 8] y) <float[8, 3, 16, 16] k, float[1, 196, 8] p,
        int64[3] s = {0, 8, -1}> {
        c = Conv<strides = [16, 16]>(x, k) r = Reshape(c, s) t = Transpose<perm = [0, 2, 1]>(r) y = Add(t, p) }"""
    model = model_of(text, k=np.ones((8, 3, 16, 16), np.float32), p=np.ones((1, 196, 8), np.float32))
    facts = facts_of(analyse_dims(model))
    assert [(facts[name].low, facts[name].high) for name in "hw"] == [(224, 239), (224, 239)]
    # 448 x 112 has as many patches, so that nothing is fixed.
    assert [(facts[name].kind, facts[name].suggestion) for name in "hw"] == [("free", 224), ("free", 224)]
    assert runs(model, {"x": (1, 3, 224, 239)})
    assert not runs(model, {"x": (1, 3, 240, 224)})


def test_names_that_several_unrelated_dims_share_are_given_up() -> None:
    text = """g (float[d, d] x) => (float[3, 5] y) <float[7, 5] w, float[3, 4] v> {
        a = MatMul(x, w) y = MatMul(v, a) }"""
    model = model_of(text, w=np.ones((7, 5), np.float32), v=np.ones((3, 4), np.float32))
    facts = facts_of(analyse_dims(model))
    assert [(fact.axes, fact.suggestion) for fact in facts.values()] == [((("x", 0),), 4), ((("x", 1),), 7)]


def test_shapes_that_nothing_can_take_are_told() -> None:
    text = """g (float[b, n] x) => (float[b, 4] y) <int64[2] s = {-1, 3}, float[4] w> {
        r = Reshape(x, s) y = Add(r, w) }"""
    report = analyse_dims(model_of(text, w=np.ones(4, np.float32)))
    assert "no sizes were found" in report.note
    assert "do not broadcast" in report.note


def test_without_limits_only_what_belongs_together_is_found() -> None:
    facts = facts_of(analyse_dims(encoder(), find_limits=False))
    assert (facts["b"].axes, facts["b"].high) == ((("ids", 1), ("mask", 1)), None)


def test_the_report_survives_json() -> None:
    report = analyse_dims(model_of(DECODER, table=np.ones((9, 8), np.float32)))
    assert DimReport.from_json(report.to_json()) == report


def test_work_grows_with_the_nodes_not_with_the_sizes() -> None:
    chain = "".join(f" t{i + 1} = Relu(t{i})" for i in range(500))
    graph = graph_of(f"g (float[b, n] t0) => (float[b, n] t500) {{{chain} }}")
    report = analyse_dims(skeleton_from_graph(graph).model)
    assert [fact.kind for fact in report.dims] == ["free", "free"]
    assert report.note == ""
