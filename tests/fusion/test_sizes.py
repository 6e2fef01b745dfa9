"""Sizes that inference leaves open, and the values of computed shapes."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_graphsurgeon as gs
import pytest

from trtforge.fusion.sizes import KnownSizes


def known(
    body: str, inputs: str, output: str = "y", **constants: np.ndarray
) -> tuple[KnownSizes, dict[str, gs.Tensor]]:
    """The sizes of a graph, without any inference before, and its tensors."""
    header = '<ir_version: 10, opset_import: ["" : 21]>\n'
    model = onnx.parser.parse_model(f"{header}g ({inputs}) => (float[] {output}) {{ {body} }}")
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in constants.items())
    graph = gs.import_onnx(model)
    for tensor in graph.tensors().values():
        if isinstance(tensor, gs.Constant):
            tensor.values = np.array(tensor.values)
        elif tensor not in graph.inputs:
            tensor.shape = None
    return KnownSizes(graph), graph.tensors()


def sizes_of(body: str, inputs: str, output: str = "y", **constants: np.ndarray) -> tuple[object, ...] | None:
    """The known sizes of one tensor."""
    sizes, tensors = known(body, inputs, output, **constants)
    return sizes.of(tensors[output])


N = {f"n{number}": np.array([number]) for number in (0, 1, 2, 8)} | {"last": np.array([-1])}


@pytest.mark.parametrize(
    ("body", "inputs", "expected"),
    [
        ("y = Add(a, b)", "float[b,s,8] a, float[?,?,8] b", ("b", "s", 8)),
        ("y = Add(a, b)", "float[1,s,8] a, float[b,1,8] b", ("b", "s", 8)),
        ("y = Add(a, b)", "float[b,s,1] a, float[8] b", ("b", "s", 8)),
        ("y = Mul(a, b)", "float[s,8] a, float[7,8] b", (7, 8)),
        ("y = MatMul(a, b)", "float[b,s,8] a, float[8,5] b", ("b", "s", 5)),
        ("y = Gemm<transA=1, transB=1>(a, b)", "float[8,m] a, float[5,8] b", ("m", 5)),
        ("y = Transpose<perm=[2,0,1]>(a)", "float[b,s,8] a", (8, "b", "s")),
        ("y = Unsqueeze(a, n1)", "float[b,s] a", ("b", 1, "s")),
        ("y = Squeeze(a, n1)", "float[b,1,s] a", ("b", "s")),
        ("y = Gather(a, i)", "float[9,8] a, int64[b,s] i", ("b", "s", 8)),
        ("y, z = Split<axis=2, num_outputs=2>(a)", "float[b,s,8] a", ("b", "s", 4)),
        ("y = Attention(q, k, v)", "float[b,2,s,8] q, float[b,2,t,8] k, float[b,2,t,4] v", ("b", 2, "s", 4)),
    ],
)
def test_operators_pass_sizes_on(body: str, inputs: str, expected: tuple[object, ...]) -> None:
    found = sizes_of(body, inputs, **{name: value for name, value in N.items() if name in body})
    assert found is not None
    if body.startswith("y, z"):
        found, expected = found[:2], expected[:2]
    assert found == expected


def test_two_unknown_sizes_are_not_taken_for_one() -> None:
    sizes, tensors = known("y = Add(a, b)", "float[?,8] a, float[?,8] b")
    a, b, y = (sizes.of(tensors[name]) for name in "aby")
    assert a is not None and b is not None and y is not None
    assert len({a[0], b[0], y[0]}) == 3
    assert y[1] == 8


def test_an_unknown_size_equals_itself_further_on() -> None:
    sizes, tensors = known("b = Neg(a) c = Unsqueeze(b, n1) y = Squeeze(c, n1)", "float[?,8] a", n1=N["n1"])
    assert sizes.of(tensors["y"]) == sizes.of(tensors["a"])


TARGETS = {
    "Shape and Concat": "s = Shape(a) b = Slice(s, n0, n1) q = Slice(s, n1, n2) t = Concat<axis=0>(b, q, n2, n8)",
    "Shape with start and end": """b = Shape<start=0, end=1>(a) q = Shape<start=1, end=2>(a)
        t = Concat<axis=0>(b, q, n2, n8)""",
    "Gather and Unsqueeze": """s = Shape(a) b0 = Gather(s, zero) q0 = Gather(s, one) b = Unsqueeze(b0, n0)
        q = Unsqueeze(q0, n0) t = Concat<axis=0>(b, q, n2, n8)""",
    "an open size": "b = Shape<start=0, end=1>(a) q = Shape<start=1, end=2>(a) t = Concat<axis=0>(b, q, last, n8)",
    "Where and a product": """b = Shape<start=0, end=2>(a) two = Mul(n2, n1) t0 = Concat<axis=0>(b, two, n8)
        t = Where(yes, t0, t0)""",
    "Cast and Reshape": "s = Shape<end=2>(a) c = Cast<to=7>(s) r = Reshape(c, last) t = Concat<axis=0>(r, n2, n8)",
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_computed_target_gives_the_sizes(name: str) -> None:
    body = f"{TARGETS[name]} y = Reshape(a, t)"
    more = {"zero": np.array(0), "one": np.array(1), "yes": np.array([True, False, True, True])} | N
    constants = {key: value for key, value in more.items() if f"{key}" in body}
    assert sizes_of(body, "float[batch,seq,16] a", **constants) == ("batch", "seq", 2, 8)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ([0, 0, 2, 8], ("batch", 7, 2, 8)),
        ([-1, 7, 2, 8], ("batch", 7, 2, 8)),
        ([-1, 16], None),
        ([0, -1], ("batch", 112)),
        ([0, -1, 5], None),
    ],
)
def test_one_open_size_is_what_is_left(target: list[int], expected: tuple[object, ...] | None) -> None:
    found = sizes_of("y = Reshape(a, t)", "float[batch,7,16] a", t=np.array(target))
    assert found is not None
    if expected is None:
        assert any(isinstance(size, str) and size.startswith("?") for size in found)
    else:
        assert found == expected
