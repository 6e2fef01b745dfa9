"""Work grows with the number of nodes and no faster: function calls are counted, which no other load changes."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx_graphsurgeon as gs
import pytest
from graph_models import write

from trtforge.graph.edit import copy_graph
from trtforge.graph.lint import lint
from trtforge.graph.load import load_model
from trtforge.graph.native import OnnxNative
from trtforge.graph.normalise import normalise
from trtforge.graph.save import save_model
from trtforge.graph.specialise import specialise
from trtforge.profile import Profile, ProfileSet, ShapeRange

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from many_nodes import make_model


def count_calls(num_nodes: int, folder: Path, native: OnnxNative) -> int:
    """Python and C functions called by the passes over a generated graph."""
    path = write(make_model(num_nodes), folder)
    shapes = ShapeRange((2, 16), (2, 16), (2, 16))
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        graph, _ = normalise(load_model(path).graph, native=native)
        specialise(graph, ProfileSet((Profile("default", {"x": shapes}),), "file"), native)
        lint(graph)
        save_model(copy_graph(graph), folder / "out.onnx")
    finally:
        sys.setprofile(None)
    return calls


def test_calls_grow_with_the_nodes(tmp_path: Path) -> None:
    with OnnxNative() as native:
        count_calls(100, tmp_path, native)
        few, many = (count_calls(size, tmp_path, native) for size in (500, 2000))
    assert many < 4.2 * few


@pytest.mark.parametrize("op", ["Cast", "Transpose", "Identity"])
def test_many_readers_of_one_tensor(tmp_path: Path, op: str) -> None:
    """Comparing each reader with each would take 2,250,000 steps."""
    source = gs.Variable("x", np.float32, [2, 3])
    attrs = {"Cast": {"to": 1}, "Transpose": {"perm": [0, 1]}, "Identity": {}}[op]
    middle = [gs.Variable(f"m{i}", np.float32, [2, 3]) for i in range(1500)]
    results = [gs.Variable(f"y{i}", np.float32, [2, 3]) for i in range(1500)]
    nodes = [gs.Node(op, f"n{i}", dict(attrs), [source], [middle[i]]) for i in range(1500)]
    nodes += [gs.Node("Neg", f"r{i}", {}, [middle[i]], [results[i]]) for i in range(1500)]
    graph = gs.Graph(nodes, [source], results, name="g", opset=23)
    result, _ = normalise(graph)
    assert [node.op for node in result.nodes] == ["Neg"] * 1500
