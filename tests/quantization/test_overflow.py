"""Which tensors are observed for overflow, in what groups, and which nodes stay float32 for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quant_cases import graph_from_text, normal
from support import dataset_of

from trtforge.data import Batch
from trtforge.graph.edit import copy_graph
from trtforge.graph.save import save_model
from trtforge.quantization import overflow
from trtforge.quantization.calibrate import Pass, observe_model
from trtforge.quantization.cast import cast_graph
from trtforge.quantization.observation import Observation
from trtforge.quantization.overflow import (
    MAX_TAP_BYTES,
    Overflow,
    batch_bytes,
    find_overflow,
    group_tensors,
    tensors_to_observe,
)
from trtforge.quantization.placement import plan_placement
from trtforge.quantization.qdq import insert_qdq
from trtforge.recipe import QuantRecipe

POWER = """g (float[b, 32] x) => (float[b, 32] y) {
    [up] h = MatMul(x, w) [square] s = Mul(h, h) [root] r = Sqrt(s) [down] y = MatMul(r, v)
}"""
# The mask is a constant, -1e9, of float16's smaller number, and what is made of it passes on to the Softmax.
MASKED = """g (float[b, 4, 8] x, float[b, 1, 8] mask) => (float[b, 4, 8] y) {
    [hide] m = Mul(mask, low) [wide] n = Identity(m)
    [scores] s = MatMul(x, w) [add] a = Add(s, n) [softmax] p = Softmax<axis = -1>(a) [context] y = MatMul(p, v)
}"""


def tensors(text, **constants):
    graph = graph_from_text(text, **constants)
    lowered = copy_graph(graph)
    return tensors_to_observe(graph, cast_graph(lowered, "float16"))


def test_tensors_of_float16_nodes_are_observed_and_no_others():
    names = tensors(POWER, w=normal(32, 32), v=normal(32, 32))
    # "root" runs in float32, and constants are known.
    assert names == ("x", "h", "s", "r", "y")
    assert tensors("g (float[b, 4] x) => (float[b, 4] y) { e = Exp(x) y = Sqrt(e) }") == ()


def test_what_is_made_of_a_mask_is_no_overflow():
    names = tensors(MASKED, low=np.float32(-1e9), w=normal(8, 8), v=normal(8, 8))
    assert {"x", "s", "p", "y"} <= set(names)
    assert not {"m", "n", "a"} & set(names)
    # A factor that float16 holds makes no mask.
    assert {"m", "n", "a"} <= set(tensors(MASKED, low=np.float32(-1e4), w=normal(8, 8), v=normal(8, 8)))


def test_a_mask_that_a_fill_makes_is_no_overflow():
    text = """g (float[b, 8] x, bool[b, 8] keep) => (float[b, 8] y) {
        size = Shape(x) fill = ConstantOfShape<value = float[1] {-1e9}>(size) a = Where(keep, x, fill)
        p = Relu(a) y = MatMul(p, w)
    }"""
    names = tensors(text, w=normal(8, 8))
    assert not {"fill", "a"} & set(names)
    assert "fill" in tensors(text.replace("-1e9", "-2.0"), w=normal(8, 8))


def test_a_bound_makes_no_mask():
    text = "g (float[b, 8] x) => (float[b, 8] y) { c = Clip(x, low, high) y = MatMul(c, w) }"
    assert "c" in tensors(text, low=np.float32(-3.4e38), high=np.float32(3.4e38), w=normal(8, 8))


def test_groups_hold_what_fits_and_every_tensor_once():
    half, name = MAX_TAP_BYTES // 2, [f"t{index}" for index in range(6)]
    sizes = {"t0": half, "t1": half, "t2": 1, "t3": 3 * half, "t4": 4, "t5": 4}
    groups = list(group_tensors(name, sizes))
    assert groups == [("t0", "t1"), ("t2",), ("t3",), ("t4", "t5")]
    # Sixteen tensors of unknown size are enough for one run.
    assert [len(group) for group in group_tensors([str(index) for index in range(40)], {})] == [16, 16, 8]
    assert list(group_tensors([], {})) == []


def test_bytes_are_those_of_the_batch_that_runs():
    assert batch_bytes({"a": (32, 10), "b": ()}, 8 / 32) == {"a": 320, "b": 1}


@pytest.mark.parametrize(("limit", "runs"), [(MAX_TAP_BYTES, [("x", "h", "s")]), (1, [("x",), ("h",), ("s",)])])
def test_the_largest_value_of_every_tensor_is_seen_in_whatever_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, runs: list[tuple[str, ...]]
) -> None:
    graph = graph_from_text(POWER, w=normal(32, 32), v=normal(32, 32))
    save_model(graph, tmp_path / "fp32.onnx")
    x = normal(10, 32, scale=100)
    dataset = dataset_of(Batch({"x": x[:8]}, None), Batch({"x": x[8:]}, None))
    ran: list[tuple[str, ...]] = []

    def observe(work: Pass, *arguments: Any) -> Observation:
        ran.append(tuple(work.channel_axes))
        return observe_model(work, *arguments)

    monkeypatch.setattr(overflow, "MAX_TAP_BYTES", limit)
    monkeypatch.setattr(overflow, "observe_model", observe)
    work = Pass(tmp_path / "fp32.onnx", "0", dict.fromkeys(("x", "h", "s")), dataset, 8)
    found = find_overflow(work, "10 samples", {"x": 8, "h": 8, "s": 8}, lambda *_, **__: None, pytest.fail)
    assert ran == runs
    h = x @ normal(32, 32)
    assert list(found.amax) == ["s"]
    np.testing.assert_allclose(found.amax["s"], np.abs(h * h).max(), rtol=1e-5)
    assert found.describe() == (
        f"1 tensor is too large for float16 on 10 samples, 's' with {found.amax['s']:.4g} the most: "
        "what computes or reads them stays float32"
    )


def test_both_ends_of_a_tensor_stay_float32_and_the_reason_names_the_largest():
    graph = graph_from_text(POWER, w=normal(32, 32), v=normal(32, 32))
    kept = Overflow("4 evaluation samples", {"h": 4e4, "s": 1.6e9}).kept_nodes(graph)
    assert kept == {
        "up": "'h' reached 4e+04 on 4 evaluation samples; float16 ends at 65504",
        "square": "'s' reached 1.6e+09 on 4 evaluation samples; float16 ends at 65504",
        "root": "'s' reached 1.6e+09 on 4 evaluation samples; float16 ends at 65504",
    }


def test_what_is_dequantized_is_as_large_as_what_was_quantized():
    graph = graph_from_text(POWER, w=normal(32, 32), v=normal(32, 32))
    insert_qdq(graph, plan_placement(graph, {}, QuantRecipe()), {"x": 4.0, "r": 9e4}, np.float16)
    kept = Overflow("4 samples", {"r": 9e4}).kept_nodes(graph)
    ops = {node.name: node.op for node in graph.nodes}
    assert sorted(ops[name] for name in kept) == ["DequantizeLinear", "MatMul", "QuantizeLinear", "Sqrt"]
    report = cast_graph(graph, "float16", {}, kept)
    assert "up" in report.cast_nodes
    assert not set(kept) & set(report.cast_nodes)
