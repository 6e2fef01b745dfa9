"""Forms of ONNX's own operators that TensorRT does not take."""

from __future__ import annotations

import numpy as np
import pytest
from graph_models import graph_of, ops, parse, run
from intake_checks import Feeds, check_equal, floats, rewritten, weights
from lint_build import RtxBuild

from trtforge.graph.intake import refused_operators
from trtforge.graph.intake.emit import Emitter
from trtforge.graph.intake.standard import function_body
from trtforge.graph.names import UniqueNames
from trtforge.graph.native import OnnxNative

QKV = "float[2,4,5,8] q, float[2,2,t,8] k, float[2,2,t,8] v"
HEADS = {"q": floats(2, 4, 5, 8), "k": floats(2, 2, 5, 8), "v": floats(2, 2, 5, 8, seed=1)}
PAST = {"pk": floats(2, 2, 3, 8), "pv": floats(2, 2, 3, 8, seed=1)}
MASK = np.random.default_rng(0).random((5, 5)) > 0.3
THETA = {"a": floats(2, 2, 3)}
CASES: dict[str, tuple[str, Feeds]] = {
    "attention with a past": (
        f"g ({QKV}, float[2,2,p,8] pk, float[2,2,p,8] pv) => (float[2,4,5,8] y, float[2,2,u,8] nk, float[2,2,u,8] nv) "
        "{ y, nk, nv = Attention<is_causal=1>(q, k, v, , pk, pv) }",
        {**HEADS, **PAST},
    ),
    "attention with a softcap": (f"g ({QKV}) => (float[2,4,5,8] y) {{ y = Attention<softcap=2.0>(q, k, v) }}", HEADS),
    "attention with a softmax in its own type": (
        f"g ({QKV}) => (float[2,4,5,8] y) {{ y = Attention<softmax_precision=1>(q, k, v) }}",
        HEADS,
    ),
    "attention, masked and causal": (
        f"g ({QKV}, bool[5,5] m) => (float[2,4,5,8] y) {{ y = Attention<is_causal=1>(q, k, v, m) }}",
        {**HEADS, "m": MASK | np.eye(5, dtype=bool)},
    ),
    "attention of flat heads": (
        "g (float[2,5,32] q, float[2,5,16] k, float[2,5,8] v) => (float[2,5,16] y) "
        "{ y = Attention<q_num_heads=4, kv_num_heads=2>(q, k, v) }",
        {"q": floats(2, 5, 32), "k": floats(2, 5, 16), "v": floats(2, 5, 8)},
    ),
    "layer norm with statistics": (
        f"g (float[b,4,8] x) => (float[b,4,8] y, float[b,4,1] m, float[b,4,1] d) {weights(s=floats(8), o=floats(8))} "
        "{ y, m, d = LayerNormalization(x, s, o) }",
        {"x": floats(2, 4, 8)},
    ),
    "dilated pool": (
        "g (float[b,2,9,11] x) => (float[b,2,h,w] y) "
        "{ y = MaxPool<kernel_shape=[2,3], dilations=[2,3], strides=[1,2], pads=[1,0,1,2]>(x) }",
        {"x": floats(2, 2, 9, 11)},
    ),
    "count": (
        "g (float[n,2] x) => (int64[1,n] y) { s = Shape<end=1>(x) "
        "o = ConstantOfShape<value=int64[1] {1}>(s) y = NonZero(o) }",
        {"x": floats(6, 2)},
    ),
    "any": (
        f"g (bool[b,3] x) => (bool[b] y, bool[b] z) {weights(a=np.array([1]))} "
        "{ y = ReduceMax<keepdims=0>(x, a) z = ReduceMin<keepdims=0>(x, a) }",
        {"x": floats(5, 3) > 0},
    ),
    "complement": (
        "g (int32[b] x) => (int32[b] y) { y = BitwiseNot(x) }",
        {"x": np.array([-3, 0, 5, 2**31 - 1], np.int32)},
    ),
    "affine grid": (
        f"g (float[2,2,3] a) => (float[2,4,6,2] y) {weights(s=np.array([2, 3, 4, 6]))} {{ y = AffineGrid(a, s) }}",
        THETA,
    ),
    "aligned affine grid": (
        f"g (float[2,2,3] a) => (float[2,4,6,2] y) {weights(s=np.array([2, 3, 4, 6]))} "
        "{ y = AffineGrid<align_corners=1>(a, s) }",
        THETA,
    ),
    "affine grid in space": (
        f"g (float[2,3,4] a) => (float[2,2,3,4,3] y) {weights(s=np.array([2, 1, 2, 3, 4]))} {{ y = AffineGrid(a, s) }}",
        {"a": floats(2, 3, 4)},
    ),
}
FOURIER = {
    "of numbers": ("float[b,16,1]", "float[b,9,2]", "onesided=1", (3, 16, 1)),
    "of complex numbers": ("float[b,16,2]", "float[b,16,2]", "", (3, 16, 2)),
    "inverse": ("float[b,16,2]", "float[b,16,2]", "inverse=1", (3, 16, 2)),
}
BUILT = ("attention with a past", "dilated pool", "count", "any", "affine grid")


