from __future__ import annotations

import numpy as np
import onnx
import pytest
from quant_cases import graph_from_text, model_of, node_of, normal, ops, run

from trtforge.quantization.cast import cast_graph
from trtforge.quantization.op_types import BFLOAT16
from trtforge.quantization.placement import plan_placement
from trtforge.quantization.qdq import insert_qdq
from trtforge.recipe import QuantRecipe

FLOAT, FLOAT16 = np.dtype(np.float32), np.dtype(np.float16)
BLOCK = """g (float[b, s, 32] x, float[b, 1, 1, s] mask) => (float[b, s, 32] y) {
    n = LayerNormalization<axis=-1>(x, gamma, beta)
    k = MatMul(n, wk)
    kt = Transpose<perm=[0, 2, 1]>(k)
    scores = MatMul(n, kt)
    far = Cast<to=1>(mask)
    m = Squeeze(far, one)
    masked = Add(scores, m)
    p = Softmax<axis=-1>(masked)
    a = MatMul(p, n)
    r = Add(a, x)
    g = Gelu(r)
    y = MatMul(g, wo)
}"""


def block():
    return graph_from_text(
        BLOCK,
        gamma=np.ones(32, np.float32),
        beta=np.zeros(32, np.float32),
        wk=normal(32, 32, scale=0.2),
        wo=normal(32, 32, seed=1),
        one=np.array([1], np.int64),
    )


def text_graph(body, io="float[b, 4] x", **initializers):
    return graph_from_text(f"g ({io}) => (y) {{ {body} }}", **initializers)


def kept(report):
    return {entry.node: entry.reason for entry in report.kept_float32}


def cast(graph, dtype="float16", amax=None):
    report = cast_graph(graph, dtype, amax)
    model_of(graph)
    return report


@pytest.mark.parametrize(("dtype", "low"), [("float16", FLOAT16), ("bfloat16", BFLOAT16)])
def test_encoder_block_runs_in_low_precision_with_casts_at_the_borders_only(dtype, low):
    graph = block()
    report = cast(graph, dtype)
    assert report.kept_float32 == ()
    assert all(
        np.dtype(n.outputs[0].dtype) == low for n in graph.nodes if n.op in ("LayerNormalization", "Softmax", "Gelu")
    )
    assert [tensor.dtype for tensor in (*graph.inputs, *graph.outputs)] == [FLOAT] * 3
    assert report.num_casts == 3


def test_error_is_of_the_size_of_float16_rounding():
    x, mask = normal(2, 8, 32), np.zeros((2, 1, 1, 8), np.float32)
    expected = run(block(), x=x, mask=mask)[0]
    graph = block()
    cast(graph)
    assert np.abs(run(graph, x=x, mask=mask)[0] - expected).max() < 2**-8 * np.abs(expected).max()


def test_names_of_inputs_outputs_and_nodes_stay():
    graph, names = block(), [node.op for node in block().nodes]
    cast(graph)
    assert [tensor.name for tensor in (*graph.inputs, *graph.outputs)] == ["x", "mask", "y"]
    assert [op for op in ops(graph) if op != "Cast"] == [op for op in names if op != "Cast"]


def test_tensor_read_twice_is_cast_once():
    graph = text_graph("a = Relu(x) b = Neg(x) y = Add(a, b)")
    cast(graph)
    assert sum(node.op == "Cast" and node.inputs[0].name == "x" for node in graph.nodes) == 1


def test_low_output_that_is_a_graph_output_and_read_on_serves_both():
    graph = graph_from_text("g (float[4] x) => (float[4] h, float[4] y) { h = Relu(x) y = Neg(h) }")
    cast(graph)
    assert [tensor.dtype for tensor in graph.outputs] == [FLOAT, FLOAT]
    negated = next(node for node in graph.nodes if node.op == "Neg").inputs[0]
    assert (negated.dtype, negated.inputs[0].op) == (FLOAT16, "Relu")


def test_graph_input_that_is_also_an_output_stays():
    graph = graph_from_text("g (float[4] x) => (float[4] x, float[4] y) { y = Relu(x) }")
    cast(graph)
    assert graph.outputs[0].name == "x"


