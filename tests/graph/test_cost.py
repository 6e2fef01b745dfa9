from __future__ import annotations

import pytest
from graph_models import graph_of

from trtforge.graph.cost import attention_flops, constant_weight, gemm_flops
from trtforge.graph.names import make_names_unique


def flops(body: str, shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, int], dict[str, int]]:
    graph = graph_of(body)
    make_names_unique(graph)
    return gemm_flops(graph, shapes), attention_flops(graph, shapes)


def zeros(count: int) -> str:
    return "{" + ", ".join(["0"] * count) + "}"


@pytest.mark.parametrize(
    ("body", "shapes", "expected"),
    [
        (
            f"g (float[N, 3] x) => (float[N, 4] y) <float[3, 4] w = {zeros(12)}> {{ y = MatMul(x, w) }}",
            {"x": (5, 3), "y": (5, 4)},
            {"MatMul_0": 2 * 5 * 4 * 3},
        ),
        (
            f"g (float[N] x) => (float[4] y) <float[3, 4] w = {zeros(12)}> {{ y = MatMul(x, w) }}",
            {"x": (3,), "y": (4,)},
            {"MatMul_0": 2 * 4 * 3},
        ),
        (
            f"g (float[3, N] x) => (float[N, 4] y) <float[4, 3] w = {zeros(12)}> "
            "{ y = Gemm<transA = 1, transB = 1>(x, w) }",
            {"x": (3, 5), "y": (5, 4)},
            {"Gemm_0": 2 * 5 * 4 * 3},
        ),
        (
            f"g (float[N, 4, 8, 8] x) => (float[N, 6, 6, 6] y) <float[6, 2, 3, 3] w = {zeros(108)}> "
            "{ y = Conv<group = 2>(x, w) }",
            {"x": (2, 4, 8, 8), "y": (2, 6, 6, 6)},
            {"Conv_0": 2 * (2 * 6 * 6 * 6) * (2 * 3 * 3)},
        ),
        (
            f"g (float[N, 4, 5, 5] x) => (float[N, 6, 10, 10] y) <float[4, 3, 2, 2] w = {zeros(48)}> "
            "{ y = ConvTranspose<group = 2, strides = [2, 2]>(x, w) }",
            {"x": (2, 4, 5, 5), "y": (2, 6, 10, 10)},
            {"ConvTranspose_0": 2 * (2 * 4 * 5 * 5) * (3 * 2 * 2)},
        ),
    ],
)
def test_weighted_nodes_cost_two_operations_per_multiply(body: str, shapes: dict, expected: dict) -> None:
    assert flops(body, shapes) == (expected, {})


def test_matmul_of_two_activations_is_attention() -> None:
    body = "g (float[B, 2, S, 4] q, float[B, 2, 4, S] k) => (float[B, 2, S, S] y) { y = MatMul(q, k) }"
    shapes = {"q": (3, 2, 5, 4), "k": (3, 2, 4, 5), "y": (3, 2, 5, 5)}
    assert flops(body, shapes) == ({}, {"MatMul_0": 2 * (3 * 2 * 5 * 5) * 4})


def test_attention_op_counts_both_products() -> None:
    body = """g (float[B, 8, S, 16] q, float[B, 2, T, 16] k, float[B, 2, T, 32] v) => (float[B, 8, S, 32] y) {
        y = Attention(q, k, v) }"""
    shapes = {"q": (1, 8, 5, 16), "k": (1, 2, 7, 16), "v": (1, 2, 7, 32)}
    assert flops(body, shapes)[1] == {"Attention_0": 2 * 8 * 5 * 7 * (16 + 32)}


def test_attention_op_of_rank_3_counts_its_heads_and_the_past() -> None:
    body = """g (float[B, S, 32] q, float[B, T, 16] k, float[B, T, 16] v, float[B, 2, P, 8] pk, float[B, 2, P, 8] pv)
        => (float[B, S, 32] y) { y = Attention<q_num_heads = 4, kv_num_heads = 2>(q, k, v, , pk, pv) }"""
    shapes = {"q": (1, 5, 32), "k": (1, 7, 16), "v": (1, 7, 16), "pk": (1, 2, 3, 8), "pv": (1, 2, 3, 8)}
    assert flops(body, shapes)[1] == {"Attention_0": 2 * 4 * 5 * (7 + 3) * (8 + 8)}


def test_unknown_shape_leaves_the_node_out() -> None:
    body = f"g (float[N, 3] x) => (float[N, 4] y) <float[3, 4] w = {zeros(12)}> {{ y = MatMul(x, w) }}"
    assert flops(body, {}) == ({}, {})


def test_weight_is_found_behind_quantization_and_layout_ops() -> None:
    graph = graph_of(f"""g (float[N, 3] x) => (float[N, 4] y)
        <float[4, 3] w = {zeros(12)}, float s = {{1}}, int8 z = {{0}}> {{
        q = QuantizeLinear(w, s, z) d = DequantizeLinear(q, s, z)
        t = Transpose<perm = [1, 0]>(d) y = MatMul(x, t) }}""")
    index, weight = constant_weight(graph.nodes[-1]) or (None, None)
    assert index == 1 and weight is graph.nodes[0].inputs[0]


def test_left_operand_may_be_the_weight() -> None:
    graph = graph_of(f"g (float[3, N] x) => (float[4, N] y) <float[4, 3] w = {zeros(12)}> {{ y = MatMul(w, x) }}")
    assert (constant_weight(graph.nodes[0]) or ())[0] == 0


def test_weight_that_is_computed_from_an_input_is_none() -> None:
    graph = graph_of("g (float[N, 3] x, float[4, 3] v) => (float[N, 4] y) { t = Transpose(v) y = MatMul(x, t) }")
    assert constant_weight(graph.nodes[1]) is None
    assert constant_weight(graph.nodes[0]) is None
