from __future__ import annotations

import numpy as np
import pytest
from quant_cases import graph_from_text, normal

from trtforge.quantization.log_arguments import products_before_log
from trtforge.quantization.placement import plan_placement
from trtforge.recipe import QuantRecipe

SPECTRUM = """[cos] r = MatMul(x, wr) [sin] i = MatMul(x, wi) rr = Mul(r, r) ii = Pow(i, two) p = Add(rr, ii)
    m = Sqrt(p) t = Transpose<perm=[1, 0]>(m) u = Transpose<perm=[1, 0]>(t) [mel] b = MatMul(u, wm) e = Add(b, epsilon)
    [log] l = Log(e) [head] y = MatMul(l, wh)"""


def graph_of(body):
    weights = {name: normal(32, 32) for name in ("wr", "wi", "wm", "wh")}
    more = {"two": np.float32(2), "epsilon": np.float32(1e-8), "zero": np.float32(0)}
    return graph_from_text(f"g (float[b, 32] x) => (float[b, 32] y) {{ {body} }}", **weights, **more)


def found(body):
    graph = graph_of(body)
    products = products_before_log(graph)
    return {node.name for node in graph.nodes if id(node) in products}


def test_the_products_of_a_log_spectrogram_stay_float_and_what_follows_it_does_not():
    placement = plan_placement(graph_of(SPECTRUM), {}, QuantRecipe())
    reasons = {entry.node: entry.reason for entry in placement.kept_float}
    assert set(reasons) == {"cos", "sin", "mel"}
    assert reasons["mel"] == "a Log reads its result: INT8's error is small beside the largest value only"
    assert placement.nodes == ("head",)


def test_a_bank_of_filters_that_the_graph_computes_is_passed_too():
    body = SPECTRUM.replace("[mel] b = MatMul(u, wm)", "f = Softmax(wm) g = Relu(f) [mel] b = MatMul(u, g)")
    assert found(body) == {"cos", "sin", "mel"}


@pytest.mark.parametrize(
    "body",
    [
        "[mm] a = MatMul(x, wr) e = Exp(a) f = Add(e, epsilon) y = Log(f)",
        "[mm] a = MatMul(x, wr) e = Softmax(a) y = Log(e)",
        "[mm] a = MatMul(x, wr) r = Relu(a) e = Add(r, epsilon) y = Log(e)",
        "[mm] a = MatMul(x, wr) s = ReduceSum(x) n = Div(a, s) y = Log(n)",
        "[mm] a = MatMul(x, wr) s = Sigmoid(x) n = Mul(a, s) y = Log(n)",
    ],
)
def test_the_walk_ends_at_activation_functions_norms_and_gates(body):
    assert found(body) == set()
