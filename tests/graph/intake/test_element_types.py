"""Types that TensorRT does not compute in."""

from __future__ import annotations

import numpy as np
import pytest
from graph_models import graph_of, parse, run
from intake_checks import Feeds, check_equal, codes, floats, rewritten
from lint_build import RtxBuild

from trtforge.graph.edit import all_nodes
from trtforge.graph.intake import narrow_types
from trtforge.graph.lint import lint
from trtforge.graph.native import OnnxNative
from trtforge.graph.normalise import normalise
from trtforge.graph.signature import tensor_dtype

WIDE = {"float32", "int32", "int64", "bool"}
CASES: dict[str, tuple[str, Feeds]] = {
    "float64": (
        "g (double[b,3] x, float[b,3] z) => (double[b,3] y, float[b,3] w) <double[3] c = {1.5, 2.5, 0.5}> "
        "{ a = Mul(x, c) e = Cast<to=11>(z) y = Add(a, e) w0 = Sqrt(e) w = Cast<to=1>(w0) }",
        {"x": floats(2, 3).astype(np.float64), "z": np.abs(floats(2, 3))},
    ),
    "mask of bytes": (
        "g (bool[b,3] x, float[b,3] z) => (float[b,3] y) <int64[1] ax = {1}> { a = Cast<to=2>(x) "
        "e = Unsqueeze(a, ax) q = Squeeze(e, ax) m = Cast<to=9>(q) zero = Sub(z, z) y = Where(m, z, zero) }",
        {"x": floats(2, 3) > 0, "z": floats(2, 3)},
    ),
    "bytes wrap": (
        "g (int32[b,3] x) => (float[3,b] y) { a = Cast<to=2>(x) e = Transpose(a) y = Cast<to=1>(e) }",
        {"x": np.array([[-1, 300, 7]], np.int32)},
    ),
    "signed bytes wrap": (
        "g (int64[b,3] x) => (float[3,b] y) { a = Cast<to=3>(x) e = Transpose(a) y = Cast<to=1>(e) }",
        {"x": np.array([[-1, 300, 130]])},
    ),
    "unsigned integers wrap": (
        "g (int64[b,3] x) => (int64[3,b] y) { a = Cast<to=12>(x) e = Transpose(a) y = Cast<to=7>(e) }",
        {"x": np.array([[-1, 300, 2**33]])},
    ),
    "image of bytes": (
        "g (uint8[b,3,4] x) => (float[4,b,3] y, uint8[4,b,3] u) { u = Transpose<perm=[2,0,1]>(x) y = Cast<to=1>(u) }",
        {"x": codes(2, 3, 4)},
    ),
    "bytes compared": (
        "g (uint8[b,3] x) => (uint8[b,3] y, float[b,3] w) <uint8[3] c = {1, 2, 3}> "
        "{ a = Max(x, c) y = Identity(a) w = Cast<to=1>(x) }",
        {"x": codes(2, 3)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_numbers_stay_and_types_go(name: str, native: OnnxNative, rtx_build: RtxBuild) -> None:
    graph = check_equal(*CASES[name], native, tolerance=1e-6 if name == "float64" else 0.0)
    ports = {id(port) for port in [*graph.inputs, *graph.outputs]}
    inner = [tensor for node in all_nodes(graph) for tensor in node.outputs if id(tensor) not in ports]
    assert {tensor_dtype(tensor.dtype).name for tensor in inner} <= WIDE
    if name in ("float64", "image of bytes", "unsigned integers wrap"):
        assert rtx_build(graph).unreadable is None


def test_what_was_done_is_noted(native: OnnxNative) -> None:
    _, report = normalise(graph_of(CASES["float64"][0], opset=20), native=native)
    assert report.notes == (
        "float64 is computed in float32 in 5 nodes, because TensorRT does not compute in it; 'x', 'y' (float64) keep "
        "their type in model.onnx and are float32 in the engine",
    )


def test_large_float64_constants_stay_finite(native: OnnxNative) -> None:
    graph = rewritten("g (double[2] x) => (double[2] y) <double[2] c = {1e300, -1e300}> { y = Max(x, c) }", native)
    (values,) = [t.values for node in graph.nodes for t in node.inputs if node.op == "Max" and hasattr(t, "values")]
    assert values.dtype == np.float32 and np.isfinite(values).all()


def test_codes_of_quantization_keep_their_type(native: OnnxNative) -> None:
    body = """g (float[b,3] x) => (float[3,b] y) <float s = {0.1}, int8 z = {0}> {
        a = QuantizeLinear(x, s, z) e = Transpose(a) y = DequantizeLinear(e, s, z) }"""
    graph = check_equal(body, {"x": floats(2, 3)}, native, tolerance=0.0)
    assert any(tensor_dtype(t.dtype) == np.int8 for node in graph.nodes for t in node.outputs)


BODIES: dict[str, tuple[str, Feeds]] = {
    "loop": (
        "g (uint8[3,4] x, int64 n) => (uint8[3,4] y) <bool t = {1}, int64[2] sizes = {3, 4}> "
        "{ y = Loop(n, t, x) <body = b (int64 i, bool c, uint8[3,4] a) => (bool d, uint8[3,4] z) "
        "{ d = Identity(c) u = Transpose<perm=[1,0]>(a) z = Reshape(u, sizes) }> }",
        {"x": codes(3, 4), "n": np.array(2)},
    ),
    "conditional": (
        "g (bool c, uint8[3,4] x, float[4,3] f) => (uint8[4,3] y) "
        "{ y = If(c) <then_branch = t () => (uint8[4,3] a) { a = Transpose<perm=[1,0]>(x) }, "
        "else_branch = e () => (uint8[4,3] b) { b, s, z = DynamicQuantizeLinear(f) }> }",
        {"c": np.array(True), "x": codes(3, 4), "f": floats(4, 3)},
    ),
    "float64 handed on": (
        "g (double[3] x, int64 n) => (double[3] y, double[3] w) <bool t = {1}> "
        "{ k = Exp(x) y, w = Loop(n, t, k, k) <body = b (int64 i, bool c, double[3] a, double[3] e) "
        "=> (bool d, double[3] z, double[3] e) { d = Identity(c) z = Neg(a) }> }",
        {"x": floats(3).astype(np.float64), "n": np.array(2)},
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_ports_of_bodies_have_the_types_of_their_node(name: str, native: OnnxNative) -> None:
    body, feeds = BODIES[name]
    graph = rewritten(body, native, operators="keep")
    narrow_types(graph)
    expected = run(parse(body), feeds)
    for before, after in zip(expected, run(graph, feeds), strict=True):
        assert before.dtype == after.dtype
        np.testing.assert_allclose(after, before, rtol=1e-6 if name == "float64 handed on" else 0)


@pytest.mark.parametrize(("kind", "wide"), [("int16", "int32"), ("uint16", "int32"), ("uint32", "int64")])
def test_ports_of_other_types_are_reported(kind: str, wide: str, native: OnnxNative) -> None:
    graph = rewritten(f"g ({kind}[b,3] x) => (float[b,3] y) {{ y = Cast<to=1>(x) }}", native)
    (finding,) = lint(graph)
    assert (finding.rule, finding.what, finding.why) == (
        "unsupported-port",
        f"input 'x' is {kind}",
        "TensorRT has no such type",
    )
    assert finding.fix == f"export the model with {wide} there"
