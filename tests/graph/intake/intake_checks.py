"""Helpers of the intake tests: one operator in a model, rewritten, and compared in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from graph_models import graph_of, model_of, parse, run

from trtforge.graph.edit import all_nodes
from trtforge.graph.intake import Operators, is_rewritten, refused_operators
from trtforge.graph.native import OnnxNative
from trtforge.graph.normalise import normalise

DOMAINS = ', "com.microsoft": 1, "ai.onnx.ml": 3'
Feeds = Mapping[str, np.ndarray]
Check = Callable[..., gs.Graph]


def weights(**arrays: np.ndarray) -> str:
    """Initializers in ONNX text."""
    return "<" + ", ".join(_weight(name, array) for name, array in arrays.items()) + ">"


def _weight(name: str, array: np.ndarray) -> str:
    kind = {"float32": "float", "float64": "double"}.get(array.dtype.name, array.dtype.name)
    sizes = f"[{','.join(map(str, array.shape))}]" if array.ndim else ""
    return f"{kind}{sizes} {name} = {{{', '.join(repr(number.item()) for number in array.ravel())}}}"


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    """Normally distributed numbers."""
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def codes(*shape: int, low: int = 0, high: int = 256, dtype: type = np.uint8) -> np.ndarray:
    """Uniformly distributed integers."""
    return np.random.default_rng([low + 1000, *shape]).integers(low, high, shape).astype(dtype)


def rewritten(body: str, native: OnnxNative, *, opset: int = 20, operators: Operators = "exact") -> gs.Graph:
    """The normalised graph of a body."""
    return normalise(graph_of(body, opset=opset, domains=DOMAINS), native=native, operators=operators)[0]


def check_equal(
    body: str,
    feeds: Feeds,
    native: OnnxNative,
    *,
    opset: int = 20,
    tolerance: float = 2e-5,
    operators: Operators = "exact",
) -> gs.Graph:
    """Compare outputs before and after; nothing that TensorRT does not take may be left; gives the new graph."""
    source = parse(body, opset=opset, domains=DOMAINS)
    expected = run(source, feeds)
    graph = rewritten(body, native, opset=opset, operators=operators)
    model = model_of(graph)
    assert not any(is_rewritten(node) or node.domain for node in all_nodes(graph)), list(refused_operators(graph))
    assert [port.name for port in model.graph.output] == [port.name for port in source.graph.output]
    for before, after in zip(expected, run(model, feeds), strict=True):
        assert (before.dtype, before.shape) == (after.dtype, after.shape)
        worst = np.max(np.abs(before.astype(np.float64) - after.astype(np.float64)), initial=0)
        assert worst <= tolerance, worst
    again, report = normalise(graph, native=native, operators=operators)
    assert report.num_operators == 0
    assert onnx.ModelProto.SerializeToString(model_of(again), deterministic=True) == model.SerializeToString(
        deterministic=True
    )
    return graph
