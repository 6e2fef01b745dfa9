"""Helpers of the graph tests: models from ONNX text, on disk and in memory, and their results in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime

from trtforge.graph.load import graph_from_model
from trtforge.graph.protos import all_bodies
from trtforge.graph.save import skeleton_from_graph
from trtforge.graph.storage import tensor_from_array


def parse(body: str, *, opset: int = 23, ir: int = 10, domains: str = "") -> onnx.ModelProto:
    """A model from ONNX text without its header."""
    return onnx.parser.parse_model(f'<ir_version: {ir}, opset_import: ["": {opset}{domains}]>\n{body}')


def graph_of(body: str, *, opset: int = 23, domains: str = "") -> gs.Graph:
    """A graph from ONNX text without its header."""
    return graph_from_model(parse(body, opset=opset, domains=domains))


def model_of(graph: gs.Graph) -> onnx.ModelProto:
    """The complete model of a graph, weights included."""
    skeleton = skeleton_from_graph(graph)
    for body in all_bodies(skeleton.model):
        for tensor in body.initializer if isinstance(body, onnx.GraphProto) else ():
            if tensor.name in skeleton.weights and not tensor.HasField("raw_data"):
                tensor.CopyFrom(tensor_from_array(tensor.name, skeleton.weights[tensor.name]))
    return skeleton.model


def write(model: onnx.ModelProto, folder: Path, name: str = "model.onnx") -> Path:
    """A model on disk."""
    path = folder / name
    path.write_bytes(model.SerializeToString())
    return path


def run(model: onnx.ModelProto | gs.Graph, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Outputs in ONNX Runtime with graph optimisation off."""
    proto = model if isinstance(model, onnx.ModelProto) else model_of(model)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, dict(feeds))


def ops(graph: gs.Graph) -> list[str]:
    """The operators of the top graph, in order."""
    return [node.op for node in graph.nodes]


def values(*numbers: float) -> str:
    """Numbers as an initializer in ONNX text."""
    return "{" + ", ".join(str(number) for number in numbers) + "}"
