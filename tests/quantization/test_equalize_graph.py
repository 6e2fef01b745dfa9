from __future__ import annotations

import numpy as np
import pytest
from equalize_cases import BIASED, CASES, LINEAR, ROWS, any_equalization, any_table, plan, table_of
from quant_cases import graph_from_text, model_of, node_of, normal, ops, run

from trtforge.errors import InputError
from trtforge.quantization.equalize_graph import apply_equalization

# Rounding of a few float32 operations on sums of up to 300 products, whose terms the multipliers make larger.
ROUNDING = 300 * np.finfo(np.float32).eps


def assert_close(actual, expected):
    for after, before in zip(actual, expected, strict=True):
        assert np.abs(after - before).max() <= ROUNDING * np.abs(before).max()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_scaled_graph_computes_the_same(case):
    graph = case.graph()
    done = apply_equalization(graph, plan(graph), any_table(graph, shift=False))
    assert (sorted(done.folded), sorted(done.explicit)) == (sorted(case.folded), sorted(case.explicit))
    assert_close(run(graph, **case.feeds), run(case.graph(), **case.feeds))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_shifted_graph_computes_the_same(case):
    graph = case.graph()
    table = any_table(graph, shift=True)
    shifted = {name for name, entry in table.tensors.items() if entry.equalization and entry.equalization.offset}
    done = apply_equalization(graph, plan(graph), table)
    assert {name for name in done.folded if name in shifted} == set(case.shifted)
    assert_close(run(graph, **case.feeds), run(case.graph(), **case.feeds))


def equalized(name, *, shift=False, kept=None):
    """A case's graph after equalization, and what was done."""
    graph = CASES[name].graph()
    return graph, apply_equalization(graph, plan(graph), any_table(graph, shift=shift), kept)


def test_nodes_of_their_own_come_right_before_the_first_reader_and_other_readers_keep_the_tensor():
    graph, done = equalized("post-norm", shift=True)
    assert ops(graph) == [
        "LayerNormalization",
        "Mul",
        "Sub",
        "MatMul",
        "Add",
        "Relu",
        "Mul",
        "Sub",
        "MatMul",
        "Add",
        "Add",
    ]
    assert graph.nodes[-1].inputs[1].name == "n"
    assert done.sources == {"n_scaled_centred": "n", "r_scaled_centred": "r"}
    assert [site.tensor for site in done.placement.activations] == list(done.sources)
    assert done.amax == dict.fromkeys(done.sources, 8.0)


def test_multipliers_of_one_need_no_product():
    graph = CASES["post-norm"].graph()
    table = any_table(graph, shift=True)
    plain = {
        name: entry.equalization.model_copy(update={"multiplier": (1.0,) * len(entry.equalization.multiplier)})
        for name, entry in table.tensors.items()
    }
    apply_equalization(graph, plan(graph), table_of(plain))
    assert "Mul" not in ops(graph)
    assert ops(graph).count("Sub") == 2


def test_tensors_without_an_equalization_stay_as_they_are():
    graph = CASES["post-norm"].graph()
    done = apply_equalization(graph, plan(graph), table_of({"n": None, "r": None}))
    assert (done.folded, done.explicit, done.placement) == ((), (), plan(CASES["post-norm"].graph()))
    assert ops(graph) == ops(CASES["post-norm"].graph())


def test_weights_of_the_placement_are_those_that_the_nodes_read():
    graph, done = equalized("linear, Relu, linear", shift=True)
    for site in done.placement.weights:
        assert node_of(graph, site.node).inputs[1].name == site.tensor


def test_shared_initializer_is_equalized_for_each_of_its_nodes():
    graph, _ = equalized("three readers of one norm")
    q, v = (node.inputs[1] for node in graph.nodes if node.outputs[0].name in "qv")
    assert q.name != v.name
    assert np.array_equal(q.values, v.values)


def test_folded_scale_stays_where_a_reader_is_kept_float():
    name = "three readers of one norm"
    _, whole = equalized(name, shift=True)
    kept = {whole.placement.nodes[1]: "no"}
    graph, done = equalized(name, shift=True, kept=kept)
    assert done.folded == whole.folded
    assert done.placement.nodes == tuple(node for node in whole.placement.nodes if node not in kept)
    assert_close(run(graph, **CASES[name].feeds), run(CASES[name].graph(), **CASES[name].feeds))