def test_constants_convert_once_and_keep_their_name():
    graph = text_graph("[a] h = MatMul(x, w) [b] y = MatMul(h, w)", w=normal(4, 4))
    cast(graph)
    weight = node_of(graph, "a").inputs[1]
    assert weight is node_of(graph, "b").inputs[1]
    assert (weight.name, weight.values.dtype) == ("w", np.float16)


def test_constant_read_in_both_precisions_exists_in_both():
    graph = text_graph("[low] h = Add(x, c) [full] p = Pow(h, c) y = Relu(p)", c=np.float32([2.0]))
    cast(graph)
    assert node_of(graph, "low").inputs[1].values.dtype == np.float16
    assert node_of(graph, "full").inputs[1].values.dtype == np.float32


def test_integer_tensors_are_untouched():
    graph = graph_from_text(
        "g (int64[n] i) => (float[n, 4] y) { j = Add(i, one) y = Gather(table, j) }",
        one=np.int64(1),
        table=normal(9, 4),
    )
    cast(graph)
    assert graph.nodes[0].outputs[0].dtype == np.int64
    assert np.abs(run(graph, i=np.array([0, 3]))[0] - normal(9, 4)[[1, 4]]).max() < 2e-3


# Rule 1: schemas and constants


def test_operator_without_low_types_in_its_schema_stays_float32():
    graph = text_graph(
        "s = Shape(x) h = Relu(x) [nms] y = NonMaxSuppression(b, h3) h3 = Unsqueeze(h, z)".replace(
            "[nms] y = NonMaxSuppression(b, h3) h3 = Unsqueeze(h, z)",
            "h3 = Unsqueeze(h, z) [nms] y = NonMaxSuppression(b, h3)",
        ),
        b=normal(1, 4, 4),
        z=np.array([0], np.int64),
        io="float[1, 4] x",
    )
    report = cast(graph)
    assert kept(report)["nms"] == "NonMaxSuppression of opset 23 does not take float16"


def test_bfloat16_conv_stays_float32_below_opset_22():
    text = "g (float[b, 4, 8, 8] x) => (y) { [conv] h = Conv(x, w) y = Sigmoid(h) }"
    for opset, expected in ((21, {"conv": "Conv of opset 21 does not take bfloat16"}), (22, {})):
        assert kept(cast(graph_from_text(text, opset, w=normal(4, 4, 3, 3)), "bfloat16")) == expected


@pytest.mark.parametrize("operator", ["ConvTranspose", "HardSwish", "Mish"])
def test_operator_that_the_builder_lacks_in_bfloat16_stays_float32(operator):
    weight = ", w" if operator == "ConvTranspose" else ""
    for dtype, expected in (("bfloat16", {"op": f"TensorRT-RTX has no bfloat16 {operator}"}), ("float16", {})):
        graph = text_graph(
            f"[a] h = Sigmoid(x) [op] p = {operator}(h{weight}) y = Sigmoid(p)",
            "float[b, 4, 8, 8] x",
            **({"w": normal(4, 4, 2, 2)} if weight else {}),
        )
        assert kept(cast(graph, dtype)) == expected


@pytest.mark.parametrize(("operator", "gates"), [("GRU", 3), ("LSTM", 4), ("RNN", 1)])
def test_recurrent_operator_with_sequence_lengths_stays_float32(operator, gates):
    weights = {"w": normal(1, gates * 8, 4), "r": normal(1, gates * 8, 8)}
    for lengths, expected in (
        (", , n", {"op": f"TensorRT-RTX has no float16 {operator} with sequence lengths"}),
        ("", {}),
    ):
        graph = text_graph(
            f"[a] h = Sigmoid(x) [op] p = {operator}<hidden_size = 8>(h, w, r{lengths}) y = Sigmoid(p)",
            "float[s, b, 4] x, int32[b] n",
            **weights,
        )
        assert kept(cast(graph, "float16")) == expected


def test_operator_of_another_domain_stays_float32():
    graph = text_graph("h = Relu(x) [odd] p = Neg(h) y = Sigmoid(p)")
    node_of(graph, "odd").domain = "com.example"
    assert kept(cast_graph(graph, "float16")) == {"odd": "no ONNX schema is known for com.example::Neg"}


