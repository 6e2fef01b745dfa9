from __future__ import annotations

import numpy as np
import onnx
import pytest
from graph_models import parse

from trtforge.graph.dims.probe import ShapeProbe
from trtforge.graph.native import OnnxNative


def probe_of(text: str) -> ShapeProbe:
    return ShapeProbe(onnx.shape_inference.infer_shapes(parse(text)))


@pytest.mark.parametrize(
    ("text", "shapes", "op", "why", "sizes"),
    [
        (
            "g (float[a] x, float[b] z) => (float[c] y) { y = Add(x, z) }",
            {"x": (3,), "z": (4,)},
            "Add",
            "broadcast",
            (3, 4),
        ),
        (
            "g (float[a, 2] x, float[b, 3] z) => (float[c, 2] y) { y = Concat<axis = 0>(x, z) }",
            {"x": (1, 2), "z": (1, 3)},
            "Concat",
            "outside axis 0",
            (2, 3),
        ),
        (
            "g (float[a, b] x) => (float[c, d] y) <int64[2] s = {3, -1}> { y = Reshape(x, s) }",
            {"x": (2, 5)},
            "Reshape",
            "10 elements",
            None,
        ),
        (
            "g (float[a, 4] x, int64[b] z) => (float[c, 4] y) <int64 o = {0}, int64 l = {1}, int64 i = {0}> "
            "{ s = Shape(z) n = Gather(s, i) r = Range(o, n, l) y = Gather(x, r) }",
            {"x": (5, 4), "z": (6,)},
            "Gather",
            "entry 5 of a table of 5",
            None,
        ),
        (
            "g (float[a] x) => (float[] y) <int64[1] s = {0}> { y = Squeeze(x, s) }",
            {"x": (3,)},
            "Squeeze",
            "must be 1",
            None,
        ),
        (
            "g (float[a, 2, n] x) => (float[a, 2, m] y) { y = MaxPool<kernel_shape = [4], pads = [1, 0]>(x) }",
            {"x": (1, 2, 2)},
            "MaxPool",
            "is 3 with padding; the window has 4",
            None,
        ),
        (
            "g (float[a, 5] x) => (float[a, 5, b, 5] y) { s = Shape(x) t = Concat<axis = 0>(s, s) y = Expand(x, t) }",
            {"x": (3, 5)},
            "",
            "",
            None,
        ),
    ],
    ids=["add", "concat", "reshape", "gather", "squeeze", "window", "none"],
)
def test_the_first_node_that_cannot_take_the_shapes_is_named(
    text: str, shapes: dict[str, tuple[int, ...]], op: str, why: str, sizes: tuple[int, int] | None
) -> None:
    conflict = probe_of(text).run(shapes)
    if not op:
        assert conflict is None
        return
    assert conflict is not None
    assert (conflict.op, conflict.sizes) == (op, sizes)
    assert why in conflict.why


def test_what_depends_on_data_is_unknown_and_fits() -> None:
    probe = probe_of("g (float[a] x) => (int64[b, c] y) <float[7] w> { n = NonZero(x) y = Concat<axis = 1>(n, n) }")
    assert probe.run({"x": (9,)}) is None
    assert "y" not in probe.shapes


def test_values_of_inputs_are_followed() -> None:
    probe = probe_of("g (float[a] x, int64[2] s) => (float[b, c] y) { y = Reshape(x, s) }")
    assert probe.run({"x": (12,), "s": (2,)}) is None
    assert "y" not in probe.shapes
    assert probe.run({"x": (12,), "s": (2,)}, {"s": np.array([3, 4])}) is None
    assert probe.shapes["y"] == (3, 4)
    assert probe.run({"x": (12,), "s": (2,)}, {"s": np.array([3, 5])}) is not None


def test_runs_do_not_remember_each_other() -> None:
    probe = probe_of("g (float[a, b] x) => (float[b, a] y) { t = Transpose(x) y = Clip(t) }")
    for shape in ((2, 3), (4, 5), (2, 3)):
        assert probe.run({"x": shape}) is None
        assert probe.shapes["y"] == shape[::-1]


def test_the_child_process_answers_the_same() -> None:
    model = onnx.shape_inference.infer_shapes(parse("g (float[a] x, float[b] z) => (float[c] y) { y = Add(x, z) }"))
    with OnnxNative() as native:
        points = [{"shapes": {"x": [3], "z": [size]}, "values": {}} for size in (3, 4)]
        good, bad = native.probe_shapes(model, points)
    assert (good.conflict, good.peak_bytes) == (None, 4 * 9)
    assert bad.conflict is not None
    assert bad.conflict.sizes == (3, 4)


def test_peak_memory_counts_what_lives_together() -> None:
    probe = probe_of("g (float[a] x) => (float[a] y) <float[4] w> { p = Relu(x) q = Relu(p) r = Relu(q) y = Relu(r) }")
    assert probe.run({"x": (100,)}) is None
    assert probe.peak_bytes() == 4 * 200


@pytest.mark.parametrize(
    ("node", "why"),
    [
        ("Conv<strides = [0]>(x, w)", None),
        ("Gather<axis = 9>(x, i)", None),
        ("Concat<axis = -7>(x, x)", None),
        ("Transpose<perm = [0, 0, 9]>(x)", None),
        ("Reshape(x, h)", "[1, 2, 3] has 6 elements; it cannot become [9223372036854775807]"),
        ("Expand(x, h)", "[1, 2, 3] and [9223372036854775807] do not broadcast"),
    ],
)
def test_a_damaged_node_has_no_shape(node: str, why: str | None) -> None:
    model = parse(
        f"g (float[a, 2, n] x, int64[1] i) => (float[b] y) <int64[1] h = {{9223372036854775807}}> {{ y = {node} }}"
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((3, 2, 1), np.float32), "w"))
    probe = ShapeProbe(model)
    conflict = probe.run({"x": (1, 2, 3), "i": (1,)})
    assert (conflict and conflict.why) == why
    assert "y" not in probe.shapes
