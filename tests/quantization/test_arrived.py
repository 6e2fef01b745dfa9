from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from quant_cases import graph_from_text, model_of, node_of, normal, ops, run

from trtforge.graph.lint import lint
from trtforge.graph.load import load_model
from trtforge.graph.names import make_names_unique
from trtforge.graph.normalise import normalise
from trtforge.quantization.arrived import connect_reused, everything_quantized, raise_small_scales
from trtforge.quantization.placement import ActivationSite, KeptQuantized, ReusedSite, WeightSite, plan_placement
from trtforge.quantization.qdq import insert_qdq
from trtforge.recipe import QuantRecipe

ZERO = np.zeros((), np.int8)
# Within 127 steps of `sx`.
X = np.clip(normal(4, 32, seed=3), -2.9, 2.9)
PAIR = "xq = QuantizeLinear(x, sx, z) xd = DequantizeLinear(xq, sx, z)"
CODES = "wd = DequantizeLinear<axis=1>(wq, sw, zw)"
FAKE = "wf = QuantizeLinear<axis=1>(w, sw, zw) wd = DequantizeLinear<axis=1>(wf, sw, zw)"
ACTIVATION_DONE = "its activation came with Q/DQ; its weight is quantized now"
WEIGHT_DONE = "its weight came with Q/DQ; its activation is quantized now"


def constants(channels=64, depth=32):
    """A weight `[depth, channels]`, its codes and scales, and the scale of x."""
    weight = normal(depth, channels, scale=0.2)
    scales = (np.abs(weight).max(axis=0) / 127).astype(np.float32)
    return {
        "w": weight,
        "wq": np.rint(weight / scales).astype(np.int8),
        "sw": scales,
        "zw": np.zeros(channels, np.int8),
        "sx": np.float32(0.0234567),
        "z": ZERO,
        "v": normal(64, 32, seed=1, scale=0.2),
    }


def graph_of(body, outputs="y", x="float[4, 32] x", **more):
    arrays = constants() | more
    used = {name: array for name, array in arrays.items() if f"{name})" in body or f"{name}," in body}
    graph = graph_from_text(f"g ({x}) => ({outputs}) {{ {body} }}", **used)
    make_names_unique(graph)
    return graph


def place(graph, **recipe):
    return plan_placement(graph, {}, QuantRecipe(**recipe))


def complete(graph, **recipe):
    """The graph with everything that the placement adds, and the placement."""
    placement = place(graph, **recipe)
    report = insert_qdq(graph, placement, dict.fromkeys(placement.tensors, 4.0))
    connect_reused(graph, placement.reused, report.nodes)
    return graph, placement


def scales_of(graph):
    """The scales of all Q/DQ nodes by node name."""
    return {
        node.name: node.inputs[1].values.tobytes()
        for node in graph.nodes
        if node.op in ("QuantizeLinear", "DequantizeLinear")
    }


@pytest.mark.parametrize("weight", [CODES, FAKE], ids=["codes", "fake-quantized"])
def test_a_complete_node_is_kept_as_it_is(weight):
    graph = graph_of(f"{PAIR} {weight} [mm] y = MatMul(xd, wd)")
    before = ops(graph)
    placement = place(graph)
    assert placement.nodes == ()
    assert placement.kept_float == ()
    assert placement.kept_quantized == (KeptQuantized("mm", "both its operands came with Q/DQ"),)
    assert ops(complete(graph)[0]) == before


def test_a_float_weight_behind_a_quantized_activation_becomes_int8():
    graph, placement = complete(graph_of(f"{PAIR} [mm] y = MatMul(xd, w)"))
    assert placement.tensors == ()
    assert placement.weights == (WeightSite("mm", 1, "w", 1),)
    assert placement.kept_quantized == (KeptQuantized("mm", ACTIVATION_DONE),)
    assert ops(graph) == ["QuantizeLinear", "DequantizeLinear", "DequantizeLinear", "MatMul"]
    assert node_of(graph, "mm").inputs[1].inputs[0].inputs[0].values.dtype == np.int8


@pytest.mark.parametrize("weight", [CODES, FAKE], ids=["codes", "fake-quantized"])
def test_a_float_activation_of_a_quantized_weight_is_calibrated(weight):
    graph, placement = complete(graph_of(f"{weight} [mm] y = MatMul(x, wd)"))
    assert placement.activations == (ActivationSite("mm", 0, "x"),)
    assert placement.weights == ()
    assert placement.kept_quantized == (KeptQuantized("mm", WEIGHT_DONE),)
    assert ops(graph).count("QuantizeLinear") == 1 + (weight is FAKE)
    assert node_of(graph, "mm").inputs[0].inputs[0].op == "DequantizeLinear"


