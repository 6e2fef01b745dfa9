"""Models with a layer that INT8 spoils, and what a search needs to know of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_graphsurgeon as gs
import onnxruntime
from support import HEADER, dataset_of

from trtforge.data import Batch, Dataset
from trtforge.graph.cost import attention_flops, gemm_flops
from trtforge.graph.edit import copy_graph
from trtforge.graph.save import save_model
from trtforge.graph.shapes import infer_shapes_at
from trtforge.inputs import BatchRange
from trtforge.mixed.task import Task
from trtforge.quantization.cast import cast_graph
from trtforge.quantization.placement import plan_placement
from trtforge.quantization.qdq import insert_qdq
from trtforge.quantization.sites import Dependent
from trtforge.recipe import QuantRecipe

Feeds = dict[str, np.ndarray]


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


def conv_net(bad: int | None = 2, layers: int = 4) -> gs.Graph:
    """x [n, 3, 8, 8] -> convolutions with a skip connection -> y [n, 8].

    Args:
        bad: the input of this layer has one channel 300 times as large as the others, whose weights are as much
            smaller: nothing changes in float, but one INT8 scale leaves the other channels nothing.
        layers: number of convolutions after the first.
    """
    weights = {"w0": normal(32, 3, 3, 3, scale=0.3), "head_w": normal(32, 16, seed=99, scale=0.2)}
    body = ["[conv0] c0 = Conv<pads = [1, 1, 1, 1]>(x, w0)", "[relu0] r0 = Relu(c0)"]
    for i in range(1, layers + 1):
        weights[f"w{i}"] = normal(32, 32, 3, 3, seed=i, scale=0.08)
        body += [f"[conv{i}] c{i} = Conv<pads = [1, 1, 1, 1]>(r{i - 1}, w{i})", f"[relu{i}] r{i} = Relu(c{i})"]
    if bad is not None:
        weights[f"w{bad - 1}"][0] *= 300.0
        weights[f"w{bad}"][:, 0] /= 300.0
    body += [
        f"[skip] s = Add(r{layers}, r0)",
        "[pool] p = GlobalAveragePool(s)",
        "[flat] f = Flatten(p)",
        "[head] y = MatMul(f, head_w)",
    ]
    return graph_from(f"g (float[n, 3, 8, 8] x) => (float[n, 16] y) {{ {' '.join(body)} }}", **weights)


def graph_from(text: str, **weights: np.ndarray) -> gs.Graph:
    """A graph from ONNX text with its weights."""
    model = onnx.parser.parse_model(HEADER.replace("20", "23") + text)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    return gs.import_onnx(onnx.shape_inference.infer_shapes(model))


def images(count: int, seed: int = 0) -> Dataset:
    """Samples for `conv_net`."""
    return dataset(Batch({"x": normal(count, 3, 8, 8, seed=seed)}, None))


def dataset(whole: Batch) -> Dataset:
    """One that gives batches of the size asked for."""
    size = len(whole)

    def read(batch: int) -> Any:
        return (whole.rows(start, min(start + batch, size)) for start in range(0, size, batch))

    return dataclasses.replace(dataset_of(whole), read=read)


@dataclasses.dataclass
class Model:
    """A model that is ready for a search.

    Attributes:
        base, quantized: without and with Q/DQ.
        quantize: the float32 graph with only these nodes quantized.
        lower: the float16 graph with these nodes left float.
    """

    base: gs.Graph
    quantized: gs.Graph
    quantize: Callable[[frozenset[str]], gs.Graph]
    lower: Callable[[frozenset[str]], gs.Graph]
    nodes: tuple[str, ...]
    dependents: tuple[Dependent, ...]

    def task(self, work: Path, calibration: Dataset | None, budget: float, **changes: Any) -> Task:
        """A search in a folder."""
        work.mkdir(exist_ok=True, parents=True)
        save_model(self.base, work / "float.onnx")
        data = calibration or changes["held_out"]
        shapes = infer_shapes_at(self.base, {name: f.shape for name, f in next(data.batches(4)).feeds.items()})
        values: dict[str, Any] = {
            "base": self.base,
            "quantized": self.quantized,
            "lower": self.lower,
            "reference": work / "float.onnx",
            "gemm_flops": gemm_flops(self.base, shapes),
            "attention_flops": attention_flops(self.base, shapes),
            "calibration": calibration,
            "held_out": None,
            "held_out_loss": None,
            "batch": BatchRange(1, 4, 8),
            "dependents": self.dependents,
            "budget": budget,
            "metric": None,
            "number_format": "int8",
            "work": work,
        }
        return Task(**(values | changes))


def session(graph: gs.Graph, taps: Sequence[str], work: Path) -> Callable[[Feeds], Feeds]:
    """Runs a graph as written, in this process: outputs and taps by name."""
    tapped = copy_graph(graph)
    tapped.outputs += [tapped.tensors()[name] for name in taps if name not in {t.name for t in tapped.outputs}]
    names = [tensor.name for tensor in tapped.outputs]
    save_model(tapped, work / "tapped.onnx")
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    loaded = onnxruntime.InferenceSession(str(work / "tapped.onnx"), options, ["CPUExecutionProvider"])
    return lambda feeds: dict(zip(names, loaded.run(names, feeds), strict=True))


def prepare(base: gs.Graph, data: Dataset, work: Path) -> Model:
    """Place Q/DQ with minmax ranges of the data."""
    placement = plan_placement(base, {}, QuantRecipe())
    amax = dict.fromkeys(placement.tensors, 0.0)
    run = session(base, [name for name in placement.tensors if name != "x"], work)
    for batch in data.batches(8):
        for name, value in (run(batch.feeds) | batch.feeds).items():
            if name in amax:
                amax[name] = max(amax[name], float(np.abs(value).max()))

    def quantize(nodes: frozenset[str]) -> gs.Graph:
        graph = copy_graph(base)
        chosen = dataclasses.replace(
            placement,
            activations=tuple(site for site in placement.activations if site.node in nodes),
            weights=tuple(site for site in placement.weights if site.node in nodes),
        )
        insert_qdq(graph, chosen, amax, np.float16)
        return graph

    def lower(kept: frozenset[str]) -> gs.Graph:
        graph = quantize(frozenset(placement.without(dict.fromkeys(kept, "kept")).nodes))
        cast_graph(graph, "float16")
        return graph

    return Model(base, quantize(frozenset(placement.nodes)), quantize, lower, placement.nodes, placement.dependents)
