from __future__ import annotations

import pytest
from quant_cases import graph_from_text, normal

from trtforge.quantization.placement import ActivationSite, Dependent, KeptFloat, plan_placement
from trtforge.recipe import QuantRecipe

CONV = "Conv<pads=[1, 1, 1, 1]>"
BLOCK = f"[a] h = {CONV}(x, w1) r = Relu(h) [b] c = {CONV}(r, w2)"


def graph_of(body, x="float[n, 32, 8, 8] i", middle=32, outputs="y", **weights):
    """i -> Relu -> x, then the body."""
    return graph_from_text(
        f"g ({x}) => ({outputs}) {{ x = Relu(i) {body} }}",
        **{"w1": normal(middle, 32, 3, 3), "w2": normal(32, middle, 3, 3)} | weights,
    )


def adds_of(graph, **recipe):
    """The sites of the residual Adds."""
    placement = plan_placement(graph, {}, QuantRecipe(**recipe))
    return [site for site in placement.activations if site.node.startswith("add")]


def test_only_the_skip_input_is_quantized_and_shares_the_pair_of_its_convolution():
    graph = graph_of(f"{BLOCK} [add] s = Add(c, x) y = Relu(s)")
    placement = plan_placement(graph, {}, QuantRecipe())
    assert adds_of(graph) == [ActivationSite("add", 1, "x")]
    assert placement.tensors == ("x", "r")
    assert placement.dependents == (Dependent("add", ("a",)),)


def test_operands_in_the_other_order():
    assert adds_of(graph_of(f"{BLOCK} [add] y = Add(x, c)")) == [ActivationSite("add", 0, "x")]


@pytest.mark.parametrize(
    "tail",
    [
        "z = Relu(c)",
        "s = Sigmoid(c) z = Mul(c, s)",
        "z = Clip(c)",
        "g = GlobalAveragePool(c) s = Sigmoid(g) z = Mul(c, s)",
    ],
    ids=["relu", "silu", "clip", "gate"],
)
def test_an_activation_or_gate_may_end_the_branch(tail):
    assert adds_of(graph_of(f"{BLOCK} {tail} [add] y = Add(z, x)")) == [ActivationSite("add", 1, "x")]


def test_a_concat_may_read_the_skip_input_too_when_its_result_is_quantized():
    body = f"{BLOCK} [add] s = Add(c, x) k = Concat<axis=1>(x, s)"
    assert len(adds_of(graph_of(f"{body} [d] y = Conv(k, w3)", w3=normal(32, 64, 1, 1)))) == 1
    assert adds_of(graph_of(f"{body} y = Tanh(k)")) == []


@pytest.mark.parametrize(
    ("body", "more"),
    [
        (f"{BLOCK} [add] s = Add(c, x) m = GlobalAveragePool(x) y = Mul(s, m)", {}),
        (f"{BLOCK} [add1] s = Add(c, x) [add2] y = Add(r, x)", {}),
        (f"{BLOCK} [d] e = Conv(x, w3) [add] y = Add(c, e)", {"w3": normal(32, 32, 1, 1)}),
        (f"{BLOCK} t = Tanh(r) [add] y = Add(t, x)", {}),
        (f"{BLOCK} [add] y = Add(x, x)", {}),
        (f"{BLOCK} [add] y = Add(c, k)", {"k": normal(1, 32, 1, 1)}),
        (f"{BLOCK} u = Add(c, c) [add] y = Add(u, x)", {}),
    ],
    ids=["float-reader", "two-additions", "two-branches", "no-branch", "itself", "constant", "sum-of-sums"],
)
def test_other_additions_stay_float(body, more):
    assert adds_of(graph_of(body, **more)) == []


def test_skip_input_that_is_an_output_of_the_model_stays_float():
    assert adds_of(graph_of(f"{BLOCK} [add] y = Add(c, x)", outputs="y, x")) == []


def test_skip_input_of_an_inverted_residual_stays_float():
    assert adds_of(graph_of(f"{BLOCK} [add] y = Add(c, x)", middle=64)) == []


def test_residuals_of_a_transformer_stay_float():
    graph = graph_from_text(
        "g (float[n, 9, 32] i) => (y) { x = Relu(i) [up] h = MatMul(x, w) [add] y = Add(h, x) }", w=normal(32, 32)
    )
    assert adds_of(graph) == []


def test_skip_input_of_a_convolution_that_stays_float_stays_float():
    graph = graph_of(f"{BLOCK} [add] y = Add(c, x)")
    assert adds_of(graph, exclude=("a",)) == []
    reduced = plan_placement(graph, {}, QuantRecipe()).without({"a": "too loud"})
    assert reduced.nodes == ("b",)


def test_an_add_can_be_excluded_by_name():
    graph = graph_of(f"{BLOCK} [add] y = Add(c, x)")
    placement = plan_placement(graph, {}, QuantRecipe(exclude=("add",)))
    assert placement.nodes == ("a", "b")
    assert placement.kept_float == (KeptFloat("add", "excluded by the recipe's pattern 'add'"),)
