from __future__ import annotations

import random
from pathlib import Path

import onnx
import pytest
from graph_models import graph_of, parse

from trtforge.errors import ChildDiedError, InputError, TrtForgeError
from trtforge.graph.lint import lint
from trtforge.graph.load import load_model
from trtforge.graph.native import OnnxNative
from trtforge.graph.normalise import normalise
from trtforge.graph.save import save_model

MODEL = """g (float[N, 4] x, bool c) => (float[N, 2] y, float[N, 1] z)
    <float[4, 4] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}, float s = {0.5}, int8 zp = {0}> {
    q = QuantizeLinear(x, s, zp)
    d = DequantizeLinear(q, s, zp)
    a = MatMul(d, w)
    sh = Shape(a)
    i0 = Constant<value_int = 0>()
    n = Gather(sh, i0)
    ax = Constant<value = int64[1] {0}>()
    n1 = Unsqueeze(n, ax)
    two = Constant<value = int64[2] {2, 2}>()
    target = Concat<axis = 0>(n1, two)
    r = Reshape(a, target)
    t = local.f(r)
    y = ReduceMax<axes = [2], keepdims = 0>(t)
    z = If(c) <then_branch = tb () => (float[N, 1] p) { p = ReduceMax<axes = [1], keepdims = 1>(a) },
               else_branch = eb () => (float[N, 1] e) { e = ReduceMin<axes = [1], keepdims = 1>(a) }> }
    <domain: "local", opset_import: ["": 17]> f (p) => (o) { k = Relu(p) o = Identity(k) }"""


@pytest.fixture
def data() -> bytes:
    return parse(MODEL, opset=17, ir=8, domains=', "local": 1').SerializeToString()


def survive(path: Path, native: OnnxNative) -> bool:
    """True when the model goes through, False when it is refused; any other exception fails the test."""
    try:
        graph, _ = normalise(load_model(path).graph, native=native)
        lint(graph)
        save_model(graph, path.with_suffix(".out"))
    except ChildDiedError:
        raise
    except TrtForgeError as err:
        assert err.what
        return False
    return True


def test_flipped_bytes_are_refused_or_harmless(tmp_path: Path, data: bytes) -> None:
    rng = random.Random(7)
    path = tmp_path / "m.onnx"
    outcomes = []
    with OnnxNative() as native:
        for index in range(300):
            flipped = bytearray(data)
            for _ in range(rng.choice((1, 1, 2, 4)) if index else 0):
                flipped[rng.randrange(len(flipped))] = rng.randrange(256)
            path.write_bytes(flipped)
            outcomes.append(survive(path, native))
    assert outcomes[0] and 0 < sum(outcomes) < 300


def test_every_truncation_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "m.onnx"
    with OnnxNative() as native:
        for length in range(0, len(data), 7):
            path.write_bytes(data[:length])
            assert not survive(path, native)


def test_swapped_fields_are_refused_or_harmless(tmp_path: Path, data: bytes) -> None:
    """Valid protobuf, wrong content: names, operators, attributes and dims exchanged between nodes."""
    rng = random.Random(11)
    path = tmp_path / "m.onnx"
    outcomes = []
    with OnnxNative() as native:
        for _ in range(150):
            model = onnx.ModelProto.FromString(data)
            nodes = list(model.graph.node)
            first, second = rng.sample(nodes, 2)
            change = rng.randrange(5)
            if change == 0:
                first.op_type, second.op_type = second.op_type, first.op_type
            elif change == 1:
                del first.input[:]
            elif change == 2 and second.attribute:
                del first.attribute[:]
                first.attribute.extend(second.attribute)
            elif change == 3:
                model.graph.initializer[0].dims[:] = [rng.choice((0, 2, 8, 16)), rng.choice((0, 1, 2, 8))]
            else:
                first.output[:], second.output[:] = list(second.output), list(first.output)
            path.write_bytes(model.SerializeToString())
            outcomes.append(survive(path, native))
    assert 0 < sum(outcomes) < 150


