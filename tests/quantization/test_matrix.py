from __future__ import annotations

import numpy as np
import pytest
from equalize_cases import plan
from quant_cases import graph_from_text, node_of, normal, run

from trtforge.errors import InputError
from trtforge.quantization.matrix import find_layers, matrix_view

SPELLINGS = {
    "MatMul": ("MatMul(x, w)", (32, 48), 1),
    "Gemm": ("Gemm(x, w)", (32, 48), 1),
    "Gemm transB": ("Gemm<transB=1>(x, w)", (48, 32), 1),
    "1x1 Conv": ("Conv(x, w)", (48, 32, 1, 1), 1),
    "Conv": ("Conv(x, w)", (48, 32, 3, 2), 6),
    "1-D Conv": ("Conv(x, w)", (48, 32, 5), 5),
}


def view_of(product, weight, **initializers):
    rank = max(weight.ndim, 2)
    dims = ",".join(["b", "32", "7", "8", "9"][:rank])
    graph = graph_from_text(f"g (float[{dims}] x) => (float y) {{ [n] y = {product} }}", w=weight, **initializers)
    return matrix_view(node_of(graph, "n"))


@pytest.mark.parametrize(("product", "shape", "taps"), SPELLINGS.values(), ids=SPELLINGS)
def test_matrix_has_input_channels_as_rows_and_the_taps_of_an_output_together(product, shape, taps):
    weight = normal(*shape)
    view = view_of(product, weight)
    assert (view.node, view.shape, view.taps, view.num_outputs) == ("n", shape, taps, 48)
    by_output = weight.reshape(48, 32, taps) if view.is_transposed else weight.T.reshape(48, 32, 1)
    assert np.array_equal(view.matrix, np.concatenate(list(by_output), axis=1))


@pytest.mark.parametrize(("product", "shape", "taps"), SPELLINGS.values(), ids=SPELLINGS)
def test_matrix_goes_back_into_the_weights_layout(product, shape, taps):
    weight = normal(*shape)
    view = view_of(product, weight)
    back = view.to_weight(view.matrix)
    assert np.array_equal(back, weight)
    assert back.flags.c_contiguous
    assert view.to_weight(view.matrix.astype(np.int8)).dtype == np.int8


@pytest.mark.parametrize(("product", "shape", "taps"), SPELLINGS.values(), ids=SPELLINGS)
def test_some_outputs_are_whole_ones(product, shape, taps):
    view = view_of(product, normal(*shape))
    by_output = np.split(view.matrix, 48, axis=1)
    assert np.array_equal(view.some_outputs(5), np.concatenate(by_output[::5], axis=1))
    assert np.array_equal(view.some_outputs(1), view.matrix)


@pytest.mark.parametrize(
    ("product", "shape"),
    [
        ("MatMul(x, w)", (2, 32, 48)),
        ("MatMul(x, w)", (32,)),
        ("Gemm<transA=1>(x, w)", (48, 32)),
        ("Gemm<alpha=0.5>(x, w)", (32, 48)),
        ("Conv<group=2>(x, w)", (48, 16, 3, 3)),
        ("ConvTranspose(x, w)", (32, 48, 3, 3)),
        ("Add(x, w)", (1, 32)),
    ],
)
def test_other_nodes_are_no_product_with_one_matrix(product, shape):
    assert view_of(product, normal(*shape)) is None


def test_weight_of_another_type_is_none():
    assert view_of("MatMul(x, w)", normal(32, 48).astype(np.float64)) is None