def test_resize_roi_and_scales_stay_float32():
    text = '[up] y = Resize<coordinate_transformation_mode="tf_crop_and_resize">(x, roi, scales)'
    graph = text_graph(
        text, "float[b, 4, 8, 8] x", roi=np.float32([0, 0, 0, 0, 1, 1, 1, 1]), scales=np.float32([1, 1, 2, 2])
    )
    cast(graph)
    assert [tensor.dtype for tensor in node_of(graph, "up").inputs] == [FLOAT16, FLOAT, FLOAT]


def test_weight_beyond_the_range_keeps_its_node_float32():
    report = cast(text_graph("[mm] h = MatMul(x, w) y = Relu(h)", w=np.float32(np.eye(4) * 1e5)))
    assert kept(report)["mm"] == "a constant reaches 1e+05, beyond float16's 65504"


def test_fully_masked_row_is_uniform_and_not_nan():
    body = "[mask] m = Mul(x, big) s = Add(x, m) [soft] p = Softmax(s) y = Relu(p)"
    graph = text_graph(body, big=np.float32(np.finfo(np.float32).min))
    report = cast(graph)
    assert report.clamped_constants == ("big",)
    assert np.array_equal(run(graph, x=np.ones((1, 4), np.float32))[0], np.full((1, 4), 0.25, np.float32))


def test_row_masked_with_infinity_is_nan_as_in_the_reference():
    def make():
        return text_graph(
            "s = Where(never, x, low) y = Softmax(s)", never=np.zeros((1, 4), bool), low=np.float32(-np.inf)
        )

    graph = make()
    cast(graph)
    x = np.ones((1, 4), np.float32)
    assert np.isnan(run(make(), x=x)[0]).all()
    assert np.isnan(run(graph, x=x)[0]).all()


def test_constant_of_shape_mask_is_clamped():
    graph = text_graph("s = Shape(x) [fill] m = ConstantOfShape<value=float[1] {-1e9}>(s) a = Add(x, m) y = Softmax(a)")
    cast(graph)
    assert node_of(graph, "fill").attrs["value"].values.tolist() == [-16376.0]
    assert np.isfinite(run(graph, x=normal(2, 4))[0]).all()


# Rule 6: steps

BAND = "[low] a = GreaterOrEqual(bins, fmin) [high] b = LessOrEqual(bins, fmax) c = And(a, b)"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_comparisons_of_an_input_with_a_table_decide_as_in_float32(dtype):
    bins = np.float32([46.875, 500.3, 2093.75, 4000.0])
    graph = text_graph(f"{BAND} y = Cast<to=6>(c)", "float fmin, float fmax", bins=bins)
    reason = "it decides by values that nothing rounded"
    assert kept(cast(graph, dtype)) == {"low": reason, "high": reason}
    feeds = {"fmin": np.array(46.876, np.float32), "fmax": np.array(2093.75, np.float32)}
    assert run(graph, **feeds)[0].tolist() == [0, 1, 1, 0]


def test_steps_stay_float32_back_to_where_their_values_start():
    body = "[scale] h = Mul(x, third) [floor] f = Floor(h) [mm] y = MatMul(f, w)"
    graph = text_graph(body, third=np.float32([1 / 3]), w=np.eye(4, dtype=np.float32))
    assert set(kept(cast(graph))) == {"scale", "floor"}
    x = np.float32([[3001.0, 2999.0, 4097.0, 6.5]])
    assert run(graph, x=x)[0].tolist() == [[1000.0, 999.0, 1365.0, 2.0]]
    graph = text_graph("[scale] h = Mul(x, scale) y = Cast<to=7>(h)", scale=np.float32([4.0]))
    assert set(kept(cast(graph))) == {"scale"}
    assert run(graph, x=np.float32([[1025.25, 2.0, 3.0, 4.0]]))[0].tolist() == [[4101, 8, 12, 16]]


def test_steps_of_values_that_low_precision_made_follow_them():
    body = "[mm] h = MatMul(x, w) [up] g = Greater(h, zero) f = Floor(h) y = Where(g, f, h)"
    assert kept(cast(text_graph(body, zero=np.float32(0), w=normal(4, 4)))) == {}


# Rules 2 and 3: sums, powers and what feeds them

