from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from graph_models import ops, values
from rewrite_checks import normalised

from trtforge.graph.native import OnnxNative

RNG = np.random.default_rng(0)
PARAMETERS = "float[4] g = {1, 0.5, -2, 3}, float[4] b = {0.1, 0.2, 0.3, 0}, float[4] m = {0, 1, 0.5, -1}, "
PARAMETERS += "float[4] v = {1, 2, 0.5, 0.01}"
NORM = "y = BatchNormalization<epsilon = 0.001>(a, g, b, m, v)"


@pytest.fixture(scope="module")
def native() -> Iterator[OnnxNative]:
    with OnnxNative() as child:
        yield child


def numbers(*shape: int) -> str:
    return values(*RNG.standard_normal(shape).round(3).ravel())


LAYERS = {
    "conv": ("float[2, 3, 5, 5] x", "a = Conv(x, w)", f"float[4, 3, 2, 2] w = {numbers(4, 3, 2, 2)}"),
    "conv with bias": (
        "float[2, 3, 5] x",
        "a = Conv(x, w, c)",
        f"float[4, 3, 2] w = {numbers(4, 3, 2)}, float[4] c = {numbers(4)}",
    ),
    "depthwise": ("float[2, 4, 5] x", "a = Conv<group = 4>(x, w)", f"float[4, 1, 2] w = {numbers(4, 1, 2)}"),
    "transposed": ("float[2, 3, 5] x", "a = ConvTranspose(x, w)", f"float[3, 4, 2] w = {numbers(3, 4, 2)}"),
    "grouped transposed": (
        "float[2, 6, 5] x",
        "a = ConvTranspose<group = 2>(x, w, c)",
        f"float[6, 2, 2] w = {numbers(6, 2, 2)}, float[4] c = {numbers(4)}",
    ),
    "gemm": (
        "float[2, 3] x",
        "a = Gemm<alpha = 0.5, beta = 2.0>(x, w, c)",
        f"float[3, 4] w = {numbers(3, 4)}, float[1, 4] c = {numbers(4)}",
    ),
    "gemm transposed": ("float[2, 3] x", "a = Gemm<transB = 1>(x, w)", f"float[4, 3] w = {numbers(4, 3)}"),
    "gemm scalar": (
        "float[2, 3] x",
        "a = Gemm<transB = 1>(x, w, c)",
        f"float[4, 3] w = {numbers(4, 3)}, float c = {{0.7}}",
    ),
}


def feed(port: str) -> dict[str, np.ndarray]:
    shape = [int(size) for size in port[port.index("[") + 1 : port.index("]")].split(",")]
    return {"x": RNG.standard_normal(shape).astype(np.float32)}


@pytest.mark.parametrize("name", LAYERS)
def test_normalisation_goes_into_the_weights(native: OnnxNative, name: str) -> None:
    port, layer, weights = LAYERS[name]
    body = f"g ({port}) => (float[] y) <{PARAMETERS}, {weights}> {{ {layer} {NORM} }}"
    graph, report = normalised(body, native, feed(port), tolerance=1e-5)
    assert len(ops(graph)) == 1 and report.num_batch_norms == 1
    assert report.notes == ("1 BatchNormalization nodes were folded into the weights before them",)


def test_after_a_matmul_the_shift_becomes_an_add(native: OnnxNative) -> None:
    weights = f"{PARAMETERS}, float[3, 4] w = {numbers(3, 4)}"
    body = f"g (float[2, 3] x) => (float[] y) <{weights}> {{ a = MatMul(x, w) {NORM} }}"
    graph, report = normalised(body, native, feed("float[2, 3] x"), tolerance=1e-5)
    assert ops(graph) == ["MatMul", "Add"] and report.num_batch_norms == 1


@pytest.mark.parametrize(
    ("port", "nodes", "weights"),
    [
        # Another reader of the layer's result.
        (
            "float[2, 3, 5] x",
            f"a = Conv(x, w) {NORM} z = Relu(a)",
            f"float[4, 3, 2] w = {numbers(4, 3, 2)}",
        ),
        # The channels of a batched MatMul are not axis 1.
        ("float[2, 4, 3] x", f"a = MatMul(x, w) {NORM} z = Neg(y)", f"float[3, 4] w = {numbers(3, 4)}"),
        # A bias that differs from row to row.
        (
            "float[2, 3] x",
            f"a = Gemm(x, w, c) {NORM} z = Neg(y)",
            f"float[3, 4] w = {numbers(3, 4)}, float[2, 4] c = {numbers(2, 4)}",
        ),
        # Weights behind Q/DQ.
        (
            "float[2, 3, 5] x",
            f"q = QuantizeLinear(w, s, zp) d = DequantizeLinear(q, s, zp) a = Conv(x, d) {NORM} z = Neg(y)",
            f"float[4, 3, 2] w = {numbers(4, 3, 2)}, float s = {{0.02}}, int8 zp = {{0}}",
        ),
        # No layer before it.
        ("float[2, 4, 3] x", f"a = Relu(x) {NORM} z = Neg(y)", "float k = {1}"),
    ],
)
def test_what_cannot_be_folded_stays(native: OnnxNative, port: str, nodes: str, weights: str) -> None:
    body = f"g ({port}) => (float[] y, float[] z) <{PARAMETERS}, {weights}> {{ {nodes} }}"
    graph, report = normalised(body, native, feed(port), tolerance=1e-6)
    assert "BatchNormalization" in ops(graph) and report.num_batch_norms == 0


@pytest.mark.parametrize("layer", ["Conv(x, w)", "Gemm<beta = 2.0>(x, w, c)"])
@pytest.mark.parametrize(("variance", "is_folded"), [("1e6", False), ("1", True)])
def test_a_weight_that_would_be_too_small_for_int8_stays(
    native: OnnxNative, layer: str, variance: str, is_folded: bool
) -> None:
    is_conv = layer.startswith("Conv")
    port = "float[2, 3, 5] x" if is_conv else "float[2, 3] x"
    shape, bias = ("4, 3, 2", "") if is_conv else ("3, 4", ", float[4] c = {1, 2, 3, 4}")
    weights = f"float[{shape}] w = {numbers(*map(int, shape.split(',')))}{bias}, float[4] g = {{1, 1, 1, 1}}, "
    weights += f"float[4] b = {{0, 0, 0, 0}}, float[4] m = {{0, 0, 0, 0}}, float[4] v = {{{', '.join([variance] * 4)}}}"
    graph, report = normalised(
        f"g ({port}) => (float[] y) <{weights}> {{ a = {layer} {NORM} }}", native, feed(port), tolerance=1e-4
    )
    assert report.num_batch_norms == is_folded
    assert ("BatchNormalization" in ops(graph)) != is_folded


def test_shared_weights_are_folded_for_each_layer(native: OnnxNative) -> None:
    body = f"""g (float[2, 3, 5] x) => (float[] y, float[] z) <{PARAMETERS}, float[4, 3, 2] w = {numbers(4, 3, 2)}> {{
        a = Conv(x, w) {NORM} k = Conv(x, w) z = BatchNormalization(k, v, m, b, v) }}"""
    graph, report = normalised(body, native, feed("float[2, 3, 5] x"), tolerance=1e-5)
    assert ops(graph) == ["Conv", "Conv"] and report.num_batch_norms == 2
