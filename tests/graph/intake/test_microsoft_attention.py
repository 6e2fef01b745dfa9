"""Attention operators against ONNX Runtime's own kernels."""

from __future__ import annotations

import numpy as np
import pytest
from intake_checks import Feeds, check_equal, floats, rewritten, weights
from lint_build import RtxBuild

from trtforge.graph.intake import refused_operators
from trtforge.graph.native import OnnxNative

X = {"x": floats(2, 5, 8)}
MASK = np.array([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]], np.int32)
LENGTHS = np.array([4, 2], np.int32)
QKV = {"q": floats(2, 5, 8), "k": floats(2, 5, 8, seed=1), "v": floats(2, 5, 8, seed=2)}
Y = "float[b,s,8] y"
ATTENTION: dict[str, tuple[str, str, str, str, Feeds]] = {
    "plain": ("", "", "", Y, {}),
    "mask": (", int32[b,s] m", ", m", "", Y, {"m": MASK}),
    "lengths": (", int32[b] m", ", m", "", Y, {"m": LENGTHS}),
    "mask of pairs": (", int32[b,s,s] m", ", m", "", Y, {"m": np.repeat(MASK[:, None], 5, 1)}),
    "causal": ("", "", ", unidirectional=1", Y, {}),
    "causal with mask": (", int32[b,s] m", ", m", ", unidirectional=1, scale=0.3", Y, {"m": MASK}),
    "past": (
        ", float[2,b,2,p,4] pa",
        ", , pa",
        ", unidirectional=1",
        f"{Y}, float[2,b,2,t,4] pr",
        {"pa": floats(2, 2, 2, 3, 4)},
    ),
    "bias": (", float[b,2,s,s] ab", ", , , ab", "", Y, {"ab": floats(2, 2, 5, 5)}),
}
MULTI: dict[str, tuple[str, str, str, str, Feeds]] = {
    "plain": ("", "", "", Y, {}),
    "bias": ("", ", c", "", Y, {}),
    "mask": (", int32[b,t] m", ", c, m", "", Y, {"m": MASK}),
    "lengths": (", int32[b] m", ", c, m", "", Y, {"m": LENGTHS}),
    "added bias": (", float[1,2,s,t] ab", ", , , ab", "", Y, {"ab": floats(1, 2, 5, 5)}),
    "causal": ("", "", ", unidirectional=1", Y, {}),
    "past": (
        ", float[b,2,p,4] pk, float[b,2,p,4] pv",
        ", , , , pk, pv",
        "",
        f"{Y}, float[b,2,u,4] nk, float[b,2,u,4] nv",
        {"pk": floats(2, 2, 3, 4), "pv": floats(2, 2, 3, 4, seed=1)},
    ),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str, native: OnnxNative, rtx_build: RtxBuild) -> None:
    inputs, arguments, attrs, outputs, feeds = ATTENTION[name]
    names = "y, pr" if "pr" in outputs else "y"
    body = (
        f"g (float[b,s,8] x{inputs}) => ({outputs}) {weights(w=floats(8, 24), c=floats(24))} "
        f"{{ {names} = com.microsoft.Attention<num_heads=2{attrs}>(x, w, c{arguments}) }}"
    )
    graph = check_equal(body, {**X, **feeds}, native)
    if name == "past":
        assert rtx_build(graph).unreadable is None


def test_attention_with_starts_and_ends(native: OnnxNative) -> None:
    body = (
        f"g (float[2,5,8] x, int32[4] m) => (float[2,5,8] y) {weights(w=floats(8, 24), c=floats(24))} "
        "{ y = com.microsoft.Attention<num_heads=2>(x, w, c, m) }"
    )
    check_equal(body, {**X, "m": np.array([4, 5, 1, 0], np.int32)}, native)


@pytest.mark.parametrize("name", MULTI)
def test_multi_head_attention(name: str, native: OnnxNative, rtx_build: RtxBuild) -> None:
    inputs, arguments, attrs, outputs, feeds = MULTI[name]
    names = "y, nk, nv" if "nk" in outputs else "y"
    body = (
        f"g (float[b,s,8] q, float[b,t,8] k, float[b,t,8] v{inputs}) => ({outputs}) {weights(c=floats(24))} "
        f"{{ {names} = com.microsoft.MultiHeadAttention<num_heads=2{attrs}>(q, k, v{arguments}) }}"
    )
    graph = check_equal(body, {**QKV, **feeds}, native)
    if name == "mask":
        assert rtx_build(graph).unreadable is None


def test_cross_attention_takes_keys_as_heads(native: OnnxNative) -> None:
    body = """g (float[b,s,8] q, float[b,2,t,4] k, float[b,2,t,4] v) => (float[b,s,8] y)
        { y = com.microsoft.MultiHeadAttention<num_heads=2>(q, k, v) }"""
    check_equal(body, {"q": floats(2, 5, 8), "k": floats(2, 2, 3, 4), "v": floats(2, 2, 3, 4, seed=1)}, native)


@pytest.mark.parametrize(
    ("past", "attrs", "rotates"),
    [
        (0, "", False),
        (0, ", do_rotary=1", True),
        (0, ", do_rotary=1, rotary_interleaved=1", True),
        (3, ", do_rotary=1", True),
        (0, ", local_window_size=3", False),
        (0, ", softcap=2.0", False),
    ],
)
def test_grouped_queries(past: int, attrs: str, rotates: bool, native: OnnxNative, rtx_build: RtxBuild) -> None:
    new = 1 if past else 5
    tables = weights(c=np.cos(floats(16, 8)), n=np.sin(floats(16, 8)))
    caches = "pk, pv" if past else ", "
    body = (
        "g (float[b,s,64] q, float[b,s,32] k, float[b,s,32] v, float[b,2,p,16] pk, float[b,2,p,16] pv, int32[b] l, "
        f"int32 n_all) => (float[b,s,64] y, float[b,2,t,16] nk, float[b,2,t,16] nv) {tables} {{ y, nk, nv = "
        f"com.microsoft.GroupQueryAttention<num_heads=4, kv_num_heads=2{attrs}>(q, k, v, {caches}, l, n_all"
        f"{', c, n' if rotates else ''}) }}"
    )
    feeds = {
        "q": floats(2, new, 64),
        "k": floats(2, new, 32),
        "v": floats(2, new, 32, seed=1),
        "pk": floats(2, 2, past, 16),
        "pv": floats(2, 2, past, 16, seed=1),
        "l": np.full(2, past + new - 1, np.int32),
        "n_all": np.array(past + new, np.int32),
    }
    check_equal(body, feeds, native)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("Attention<num_heads=2, do_rotary=1>(x, w)", "it rotates positions inside"),
        ("Attention<num_heads=2, past_present_share_buffer=1>(x, w)", "its cache is one buffer"),
        ("MultiHeadAttention<num_heads=2>(x)", "it has no key"),
        (
            "GroupQueryAttention<num_heads=2, kv_num_heads=1, smooth_softmax=1>(x, x, x, , , l)",
            "its Softmax has an extra",
        ),
        ("GroupQueryAttention<num_heads=2, kv_num_heads=0>(x, x, x, , , l)", "its inputs or attributes do not fit"),
    ],
)
def test_refusals(call: str, reason: str, native: OnnxNative) -> None:
    ports = "g (float[2,3,8] x, int32[2] l) => (float[2,3,8] y)"
    body = f"{ports} {weights(w=floats(8, 24))} {{ [n] y = com.microsoft.{call} }}"
    (refused,) = refused_operators(rewritten(body, native))
    assert refused.node == "n" and refused.reason.startswith(reason) and refused.fix
