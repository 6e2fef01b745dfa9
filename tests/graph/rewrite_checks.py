"""Normalise a small model in tests of rewrites, and compare it with its source in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_graphsurgeon as gs
from graph_models import graph_of, model_of, parse, run

from trtforge.graph.edit import all_nodes
from trtforge.graph.load import graph_from_model
from trtforge.graph.native import OnnxNative
from trtforge.graph.normalise import NormaliseReport, normalise
from trtforge.graph.specialise import specialise
from trtforge.profile import Profile, ProfileSet, ShapeRange

Feeds = Mapping[str, np.ndarray]
Sizes = tuple[int, int]


def normalised(
    body: str, native: OnnxNative, *feeds: Feeds, opset: int = 23, tolerance: float = 0.0
) -> tuple[gs.Graph, NormaliseReport]:
    """The normalised graph, after checking that it gives the source's outputs and that a second run changes nothing."""
    graph, report = normalise(graph_of(body, opset=opset), native=native)
    compare(body, graph, feeds, opset, tolerance)
    first = model_of(graph)
    second, again = normalise(graph_from_model(model_of(graph)), native=native)
    assert model_of(second) == first
    assert report.num_qdq == again.num_qdq and again.num_folded == again.num_dead == again.num_identities == 0
    assert (again.num_casts, again.num_transposes, again.num_batch_norms, again.num_control_flow) == (0, 0, 0, 0)
    return graph, report


def specialised(
    body: str,
    native: OnnxNative,
    sizes: Mapping[str, list[Sizes]],
    *feeds: Feeds,
    values: Mapping[str, tuple[list[int], list[int]]] | None = None,
) -> tuple[gs.Graph, tuple[str, ...]]:
    """The graph normalised and specialised for one profile, compared with its source, and the notes.

    Args:
        body: ONNX text of opset 23.
        native: the child process.
        sizes: (min, max) of each axis by input.
        feeds: inputs inside the profile.
        values: smallest and largest values of integer inputs.
    """
    graph, _ = normalise(graph_of(body), native=native)
    notes = specialise(graph, profile_set(sizes, values or {}), native)
    compare(body, graph, feeds, 23, 1e-6)
    return graph, notes


def profile_set(
    sizes: Mapping[str, list[Sizes]], values: Mapping[str, tuple[list[int], list[int]]] | None = None
) -> ProfileSet:
    """One profile whose opt is its max."""

    def span(low: list[int], high: list[int]) -> ShapeRange:
        return ShapeRange(tuple(low), tuple(high), tuple(high))

    shapes = {name: span([s[0] for s in axes], [s[1] for s in axes]) for name, axes in sizes.items()}
    ranges = {name: span(low, high) for name, (low, high) in (values or {}).items()}
    return ProfileSet((Profile("default", shapes, ranges),), "file")


def compare(body: str, graph: gs.Graph, feeds: tuple[Feeds, ...], opset: int, tolerance: float) -> None:
    """Outputs of the source and of a graph are equal; no node is left that reads nothing known."""
    source = parse(body, opset=opset, ir=8)
    assert feeds
    for feed in feeds:
        for expected, found in zip(run(source, feed), run(graph, feed), strict=True):
            assert expected.dtype == found.dtype and expected.shape == found.shape
            np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def count(graph: gs.Graph, *ops: str) -> int:
    """Nodes of these operators, subgraphs included."""
    return sum(node.op in ops for node in all_nodes(graph))