def test_layers_without_any_are_placed_as_usual():
    placement = place(graph_of(f"{PAIR} {CODES} [mm] h = MatMul(xd, wd) r = Relu(h) [next] y = MatMul(r, v)"))
    assert placement.activations == (ActivationSite("next", 0, "r"),)
    assert placement.weights == (WeightSite("next", 1, "v", 1),)
    assert [kept.node for kept in placement.kept_quantized] == ["mm"]


def test_a_pair_that_one_node_has_serves_the_next():
    body = f"[other] o = MatMul(x, w) {PAIR} {CODES} [mm] h = MatMul(xd, wd) y = Add(h, o)"
    graph, placement = complete(graph_of(body))
    assert placement.reused == (ReusedSite("other", 0, "x", "xd"),)
    assert placement.tensors == ()
    assert placement.nodes == ("other",)
    assert ops(graph).count("QuantizeLinear") == 1
    assert node_of(graph, "other").inputs[0] is node_of(graph, "mm").inputs[0]
    assert np.allclose(run(graph, x=X)[0], 2 * (X @ constants()["w"]), atol=0.3)


def test_a_node_that_went_back_to_float_does_not_read_the_pair():
    graph = graph_of(f"[other] o = MatMul(x, w) {PAIR} {CODES} [mm] h = MatMul(xd, wd) y = Add(h, o)")
    placement = place(graph)
    connect_reused(graph, placement.reused, placement.without({"other": "too loud"}).nodes)
    assert node_of(graph, "other").inputs[0].name == "x"


@pytest.mark.parametrize(
    "pair",
    [
        "xq = QuantizeLinear(x, sx, u) xd = DequantizeLinear(xq, sx, u)",
        "xq = QuantizeLinear<axis=1>(x, sp, zp) xd = DequantizeLinear<axis=1>(xq, sp, zp)",
    ],
    ids=["uint8", "per-channel"],
)
def test_a_pair_that_tensorrt_does_not_take_is_not_reused(pair):
    more = {"u": np.zeros((), np.uint8), "sp": np.ones(32, np.float32), "zp": np.zeros(32, np.int8)}
    placement = place(graph_of(f"[other] o = MatMul(x, w) {pair} t = Tanh(xd) y = MatMul(t, o)", "y", **more))
    assert placement.reused == ()
    assert placement.activations == (ActivationSite("other", 0, "x"),)


@pytest.mark.parametrize(
    "between", ["t = Transpose<perm=[1, 0]>(wd)", "r = Reshape(wd, sh) t = Transpose<perm=[1, 0]>(r)"]
)
def test_layout_between_a_quantized_weight_and_its_node(between):
    """PyTorch's exporters write a Linear's weight `[N, K]` with its scales, then transpose it."""
    rows = {"wn": np.zeros((64, 32), np.int8), "sh": np.array([64, 32])}
    graph = graph_of(f"wd = DequantizeLinear<axis=0>(wn, sw, zw) {between} {PAIR} [mm] y = MatMul(xd, t)", **rows)
    assert [kept.reason for kept in place(graph).kept_quantized] == ["both its operands came with Q/DQ"]


def test_max_pool_passes_a_pair_on():
    body = f"{PAIR} m = MaxPool<kernel_shape=[2, 2]>(xd) [c] y = Conv(m, k)"
    placement = place(graph_of(body, x="float[1, 32, 8, 8] x", k=normal(32, 32, 3, 3)))
    assert placement.tensors == ()
    assert [site.node for site in placement.weights] == ["c"]


def test_relu_makes_new_values():
    assert place(graph_of(f"{PAIR} r = Relu(xd) {CODES} [mm] y = MatMul(r, wd)")).tensors == ("r",)


