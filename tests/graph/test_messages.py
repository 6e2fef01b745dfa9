"""The messages are those of onnx-graphsurgeon's exporter, which reads every graph here as well."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from graph_models import graph_of

from trtforge.errors import InputError
from trtforge.graph.edit import copy_graph
from trtforge.graph.messages import model_from_graph

GRAPHS = {
    "weights": "g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}> { y = MatMul(x, w) }",
    "attributes": """g (float[2, 4, 6] x) => (float[] y) {
        a = Transpose<perm = [2, 0, 1]>(x)
        b = Concat<axis = 0>(a, a)
        c = Resize<mode = "nearest", cubic_coeff_a = 0.5>(b, , s)
        d = ConstantOfShape<value = float[1] {3}>(z)
        y = Add(c, d) }""",
    "no types": "g (float[N] x) => (y) { a = com.z.F(x) y = com.z.G(a) }",
    "sequences": "g (float[2, 4] x) => (float[2, 4] y) { s = SplitToSequence(x) y = ConcatFromSequence<axis = 0>(s) }",
    "branches": """g (float[2] x, bool c) => (float[2] y) {
        y = If (c) <then_branch = a () => (float[2] t) { t = Neg(x) },
                    else_branch = b () => (float[2] e) { e = Exp(x) }> }""",
    "a function": """g (float[2] x) => (float[2] y) { y = trtforge.f<p = 2.0>(x) }
        <domain: "trtforge", opset_import: ["": 23]> f <p, q: float = 1.0> (a) => (b) {
            c = Constant<value_float: float = @p>() d = Constant<value = float {2}>() e = Mul(a, c) b = Mul(e, d) }""",
}


def _graph(name: str) -> gs.Graph:
    body = GRAPHS[name]
    body = body.replace("x)", "x, float[3] s, int64[1] z)", 1) if name == "attributes" else body
    return graph_of(body, domains={"no types": ', "com.z": 1', "a function": ', "trtforge": 1'}.get(name, ""))


def _inferred(graph: gs.Graph) -> gs.Graph:
    """With the types of inner tensors, as passes see it."""
    for node in graph.nodes:
        for tensor in node.outputs:
            if tensor.dtype is None and not node.domain:
                tensor.dtype, tensor.shape = np.dtype(np.float32), [None, "N", 2]
                tensor.type = "sequence_type" if "Sequence" in node.op and tensor.name == "s" else "tensor_type"
    return graph


@pytest.mark.parametrize("name", GRAPHS)
def test_a_message_is_the_one_that_graphsurgeon_writes(name: str) -> None:
    graph = _inferred(_graph(name))
    ours, theirs = model_from_graph(graph), gs.export_onnx(graph, do_type_check=False)
    assert ours.graph.SerializeToString(deterministic=True) == theirs.graph.SerializeToString(deterministic=True)
    assert [f.SerializeToString(deterministic=True) for f in ours.functions] == [
        f.SerializeToString(deterministic=True) for f in theirs.functions
    ]


@pytest.mark.parametrize("name", GRAPHS)
def test_a_copy_writes_the_same_message_and_shares_no_node_or_tensor(name: str) -> None:
    graph = _inferred(_graph(name))
    before = model_from_graph(graph).SerializeToString(deterministic=True)
    copy = copy_graph(graph)
    assert model_from_graph(copy).SerializeToString(deterministic=True) == before
    for node in copy.nodes:
        for tensor in (*node.inputs, *node.outputs):
            tensor.name += "_"
        node.op = "Other"
    assert model_from_graph(graph).SerializeToString(deterministic=True) == before


def test_a_stub_has_type_and_dims_but_no_data() -> None:
    graph = _graph("weights")
    weight = graph.nodes[0].inputs[1]
    (stub,) = model_from_graph(graph, {id(weight)}).graph.initializer
    assert (stub.name, stub.data_type, list(stub.dims)) == ("w", onnx.TensorProto.FLOAT, [2, 2])
    assert not stub.HasField("raw_data")


def test_a_numpy_type_as_an_attribute_is_written_as_its_number() -> None:
    graph = graph_of("g (float[2] x) => (float16[2] y) { y = Cast<to = 10>(x) }")
    graph.nodes[0].attrs["to"] = np.float16
    assert model_from_graph(graph).graph.node[0].attribute[0].i == onnx.TensorProto.FLOAT16


def test_a_constant_of_a_copied_body_stays_the_outer_one() -> None:
    graph = graph_of("""g (float[2] x, bool c) => (float[2] y) <float[2] k = {3, 4}> {
        y = If (c) <then_branch = a () => (float[2] t) { t = Add(x, k) },
                    else_branch = b () => (float[2] e) { e = Mul(x, k) }> }""")
    branches = [copy_graph(graph).nodes[0].attrs[name] for name in ("then_branch", "else_branch")]
    copy = copy_graph(graph)
    first, second = (copy.nodes[0].attrs[name].nodes[0].inputs[1] for name in ("then_branch", "else_branch"))
    assert first is second
    assert first is not branches[0].nodes[0].inputs[1]
    assert [node.op for node in first.outputs] == ["Add", "Mul"]


def test_what_onnx_cannot_hold_is_refused() -> None:
    graph = _graph("weights")
    graph.nodes[0].attrs["odd"] = object()
    with pytest.raises(InputError, match="the graph cannot be written as ONNX"):
        model_from_graph(graph)
