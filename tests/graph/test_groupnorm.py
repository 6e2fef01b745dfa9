from __future__ import annotations

import numpy as np
import pytest
from graph_models import graph_of, ops, parse, run

from trtforge.errors import InputError
from trtforge.graph.normalise import normalise

CONSTANT = """g (float[N, 6, 4] x) => (float[N, 6, 4] y) <float[3] s = {1, 2, 3}, float[3] b = {0, 5, -1}> {
    y = GroupNormalization<num_groups = 3>(x, s, b) }"""
DYNAMIC = """g (float[N, 6, 4] x, float[3] s, float[3] b) => (float[N, 6, 4] y) {
    y = GroupNormalization<num_groups = 3>(x, s, b) }"""


def expected(x: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Opset 18's definition: scale and bias per group."""
    groups = x.reshape(len(x), 3, -1).astype(np.float64)
    normal = (groups - groups.mean(-1, keepdims=True)) / np.sqrt(groups.var(-1, keepdims=True) + 1e-5)
    return (normal * scale[:, None] + bias[:, None]).reshape(x.shape)


@pytest.mark.parametrize("body", [CONSTANT, DYNAMIC])
def test_scale_and_bias_per_group_survive_opset_21(body: str) -> None:
    x = np.random.default_rng(0).normal(size=(2, 6, 4)).astype(np.float32)
    scale, bias = np.array([1, 2, 3], np.float32), np.array([0, 5, -1], np.float32)
    feeds = {"x": x} if body is CONSTANT else {"x": x, "s": scale, "b": bias}
    graph, report = normalise(graph_of(body, opset=18))
    assert report.opset == 23
    np.testing.assert_allclose(run(graph, feeds)[0], expected(x, scale, bias), atol=1e-5)


def test_scale_and_bias_per_channel_of_opset_21_are_left_alone() -> None:
    body = CONSTANT.replace("float[3]", "float[6]").replace("{1, 2, 3}", "{1, 2, 3, 4, 5, 6}")
    body = body.replace("{0, 5, -1}", "{0, 5, -1, 0, 0, 0}")
    x = np.random.default_rng(0).normal(size=(2, 6, 4)).astype(np.float32)
    graph, _ = normalise(graph_of(body, opset=21))
    assert ops(graph) == ["GroupNormalization"]
    np.testing.assert_array_equal(run(graph, {"x": x})[0], run(parse(body, opset=21), {"x": x})[0])


def test_unknown_number_of_channels_is_refused() -> None:
    with pytest.raises(InputError, match="GroupNormalization 'GroupNormalization_0' cannot be raised") as caught:
        normalise(graph_of(DYNAMIC.replace("6", "C"), opset=18))
    assert "static multiple" in caught.value.why and "21" in caught.value.fix


def test_a_name_that_the_model_uses_already_is_not_given_twice() -> None:
    taken = "GroupNormalization_0_scale_per_channel"
    body = DYNAMIC.replace(" s,", f" {taken},").replace("(x, s, b)", f"(x, {taken}, b)")
    x = np.random.default_rng(0).normal(size=(2, 6, 4)).astype(np.float32)
    scale, bias = np.array([1, 2, 3], np.float32), np.array([0, 5, -1], np.float32)
    graph, _ = normalise(graph_of(body, opset=18))
    np.testing.assert_allclose(run(graph, {"x": x, taken: scale, "b": bias})[0], expected(x, scale, bias), atol=1e-5)
