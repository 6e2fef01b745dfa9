"""Small graphs for the tests of quantization, and ONNX Runtime with its optimisations off."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_graphsurgeon as gs
import onnxruntime

HEADER = '<ir_version: 10, opset_import: ["" : {}]>\n'


def graph_from_text(text, opset=23, **initializers):
    """A graph from ONNX text, with arrays as initializers and inferred types and shapes."""
    model = onnx.parser.parse_model(HEADER.format(opset) + text)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in initializers.items())
    return gs.import_onnx(onnx.shape_inference.infer_shapes(model, data_prop=True))


def model_of(graph):
    """The checked ONNX model of a graph: types and order are right."""
    model = gs.export_onnx(graph)
    onnx.checker.check_model(model, full_check=True)
    return model


def run(graph, **feeds):
    """The outputs of a graph as written, in ONNX Runtime."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model_of(graph).SerializeToString(), options, ["CPUExecutionProvider"])
    return session.run(None, feeds)


def node_of(graph, name):
    """The node of this name."""
    return next(node for node in graph.nodes if node.name == name)


def ops(graph):
    """The operators in order."""
    return [node.op for node in graph.nodes]


def normal(*shape, seed=0, scale=1.0):
    """Normally distributed float32 values."""
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)