@pytest.mark.parametrize(
    ("opset", "node", "message"),
    [
        (5, 'Cast<to = "FOO">(x)', "is no element type"),
        (5, 'Cast<to = "UNDEFINED">(x)', "is no element type"),
        (6, "Add<axis = 1, broadcast = 1>(x)", "2 and 1"),
        (6, "Add<axis = 1, broadcast = 1>(s, x)", None),
        (6, "PRelu(x)", "2 and 1"),
        (6, "Gemm<broadcast = 1>(x, x)", "3 and 1"),
        (6, 'Clip<min = "a">(x)', "its kind is STRING"),
        (7, "Upsample<scales = [1.0, 2.0]>()", "1 and 1"),
        (7, 'Upsample<mode = "nearest">(x)', "lacks the attribute 'scales'"),
        (8, "BatchNormalization<spatial = 0>(x)", "5 and 1"),
        (9, "Upsample(x)", "2 and 1"),
        (9, "Hardmax()", "1 and 1"),
        (9, "Hardmax<axis = 1.5>(x)", "its kind is FLOAT"),
        (10, "Resize(x)", "2 and 1"),
        (10, "Clip()", "1 and 1"),
        (10, "Clip<max = 1.0>(t)", "takes text"),
        (10, "Pad<value = 1.0>(x)", "lacks the attribute 'pads'"),
        (10, "Pad<pads = [0, 0], mode = 3>(x)", "its kind is INT"),
    ],
)
def test_damaged_nodes_of_old_opsets_are_refused(opset: int, node: str, message: str | None) -> None:
    graph = graph_of(f"g (float[N, 2] x, float s, string[N] t) => (float[] y) {{ y = {node} }}", opset=opset)
    with OnnxNative() as native:
        if message is None:
            normalise(graph, native=native)
            return
        with pytest.raises(InputError) as caught:
            normalise(graph, native=native)
    assert message in f"{caught.value.what} {caught.value.why}" and caught.value.fix


def test_values_of_a_huge_constant_are_not_written_out(tmp_path: Path) -> None:
    """onnx's own data propagation would take all memory."""
    body = "g (float[1099511627776] x) => (float[M] y) { s = Shape(x) c = ConstantOfShape(s) y = Add(x, c) }"
    graph, report = normalise(graph_of(body))
    assert [node.op for node in graph.nodes] == ["ConstantOfShape", "Add"]
    assert graph.nodes[0].outputs[0].shape == [2**40]
    assert report.notes == ("'ConstantOfShape_1' not folded: its result would be too large",)


def test_loops_in_loops_are_not_unrolled_without_end(tmp_path: Path) -> None:
    """Each of them is short; all together would be 4^7 copies of the innermost."""
    graph = parse("leaf (int64 i, bool c, float[2] a) => (bool d, float[2] z) { d = Identity(c) z = Neg(a) }").graph
    for depth in range(6):
        inner = onnx.helper.make_node("Loop", ["n", "t", f"a{depth}"], [f"z{depth}"], body=graph)
        same = onnx.helper.make_node("Identity", [f"c{depth}"], [f"d{depth}"])
        ports = [(f"i{depth}", 7, []), (f"c{depth}", 9, []), (f"a{depth}", 1, [2])]
        results = [(f"d{depth}", 9, []), (f"z{depth}", 1, [2])]
        infos = [[onnx.helper.make_tensor_value_info(*port) for port in part] for part in (ports, results)]
        graph = onnx.helper.make_graph([same, inner], f"g{depth}", *infos)
    loop = onnx.helper.make_node("Loop", ["n", "t", "x"], ["y"], body=graph)
    values = [onnx.helper.make_tensor("n", 7, [], [4]), onnx.helper.make_tensor("t", 9, [], [True])]
    infos = [[onnx.helper.make_tensor_value_info(name, 1, [2])] for name in ("x", "y")]
    top = onnx.helper.make_graph([loop], "top", *infos, values)
    path = tmp_path / "m.onnx"
    path.write_bytes(onnx.helper.make_model(top, opset_imports=[onnx.helper.make_opsetid("", 23)]).SerializeToString())
    with OnnxNative() as native:
        assert survive(path, native)


def test_deep_nesting_does_not_overflow_the_stack(tmp_path: Path) -> None:
    graph = parse("leaf () => (float[2] y0) { y0 = Constant<value = float[2] {1, 2}>() }").graph
    for depth in range(1, 30):
        node = onnx.helper.make_node("If", ["c"], [f"y{depth}"], then_branch=graph, else_branch=graph)
        outputs = [onnx.helper.make_tensor_value_info(f"y{depth}", 1, [2])]
        if depth > 6:
            graph.node.append(onnx.helper.make_node("Identity", [f"k{depth}"], [f"on{depth}"]))
            graph.input.append(onnx.helper.make_tensor_value_info(f"i{depth}", onnx.TensorProto.INT64, []))
            graph.input.append(onnx.helper.make_tensor_value_info(f"k{depth}", onnx.TensorProto.BOOL, []))
            graph.output.insert(0, onnx.helper.make_tensor_value_info(f"on{depth}", onnx.TensorProto.BOOL, []))
            node = onnx.helper.make_node("Loop", ["", "c"], [f"y{depth}"], body=graph)
        graph = onnx.helper.make_graph([node], f"g{depth}", [], outputs)
    graph.input.append(onnx.helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, []))
    path = tmp_path / "m.onnx"
    path.write_bytes(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 23)]).SerializeToString()
    )
    with OnnxNative() as native:
        assert survive(path, native)
