"""Each fused operator against ONNX Runtime's own kernel."""

from __future__ import annotations

import numpy as np
import pytest
from intake_checks import Feeds, check_equal, codes, floats, rewritten, weights
from lint_build import RtxBuild

from trtforge.graph.intake import refused_operators
from trtforge.graph.native import OnnxNative

X = {"x": floats(2, 5, 8)}
SKIP = {**X, "k": floats(2, 5, 8, seed=1)}
NORM = weights(g=floats(8), e=floats(8, seed=1), a=floats(8, seed=2))
IDS = {"i": codes(2, 5, high=10, dtype=np.int32), "s": codes(2, 5, high=2, dtype=np.int32)}
MASK = np.array([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]], np.int32)
TABLES = weights(w=floats(10, 8), p=floats(12, 8), t=floats(2, 8), g=floats(8), e=floats(8, seed=1))
ROTATION = weights(c=np.cos(floats(16, 4)), n=np.sin(floats(16, 4)))
ONE = "g (float[b,s,8] x) => (float[b,s,8] y)"
TWO = "g (float[b,s,8] x, float[b,s,8] k) => (float[b,s,8] y, float[b,s,8] t)"
CONV = weights(w=floats(3, 2, 3, 3), c=floats(3))
CASES: dict[str, tuple[str, Feeds]] = {
    "skip layer norm": (
        f"{TWO} {NORM} {{ y, m, v, t = com.microsoft.SkipLayerNormalization<epsilon=1e-5>(x, k, g, e, a) }}",
        SKIP,
    ),
    "skip without batch": (
        f"g (float[b,s,8] x, float[1,s,8] k) => (float[b,s,8] y) {NORM} "
        "{ y = com.microsoft.SkipLayerNormalization(x, k, g, e) }",
        {**X, "k": floats(1, 5, 8)},
    ),
    "skip rms norm": (
        f"{TWO} {NORM} {{ y, m, v, t = com.microsoft.SkipSimplifiedLayerNormalization<epsilon=1e-5>(x, k, g) }}",
        SKIP,
    ),
    "rms norm": (f"{ONE} {NORM} {{ y = SimplifiedLayerNormalization<epsilon=1e-5>(x, g) }}", X),
    "embeddings": (
        "g (int32[b,s] i, int32[b,s] s, int32[b,s] m) => (float[b,s,8] y, int32[b] l, float[b,s,8] u) "
        f"{TABLES} {{ y, l, u = com.microsoft.EmbedLayerNormalization(i, s, w, p, t, g, e, m) }}",
        {**IDS, "m": MASK},
    ),
    "embeddings without segments": (
        f"g (int32[b,s] i) => (float[b,s,8] y, int32[b] l) {TABLES} "
        "{ y, l = com.microsoft.EmbedLayerNormalization(i, , w, p, , g, e) }",
        {"i": IDS["i"]},
    ),
    "gelu": (f"{ONE} {{ y = com.microsoft.Gelu(x) }}", X),
    "gelu with bias": (f"{ONE} {NORM} {{ y = com.microsoft.BiasGelu(x, g) }}", X),
    "fast gelu": (f"{ONE} {{ y = com.microsoft.FastGelu(x) }}", X),
    "fast gelu with bias": (f"{ONE} {NORM} {{ y = com.microsoft.FastGelu(x, g) }}", X),
    "quick gelu": (f"{ONE} {{ y = com.microsoft.QuickGelu<alpha=1.5>(x) }}", X),
    "matmul, transposed and scaled": (
        "g (float[b,s,8] x, float[b,s,8] k) => (float[b,s,t] y) "
        "{ y = com.microsoft.FusedMatMul<transB=1, alpha=0.5>(x, k) }",
        SKIP,
    ),
    "matmul, first transposed": (
        "g (float[b,s,8] x, float[b,s,4] k) => (float[b,h,t] y) { y = com.microsoft.FusedMatMul<transA=1>(x, k) }",
        {**X, "k": floats(2, 5, 4)},
    ),
    "matmul, batch axis moved": (
        "g (float[s,b,n,8] x, float[b,n,8,4] k) => (float[b,n,s,t] y) "
        "{ y = com.microsoft.FusedMatMul<transBatchA=1>(x, k) }",
        {"x": floats(3, 2, 5, 8), "k": floats(2, 5, 8, 4)},
    ),
    "old name of matmul": (
        "g (float[b,s,8] x, float[b,s,8] k) => (float[b,s,t] y) { y = com.microsoft.TransposeMatMul<transB=1>(x, k) }",
        SKIP,
    ),
    "conv and activation": (
        f"g (float[b,2,6,6] x) => (float[b,3,6,6] y) {CONV} {{ y = com.microsoft.FusedConv<kernel_shape=[3,3], "
        'pads=[1,1,1,1], activation="LeakyRelu", activation_params=[0.2]>(x, w, c) }',
        {"x": floats(2, 2, 6, 6)},
    ),
    "conv, sum and clip": (
        f"g (float[b,2,6,6] x, float[b,3,6,6] z) => (float[b,3,6,6] y) {CONV} {{ y = com.microsoft.FusedConv<"
        'kernel_shape=[3,3], pads=[1,1,1,1], activation="Clip", activation_params=[-0.5,0.7]>(x, w, c, z) }',
        {"x": floats(2, 2, 6, 6), "z": floats(2, 3, 6, 6)},
    ),
    "gemm and activation": (
        f"g (float[b,8] x) => (float[b,3] y) {weights(w=floats(3, 8), c=floats(3))} {{ y = com.microsoft.FusedGemm<"
        'transB=1, alpha=0.5, activation="LeakyRelu", activation_alpha=0.3>(x, w, c) }',
        {"x": floats(2, 8)},
    ),
    "rotation": (
        f"g (float[b,s,16] x, int64[b,s] p) => (float[b,s,16] y) {ROTATION} "
        "{ y = com.microsoft.RotaryEmbedding(x, p, c, n) }",
        {"x": floats(2, 5, 16), "p": np.tile(np.arange(5), (2, 1))},
    ),
    "interleaved rotation": (
        f"g (float[b,s,16] x, int64[b,s] p) => (float[b,s,16] y) {ROTATION} "
        "{ y = com.microsoft.RotaryEmbedding<interleaved=1>(x, p, c, n) }",
        {"x": floats(2, 5, 16), "p": np.tile(np.arange(5), (2, 1))},
    ),
    "rotation from an offset": (
        f"g (float[b,2,s,8] x, int64[1] p) => (float[b,2,s,8] y) {ROTATION} "
        "{ y = com.microsoft.RotaryEmbedding(x, p, c, n) }",
        {"x": floats(2, 2, 5, 8), "p": np.array([2])},
    ),
    "pool of codes, channels last": (
        "g (uint8[b,6,6,2] x) => (uint8[b,3,3,2] y) "
        "{ y = com.microsoft.NhwcMaxPool<kernel_shape=[2,2], strides=[2,2]>(x) }",
        {"x": codes(2, 6, 6, 2)},
    ),
    "triangle": (
        "g (float[b,4,4] x) => (float[b,4,4] y) { y = com.microsoft.Trilu<upper=0>(x) }",
        {"x": floats(2, 4, 4)},
    ),
}
BUILT = ("skip layer norm", "skip rms norm", "embeddings", "rotation from an offset", "conv, sum and clip")