RMSNORM = """[square] q = Mul(x2, x2) [mean] v = ReduceMean<keepdims=1>(q, axis) [eps] e = Add(v, epsilon)
    [root] r = Sqrt(e) [norm] n = Div(x2, r) y = Mul(n, gain)"""


def rms_norm():
    return text_graph(
        "x2 = Mul(x, gain) " + RMSNORM,
        axis=np.array([-1], np.int64),
        epsilon=np.float32(1e-12),
        gain=np.float32([300.0]),
    )


def test_hand_written_norm_keeps_its_sum_of_squares_float32():
    graph = rms_norm()
    reasons = kept(cast(graph))
    assert set(reasons) == {"square", "mean", "eps", "root"}
    assert reasons["square"] == "its product feeds ReduceMean, which sums in float32"
    assert reasons["mean"] == "ReduceMean needs float32 inside"
    x = normal(3, 4)
    expected = run(rms_norm(), x=x)[0]
    assert np.abs(run(graph, x=x)[0] - expected).max() < 2**-8 * np.abs(expected).max()


def test_quotient_of_two_sums_stays_float32_and_does_not_overflow():
    body = "[e] e = Exp(x) [s] s = ReduceSum<keepdims=1>(e, axis) [q] p = Div(e, s) y = Relu(p)"
    graph = text_graph(body, axis=np.array([-1], np.int64))
    assert kept(cast(graph))["q"] == "both its inputs are float32"
    assert np.allclose(run(graph, x=np.full((1, 4), 20.0, np.float32))[0], 0.25)


@pytest.mark.parametrize(
    "operator",
    [
        "GlobalAveragePool",
        "InstanceNormalization",
        "ReduceMean",
        "ReduceL2",
        "Exp",
        "Log",
        "Sqrt",
        "Softplus",
        "LogSoftmax",
    ],
)
def test_operator_that_sums_or_leaves_the_range_stays_float32(operator):
    more = ", s, s" if operator == "InstanceNormalization" else ""
    text = f"h = Sigmoid(x) [op] p = {operator}(h{more}) y = Sigmoid(p)"
    reasons = kept(cast(text_graph(text, "float[b, 4, 8, 8] x", s=np.ones(4, np.float32))))
    assert reasons == {"op": f"{operator} needs float32 inside"}


def test_softmax_outside_attention_stays_float32():
    reasons = kept(cast(text_graph("h = Sigmoid(x) [soft] p = Softmax(h) y = Sigmoid(p)")))
    assert reasons == {"soft": "a Softmax outside attention is computed in the type of its input"}


def test_guarded_softmax_of_attention_is_cast():
    body = "p = Softmax(x) n = IsNaN(p) g = Where(n, zero, p) y = MatMul(g, v)"
    graph = text_graph(body, "float[4, 4] x, float[4, 8] v", zero=np.float32(0))
    assert kept(cast(graph)) == {}


def test_scatter_with_a_reduction_stays_float32():
    text = '[plain] h = ScatterND(x, i, u) [sum] s = ScatterND<reduction="add">(h, i, u) y = Sigmoid(s)'
    graph = text_graph(text, "float[8] x", i=np.array([[1], [1]]), u=np.float32([2, 3]))
    assert kept(cast(graph)) == {"sum": "ScatterND with a reduction needs float32 inside"}


def test_group_normalization_of_an_old_opset_stays_float32():
    text = "g (float[b, 4, 8, 8] x) => (y) { [gn] h = GroupNormalization<num_groups=2>(x, s, t) y = Sigmoid(h) }"
    for opset, size, expected in ((20, 2, ["gn"]), (21, 4, [])):
        graph = graph_from_text(text, opset, s=np.ones(size, np.float32), t=np.zeros(size, np.float32))
        assert list(kept(cast_graph(graph, "float16"))) == expected


# Rule 4: positions


