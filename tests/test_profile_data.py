from __future__ import annotations

import pytest
from profile_cases import BERT

from trtforge.errors import InputError
from trtforge.profile import DimFact, DimReport, ShapeRange
from trtforge.profile_data import profiles_from_data
from trtforge.tensor import TensorSpec


def test_ranges_span_the_data_and_opt_is_the_most_frequent_size() -> None:
    shapes = {"input_ids": [(8, 32), (8, 64), (3, 64)], "attention_mask": [(8, 32), (8, 64), (3, 64)]}
    profiles = profiles_from_data(shapes, BERT)
    assert profiles.source == "data"
    assert profiles.first.inputs["input_ids"] == ShapeRange((1, 32), (8, 64), (8, 64))


def test_of_equally_frequent_sizes_the_larger_is_opt() -> None:
    spec = (TensorSpec("x", "float32", ("b", "s")),)
    assert profiles_from_data({"x": [(4, 5), (4, 9)]}, spec).first.inputs["x"].opt == (4, 9)


def test_sizes_that_the_model_fixes_stay_when_ranges_come_from_data() -> None:
    spec = (TensorSpec("x", "float32", (1, "s")),)
    assert profiles_from_data({"x": [(8, 5)]}, spec).first.inputs["x"] == ShapeRange((1, 5), (1, 5), (1, 5))


def test_data_without_one_of_the_inputs_gives_no_ranges() -> None:
    with pytest.raises(InputError, match="without a range"):
        profiles_from_data({"input_ids": [(1, 2)]}, BERT)


def test_data_of_several_ranks_gives_no_ranges() -> None:
    with pytest.raises(InputError, match="different numbers of axes") as caught:
        profiles_from_data({"x": [(1, 2), (1, 2, 3)]}, (TensorSpec("x", "float32", None),))
    assert "2 and 3 axes" in caught.value.why


def test_opt_is_a_combination_that_was_seen() -> None:
    specs = (TensorSpec("x", "float32", (1, "h", "w")),)
    shapes = {"x": [(1, 8, 4), (1, 8, 4), (1, 6, 9), (1, 7, 9), (1, 5, 9)]}
    assert profiles_from_data(shapes, specs).first.inputs["x"] == ShapeRange((1, 5, 4), (1, 8, 4), (1, 8, 9))


def test_feeds_that_are_run_whole_keep_their_first_axis() -> None:
    specs = (TensorSpec("x", "float32", ("b", 4)), TensorSpec("s", "float32", (2, "b")), TensorSpec("r", "int64", ()))
    shapes = {"x": [(3, 4), (5, 4)], "s": [(2, 3), (2, 5)], "r": [(), ()]}
    values = {"r": [(8000,), (16000,)]}
    first = profiles_from_data(shapes, specs, values=values, has_whole_feeds=True).first
    assert first.inputs == {
        "x": ShapeRange((3, 4), (5, 4), (5, 4)),
        "s": ShapeRange((2, 3), (2, 5), (2, 5)),
        "r": ShapeRange((), (), ()),
    }
    assert first.values == {"r": ShapeRange((8000,), (16000,), (16000,))}


DECODER = (
    TensorSpec("ids", "int64", (1, "seq")),
    TensorSpec("past", "float32", (1, "p", 4)),
    TensorSpec("m", "int64", (1, "t")),
)
SUMS = DimReport(
    (
        DimFact("seq", (("ids", 1),), "free"),
        DimFact("p", (("past", 1),), "free"),
        DimFact("t", (("m", 1),), "derived", terms=(("seq", 1), ("p", 1))),
    ),
    {},
)


def test_what_follows_from_other_dims_gets_the_sums_of_their_ends() -> None:
    shapes = {"ids": [(1, 8), (1, 1)], "past": [(1, 0, 4), (1, 20, 4)], "m": [(1, 8), (1, 21)]}
    first = profiles_from_data(shapes, DECODER, report=SUMS, has_whole_feeds=True).first
    assert first.inputs["m"] == ShapeRange((1, 1), (1, 8), (1, 28))


def test_what_follows_from_a_sum_gets_the_ends_of_its_range() -> None:
    specs = (TensorSpec("w", "float32", ("u",)), *DECODER)
    double = DimFact("u", (("w", 0),), "derived", terms=(("t", 2),))
    shapes = {"w": [(16,), (42,)], "ids": [(1, 8), (1, 1)], "past": [(1, 0, 4), (1, 20, 4)], "m": [(1, 8), (1, 21)]}
    report = DimReport((double, *SUMS.dims), {})
    first = profiles_from_data(shapes, specs, report=report, has_whole_feeds=True).first
    assert first.inputs["w"] == ShapeRange((2,), (42,), (56,))


def test_values_in_several_numbers_are_refused() -> None:
    specs = (TensorSpec("s", "int64", ("n",)),)
    with pytest.raises(InputError, match="the data gives input 's' different numbers of values: 1, 2") as caught:
        profiles_from_data({"s": [(1,), (2,)]}, specs, values={"s": [(4,), (4, 5)]}, has_whole_feeds=True)
    assert caught.value.fix == "save every sample with the same number of values"


def test_a_batch_that_the_graph_fixes_is_the_batch() -> None:
    specs = (TensorSpec("x", "float32", ("b", 4)),)
    report = DimReport((DimFact("b", (("x", 0),), "fixed", 1, 1, suggestion=1, reason="node 'r' (Reshape)"),), {})
    first = profiles_from_data({"x": [(8, 4), (3, 4)]}, specs, report=report).first
    assert first.inputs["x"] == ShapeRange((1, 4), (1, 4), (1, 4))


@pytest.mark.parametrize("sizes", [(5, 5), (7, 5), (5, 9), (7, 9)])
def test_data_of_a_size_that_the_graph_does_not_take_is_refused(sizes: tuple[int, int]) -> None:
    wrong = next(size for size in sorted(sizes) if size != 7)
    specs = (TensorSpec("x", "float32", ("b", "n")),)
    fact = DimFact("n", (("x", 1),), "fixed", 7, 7, suggestion=7, reason="node 'm' (MatMul): the inner sizes differ")
    with pytest.raises(InputError, match=f"the data has size {wrong} on axis 1 of input 'x'") as caught:
        profiles_from_data({"x": [(8, size) for size in sizes]}, specs, report=DimReport((fact,), {}))
    assert caught.value.why == "the graph takes 7 there: node 'm' (MatMul): the inner sizes differ"
    assert caught.value.fix == "save the data with 7 there"