@pytest.mark.parametrize("name", CASES)
def test_a_fused_operator_gives_the_same_numbers(name: str, native: OnnxNative, rtx_build: RtxBuild) -> None:
    graph = check_equal(*CASES[name], native)
    if name in BUILT:
        assert rtx_build(graph).unreadable is None


@pytest.mark.parametrize(("bits", "has_zeros"), [(4, False), (4, True), (8, False), (8, True)])
def test_packed_weights_are_written_out(bits: int, has_zeros: bool, native: OnnxNative) -> None:
    arrays = {"w": codes(6, 3, 16 * bits // 8), "s": np.abs(floats(18)) * 0.01}
    if has_zeros:
        arrays["z"] = codes(6 * ((3 * bits + 7) // 8))
    body = (
        f"g (float[b,40] x) => (float[b,6] y) {weights(**arrays)} {{ y = com.microsoft.MatMulNBits<K=40, N=6, "
        f"bits={bits}, block_size=16>(x, w, s{', z' if has_zeros else ''}) }}"
    )
    check_equal(body, {"x": floats(3, 40)}, native, tolerance=2e-5)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("y = com.microsoft.FusedMatMul<transA=1, transBatchA=1>(x, x)", "it transposes two ways at once"),
        ('y = com.microsoft.FusedConv<activation="Erf">(x, x)', "its activation 'Erf' is not known"),
        ("y = com.microsoft.MatMulNBits<K=8, N=8, block_size=16>(x, x, x)", "its weight is computed at run time"),
        ("y, y2 = com.microsoft.SimplifiedLayerNormalization(x, x)", "its mean or inverse deviation is read"),
        ("y = com.microsoft.MatMulNBits<bits=4>(x, x, x)", "its inputs or attributes do not fit the operator ('N')"),
        ("y = com.microsoft.SkipLayerNormalization(x)", "its inputs or attributes do not fit the operator"),
        ("y = com.microsoft.CDist(x, x)", "it is an operator of ONNX Runtime's own that has no standard form here"),
        ("y = com.microsoft.BeamSearch(x)", "it holds a whole search with the model inside"),
        ("y = com.microsoft.nchwc.ReorderInput(x)", "ONNX Runtime laid the file out for one kind of CPU"),
    ],
)
def test_what_has_no_standard_form_is_refused_with_the_reason(call: str, reason: str, native: OnnxNative) -> None:
    outputs = "float[2,3,8] y, float[2,3,1] y2" if "y2" in call else "float[2,3,8] y"
    domains = "com.microsoft.nchwc" if "nchwc" in call else ""
    body = f"g (float[2,3,8] x) => ({outputs}) {{ [n] {call} }}"
    graph = rewritten(body, native) if not domains else _with_domain(body, domains, native)
    (refused,) = refused_operators(graph)
    assert refused.node == "n" and refused.reason.startswith(reason) and refused.fix


def _with_domain(body: str, domain: str, native: OnnxNative):  # type: ignore[no-untyped-def]
    from graph_models import graph_of

    from trtforge.graph.normalise import normalise

    return normalise(graph_of(body, opset=20, domains=f', "{domain}": 1'), native=native)[0]