def test_rotary_positions_stay_float32_up_to_sin_and_cos():
    body = """[float] p = Cast<to=1>(ids) [column] c = Unsqueeze(p, two) [angle] a = MatMul(c, frequencies)
        [both] d = Concat<axis=-1>(a, a) [cos] o = Cos(d) y = Mul(x, o)"""

    def make():
        return text_graph(
            body,
            "int64[b, s] ids, float[b, s, 8] x",
            two=np.array([2], np.int64),
            frequencies=np.float32([[1, 0.1, 0.01, 1e-3]]),
        )

    graph = make()
    reasons = kept(cast(graph))
    assert {"column", "angle", "both", "cos"} <= set(reasons)
    assert reasons["angle"] == "it computes the argument of Sin or Cos, where positions need float32"
    feeds = {"ids": np.array([[4095, 8191]]), "x": np.ones((1, 2, 8), np.float32)}
    assert np.abs(run(graph, **feeds)[0] - run(make(), **feeds)[0]).max() < 1e-3


def test_weights_before_a_sine_activation_are_still_cast():
    report = cast(text_graph("[mm] h = MatMul(x, w) [sin] s = Sin(h) y = Sigmoid(s)", w=normal(4, 4)))
    assert list(kept(report)) == ["sin"]


# Rule 5 and casts


def test_layout_between_float32_nodes_adds_no_casts():
    graph = text_graph("h = Sigmoid(x) [e] e = Exp(h) [t] t = Transpose(e) [l] l = Log(t) y = Sigmoid(l)")
    report = cast(graph)
    assert kept(report)["t"] == "it lies between float32 nodes"
    assert report.num_casts == 4  # at both borders of the graph, and around the three nodes


def test_input_that_is_only_passed_on_is_not_rounded():
    graph = text_graph("[t] t = Transpose(x) y = Identity(t)")
    assert cast(graph).num_casts == 0
    x = np.float32([[1e6, 1 / 3, 0, 0]])
    assert np.array_equal(run(graph, x=x)[0], x.T)


def test_sum_that_is_a_graph_output_is_never_rounded():
    graph = text_graph("[s] s = ReduceSum<keepdims=1>(x, axis) y = Squeeze(s, axis)", axis=np.array([-1], np.int64))
    cast(graph)
    assert run(graph, x=np.full((1, 4), 40_000, np.float32))[0] == 160_000


def test_integers_are_cast_straight_to_low_precision():
    graph = text_graph("f = Cast<to=1>(ids) y = Mul(f, x)", "int64[b, 4] ids, float[b, 4] x")
    cast(graph)
    casts = [node for node in graph.nodes if node.op == "Cast" and node.inputs[0].name == "ids"]
    assert [node.attrs["to"] for node in casts] == [onnx.TensorProto.FLOAT16]


def test_integers_read_in_both_precisions_are_cast_to_each():
    graph = text_graph(
        "f = Cast<to=1>(ids) a = Mul(f, x) e = Exp(f) r = Relu(e) y = Add(a, r)", "int64[b, 4] ids, float[b, 4] x"
    )
    cast(graph)
    casts = [node.attrs["to"] for node in graph.nodes if node.op == "Cast" and node.inputs[0].name == "ids"]
    assert sorted(casts) == [onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16]


def test_no_cast_undoes_another():
    graph = block()
    cast(graph)
    for node in graph.nodes:
        if node.op == "Cast" and node.inputs[0].inputs:
            assert node.inputs[0].inputs[0].op != "Cast"


def test_idle_cast_disappears():
    graph = text_graph("h = Relu(x) f = Cast<to=1>(h) y = Neg(f)")
    cast(graph)
    assert ops(graph) == ["Cast", "Relu", "Neg", "Cast"]


def test_cast_to_integers_reads_whichever_version_there_is():
    graph = text_graph("h = Sigmoid(x) i = Cast<to=7>(h) y = Identity(i)")
    assert cast(graph).num_casts == 1


# Rule 7


def test_node_that_calibration_saw_reach_far_stays_float32():
    text = "[up] h = MatMul(x, w) [act] y = Relu(h)"
    report = cast(text_graph(text, w=normal(4, 4)), amax={"h": 5e4})
    assert kept(report)["up"] == "'h' reached 5e+04 in calibration; float16 ends at 65504"
    assert kept(cast(text_graph(text, w=normal(4, 4)), "bfloat16", {"h": 5e4})) == {}


def test_node_behind_the_one_that_calibration_saw_reach_far_stays_float32():
    text = "[up] h = MatMul(x, w) [act] r = Relu(h) [t] y = Transpose(r)"
    report = cast(text_graph(text, w=normal(4, 4)), amax={"r": 5e4})
    assert kept(report)["up"] == "'h' reached 5e+04 in calibration; float16 ends at 65504"


