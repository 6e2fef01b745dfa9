from __future__ import annotations

import numpy as np
import pytest
from quant_cases import graph_from_text, normal

from trtforge.errors import InputError
from trtforge.quantization.formats import INT4, INT8
from trtforge.quantization.sites import ActivationSite, WeightSite
from trtforge.quantization.weight_only import plan_weight_only
from trtforge.recipe import QuantRecipe


def plan(text, number_format=INT4, exclude=(), **weights):
    return plan_weight_only(graph_from_text(text, **weights), QuantRecipe(exclude=exclude), number_format)


def reasons(placement):
    return {kept.node: kept.reason for kept in placement.kept_float}


def test_products_are_stored_along_their_output_channels_and_their_activations_sampled():
    placement = plan(
        """g (float[b, 128] x) => (y, z) {
            [mm] h = MatMul(x, w) [gemm] y = Gemm<transB=1>(x, v) [flat] z = Gemm(x, w)
        }""",
        w=normal(128, 64),
        v=normal(64, 128),
    )
    assert placement.weights == (
        WeightSite("mm", 1, "w", 1),
        WeightSite("gemm", 1, "v", 0),
        WeightSite("flat", 1, "w", 1),
    )
    assert placement.activations == tuple(ActivationSite(node, 0, "x") for node in ("mm", "gemm", "flat"))
    assert placement.kept_float == ()


def test_a_product_of_one_row_is_stored_too_as_its_weight_is_what_it_reads():
    assert plan("g (float[1, 128] x) => (y) { [mm] y = MatMul(x, w) }", w=normal(128, 64)).nodes == ("mm",)


@pytest.mark.parametrize(
    ("text", "shape", "reason"),
    [
        ("[n] y = MatMul(x, w)", (192, 64), "K is 192, not a multiple of the INT4 block of 128"),
        ("[n] y = Gemm<transB=1>(x, w)", (64, 192), "K is 192, not a multiple of the INT4 block of 128"),
        ("[n] y = MatMul(x, w)", (2, 192, 64), "its weight has 3 axes; INT4 blocks lie along one of two"),
        ("[n] y = MatMul(x, w)", (192,), "its weight is one vector"),
        ("[n] y = MatMul(w, x)", (8, 8), "its weight is the left operand, for which TensorRT has no per-channel scale"),
    ],
)
def test_int4_says_why_a_product_stays_float(text, shape, reason):
    assert reasons(plan(f"g (float[8, 192] x) => (y) {{ {text} }}", w=normal(*shape))) == {"n": reason}


def test_int4_leaves_convolutions_float_and_int8_stores_them():
    text = "g (float[n, 128, 8, 8] x) => (y) { [conv] h = Conv(x, w) [up] y = ConvTranspose(h, v) }"
    weights = {"w": normal(64, 128, 3, 3), "v": normal(64, 32, 2, 2)}
    assert reasons(plan(text, **weights)) == {
        "conv": "TensorRT-RTX 1.7.1 refuses an INT4 weight of Conv",
        "up": "TensorRT-RTX 1.7.1 refuses an INT4 weight of ConvTranspose",
    }
    placement = plan(text, INT8, **weights)
    assert [(site.node, site.axis) for site in placement.weights] == [("conv", 0), ("up", 1)]
    assert placement.tensors == (), "rows of a convolution's input are not what its weight multiplies"


def test_int8_leaves_small_weights_float():
    placement = plan(
        "g (float[n, 32, 8, 8] x) => (y) { [depthwise] y = Conv<group=32>(x, w) }", INT8, w=normal(32, 1, 3, 3)
    )
    assert reasons(placement) == {
        "depthwise": "its weight has 9 numbers for each of 32 output channels, too few to save anything"
    }


def test_attention_products_are_no_candidates():
    placement = plan("g (float[b, 128] x, float[128, 8] z) => (y) { [mm] y = MatMul(x, z) }")
    assert (placement.nodes, placement.kept_float) == ((), ())


def test_excluded_patterns_count_and_one_that_matches_nothing_is_an_error():
    text = "g (float[b, 128] x) => (y) { [up] h = MatMul(x, w) [head] y = MatMul(h, w) }"
    placement = plan(text, exclude=("he*",), w=normal(128, 128))
    assert (placement.nodes, reasons(placement)) == (("up",), {"head": "excluded by the recipe's pattern 'he*'"})
    with pytest.raises(InputError, match="matches no node"):
        plan(text, exclude=("tail",), w=normal(128, 128))


def test_weight_in_a_subgraph_stays_float():
    text = """g (bool c, float[b, 128] x) => (y) {
        y = If(c) <
            then_branch = t () => (float[b, 128] p) { [inner] p = MatMul(x, w) },
            else_branch = e () => (float[b, 128] q) { q = Identity(x) }
        >
    }"""
    assert reasons(plan(text, w=normal(128, 128))) == {"inner": "it lies in the body of an If, Loop or Scan"}


def test_weight_of_another_type_stays_float():
    text = "g (float16[b, 128] x) => (y) { [mm] y = MatMul(x, w) }"
    assert "float16, not float32" in reasons(plan(text, w=normal(128, 128).astype(np.float16)))["mm"]