@pytest.mark.parametrize(
    ("body", "more", "reason"),
    [
        (
            "wd = DequantizeLinear<axis=1>(wu, sw, zu) [mm] y = MatMul(x, wd)",
            {"wu": np.zeros((32, 64), np.uint8), "zu": np.zeros(64, np.uint8)},
            "only its weight came with Q/DQ, and that is all: it is uint8, not int8",
        ),
        (
            f"{PAIR} [mm] y = MatMul(xd, n)",
            {"n": normal(32, 8)},
            "only its activation came with Q/DQ, and that is all: N is 8; an INT8 tile needs 16",
        ),
        (
            f"{PAIR} t = Tanh(x) [mm] y = MatMul(xd, t)",
            {},
            "one of its two activations came with Q/DQ; the other stays float",
        ),
        (
            f"{PAIR} [mm] y = MatMul(h, xd)",
            {"h": normal(64, 4)},
            "only its activation came with Q/DQ, and that is all: its weight is the left operand, for which "
            "TensorRT has no per-channel scale",
        ),
        (
            "wd = DequantizeLinear<axis=1>(wq, sw, zw) t = Transpose<perm=[1, 0]>(x) [mm] y = MatMul(wd, t)",
            {},
            "only its weight came with Q/DQ, and that is all: its weight is the left operand, for which "
            "TensorRT has no per-channel scale",
        ),
        (
            "wd = DequantizeLinear<axis=1>(wq, sw, zw) [mm] y = MatMul(k, wd)",
            {"k": normal(4, 32)},
            "only its weight came with Q/DQ, and that is all: its other input is a constant",
        ),
    ],
    ids=["uint8", "tiny", "two-activations", "left-float-weight", "left-weight", "constants"],
)
def test_what_cannot_be_completed_stays_as_it_came(body, more, reason):
    x = "float[4, 4] x" if "two" in reason else "float[16, 64] x" if "(wd, t)" in body else "float[4, 32] x"
    placement = place(graph_of(body, x=x, **more))
    assert placement.nodes == ()
    assert placement.kept_quantized == (KeptQuantized("mm", reason),)


def test_an_excluded_node_is_not_completed():
    placement = place(graph_of(f"{PAIR} [mm] y = MatMul(xd, w)"), exclude=("mm",))
    assert placement.nodes == ()
    reason = "only its activation came with Q/DQ, and that is all: excluded by the recipe's pattern 'mm'"
    assert placement.kept_quantized == (KeptQuantized("mm", reason),)


def test_scales_that_came_keep_every_bit():
    body = f"{PAIR} [mm] h = MatMul(xd, w) r = Relu(h) [next] y = MatMul(r, v)"
    before = scales_of(graph_of(body))
    after = scales_of(complete(graph_of(body))[0])
    assert len(before) == 2
    assert before.items() < after.items()


def test_residual_adds_of_a_model_that_came_quantized_stay_float():
    body = f"{PAIR} [a] c = Conv<pads=[1, 1, 1, 1]>(xd, k) [add] y = Add(c, x)"
    placement = place(graph_of(body, x="float[1, 32, 8, 8] x", k=normal(32, 32, 3, 3)))
    assert placement.nodes == ("a",)


def test_quantized_products_of_attention_are_kept():
    body = f"{PAIR} t = Transpose<perm=[0, 2, 1]>(xd) [scores] s = MatMul(xd, t) y = Softmax(s)"
    placement = place(graph_of(body, x="float[2, 16, 32] x"), attention=True)
    assert placement.kept_quantized == (KeptQuantized("scores", "both its operands came with Q/DQ"),)


def test_the_graph_computes_what_it_did_within_the_steps_of_the_added_pairs():
    weights = constants()
    reference = np.maximum(X @ weights["w"], 0) @ weights["v"]
    graph, _ = complete(graph_of(f"{PAIR} [mm] h = MatMul(xd, w) r = Relu(h) [next] y = MatMul(r, v)"))
    error = np.abs(run(graph, x=X)[0] - reference)
    assert 0 < error.max() < 0.05 * np.abs(reference).max()


