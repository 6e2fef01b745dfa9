from __future__ import annotations

import numpy as np
import pytest
from quant_cases import graph_from_text, normal

from trtforge.errors import InputError
from trtforge.quantization.placement import ActivationSite, KeptFloat, WeightSite, plan_placement
from trtforge.recipe import QuantRecipe
from trtforge.target import BackendName


def one_node(text, *weight_shape, x="float[b, 32] x", dtype=np.float32, **more):
    return graph_from_text(f"g ({x}) => (y) {{ {text} }}", w=np.zeros(weight_shape, dtype), **more)


def place(graph, shapes=None, recipe=None, backend=BackendName.TENSORRT_RTX):
    return plan_placement(graph, shapes or {}, recipe or QuantRecipe(), backend)


def reason_of(graph, shapes=None, **recipe):
    """Why the only candidate stays float."""
    placement = place(graph, shapes, QuantRecipe(**recipe))
    assert placement.activations == placement.weights == ()
    (kept,) = placement.kept_float
    return kept.reason


MATMUL = "[mm] y = MatMul(x, w)"


def test_matmul_gets_one_activation_scale_and_its_last_weight_axis():
    placement = place(one_node(MATMUL, 32, 64))
    assert placement.activations == (ActivationSite("mm", 0, "x"),)
    assert placement.weights == (WeightSite("mm", 1, "w", 1),)
    assert placement.kept_float == ()


@pytest.mark.parametrize(
    ("text", "shape", "x", "axis"),
    [
        ("[n] y = Gemm(x, w)", (32, 64), "float[b, 32] x", 1),
        ("[n] y = Gemm<transB=1>(x, w)", (64, 32), "float[b, 32] x", 0),
        ("[n] y = Gemm<transB=1, alpha=0.5, beta=2.0>(x, w)", (64, 32), "float[b, 32] x", 0),
        ("[n] y = MatMul(x, w)", (4, 32, 64), "float[b, 4, 9, 32] x", 2),
        ("[n] y = Conv(x, w)", (64, 32, 3, 3), "float[b, 32, 8, 8] x", 0),
        ("[n] y = Conv(x, w)", (64, 32, 3), "float[b, 32, 8] x", 0),
        ("[n] y = Conv<group=2>(x, w)", (64, 16, 3, 3), "float[b, 32, 8, 8] x", 0),
    ],
)
def test_weight_axis_is_that_of_the_output_channels(text, shape, x, axis):
    assert place(one_node(text, *shape, x=x)).weights == (WeightSite("n", 1, "w", axis),)


@pytest.mark.parametrize("shape", [(16, 64), (32, 16)])
def test_sides_of_exactly_one_tile_are_quantized(shape):
    assert place(one_node(MATMUL, *shape, x=f"float[b, {shape[0]}] x")).nodes == ("mm",)


def test_per_tensor_recipe_gives_no_axis():
    assert place(one_node(MATMUL, 32, 64), recipe=QuantRecipe(weights="per_tensor")).weights[0].axis is None


def test_conv_transpose_gets_one_scale_where_the_builder_has_int8():
    graph = one_node("[up] y = ConvTranspose(x, w)", 32, 64, 2, 2, x="float[b, 32, 8, 8] x")
    assert place(graph, backend=BackendName.TENSORRT).weights == (WeightSite("up", 1, "w", None),)


def test_conv_transpose_stays_float_on_rtx():
    graph = one_node("[up] y = ConvTranspose(x, w)", 32, 64, 2, 2, x="float[b, 32, 8, 8] x")
    assert reason_of(graph) == "TensorRT-RTX 1.7.1 runs ConvTranspose in half precision, even with Q/DQ"


@pytest.mark.parametrize(
    ("text", "shape", "reason"),
    [
        (
            "ConvTranspose<group=2>",
            (32, 32, 2, 2),
            "grouped ConvTranspose has no INT8 kernel in some TensorRT releases",
        ),
        ("ConvTranspose", (32, 8, 2, 2), "it has 32 input and 8 output channels; an INT8 tile needs 16"),
    ],
)
def test_conv_transpose_without_a_kernel_stays_float(text, shape, reason):
    graph = one_node(f"[up] y = {text}(x, w)", *shape, x="float[b, 32, 8, 8] x")
    assert place(graph, backend=BackendName.TENSORRT).kept_float == (KeptFloat("up", reason),)


def test_shared_activation_is_calibrated_once():
    graph = graph_from_text(
        "g (float[b, 32] x) => (q, k) { [q] q = MatMul(x, wq) [k] k = MatMul(x, wk) }",
        wq=normal(32, 32),
        wk=normal(32, 32),
    )
    placement = place(graph)
    assert placement.tensors == ("x",)
    assert placement.nodes == ("q", "k")


