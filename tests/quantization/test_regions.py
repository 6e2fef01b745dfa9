from __future__ import annotations

import numpy as np
from quant_cases import graph_from_text, normal

from trtforge.graph.edit import copy_graph
from trtforge.quantization.placement import ActivationSite, Placement, plan_placement
from trtforge.quantization.qdq import insert_qdq
from trtforge.quantization.regions import find_needs, find_regions, find_sites
from trtforge.quantization.sites import Dependent
from trtforge.recipe import QuantRecipe


def quantize(graph, placement=None):
    placement = placement or plan_placement(graph, {}, QuantRecipe())
    quantized = copy_graph(graph)
    insert_qdq(quantized, placement, dict.fromkeys(placement.tensors, 4.0))
    return quantized


def regions_in(graph, flops=None, placement=None):
    sites = find_sites(graph, quantize(graph, placement))
    return [(region.nodes, region.flops) for region in find_regions(graph, sites, flops or {})]


ATTENTION = """g (float[2, 16, 32] x) => (float[2, 16, 32] y) {
    [q] a = MatMul(x, wq)
    [k] b = MatMul(x, wk)
    [k_t] k_turned = Transpose<perm = [0, 2, 1]>(b)
    [scores] s = MatMul(a, k_turned)
    [scale] scaled = Mul(s, factor)
    [softmax] p = Softmax(scaled)
    [v] c = MatMul(x, wv)
    [context] d = MatMul(p, c)
    [out] y = MatMul(d, wo)
}"""


def attention():
    return graph_from_text(
        ATTENTION,
        wq=normal(32, 32),
        wk=normal(32, 32, seed=1),
        wv=normal(32, 32, seed=2),
        wo=normal(32, 32, seed=3),
        factor=np.float32(0.2),
    )


def test_products_that_share_their_input_are_one_region():
    flops = {"q": 5, "k": 5, "v": 5, "out": 7, "scores": 100}
    assert regions_in(attention(), flops) == [(("q", "k", "v"), 15), (("out",), 7)]


def test_sites_are_the_inputs_behind_new_dequantize_nodes():
    graph = attention()
    sites = find_sites(graph, quantize(graph))
    assert sites["q"] == {0: "x", 1: "wq"} and sites["out"] == {0: "d", 1: "wo"}
    assert set(sites) == {"q", "k", "v", "out"}


def test_nodes_that_need_one_another_are_one_region():
    graph = attention()
    placed = [("scores", 0, "a"), ("scores", 1, "k_turned"), ("context", 0, "p"), ("context", 1, "c"), ("out", 0, "d")]
    placement = Placement(tuple(ActivationSite(*site) for site in placed), (), ())
    dependents = (Dependent("scores", ("context", "out")), Dependent("context", ("scores", "out")))
    sites = find_sites(graph, quantize(graph, placement))
    regions = find_regions(graph, sites, {"scores": 2, "context": 3}, dependents)
    assert [(region.nodes, region.flops) for region in regions] == [(("scores", "context"), 5), (("out",), 0)]
    assert find_needs(regions, dependents) == {"scores": frozenset({"out"})}


def test_convolutions_with_other_strides_or_windows_are_regions_of_their_own():
    graph = graph_from_text(
        """g (float[1, 32, 8, 8] x) => (float[1, 32, 8, 8] a, float[1, 32, 8, 8] b, float[1, 32, 4, 4] c) {
            [one] a = Conv(x, w1)
            [two] b = Conv(x, w2)
            [half] c = Conv<strides = [2, 2]>(x, w3)
            [wide] d = Conv<pads = [1, 1, 1, 1]>(x, w4)
        }""",
        w1=normal(32, 32, 1, 1),
        w2=normal(48, 32, 1, 1),
        w3=normal(32, 32, 1, 1),
        w4=normal(32, 32, 3, 3),
    )
    assert [nodes for nodes, _ in regions_in(graph)] == [("one", "two"), ("half",), ("wide",)]


def test_nodes_that_stayed_float_and_pairs_that_were_there_before_are_no_sites():
    graph = attention()
    arrived = quantize(graph, plan_placement(graph, {}, QuantRecipe(exclude=("out",))))
    placement = Placement((ActivationSite("out", 0, "d"),), (), ())
    sites = find_sites(arrived, quantize(arrived, placement))
    assert sites == {"out": {0: "d"}}