def test_a_model_that_onnxruntime_quantized_in_part_is_completed(tmp_path):
    """`quantize_static` with one node left out, symmetric and without bias quantization."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self):
            self.batches = iter([{"x": X}])

        def get_next(self):
            return next(self.batches, None)

    body = "[first] h = MatMul(x, w) r = Relu(h) [second] y = MatMul(r, v)"
    onnx.save(model_of(graph_of(body)), tmp_path / "float.onnx")
    quantize_static(
        tmp_path / "float.onnx",
        tmp_path / "part.onnx",
        Reader(),
        quant_format=QuantFormat.QDQ,
        activation_type=QuantType.QInt8,
        weight_type=QuantType.QInt8,
        per_channel=True,
        nodes_to_exclude=["second"],
        extra_options={"ActivationSymmetric": True, "WeightSymmetric": True, "QuantizeBias": False},
    )
    graph, _ = normalise(load_model(tmp_path / "part.onnx").graph)
    before = scales_of(graph)
    completed, placement = complete(graph)
    assert [kept.reason for kept in placement.kept_quantized] == ["both its operands came with Q/DQ", ACTIVATION_DONE]
    assert placement.nodes == ("second",)
    assert placement.tensors == ()
    assert before.items() < scales_of(completed).items()
    reference = run(graph_of(body), x=X)[0]
    assert np.abs(run(completed, x=X)[0] - reference).max() < 0.1 * np.abs(reference).max()


def test_nothing_left_to_quantize_is_said():
    error = everything_quantized(tuple(KeptQuantized(f"n{index}", "") for index in range(5)))
    assert error.what == "every layer of this model that could be quantized came with Q/DQ"
    assert error.why == "there is nothing left to calibrate: n0, n1, n2, n3, ..."
    assert error.fix == "build it with --fp16, --bf16 or --fp32, which keep its Q/DQ and run these layers in INT8"


def dead_channel(weight):
    """A weight whose channel 3 is dead, with the scale that torch gives such a channel."""
    arrays = constants()
    for name in ("w", "wq"):
        arrays[name][:, 3] = 0
    arrays["sw"][3] = 1.1920929e-07
    return graph_of(f"{PAIR} {weight} [mm] y = MatMul(xd, wd)", **arrays)


@pytest.mark.parametrize("weight", [CODES, FAKE], ids=["codes", "fake-quantized"])
def test_scale_of_a_dead_channel_is_raised_to_what_float16_holds(weight):
    graph = dead_channel(weight)
    before = run(graph, x=X)[0]
    assert len(raise_small_scales(graph, np.float16)) == 1 + (weight is FAKE)
    scales = node_of(graph, "mm").inputs[1].inputs[0].inputs[1].values
    assert scales[3] == np.float32(2**-14)
    assert np.array_equal(np.delete(scales, 3), np.delete(constants()["sw"], 3))
    assert np.array_equal(run(graph, x=X)[0], before)


def test_codes_follow_a_raised_scale():
    arrays = constants()
    arrays["sw"][3] = 2.0**-16
    graph = graph_of(f"{CODES} {PAIR} [mm] y = MatMul(xd, wd)", **arrays)
    expected = arrays["wq"][:, 3] * 2.0**-16
    raise_small_scales(graph, np.float16)
    dequantize = node_of(graph, "mm").inputs[1].inputs[0]
    codes, scales = (tensor.values for tensor in dequantize.inputs[:2])
    assert codes.dtype == np.int8
    assert np.abs(codes[:, 3] * scales[3] - expected).max() <= 2.0**-15
    assert np.array_equal(np.delete(codes, 3, axis=1), np.delete(arrays["wq"], 3, axis=1))


def test_scales_that_fit_are_not_touched():
    graph = graph_of(f"{PAIR} {CODES} [mm] y = MatMul(xd, wd)")
    assert raise_small_scales(graph, np.float16) == ()
    assert raise_small_scales(dead_channel(CODES), np.float32) == ()


@pytest.mark.parametrize("axis", [2, -3])
def test_scales_along_no_axis_of_the_codes_are_not_touched_and_refused(axis):
    graph = dead_channel(CODES.replace("axis=1", f"axis={axis}"))
    assert raise_small_scales(graph, np.float16) == ()
    assert "error" in {finding.severity for finding in lint(graph)}


def test_scale_of_an_activation_is_not_touched():
    graph = graph_of(f"{PAIR} y = Relu(xd)", sx=np.float32(1e-6))
    assert raise_small_scales(graph, np.float16) == ()


def test_a_constant_that_two_nodes_share_is_replaced_only_where_it_is_a_small_scale():
    graph = dead_channel(CODES)
    graph.nodes.append(
        gs.Node(
            "Neg",
            "neg",
            inputs=[node_of(graph, "mm").inputs[1].inputs[0].inputs[1]],
            outputs=[gs.Variable("n", np.float32, (64,))],
        )
    )
    graph.outputs.append(graph.nodes[-1].outputs[0])
    raise_small_scales(graph, np.float16)
    assert run(graph, x=X)[1][3] == np.float32(-1.1920929e-07)
