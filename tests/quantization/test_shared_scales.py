from __future__ import annotations

import numpy as np
import pytest
from quant_cases import graph_from_text, normal, run

from trtforge.quantization.placement import plan_placement, share_amax
from trtforge.quantization.qdq import insert_qdq
from trtforge.recipe import QuantRecipe

W = {"w1": normal(32, 32, 1, 1), "w2": normal(32, 64, 1, 1), "w3": normal(32, 32, 1, 1)}


def shared(body, **constants):
    graph = graph_from_text(
        f"g (float[n, 32, 8, 8] i) => (y) {{ x = Relu(i) {body} }}",
        **{name: array for name, array in {**W, **constants}.items() if name in body},
    )
    return plan_placement(graph, {}, QuantRecipe()).shared


def test_inputs_and_output_of_a_concat_share_one_scale():
    body = (
        "[a] c = Conv(x, w1) r = Relu(c) k = Concat<axis=1>(x, r) [b] d = Conv(k, w2) [e] f = Conv(r, w3) y = Add(d, f)"
    )
    assert shared(body) == (("x", "r", "k"),)


def test_a_scale_passes_through_operators_in_a_row():
    body = "t = Tanh(x) k = Concat<axis=1>(x, t) m = MaxPool<kernel_shape=[2, 2]>(k) [a] c = Conv(m, w2)"
    assert shared(f"{body} [b] d = Conv(x, w3) g = GlobalAveragePool(c) y = Mul(d, g)") == (("x", "m"),)


def test_float_inputs_of_a_concat_get_no_pair_of_their_own():
    body = "t = Tanh(x) u = Neg(x) k = Concat<axis=1>(t, u) [b] y = Conv(k, w2)"
    assert shared(body) == ()


@pytest.mark.parametrize(
    ("op", "constants"),
    [
        ("MaxPool<kernel_shape=[2, 2]>(x)", {}),
        ("Transpose<perm=[0, 1, 3, 2]>(x)", {}),
        ('Resize<mode="nearest">(x, , sizes)', {"sizes": np.array([1, 1, 2, 2], np.float32)}),
    ],
)
def test_operators_that_pass_values_on_keep_the_scale(op, constants):
    assert shared(
        f"m = {op} [a] c = Conv(m, w1) [b] d = Conv(x, w3) g = GlobalAveragePool(c) y = Mul(d, g)", **constants
    ) == (("x", "m"),)


@pytest.mark.parametrize(
    ("op", "constants"),
    [
        ("AveragePool<kernel_shape=[2, 2]>(x)", {}),
        ("Tanh(x)", {}),
        ('Resize<mode="linear">(x, , sizes)', {"sizes": np.array([1, 1, 2, 2], np.float32)}),
    ],
)
def test_operators_that_make_new_values_do_not(op, constants):
    body = f"m = {op} [a] c = Conv(m, w1) [b] d = Conv(x, w3) g = GlobalAveragePool(c) y = Mul(d, g)"
    assert shared(body, **constants) == ()


def test_a_concat_that_nothing_quantized_reads_joins_nothing():
    body = "[a] c = Conv(x, w1) r = Relu(c) [b] d = Conv(r, w3) y = Concat<axis=1>(x, r)"
    assert shared(body) == ()


def test_concats_that_share_an_input_share_their_scale():
    both = "k = Concat<axis=1>(x, c) l = Concat<axis=1>(c, x)"
    body = f"[a] c = Conv(x, w1) {both} [b] d = Conv(k, w2) [e] f = Conv(l, w2) y = Add(d, f)"
    assert shared(body) == (("x", "k", "l"),)


def test_shared_tensors_have_one_scale_in_the_graph():
    graph = graph_from_text(
        "g (float[1, 32, 4, 4] x) => (y) { [a] c = Conv(x, w1) k = Concat<axis=1>(x, c) [b] y = Conv(k, w2) }",
        **{name: W[name] for name in ("w1", "w2")},
    )
    placement = plan_placement(graph, {}, QuantRecipe())
    report = insert_qdq(graph, placement, share_amax(placement, {"x": 2.0, "k": 5.0}), np.float16)
    assert report.activation_scales["x"] == report.activation_scales["k"]
    assert np.isfinite(run(graph, x=normal(1, 32, 4, 4))[0]).all()
