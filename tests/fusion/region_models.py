"""One transformer block as ONNX text, x [batch, seq, 16] -> y, with 2 heads of 8; tests change pieces of its text."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnx.parser

HEADER = '<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1, "other" : 1]>\n'
INPUTS = "float[batch, seq, 16] x, int64[batch, seq] mask"
QKV = """[mq] q0 = MatMul(x, wq) [bq_] q1 = Add(q0, bq) [mk] k0 = MatMul(x, wk) [bk_] k1 = Add(k0, bk)
    [mv] v0 = MatMul(x, wv) [bv_] v1 = Add(v0, bv) """
LAYOUT = """q2 = Reshape(q1, heads) [qt] q = Transpose<perm=[0, 2, 1, 3]>(q2) k2 = Reshape(k1, heads)
    [kt] kt = Transpose<perm=[0, 2, 3, 1]>(k2) v2 = Reshape(v1, heads) [vt] v = Transpose<perm=[0, 2, 1, 3]>(v2) """
MASK = """m1 = Unsqueeze(mask, axes12) m2 = Cast<to=1>(m1) m3 = Sub(one, m2) bias = Mul(m3, low) """
SCORES = "[scores] s0 = MatMul(q, kt) [scale_] s1 = Mul(s0, scale) [masked] s2 = Add(s1, bias) "
SOFTMAX = "[softmax] p = Softmax<axis=-1>(s2) [context] c = MatMul(p, v) "
OUT = """[ct] c1 = Transpose<perm=[0, 2, 1, 3]>(c) [join] c2 = Reshape(c1, flat) [mo] o0 = MatMul(c2, wo)
    [bo_] o = Add(o0, bo) """
UP = "[mu] u0 = MatMul(h, wu) [bu_] u = Add(u0, bu) "
GELU = "[act] a = Gelu(u) "
DOWN = "[md] d0 = MatMul(a, wd) [bd_] d = Add(d0, bd) "
NORM1 = "[norm1] h = LayerNormalization<epsilon=1e-6>(r1, g1, e1) "
NORM2 = "[norm2] y = LayerNormalization<epsilon=1e-6>(r2, g2, e2) "
POST = QKV + LAYOUT + MASK + SCORES + SOFTMAX + OUT + "[res1] r1 = Add(o, x) " + NORM1
POST += UP + GELU + DOWN + "[res2] r2 = Add(d, h) " + NORM2

PRE = "[norm1] n = LayerNormalization<epsilon=1e-6>(x, g1, e1) " + QKV.replace("(x,", "(n,") + LAYOUT + MASK + SCORES
PRE += SOFTMAX + OUT + "[res1] h = Add(x, o) [norm2] n2 = LayerNormalization<epsilon=1e-6>(h, g2, e2) "
PRE += UP.replace("(h,", "(n2,") + GELU + DOWN + "[res2] y = Add(h, d)"
"""Both orders, in the plainest spelling."""


def normal(*shape: int) -> np.ndarray:
    """Normally distributed numbers; the sizes are their seed."""
    return (np.random.default_rng([7, *shape]).normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)


def _weight(name: str, *shape: int) -> np.ndarray:
    """A weight of its own for each name, which no other can stand in for."""
    return (np.random.default_rng([ord(char) for char in name]).normal(size=shape) / 4).astype(np.float32)


CONSTANTS: dict[str, np.ndarray] = {
    **{f"w{name}": _weight(f"w{name}", 16, 16) for name in "qkvo"},
    **{f"b{name}": _weight(f"b{name}", 16) for name in "qkvod"},
    "wu": _weight("wu", 16, 32),
    "bu": _weight("bu", 32),
    "wd": _weight("wd", 32, 16),
    "wqkv": _weight("wqkv", 16, 48),
    "bqkv": _weight("bqkv", 48),
    **{name: _weight(name, 16) + 1 for name in ("g1", "g2")},
    **{name: _weight(name, 16) for name in ("e1", "e2")},
    "heads": np.array([0, 0, 2, 8]),
    "flat": np.array([0, 0, 16]),
    "axes12": np.array([1, 2]),
    "last": np.array([-1]),
    "zero": np.array(0.0, np.float32),
    "one": np.array(1.0, np.float32),
    "half": np.array(0.5, np.float32),
    "two": np.array(2.0, np.float32),
    "three": np.array(3.0, np.float32),
    "low": np.array(-10000.0, np.float32),
    "scale": np.array(8**-0.5, np.float32),
    "root": np.array(8**0.5, np.float32),
    "eps": np.array(1e-6, np.float32),
    "sqrt2": np.array(2**0.5, np.float32),
    "cubic": np.array(0.044715, np.float32),
    "sqrt2pi": np.array((2 / np.pi) ** 0.5, np.float32),
}


def changed(body: str, *changes: tuple[str, str]) -> str:
    """A body with pieces replaced, each of which is in it exactly once."""
    for old, new in changes:
        assert body.count(old) == 1, f"{body.count(old)} times: {old}"
        body = body.replace(old, new)
    return body


def model_of(body: str, inputs: str = INPUTS, outputs: str = "y", **constants: np.ndarray) -> onnx.ModelProto:
    """The model of a body, with the constants that it names; the types of its outputs are left to inference."""
    model = onnx.parser.parse_model(f"{HEADER}g ({inputs}) => ({outputs}) {{ {body} }}")
    named = {name: array for name, array in (CONSTANTS | constants).items() if re.search(rf"\b{name}\b", body)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in named.items())
    for index, node in enumerate(model.graph.node):
        node.name = node.name or f"n{index}"
    for port in model.graph.output:
        port.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    return model