def test_scale_of_its_own_is_put_before_quantized_readers_only():
    text = "g (float[b,32] x) => (float[b,48] y, float[b,48] z) { [one] y = MatMul(x, w1)  [two] z = MatMul(x, w1) }"
    for kept in ({"one": ""}, {"two": ""}, {"one": "", "two": ""}):
        graph = graph_from_text(text, w1=LINEAR["w1"])
        done = apply_equalization(graph, plan(graph), any_table(graph, shift=True), kept)
        for node in ("one", "two"):
            reads = node_of(graph, node).inputs
            assert (reads[0].name == "x") == (reads[1].name == "w1") == (node in kept)
        assert ops(graph).count("Mul") == (len(kept) < 2)
        assert done.amax == ({} if len(kept) == 2 else {"x_scaled_centred": 8.0})
        assert_close(run(graph, **ROWS), run(graph_from_text(text, w1=LINEAR["w1"]), **ROWS))


def test_weights_that_stay_quantized_do_not_depend_on_what_is_kept_float():
    name = "linear, Relu, linear"
    graph, whole = equalized(name)
    first, second = whole.placement.nodes
    other, _ = equalized(name, kept={second: ""})
    assert np.array_equal(node_of(graph, first).inputs[1].values, node_of(other, first).inputs[1].values)


def assert_misfit(text, equalization, weights=None, recipe=None, tensor="x"):
    graph = graph_from_text(text, **(weights or BIASED))
    placement = plan(graph, recipe)
    table = table_of({name: equalization if name == tensor else None for name in placement.tensors})
    with pytest.raises(InputError) as error:
        apply_equalization(graph, placement, table)
    assert error.value.what == f"the calibration table's equalization of {tensor!r} does not fit this model"
    assert "calibrate again" in error.value.fix


ONE = "g (float[b,32] x) => (float[b,48] y) { [m] y = MatMul(x, w1) }"
CONVOLUTION = "g (float[b,32,4,4] x) => (float[b,48,h,w] y) {{ [c] y = Conv<{}>(x, k) }}"


def test_equalization_of_another_length_is_refused():
    assert_misfit(ONE, any_equalization(31))
    assert_misfit(ONE, any_equalization(33, shift=True))


def test_offset_of_another_length_is_refused():
    assert_misfit(ONE, any_equalization(32, shift=True).model_copy(update={"offset": (1.0,) * 31}))


def test_offset_before_a_window_is_refused_and_a_scale_is_not():
    kernel = {"k": normal(48, 32, 3, 3)}
    assert_misfit(CONVOLUTION.format("pads=[1,1,1,1]"), any_equalization(32, shift=True), kernel)
    graph = graph_from_text(CONVOLUTION.format("pads=[1,1,1,1]"), **kernel)
    assert apply_equalization(graph, plan(graph), table_of({"x": any_equalization(32)})).explicit == ("x",)


def test_offset_before_padding_is_refused():
    assert_misfit(CONVOLUTION.format("pads=[0,1,0,1]"), any_equalization(32, shift=True), {"k": normal(48, 32, 1, 1)})
    graph = graph_from_text(CONVOLUTION.format("pads=[0,0,0,0]"), k=normal(48, 32, 1, 1))
    assert apply_equalization(graph, plan(graph), table_of({"x": any_equalization(32, shift=True)})).explicit == ("x",)


def test_equalization_before_a_grouped_convolution_is_refused():
    assert_misfit(CONVOLUTION.format("group=2"), any_equalization(32), {"k": normal(48, 16, 3, 3)})


def test_equalization_of_a_tensor_whose_scale_is_shared_is_refused():
    text = """g (float[b,32,4,4] x) => (float[b,48,h,w] y, float[b,48,i,j] z) {
        [a] y = Conv(x, k)  p = MaxPool<kernel_shape=[2,2]>(x)  [c] z = Conv(p, k) }"""
    assert_misfit(text, any_equalization(32), {"k": normal(48, 32, 1, 1)})


def test_table_that_lacks_a_tensor_is_refused():
    graph = CASES["post-norm"].graph()
    with pytest.raises(InputError, match=r"lacks 1 of the 2 tensors to quantize"):
        apply_equalization(graph, plan(graph), table_of({"n": any_equalization(32)}))


def test_tensors_that_are_not_quantized_any_more_are_passed_over():
    graph = graph_from_text(ONE, w1=LINEAR["w1"])
    done = apply_equalization(graph, plan(graph), table_of({"x": None, "gone": any_equalization(7)}))
    assert done.sources == {"x": "x"}


def test_weight_with_nan_is_refused():
    graph = graph_from_text(ONE, w1=np.full((32, 48), np.nan, np.float32))
    with pytest.raises(InputError, match=r"the weight 'w1' of node 'm' holds NaN or infinity"):
        apply_equalization(graph, plan(graph), table_of({"x": any_equalization(32)}))


def test_same_table_gives_the_same_bytes():
    first, second = (equalized("post-norm", shift=True)[0] for _ in range(2))
    assert model_of(first).SerializeToString() == model_of(second).SerializeToString()
