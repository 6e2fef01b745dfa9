from __future__ import annotations

import numpy as np
import pytest
from quant_cases import graph_from_text, node_of, normal, ops, run

from trtforge.graph.names import UniqueNames
from trtforge.quantization.output_bias import OutputBias

W, K, C = normal(32, 48), normal(48, 32, 3, 3), normal(48, seed=1)
GEMM = {"w": W, "c": C}
LINEAR = {
    "MatMul": ("[n] y = MatMul(x, w)", {"w": W}, 1),
    "MatMul and bias": ("[n] p = MatMul(x, w) y = Add(p, c)", GEMM, 0),
    "MatMul and bias first": ("[n] p = MatMul(x, w) y = Add(c, p)", {"w": W, "c": C[None]}, 0),
    "MatMul and number": ("[n] p = MatMul(x, w) y = Add(p, c)", {"w": W, "c": C[:1]}, 1),
    "Gemm": ("[n] y = Gemm(x, w)", {"w": W}, 0),
    "Gemm without bias, beta 0": ("[n] y = Gemm<beta=0.0>(x, w)", {"w": W}, 1),
    "Gemm with bias": ("[n] y = Gemm<transB=1>(x, w, c)", {"w": W.T.copy(), "c": C}, 0),
    "Gemm with beta": ("[n] y = Gemm<beta=0.5>(x, w, c)", GEMM, 1),
    "Gemm with beta and Add": ("[n] p = Gemm<beta=0.5>(x, w, c) y = Add(p, c)", GEMM, 0),
    "Gemm with one number": ("[n] y = Gemm(x, w, c)", {"w": W, "c": C[:1]}, 1),
}
CONV = {
    "Conv": ("[n] y = Conv(x, k)", {"k": K}, 0),
    "Conv with bias": ("[n] y = Conv<pads=[1,1,1,1]>(x, k, c)", {"k": K, "c": C}, 0),
    "Conv with computed bias": ("v = Neg(c) [n] y = Conv(x, k, v)", {"k": K, "c": C}, 1),
}
HEADS = {"linear": "g (float[b,32] x) => (float[b,48] y)", "conv": "g (float[b,32,5,5] x) => (float[b,48,h,w] y)"}
CASES = {name: (f"{HEADS['linear']} {{ {body} }}", *rest) for name, (body, *rest) in LINEAR.items()}
CASES |= {name: (f"{HEADS['conv']} {{ {body} }}", *rest) for name, (body, *rest) in CONV.items()}
CASES["MatMul read twice"] = (
    "g (float[b,32] x) => (float[b,48] y, float[b,48] z) { [n] p = MatMul(x, w) y = Add(p, c) z = Neg(p) }",
    GEMM,
    1,
)
CASES["MatMul that is an output"] = (
    "g (float[b,32] x) => (float[b,48] p, float[b,48] y) { [n] p = MatMul(x, w) y = Add(p, c) }",
    GEMM,
    1,
)


@pytest.mark.parametrize(("text", "weights", "added"), CASES.values(), ids=CASES)
def test_constant_is_added_at_the_output_of_one_node_and_nowhere_else(text, weights, added):
    graph, vector = graph_from_text(text, **weights), normal(48, seed=2).astype(np.float64)
    x = normal(3, 32, *([5, 5] if "Conv" in text else []), seed=3)
    expected = run(graph_from_text(text, **weights), x=x)
    biases = OutputBias(graph, UniqueNames(graph))
    biases.add(node_of(graph, "n"), vector)
    biases.finish()
    assert ops(graph).count("Add") == ops(graph_from_text(text, **weights)).count("Add") + added
    change = vector.reshape(-1, 1, 1) if "Conv" in text else vector
    signs = {"z": -1.0}  # z = Neg(p)
    for before, after, output in zip(expected, run(graph, x=x), graph.outputs, strict=True):
        assert np.allclose(after - before, change * signs.get(output.name, 1.0), atol=1e-4)


def test_constant_that_others_read_stays_as_it_is():
    text = """g (float[b,32] x) => (float[b,48] y, float[b,48] z) {
        [n] p = MatMul(x, w) [one] y = Add(p, c) [two] z = Add(y, c) }"""
    graph = graph_from_text(text, w=W, c=C)
    biases = OutputBias(graph, UniqueNames(graph))
    biases.add(node_of(graph, "n"), np.ones(48))
    biases.finish()
    assert np.array_equal(node_of(graph, "one").inputs[1].values, C + 1)
    assert np.array_equal(node_of(graph, "two").inputs[1].values, C)


def test_new_nodes_come_right_behind_theirs_and_take_over_the_outputs_name():
    text = "g (float[b,32] x) => (float[b,32] y) { [n] h = MatMul(x, w)  [r] r = Relu(h)  [m] y = MatMul(r, v) }"
    graph = graph_from_text(text, w=W, v=normal(48, 32))
    biases = OutputBias(graph, UniqueNames(graph))
    for name, size in (("m", 32), ("n", 48)):
        biases.add(node_of(graph, name), np.ones(size))
    biases.finish()
    assert ops(graph) == ["MatMul", "Add", "Relu", "MatMul", "Add"]
    assert [node.outputs[0].name for node in graph.nodes] == ["h_product", "h", "r", "y_product", "y"]
