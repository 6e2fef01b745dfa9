"""What the compiled plan of TensorRT-RTX says about graphs that this package quantized and cast."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import onnx
import pytest
from quant_cases import graph_from_text, model_of, normal

from trtforge.backends.base import BuildRequest
from trtforge.backends.plan import node_precision
from trtforge.backends.tensorrt_rtx import BACKEND
from trtforge.fusion.packed_qkv import pack_qkv
from trtforge.profile import Profile, ProfileSet, ShapeRange
from trtforge.quantization.cast import cast_graph
from trtforge.quantization.placement import plan_placement
from trtforge.quantization.qdq import insert_qdq
from trtforge.recipe import QuantRecipe
from trtforge.target import rtx_target_from_option


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    if find_spec("tensorrt_rtx") is None:
        pytest.skip("TensorRT-RTX is not installed")
    with BACKEND.start_worker(tmp_path_factory.mktemp("worker") / "build.log") as child:
        yield child


@pytest.fixture
def plan_of(worker, tmp_path):
    """The plan of a float graph after Q/DQ and a cast to float16, at batch 1 to 8."""

    def build(graph, tail):
        placement = plan_placement(graph, {}, QuantRecipe())
        insert_qdq(graph, placement, dict.fromkeys(placement.tensors, 4.0), np.float16)
        cast_graph(graph, "float16")
        path = tmp_path / "model.onnx"
        onnx.save(model_of(graph), path)
        shapes = ShapeRange((1, *tail), (4, *tail), (8, *tail))
        profiles = ProfileSet((Profile("p", {"x": shapes}),), "file")
        request = BuildRequest(path, tmp_path / "model.engine", profiles, rtx_target_from_option("sm_86"))
        return BACKEND.build(request, worker, None).plan

    return build


@pytest.mark.parametrize(
    ("text", "shape", "tail"),
    [
        ("Gemm<transB=1>(x, w, b)", (64, 32), (32,)),
        ("Gemm<transB=1, alpha=0.5, beta=2.0>(x, w, b)", (64, 32), (32,)),
        ("Gemm(x, w, b)", (32, 64), (32,)),
        ("MatMul(x, w)", (32, 64), (16, 32)),
        ("MatMul(x, w)", (3, 32, 64), (3, 16, 32)),
        ("Conv(x, w, b)", (64, 32, 3, 3), (32, 8, 8)),
        ("Conv(x, w, b)", (64, 32, 3), (32, 8)),
        ("Conv<group=2>(x, w, b)", (64, 32, 3, 3), (64, 8, 8)),
        ("Conv(x, w)", (32, 3, 3, 3), (3, 16, 16)),
    ],
)
def test_quantized_node_is_an_int8_kernel(plan_of, text, shape, tail):
    dims = ", ".join(str(size) for size in ("b", *tail))
    graph = graph_from_text(
        f"g (float[{dims}] x) => (y) {{ [n] h = {text} y = Relu(h) }}", w=normal(*shape), b=normal(64)
    )
    assert node_precision(plan_of(graph, tail), ["n"]) == {"n": "int8"}


SPLIT = "[qkv] p = MatMul(n, w) h = Add(p, b) q, k, v = Split<axis=-1, num_outputs=3>(h) "
THREE = "[q] q = MatMul(n, wq) [k] k = MatMul(n, wk) [v] v = MatMul(n, wv) "
HEADS = """q4 = Reshape(q, heads) k4 = Reshape(k, heads) v4 = Reshape(v, heads)
    qt = Transpose<perm=[0, 2, 1, 3]>(q4) kt = Transpose<perm={}>(k4) vt = Transpose<perm=[0, 2, 1, 3]>(v4) """
SPELLED = HEADS.format([0, 2, 3, 1]) + "s = MatMul(qt, kt) sc = Mul(s, c) pr = Softmax<axis=-1>(sc) a = MatMul(pr, vt) "
OPERATOR = HEADS.format([0, 2, 1, 3]) + "a = Attention(qt, kt, vt) "
REST = "at = Transpose<perm=[0, 2, 1, 3]>(a) o = Reshape(at, flat) [out] d = MatMul(o, wo) y = Add(d, x)"


def attention_block(projection, attention):
    text = f"g (float[b, 64, 64] x) => (y) {{ n = LayerNormalization(x, gamma, beta) {projection} {attention} {REST} }}"
    constants = {
        "gamma": np.ones(64, np.float32),
        "beta": np.zeros(64, np.float32),
        "w": normal(64, 192, scale=0.1),
        "b": normal(192, scale=0.1),
        **{name: normal(64, 64, seed=index, scale=0.1) for index, name in enumerate(("wq", "wk", "wv", "wo"))},
        "c": np.float32(0.18),
        "heads": np.array([0, 0, 2, 32]),
        "flat": np.array([0, 0, 64]),
    }
    graph = graph_from_text(text, **{name: array for name, array in constants.items() if f"{name}" in text})
    for index, node in enumerate(graph.nodes):
        node.name = node.name or f"node{index}"
    return graph


@pytest.mark.parametrize(
    ("projection", "attention"),
    [(SPLIT, SPELLED), (SPLIT, OPERATOR), (THREE, SPELLED), (THREE, OPERATOR)],
    ids=["split-spelled", "split-operator", "three-spelled", "three-operator"],
)
def test_every_projection_is_int8_and_attention_stays_fused(plan_of, projection, attention):
    graph = attention_block(projection, attention)
    pack_qkv(graph)
    weighted = plan_placement(graph, {}, QuantRecipe()).nodes
    plan = plan_of(graph, (64, 64))
    assert set(node_precision(plan, weighted).values()) == {"int8"}
    assert plan.fused_attention == 1


def test_split_that_is_not_respelled_loses_int8(plan_of):
    plan = plan_of(attention_block(SPLIT, SPELLED), (64, 64))
    assert node_precision(plan, ["qkv"]) != {"qkv": "int8"}