@pytest.mark.parametrize(
    ("product", "shape", "expected"),
    [
        ("MatMul(x, w)", (32, 48), True),
        ("Conv(x, w)", (48, 32, 1, 1), True),
        ("Conv<strides=[2,2]>(x, w)", (48, 32, 1, 1), True),
        ('Conv<auto_pad="SAME_UPPER", strides=[2,2]>(x, w)', (48, 32, 1, 1), True),
        ("Conv<pads=[0,0,0,1]>(x, w)", (48, 32, 1, 1), False),
        ("Conv(x, w)", (48, 32, 1, 2), False),
    ],
)
def test_offset_is_a_constant_at_the_output_without_window_and_padding(product, shape, expected):
    weight = normal(*shape)
    assert view_of(product, weight).takes_offset == expected
    graph = graph_from_text(
        f"g (float[b,32{',7,8' if len(shape) == 4 else ''}] x) => (float[{','.join('abcd'[: len(shape)])}] y) "
        f"{{ [n] y = {product} }}",
        w=weight,
    )
    change = run(graph, x=np.ones((1, 32, 7, 8)[: len(shape)], np.float32))[0]
    by_channel = change.reshape(1, 48, -1) if len(shape) == 4 else change[..., None]
    assert np.allclose(by_channel, by_channel[:, :, :1], atol=1e-4) or not expected


def layers_of(text, **weights):
    graph = graph_from_text(text, **weights)
    return {layer.tensor: layer for layer in find_layers(graph, plan(graph))}


def test_readers_of_one_activation_are_one_layer():
    text = """g (float[b,s,32] x) => (float[b,s,48] a, float[b,s,32] c) {
        [one] a = MatMul(x, w1)  [two] c = MatMul(x, w2)  n = Neg(x) }"""
    layer = layers_of(text, w1=normal(32, 48), w2=normal(32, 32, seed=1))["x"]
    assert [view.node for view in layer.views] == ["one", "two"]
    assert (layer.axis, layer.num_channels, layer.is_closed, layer.matrix.shape) == (-1, 32, True, (32, 80))


def test_convolutions_have_channels_on_axis_1():
    layer = layers_of("g (float[b,32,4,4] x) => (float[b,48,4,4] y) { [c] y = Conv(x, w) }", w=normal(48, 32, 1, 1))[
        "x"
    ]
    assert (layer.axis, layer.num_channels) == (1, 32)


def test_grouped_reader_leaves_its_activation_out():
    text = """g (float[b,32,4,4] x) => (float[b,48,4,4] y, float[b,48,4,4] z) {
        [a] y = Conv(x, w)  [c] z = Conv<group=2>(x, v) }"""
    assert layers_of(text, w=normal(48, 32, 1, 1), v=normal(48, 16, 1, 1)) == {}


def test_readers_along_different_axes_leave_their_activation_out():
    text = "g (float[b,32,32] x) => (float[b,48,32] y, float[b,32,48] z) { [a] y = Conv(x, w)  [c] z = MatMul(x, v) }"
    assert layers_of(text, w=normal(48, 32, 1), v=normal(32, 48)) == {}


def test_activation_that_a_residual_add_reads_in_int8_is_not_closed():
    text = """g (float[b,32,4,4] x) => (float[b,32,4,4] y) {
        r = Relu(x)  [one] c = Conv(r, w)  s = Relu(c)  [two] d = Conv(s, w)  [skip] y = Add(d, r) }"""
    layers = layers_of(text, w=normal(32, 32, 1, 1))
    assert {name: layer.is_closed for name, layer in layers.items()} == {"r": False, "s": True}
    assert [view.node for view in layers["r"].views] == ["one"]


def test_activation_that_shares_its_scale_is_not_closed():
    text = """g (float[b,32,4,4] x) => (float[b,32,4,4] y, float[b,32,2,2] z) {
        [a] y = Conv(x, w)  p = MaxPool<kernel_shape=[3,3]>(x)  [c] z = Conv(p, w) }"""
    assert {name: layer.is_closed for name, layer in layers_of(text, w=normal(32, 32, 1, 1)).items()} == {
        "x": False,
        "p": False,
    }


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weight_that_is_not_finite_is_refused(value):
    weight = normal(32, 48)
    weight[3, 4] = value
    with pytest.raises(InputError) as error:
        layers_of("g (float[b,32] x) => (float[b,48] y) { [m] y = MatMul(x, w) }", w=weight)
    assert error.value.what == "the weight 'w' of node 'm' holds NaN or infinity"
    assert error.value.fix == "repair the model, or leave the node float with the recipe's exclude list"
