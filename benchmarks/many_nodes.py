"""CPU seconds of every graph pass over generated graphs of many nodes: is growth linear, and what costs most?

    python benchmarks/many_nodes.py [NODES ...]        # default 10000 20000 40000

The graph repeats a block of MatMul, Add, shape arithmetic, Reshape, two Transposes, Relu and residual Add, as exporters
write them. Seconds are those of this process and of its child that runs onnx's C++, without ONNX Runtime. Garbage
collection is set as the command line sets it.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
from onnx import TensorProto, helper, numpy_helper

from trtforge.fusion.packed_qkv import pack_qkv
from trtforge.graph.edit import copy_graph
from trtforge.graph.lint import lint
from trtforge.graph.load import load_model
from trtforge.graph.native import OnnxNative
from trtforge.graph.normalise import normalise
from trtforge.graph.save import save_model
from trtforge.graph.shapes import infer_shapes_at
from trtforge.graph.specialise import specialise
from trtforge.profile import Profile, ProfileSet, ShapeRange
from trtforge.quantization.cast import cast_graph
from trtforge.quantization.placement import plan_placement
from trtforge.recipe import QuantRecipe

WIDTH = 16


def make_model(num_nodes: int) -> onnx.ModelProto:
    """A model of about that many nodes, x [N, 16] -> y [N, 16]."""
    rng = np.random.default_rng(0)
    nodes: list[onnx.NodeProto] = []
    weights: list[onnx.TensorProto] = []

    def add(op: str, *inputs: str, **attributes: Any) -> str:
        name = f"t{len(nodes)}"
        nodes.append(helper.make_node(op, list(inputs), [name], name=f"{op}_{len(nodes)}", **attributes))
        return name

    def constant(*values: int) -> str:
        return add("Constant", value=numpy_helper.from_array(np.array(values, np.int64)))

    current = "x"
    while len(nodes) < num_nodes:
        index = len(weights) // 2
        for name, shape in ((f"w{index}", (WIDTH, WIDTH)), (f"b{index}", (WIDTH,))):
            weights.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32) / 8, name))
        hidden = add("Add", add("MatMul", current, f"w{index}"), f"b{index}")
        batch = add("Gather", add("Shape", hidden), constant(0), axis=0)
        target = add("Concat", batch, constant(4, 4), axis=0)
        turned = add("Transpose", add("Reshape", hidden, target), perm=[0, 2, 1])
        flat = add("Reshape", add("Transpose", turned, perm=[0, 2, 1]), constant(0, WIDTH))
        current = add("Add", add("Identity", add("Relu", flat)), current)
    nodes.append(helper.make_node("Identity", [current], ["y"], name="last"))
    ports = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", WIDTH])] for name in ("x", "y")]
    graph = helper.make_graph(nodes, "many", *ports, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def measure(num_nodes: int, folder: Path) -> dict[str, float]:
    """CPU seconds by pass."""
    path = folder / "model.onnx"
    path.write_bytes(make_model(num_nodes).SerializeToString())
    seconds: dict[str, float] = {}
    with OnnxNative() as native:
        child = psutil.Process(native._child.pid)

        def timed(name: str, work: Callable[[], Any]) -> Any:
            before = time.process_time() + sum(child.cpu_times()[:2])
            result = work()
            seconds[name] = time.process_time() + sum(child.cpu_times()[:2]) - before
            return result

        shapes = ShapeRange((1, WIDTH), (4, WIDTH), (8, WIDTH))
        profiles = ProfileSet((Profile("default", {"x": shapes}),), "file")
        loaded = timed("load", lambda: load_model(path))
        graph, _ = timed("normalise", lambda: normalise(loaded.graph, native=native))
        timed("specialise", lambda: specialise(graph, profiles, native))
        timed("lint", lambda: lint(graph))
        timed("pack_qkv", lambda: pack_qkv(graph))
        sizes = timed("shapes", lambda: infer_shapes_at(graph, {"x": shapes.opt}, native))
        timed("placement", lambda: plan_placement(graph, sizes, QuantRecipe()))
        copy = timed("copy", lambda: copy_graph(graph))
        timed("cast", lambda: cast_graph(copy, "float16", {}))
        timed("save", lambda: save_model(copy, folder / "out.onnx"))
    return seconds


def main() -> None:
    """Print one row for each pass."""
    gc.set_threshold(100_000, 10, 10)
    sizes = [int(argument) for argument in sys.argv[1:]] or [10_000, 20_000, 40_000]
    with tempfile.TemporaryDirectory() as folder:
        columns = [measure(size, Path(folder)) for size in sizes]
    print("| pass | " + " | ".join(f"{size:,} nodes" for size in sizes) + " |")
    print("|--" * (len(sizes) + 1) + "|")
    for name in columns[0]:
        print(f"| {name} | " + " | ".join(f"{column[name]:.2f}" for column in columns) + " |")
    print("| total | " + " | ".join(f"{sum(column.values()):.2f}" for column in columns) + " |")


if __name__ == "__main__":
    main()