@pytest.mark.parametrize(
    ("text", "shape", "reason"),
    [
        (MATMUL, (32, 8), "N is 8; an INT8 tile needs 16"),
        (MATMUL, (32, 1), "it is a matrix times one vector (M = None, N = 1)"),
        ("[g] y = Gemm<transB=1>(x, w)", (10, 32), "N is 10; an INT8 tile needs 16"),
        (MATMUL, (32,), "its weight is one vector"),
    ],
)
def test_small_products_stay_float(text, shape, reason):
    assert reason_of(one_node(text, *shape)) == reason


def test_short_contraction_stays_float():
    assert reason_of(one_node(MATMUL, 4, 64, x="float[b, 4] x")) == "K is 4; an INT8 tile needs 16"


def test_single_row_at_the_opt_shape_stays_float():
    graph = one_node(MATMUL, 32, 64)
    assert reason_of(graph, {"x": (1, 32)}) == "it is a matrix times one vector (M = 1, N = 64)"
    assert place(graph, {"x": (8, 32)}).nodes == ("mm",)


def test_rows_are_counted_over_all_leading_axes():
    assert place(one_node(MATMUL, 32, 64, x="float[b, s, 32] x"), {"x": (1, 128, 32)}).nodes == ("mm",)


def test_transposed_activation_stays_float():
    graph = one_node("[g] y = Gemm<transA=1>(x, w)", 32, 64, x="float[32, b] x")
    assert reason_of(graph) == "transA=1 would put a transpose between Q/DQ and the product"


def test_depthwise_conv_stays_float():
    graph = one_node("[dw] y = Conv<group=32>(x, w)", 32, 1, 3, 3, x="float[b, 32, 8, 8] x")
    assert reason_of(graph) == "depthwise: INT8 saves no memory traffic here and costs accuracy"


@pytest.mark.parametrize(
    ("shape", "group", "reason"),
    [
        ((8, 32, 3, 3), 1, "it has 8 output channels per group; an INT8 tile needs 16"),
        ((64, 8, 3, 3), 4, "it has 8 input channels per group; an INT8 tile needs 16"),
    ],
)
def test_conv_with_few_channels_stays_float(shape, group, reason):
    graph = one_node(f"[c] y = Conv<group={group}>(x, w)", *shape, x="float[b, 32, 8, 8] x")
    assert reason_of(graph) == reason


def test_first_layer_on_an_image_is_quantized_through_its_preprocessing():
    graph = graph_from_text(
        "g (float[b, 3, 32, 32] image) => (y) { x = Div(image, c) [stem] y = Conv(x, w) }",
        w=normal(32, 3, 3, 3),
        c=np.float32(255.0),
    )
    assert place(graph).nodes == ("stem",)


def test_first_layer_with_a_short_window_stays_float():
    graph = one_node("[stem] y = Conv(x, w)", 32, 3, 1, 1, x="float[b, 3, 8, 8] x")
    assert reason_of(graph) == "it has 3 input channels per group; an INT8 tile needs 16"


def test_later_conv_with_few_channels_stays_float():
    graph = graph_from_text(
        "g (float[b, 3, 8, 8] image) => (y) { x = MaxPool<kernel_shape=[2, 2]>(image) [c] y = Conv(x, w) }",
        w=normal(32, 3, 3, 3),
    )
    assert reason_of(graph) == "it has 3 input channels per group; an INT8 tile needs 16"


def test_product_of_two_activations_stays_float():
    graph = graph_from_text("g (float[b, 32, 32] q, float[b, 32, 32] k) => (y) { [qk] y = MatMul(q, k) }")
    assert reason_of(graph) == (
        "both inputs are activations; Q/DQ on an attention product can end its fusion into one kernel"
    )


def test_attention_operator_stays_float():
    graph = graph_from_text("g (float[b, 2, s, 32] q) => (float[b, 2, s, 32] y) { [att] y = Attention(q, q, q) }")
    assert reason_of(graph) == "fused attention runs in the float type"


def test_constant_left_operand_stays_float():
    graph = graph_from_text("g (float[32, n] x) => (y) { [mm] y = MatMul(w, x) }", w=normal(64, 32))
    assert reason_of(graph) == "its weight is the left operand, for which TensorRT has no per-channel scale"


def test_weight_behind_another_operator_stays_float():
    graph = graph_from_text("g (float[b, 32] x) => (y) { t = Transpose(w) [mm] y = MatMul(x, t) }", w=normal(64, 32))
    assert reason_of(graph) == "its weight 'w' goes through Transpose first"


def test_half_precision_weight_stays_float():
    graph = one_node(MATMUL, 32, 64, x="float16[b, 32] x", dtype=np.float16)
    assert reason_of(graph) == "its weight is float16, not float32"


def test_node_of_constants_only_stays_float():
    graph = graph_from_text("g (float[b] x) => (y) { [mm] y = MatMul(a, w) }", a=normal(4, 32), w=normal(32, 64))
    assert reason_of(graph) == "all its inputs are constants"


