"""What TensorRT-RTX makes of the placement: the reason for each of its rules."""

from __future__ import annotations

import math
from importlib.util import find_spec

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from quant_cases import graph_from_text, model_of, normal

from trtforge.backends.base import BuildRequest
from trtforge.backends.plan import node_precision
from trtforge.backends.tensorrt_rtx import BACKEND
from trtforge.graph.names import make_names_unique
from trtforge.profile import Profile, ProfileSet, ShapeRange
from trtforge.quantization.arrived import connect_reused, raise_small_scales
from trtforge.quantization.cast import cast_graph
from trtforge.quantization.conv_scales import move_channel_scales
from trtforge.quantization.placement import ActivationSite, Placement, plan_placement, share_amax
from trtforge.quantization.qdq import insert_qdq
from trtforge.recipe import QuantRecipe
from trtforge.target import rtx_target_from_option

BYTES = {"int8": 1, "fp16": 2, "fp32": 4}


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Builds a float32 graph of one static input x for sm_86, after Q/DQ and a cast to float16."""
    if find_spec("tensorrt_rtx") is None:
        pytest.skip("TensorRT-RTX is not installed")
    folder = tmp_path_factory.mktemp("plan")

    def plan_of(graph, placement=None, amax=None, change=None):
        placement = placement or plan_placement(graph, {}, QuantRecipe())
        report = insert_qdq(graph, placement, amax or dict.fromkeys(placement.tensors, 4.0), np.float16)
        connect_reused(graph, placement.reused, report.nodes)
        raise_small_scales(graph, np.float16)
        if change is not None:
            change(graph)
        cast_graph(graph, "float16")
        onnx.save(model_of(graph), folder / "model.onnx")
        shape = tuple(graph.inputs[0].shape)
        profiles = ProfileSet((Profile("p", {"x": ShapeRange(shape, shape, shape)}),), "file")
        request = BuildRequest(folder / "model.onnx", folder / "e", profiles, rtx_target_from_option("sm_86"))
        return BACKEND.build(request, worker, None).plan

    with BACKEND.start_worker(folder / "build.log") as worker:
        yield plan_of


def bytes_moved(plan):
    """Bytes that all kernels read and write, weights left out."""
    kernels = [layer for layer in plan.layers if layer.is_kernel]
    tensors = [tensor for layer in kernels for tensor in (*layer.inputs, *layer.outputs)]
    return sum(BYTES[tensor.dtype] * math.prod(tensor.shape) for tensor in tensors)


def attention(keys=64, head=32, out="f = Reshape(at, flat) [out] y = MatMul(f, wo)"):
    """Two heads on x [2, keys, 2 * head]."""
    width = 2 * head
    constants = {
        **{name: normal(width, width, seed=index, scale=0.1) for index, name in enumerate(("wq", "wk", "wv", "wo"))},
        "scale": np.float32(head**-0.5),
        "heads": np.array([0, 0, 2, head]),
        "flat": np.array([0, 0, width]),
    }
    text = f"""g (float[2, {keys}, {width}] x) => (y) {{
        [q] q0 = MatMul(x, wq) [k] k0 = MatMul(x, wk) [v] v0 = MatMul(x, wv)
        q4 = Reshape(q0, heads) k4 = Reshape(k0, heads) v4 = Reshape(v0, heads)
        qt = Transpose<perm=[0, 2, 1, 3]>(q4) kt = Transpose<perm=[0, 2, 3, 1]>(k4)
        vt = Transpose<perm=[0, 2, 1, 3]>(v4)
        [scores] s = MatMul(qt, kt) sc = Mul(s, scale) p = Softmax<axis=-1>(sc) [context] a = MatMul(p, vt)
        at = Transpose<perm=[0, 2, 1, 3]>(a) {out} }}"""
    graph = graph_from_text(text, **{name: array for name, array in constants.items() if f"{name})" in text})
    make_names_unique(graph)
    return graph


def with_products(placement, graph, places):
    """The placement with these inputs of the products quantized too, whatever the rules say."""
    nodes = {node.name: node for node in graph.nodes}
    sites = tuple(ActivationSite(name, index, nodes[name].inputs[index].name) for name, index in places)
    return Placement(placement.activations + sites, placement.weights, ())


ALL = [("scores", 0), ("scores", 1), ("context", 0), ("context", 1)]


def test_attention_with_all_operands_quantized_is_one_int8_kernel(build):
    graph = attention()
    placement = plan_placement(graph, {}, QuantRecipe(attention=True))
    plan = build(graph, placement)
    assert plan.fused_attention == 1
    assert node_precision(plan, ["scores", "context"]) == {"scores": "int8", "context": "int8"}
    assert plan.kernels < build(attention()).kernels


@pytest.mark.parametrize(
    ("changes", "places"),
    [
        ({}, ALL[:2]),
        ({}, ALL[2:]),
        ({"keys": 513}, ALL),
        ({"head": 96}, ALL),
        ({"out": "y = Reshape(at, flat)"}, ALL),
    ],
    ids=["scores-only", "context-only", "513-keys", "head-96", "float-result"],
)
def test_pairs_that_the_rules_refuse_end_the_fusion(build, changes, places):
    graph = attention(**changes)
    placement = plan_placement(graph, {}, QuantRecipe())
    assert build(graph, with_products(placement, graph, places)).fused_attention == 0
    assert build(attention(**changes)).fused_attention == 1
    refused = plan_placement(attention(**changes), {}, QuantRecipe(attention=True))
    assert ("scores" in refused.nodes) == (not changes)


CONV = "Conv<pads=[1, 1, 1, 1]>"


def convnet(body, channels=32, **weights):
    """x [2, 3, 16, 16] -> a convolution of 32 channels, the body, a convolution of the result z."""
    weights = {"w0": normal(32, 3, 3, 3), "w9": normal(32, channels, 3, 3)} | weights
    text = (
        f"g (float[2, 3, 16, 16] x) => (y) {{ [stem] s = {CONV}(x, w0) t = Relu(s) {body} [last] y = {CONV}(z, w9) }}"
    )
    graph = graph_from_text(text, **weights)
    make_names_unique(graph)
    return graph


RESIDUAL = f"[a] h = {CONV}(t, w1) r = Relu(h) [b] c = {CONV}(r, w2) [add] u = Add(c, t) z = Relu(u)"


def test_a_quantized_skip_input_is_stored_once(build):
    weights = {"w1": normal(32, 32, 3, 3), "w2": normal(32, 32, 3, 3)}
    without = plan_placement(convnet(RESIDUAL, **weights), {}, QuantRecipe(exclude=("add",)))
    placed, plain = build(convnet(RESIDUAL, **weights)), build(convnet(RESIDUAL, **weights), without)
    assert placed.kernels == plain.kernels
    # Written and read once in int8, instead of once in int8 and once in float16: 3 bytes for each of its numbers.
    assert bytes_moved(plain) - bytes_moved(placed) == 3 * 2 * 32 * 16 * 16


def test_a_shared_scale_saves_the_second_copy_in_front_of_a_concat(build):
    body = f"[a] h = {CONV}(t, w1) r = Relu(h) z = Concat<axis=1>(t, r)"
    weights = {"w1": normal(32, 32, 3, 3)}
    placement = plan_placement(convnet(body, 64, **weights), {}, QuantRecipe())
    assert placement.shared == (("t", "z"),)
    amax = {name: 3.0 + index for index, name in enumerate(placement.tensors)}
    own = build(convnet(body, 64, **weights), placement, amax)
    shared = build(convnet(body, 64, **weights), placement, share_amax(placement, amax))
    assert shared.kernels <= own.kernels
    assert bytes_moved(shared) < bytes_moved(own)


def test_moved_channel_scales_halve_what_a_convolution_writes(build):
    def move(graph):
        assert move_channel_scales(graph, np.float16) == ("stem", "a", "last")

    body = f"[a] h = {CONV}(t, w1) z = Relu(h)"
    graph, other = (convnet(body, w1=normal(32, 32, 3, 3)) for _ in range(2))
    moved, plain = build(graph, change=move), build(other)
    assert moved.kernels == plain.kernels
    assert node_precision(moved, ["stem", "a", "last"]) == dict.fromkeys(("a", "last", "stem"), "int8")

    def results(plan):
        return {tensor.dtype for layer in plan.layers if layer.is_gemm for tensor in layer.outputs}

    assert (results(plain), results(moved)) == ({"fp32"}, {"fp16"})


PAIR = "xq = QuantizeLinear(x, sx, z) xd = DequantizeLinear(xq, sx, z)"
CODES = "wd = DequantizeLinear<axis=0>(wq, sw, zw) wt = Transpose<perm=[1, 0]>(wd)"


@pytest.mark.parametrize(
    "body",
    [
        f"{PAIR} {CODES} [mm] y = MatMul(xd, wt)",
        f"{CODES} [mm] y = MatMul(x, wt)",
        f"{PAIR} [mm] y = MatMul(xd, w)",
        f"[mm] h = MatMul(x, w) {PAIR} {CODES} [other] o = MatMul(xd, wt) y = Mul(h, o)",
    ],
    ids=["complete", "weight-only", "activation-only", "reused"],
)
def test_what_arrives_quantized_runs_in_int8_when_completed(build, body):
    """With a dead channel, whose scale is too small for float16."""
    codes = np.clip(np.rint(normal(64, 32, scale=30)), -127, 127).astype(np.int8)
    scales = np.full(64, 0.001, np.float32)
    codes[3], scales[3] = 0, 1.1920929e-07
    constants = {
        "wq": codes,
        "sw": scales,
        "zw": np.zeros(64, np.int8),
        "sx": np.float32(0.0234567),
        "z": np.zeros((), np.int8),
        "w": normal(32, 64),
    }
    used = {name: array for name, array in constants.items() if f"{name})" in body or f"{name}," in body}
    graph = graph_from_text(f"g (float[2, 16, 32] x) => (y) {{ {body} }}", **used)
    make_names_unique(graph)
    names = [node.name for node in graph.nodes if node.op == "MatMul"]
    assert isinstance(graph.outputs[0], gs.Variable)
    assert node_precision(build(graph), names) == dict.fromkeys(sorted(names), "int8")
