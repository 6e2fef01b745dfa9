from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime
import pytest

from trtforge.graph.passes.dilation import fill_kernel, spell_out_pool

RNG = np.random.default_rng(3)


def graph_from_text(text, **constants):
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 23]>\n{text}')
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in constants.items())
    graph = gs.import_onnx(onnx.shape_inference.infer_shapes(model))
    for tensor in graph.tensors().values():
        if isinstance(tensor, gs.Constant):
            tensor.values = np.asarray(tensor.values)
    return graph


def run(graph, x):
    model = gs.export_onnx(graph)
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


def node(graph, name):
    return next(node for node in graph.nodes if node.name == name)


@pytest.mark.parametrize(
    ("attributes", "rank", "group"),
    [
        ("dilations=[2,3],strides=[2,2]", 2, 1),
        ("dilations=[2,2],strides=[3,2],pads=[1,0,2,1],output_padding=[1,0]", 2, 2),
        ("dilations=[2,1],strides=[2,2],kernel_shape=[3,3]", 2, 1),
        ('dilations=[3],strides=[2],auto_pad="SAME_UPPER"', 1, 1),
        ("dilations=[2,2,2],strides=[2,2,2]", 3, 4),
    ],
)
def test_a_dilated_deconvolution_becomes_one_with_a_wider_kernel(attributes, rank, group):
    sizes = ",".join(["7"] * rank)
    graph = graph_from_text(
        f"g (float[2,4,{sizes}] x) => (float y) "
        f"{{ a = Relu(x) [up] y = ConvTranspose<{attributes},group={group}>(a,w) }}",
        w=RNG.normal(size=(4, 8 // group, *[3] * rank)).astype(np.float32),
    )
    x = RNG.normal(size=(2, 4, *[7] * rank)).astype(np.float32)
    before = run(graph, x)
    assert fill_kernel(node(graph, "up"), graph) is None
    assert node(graph, "up").attrs["dilations"] == [1] * rank
    np.testing.assert_allclose(run(graph, x), before, rtol=1e-5, atol=1e-5)


def test_a_deconvolution_with_a_computed_weight_stays():
    graph = graph_from_text(
        "g (float[1,4,7,7] x, float[4,4,3,3] w) => (float y) { [up] y = ConvTranspose<dilations=[2,2]>(x,w) }"
    )
    assert fill_kernel(node(graph, "up"), graph) == "its weight is no constant"
    assert node(graph, "up").attrs["dilations"] == [2, 2]


@pytest.mark.parametrize(
    ("attributes", "rank"),
    [
        ("kernel_shape=[3,3],dilations=[2,2]", 2),
        ("kernel_shape=[3,2],dilations=[2,3],strides=[2,3],pads=[1,1,0,1],count_include_pad=1", 2),
        ("kernel_shape=[3,3],dilations=[2,2],ceil_mode=1", 2),
        ('kernel_shape=[2,2],dilations=[3,2],strides=[2,1],auto_pad="VALID"', 2),
        ("kernel_shape=[4],dilations=[3]", 1),
        ("kernel_shape=[2,2,2],dilations=[2,2,2],strides=[2,2,2]", 3),
    ],
)
def test_a_dilated_pool_is_written_out(attributes, rank):
    sizes = ",".join(["11"] * rank)
    graph = graph_from_text(
        f"g (float[b,3,{sizes}] x) => (float y) {{ a = Neg(x) [pool] p = AveragePool<{attributes}>(a) y = Neg(p) }}"
    )
    x = RNG.normal(size=(2, 3, *[11] * rank)).astype(np.float32)
    before = run(graph, x)
    assert spell_out_pool(node(graph, "pool"), graph) is None
    assert node(graph, "pool").op == "Mean"
    np.testing.assert_allclose(run(graph, x), before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        ("AveragePool<kernel_shape=[3,3],dilations=[2,2],pads=[1,1,1,1]>", "it leaves its padding out of the mean"),
        ("AveragePool<kernel_shape=[3,3],dilations=[2,2],strides=[2,2],ceil_mode=1>", "its ceil_mode is 1"),
        ('AveragePool<kernel_shape=[3,3],dilations=[2,2],auto_pad="SAME_UPPER">', "its auto_pad is SAME_UPPER"),
        ("AveragePool<kernel_shape=[9,9],dilations=[2,2]>", "its window has 81 taps, and 64 is the most"),
        ("LpPool<kernel_shape=[3,3],dilations=[2,2]>", "LpPool is no AveragePool"),
    ],
)
def test_a_pool_that_cannot_be_written_out_stays(op, reason):
    graph = graph_from_text(f"g (float[b,3,20,20] x) => (float y) {{ [pool] y = {op}(x) }}")
    nodes = list(graph.nodes)
    assert spell_out_pool(node(graph, "pool"), graph) == reason
    assert graph.nodes == nodes


def test_a_kernel_that_would_be_huge_is_left():
    graph = graph_from_text(
        "g (float[1,4,7,7] x) => (float y) { [up] y = ConvTranspose<dilations=[20000,20000]>(x,w) }",
        w=np.ones((4, 4, 3, 3), np.float32),
    )
    size = 4 * 4 * 40001**2
    assert fill_kernel(node(graph, "up"), graph) == f"its kernel would have {size} elements, and {2**26} is the most"
    assert node(graph, "up").attrs["dilations"] == [20000, 20000]