def test_node_inside_a_subgraph_stays_float():
    graph = graph_from_text(
        """g (bool c, float[b, 32] x) => (float[b, 64] y) {
            y = If(c) <then_branch = t () => (float[b, 64] a) { [inner] a = MatMul(x, w) },
                       else_branch = e () => (float[b, 64] d) { d = Neg(z) }>
        }""",
        w=normal(32, 64),
        z=normal(1, 64),
    )
    assert place(graph).kept_float == (KeptFloat("inner", "it lies in the body of an If, Loop or Scan"),)


TWO = "g (float[b, 32] x) => (y) { [block.0/up[a]] h = MatMul(x, w1) [block.0/down] y = MatMul(h, w2) }"


def two_products():
    graph = graph_from_text(
        TWO.replace("block.0/up[a]", "up").replace("block.0/down", "down"), w1=normal(32, 64), w2=normal(64, 32)
    )
    graph.nodes[0].name, graph.nodes[1].name = "block.0/up[a]", "block.0/down"
    return graph


def test_excluded_node_stays_float_with_its_pattern():
    placement = place(two_products(), recipe=QuantRecipe(exclude=("*/down",)))
    assert placement.nodes == ("block.0/up[a]",)
    assert placement.kept_float == (KeptFloat("block.0/down", "excluded by the recipe's pattern '*/down'"),)


def test_brackets_in_a_pattern_mean_themselves():
    assert place(two_products(), recipe=QuantRecipe(exclude=("block.?/up[a]",))).nodes == ("block.0/down",)


def test_pattern_that_matches_nothing_names_the_closest_nodes():
    with pytest.raises(InputError) as error:
        place(two_products(), recipe=QuantRecipe(exclude=("block.0/dwn",)))
    assert error.value.what == "the recipe's exclude pattern 'block.0/dwn' matches no node that could be quantized"
    assert error.value.why.startswith("closest names: block.0/down")


def test_scope_pattern_excludes_the_head_and_nothing_else():
    graph = two_products()
    graph.nodes[1].name = "/model/head/cls/MatMul"
    placement = place(graph, recipe=QuantRecipe(exclude=("/model/head/*",)))
    assert placement.nodes == ("block.0/up[a]",)
    assert [kept.node for kept in placement.kept_float] == ["/model/head/cls/MatMul"]


def test_pattern_has_to_match_the_whole_name():
    with pytest.raises(InputError, match="matches no node"):
        place(two_products(), recipe=QuantRecipe(exclude=("block.0/up",)))


def test_placement_without_nodes_keeps_the_rest_and_says_why():
    placement = place(two_products()).without({"block.0/down": "too loud"})
    assert placement.nodes == ("block.0/up[a]",)
    assert [site.node for site in placement.weights] == ["block.0/up[a]"]
    assert placement.kept_float == (KeptFloat("block.0/down", "too loud"),)


def test_every_candidate_is_placed_or_has_a_reason():
    graph = graph_from_text(
        """g (float[b, 3, 32, 32] x, float[b, 64, 64] z) => (y, r) {
            [stem] a = Conv(x, w0) [dw] d = Conv<group=32>(a, w1) [tiny] e = Conv(d, w2)
            [up] u = ConvTranspose(e, w3) y = Relu(u)
            [mm] q = MatMul(z, w4) [bmm] r = MatMul(q, z)
        }""",
        w0=normal(32, 3, 3, 3),
        w1=normal(32, 1, 3, 3),
        w2=normal(8, 32, 1, 1),
        w3=normal(8, 32, 2, 2),
        w4=normal(64, 64),
    )
    placement = place(graph)
    assert placement.nodes == ("stem", "mm")
    assert [kept.node for kept in placement.kept_float] == ["dw", "tiny", "up", "bmm"]
    assert all(kept.reason for kept in placement.kept_float)


CHAINS = {
    "silu": "s = Sigmoid(a) r = Mul(a, s)",
    "erf gelu": "d = Div(a, c) e = Erf(d) f = Add(e, c) m = Mul(a, f) r = Mul(m, c)",
    "tanh gelu": "p = Mul(a, a) q = Mul(p, a) k = Mul(q, c) i = Add(a, k) t = Tanh(i) f = Add(t, c) r = Mul(a, f)",
    "layer norm": """m = ReduceMean<axes=[-1]>(a) d = Sub(a, m) p = Mul(d, d) v = ReduceMean<axes=[-1]>(p)
        e = Add(v, c) q = Sqrt(e) n = Div(d, q) g = Mul(n, c) r = Add(g, c)""",
}


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_activation_and_norm_chains_hold_no_pair(chain):
    graph = graph_from_text(
        f"g (float[b, 9, 64] x) => (y) {{ [up] a = MatMul(x, w) {chain} [down] y = MatMul(r, w) }}",
        opset=17,
        w=normal(64, 64),
        c=np.float32(0.5),
    )
    assert [(site.node, site.tensor) for site in place(graph).activations] == [("up", "x"), ("down", "r")]