# Q/DQ and subgraphs


def quantized_mlp():
    text = "[up] h = MatMul(x, w1) [act] r = Relu(h) [down] y = MatMul(r, w2)"
    return text_graph(text, "float[b, 32] x", w1=normal(32, 64), w2=normal(64, 32))


@pytest.mark.parametrize(("dtype", "low"), [("float16", FLOAT16), ("bfloat16", BFLOAT16)])
def test_scales_take_the_low_type_without_changing_a_number(dtype, low):
    graph = quantized_mlp()
    insert_qdq(graph, plan_placement(graph, {}, QuantRecipe()), {"x": 3.3, "r": 7.7}, low)
    before = {node.name: node.inputs[1].values.copy() for node in graph.nodes if "Linear" in node.op}
    cast(graph, dtype)
    for node in graph.nodes:
        if "Linear" in node.op:
            assert node.inputs[1].dtype == low
            assert np.array_equal(node.inputs[1].values.astype(np.float32), before[node.name])
            assert node.inputs[2].dtype == np.int8
            assert (node.inputs[0] if node.op == "QuantizeLinear" else node.outputs[0]).dtype == low


def test_quantized_node_that_stays_float32_keeps_float32_pairs():
    graph = quantized_mlp()
    insert_qdq(graph, plan_placement(graph, {}, QuantRecipe()), {"x": 3.3, "r": 7.7}, np.float16)
    cast(graph, amax={"h": 6e4})
    node = node_of(graph, "up")
    assert [tensor.inputs[0].op for tensor in node.inputs] == ["DequantizeLinear"] * 2
    assert [tensor.dtype for tensor in node.inputs] == [FLOAT, FLOAT]


def test_own_scale_below_the_range_of_float16_stays_float32():
    graph = text_graph(
        """[q] q = QuantizeLinear(x, s, z)
        d = DequantizeLinear(q, s, z)
        [wdq] w = DequantizeLinear<axis=1>(k, ks, kz)
        y = MatMul(d, w)""",
        s=np.float32(0.1),
        z=np.int8(0),
        k=np.full((4, 2), 100, np.int8),
        ks=np.float32([0.01, 1e-9]),
        kz=np.zeros(2, np.int8),
    )
    assert kept(cast(graph))["wdq"] == "a constant is at most 1e-09, below float16's 6.104e-05"
    assert node_of(graph, "wdq").inputs[1].values[1] == np.float32(1e-9)
    assert node_of(graph, "q").inputs[1].dtype == FLOAT16


IF = """g (bool c, float[4] x) => (float[4] y) {
    h = Relu(x)
    [branch] p = If(c) <then_branch = t () => (float[4] a) { a = Mul(h, k) },
                        else_branch = e () => (float[4] d) { d = Neg(h) }>
    y = Relu(p)
}"""


@pytest.mark.parametrize("condition", [True, False])
def test_subgraphs_stay_float32_with_casts_at_the_border(condition):
    graph = graph_from_text(IF, k=np.float32([3.0]))
    assert kept(cast(graph))["branch"] == "it holds subgraphs, which stay float32"
    x = np.float32([-1, 0, 1, 2])
    expected = run(graph_from_text(IF, k=np.float32([3.0])), c=np.array(condition), x=x)[0]
    assert np.array_equal(run(graph, c=np.array(condition), x=x)[0], expected)


@pytest.mark.parametrize("make", [block, lambda: graph_from_text(IF, k=np.float32([3.0]))], ids=["block", "if"])
def test_casting_a_copy_leaves_the_original_as_it_was(make):
    graph = make()
    before = model_of(graph).SerializeToString(deterministic=True)
    copy = graph.copy()
    cast(copy)
    assert model_of(graph).SerializeToString(deterministic=True) == before
    assert model_of(copy).SerializeToString(deterministic=True) != before


def test_same_graph_gives_the_same_bytes():
    first, second = block(), block()
    cast(first)
    cast(second)
    assert model_of(first).SerializeToString(deterministic=True) == model_of(second).SerializeToString(
        deterministic=True
    )
