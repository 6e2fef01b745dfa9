from __future__ import annotations

import numpy as np
import pytest
from quant_cases import graph_from_text, node_of, normal

from trtforge.quantization.producers import find_producer

LINEAR = {"w": normal(32, 48), "c": normal(48, seed=1)}
HEAD = "g (float[b,32] x) => (float[b,48] y) "
IMAGE = "g (float[b,32,6,6] x) => (float[b,48,h,w] y) "
NORM = {"g": normal(32), "b": normal(32, seed=1)}
FOUND = {
    "layer norm": (HEAD + "{ [n] t = LayerNormalization(x, g, b)  y = Neg(t) }", NORM, 1, ("n", 2), True),
    "layer norm without bias": (HEAD + "{ [n] t = LayerNormalization(x, g)  y = Neg(t) }", NORM, 1, None, True),
    "RMS norm": (HEAD + "{ [n] t = RMSNormalization(x, g)  y = Neg(t) }", NORM, 1, None, True),
    "MatMul": (HEAD + "{ [n] t = MatMul(x, w)  y = Neg(t) }", LINEAR, 1, None, True),
    "MatMul and bias": (HEAD + "{ [n] p = MatMul(x, w)  [a] t = Add(c, p)  y = Neg(t) }", LINEAR, 1, ("a", 0), True),
    "Relus": (HEAD + "{ [n] p = Gemm(x, w, c) q = Relu(p) t = Relu(q)  y = Neg(t) }", LINEAR, 1, ("n", 2), False),
    "Mul": (HEAD + "{ [n] t = Mul(g, x)  y = Neg(t) }", NORM, 0, None, True),
}
NOT_FOUND = {
    "graph input": (HEAD + "{ t = Identity(x)  y = Neg(t) }", {}),
    "computed weight": (HEAD + "{ v = Exp(w)  t = MatMul(x, v)  y = Neg(t) }", LINEAR),
    "computed scales": (HEAD + "{ v = Exp(g)  t = LayerNormalization(x, v, b)  y = Neg(t) }", NORM),
    "computed bias": (HEAD + "{ v = Exp(c)  t = Gemm(x, w, v)  y = Neg(t) }", LINEAR),
    "bias of two activations": (HEAD + "{ p = MatMul(x, w)  t = Add(p, p)  y = Neg(t) }", LINEAR),
    "weight on the left": ("g (float[48,b] x) => (float[32,b] y) { t = MatMul(w, x)  y = Neg(t) }", LINEAR),
    "Relu that others read through": (HEAD + "{ p = MatMul(x, w) t = Relu(p) q = Neg(p) y = Add(t, q) }", LINEAR),
    "other activation": (HEAD + "{ p = MatMul(x, w)  t = Gelu(p)  y = Neg(t) }", LINEAR),
    "statistics of a norm": (HEAD + "{ t, m = LayerNormalization(x, g, b)  y = Add(t, m) }", NORM),
    "convolution": (IMAGE + "{ t = Conv(x, k)  y = Neg(t) }", {"k": normal(48, 32, 3, 3)}),
}


def producer_of(text, weights, axis=-1, pinned=()):
    graph = graph_from_text(text, **weights)
    return graph, find_producer(graph.tensors()["t"], axis, pinned)


@pytest.mark.parametrize(("text", "weights", "index", "bias", "takes_offset"), FOUND.values(), ids=FOUND)
def test_constants_that_decide_the_channels_are_found(text, weights, index, bias, takes_offset):
    _, producer = producer_of(text, weights)
    assert (producer.node.name, producer.index, producer.takes_offset) == ("n", index, takes_offset)
    assert (None if producer.bias is None else (producer.bias[0].name, producer.bias[1])) == bias


@pytest.mark.parametrize(("text", "weights"), NOT_FOUND.values(), ids=NOT_FOUND)
def test_other_makers_are_not_taken(text, weights):
    assert producer_of(text, weights)[1] is None


@pytest.mark.parametrize("group", [1, 2, 16])
def test_output_channels_of_any_convolution_are_found_for_convolutions_only(group):
    text = IMAGE + f"{{ [n] t = Conv<group={group}>(x, k, c)  y = Neg(t) }}"
    weights = {"k": normal(48, 32 // group, 3, 3), "c": normal(48)}
    _, producer = producer_of(text, weights, axis=1)
    assert (producer.node.name, producer.axis) == ("n", 0)
    assert producer_of(text, weights, axis=-1)[1] is None


def test_tensor_that_must_keep_its_values_lets_no_scale_through():
    text, weights = HEAD + "{ p = MatMul(x, w)  t = Relu(p)  y = Neg(t) }", LINEAR
    assert producer_of(text, weights)[1] is not None
    assert producer_of(text, weights, pinned={"p"})[1] is None
    text = HEAD + "{ p = MatMul(x, w)  t = Add(p, c)  y = Neg(t) }"
    assert producer_of(text, weights, pinned={"p"})[1] is None


@pytest.mark.parametrize(
    ("name", "size", "has_offset"),
    [
        ("MatMul", 48, True),
        ("Relus", 48, True),
        ("layer norm", 31, False),
        ("MatMul and bias", 1, True),
        ("Mul", 48, False),
    ],
)
def test_what_does_not_fit_changes_nothing(name, size, has_offset):
    text, weights, *_ = FOUND[name]
    _, producer = producer_of(text, weights)
    ones = np.ones(size, np.float32)
    assert not producer.fold(ones, ones if has_offset else None, lambda *_: pytest.fail("changed"))


def test_fold_multiplies_both_constants_and_subtracts_the_offset_from_the_bias():
    text, weights, *_ = FOUND["layer norm"]
    graph, producer = producer_of(text, weights)
    changed = {}
    m, o = np.float32(np.arange(32) + 1), normal(32, seed=3)
    assert producer.fold(m, o, lambda node, index, values: changed.update({(node.name, index): values}))
    assert np.array_equal(changed["n", 1], weights["g"] * m)
    assert np.array_equal(changed["n", 2], weights["b"] * m - o)
    assert node_of(graph, "n").inputs[1].name == "g"