def _opset(name: str) -> int:
    return 23 if name.startswith("attention") else 20


@pytest.mark.parametrize("name", CASES)
def test_a_refused_form_gives_the_same_numbers(name: str, native: OnnxNative, rtx_build: RtxBuild) -> None:
    graph = check_equal(*CASES[name], native, opset=_opset(name))
    if name in BUILT:
        assert rtx_build(graph).unreadable is None


@pytest.mark.parametrize("name", FOURIER)
def test_fourier_transforms(name: str, native: OnnxNative, rtx_build: RtxBuild) -> None:
    given, result, attrs, shape = FOURIER[name]
    call = f"DFT<{attrs}>" if attrs else "DFT"
    body = f"g ({given} x) => ({result} y) {weights(a=np.array(1))} {{ y = {call}(x, , a) }}"
    graph = check_equal(body, {"x": floats(*shape)}, native, tolerance=1e-4)
    assert "DFT" not in ops(graph) and rtx_build(graph).unreadable is None


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            f"g ({QKV}) => (float[2,4,5,8] y, float[2,4,5,t] s) {{ [n] y, a, b, s = Attention(q, k, v) }}",
            "its scores are read",
        ),
        (
            f"g ({QKV}) => (float[2,4,5,8] y) {{ [n] y = Attention<softmax_precision=10>(q, k, v) }}",
            "its softmax is computed in float16 and its tensors are float32",
        ),
        (
            "g (float[1,1,4,4] x) => (float[1,1,2,2] y, int64[1,1,2,2] i) "
            "{ [n] y, i = MaxPool<kernel_shape=[3,3]>(x) }",
            "its indices are read",
        ),
        ("g (float[2,2,3] x, int64[4] s) => (float[a,b,c,2] y) { [n] y = AffineGrid(x, s) }", "the size of its grid"),
        (
            "g (float[b,n,1] x) => (float[b,n,2] y) <int64 a = {1}> { [n] y = DFT(x, , a) }",
            "the length of its transform",
        ),
        ("g (float[2] x) => (float[2] y) { [n] y = Bernoulli(x) }", "it gives another result at each run"),
        (
            "g (float[2,8,1] x) => (float[2,8,2] y) <int64 a = {-4}> { [n] y = DFT(x, , a) }",
            "its axis -4 is none of a tensor with 3 axes",
        ),
        (
            "g (float[2,3] x, int64[2,3] i, float[2,3] u) => (float[2,3] y) "
            '{ [n] y = ScatterElements<axis=2, reduction="add">(x, i, u) }',
            "its axis 2 is none of a tensor with 2 axes",
        ),
    ],
)
def test_refusals(body: str, reason: str, native: OnnxNative) -> None:
    (refused,) = refused_operators(rewritten(body, native, opset=23))
    assert refused.node == "n" and refused.reason.startswith(reason) and refused.fix


def test_an_operator_that_onnx_defines_as_a_function_is_replaced_by_it() -> None:
    body = "g (float[2,8] x) => (float[2,8] y) { [n] y = HardSwish(x) }"
    graph = graph_of(body)
    (node,) = graph.nodes
    emit = Emitter(UniqueNames(graph), graph.opset)
    emit.begin(node)
    graph.nodes = emit.commit(node, function_body(node, emit))
    assert "HardSwish" not in ops(graph) and "HardSigmoid" in ops(graph)
    x = floats(2, 8)
    np.testing.assert_allclose(run(graph, {"x": x})[0], run(parse(body), {"x": x})[0], rtol=1e-6)
