from __future__ import annotations

import numpy as np
import pytest
from graph_models import parse

from trtforge.graph.evaluate import count_output_elements, evaluate_node

INT = np.int64


@pytest.mark.parametrize(
    ("call", "inputs", "count"),
    [
        ("Add(a, b)", [np.zeros((3, 1)), np.zeros(4)], 12),
        ("Concat<axis = 0>(a, b)", [np.zeros((3, 4)), np.zeros((2, 4))], 20),
        ("ConstantOfShape(a)", [np.array([3, 0, 4])], 0),
        ("ConstantOfShape(a)", [np.array([3, 4])], 12),
        ("Range(a, b, c)", [np.array(2), np.array(9), np.array(3)], 3),
        ("Range(a, b, c)", [np.array(9), np.array(2), np.array(3)], 0),
        ("Gather<axis = 1>(a, b)", [np.zeros((3, 4)), np.zeros((5, 2), INT)], 30),
        ("Gather(a, b)", [np.zeros((3, 4)), np.array(1)], 4),
        ("Expand(a, b)", [np.zeros((3, 1)), np.array([2, 1, 4])], 24),
        ("Tile(a, b)", [np.zeros((3, 4)), np.array([2, 3])], 72),
        ("Transpose(a)", [np.zeros((3, 4))], 24),
        ("NonZero(a)", [np.ones((3, 4))], 24),
        ("Pad(a, b)", [np.zeros((3, 4)), np.array([1, 0, 1, 2])], 56),
    ],
)
def test_the_number_of_elements_is_known_before_they_are_computed(
    call: str, inputs: list[np.ndarray], count: int
) -> None:
    node = parse(f"g (float a, float b, float c) => (float y) {{ y = {call} }}").graph.node[0]
    assert count_output_elements(node, inputs) == count
    assert evaluate_node(node, inputs, 23)[0].size <= count


def test_inputs_that_do_not_fit_are_an_error_before_anything_is_computed() -> None:
    node = parse("g (float a, float b) => (float y) { y = Add(a, b) }").graph.node[0]
    with pytest.raises(ValueError, match="broadcast"):
        count_output_elements(node, [np.zeros(3), np.zeros(4)])
