"""A float32 twin of a bfloat16 or float16 graph, for ONNX Runtime on the CPU.

It has no bfloat16 kernels and few float16 ones. Operators without one run in float32, and the casts around them are
taken out where two meet, even with graph optimisation off: nothing rounds then, and nothing overflows. So every
tensor t of the low type becomes a float32 tensor that holds values of that type:

    t = float32(low(op(inputs)))

which is how a kernel behaves that reads the low type, computes in float32 and rounds its result once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trtforge.graph.edit import all_graphs, copy_graph
from trtforge.graph.names import UniqueNames
from trtforge.quantization.cast_ops import LAYOUT_OPS
from trtforge.quantization.op_types import BFLOAT16

FLOAT16: np.dtype[Any] = np.dtype(np.float16)
# They only move values, so their results are rounded already.
_EXACT_OPS = LAYOUT_OPS | {"Where"}
# Attributes that state the type of a node's output.
_TYPE_ATTRIBUTES = ("dtype", "output_dtype", "to")


def uses_bfloat16(graph: gs.Graph) -> bool:
    """True when a tensor of a graph is bfloat16: `cast_graph` made it so, or its source is."""
    return any(_is_of(tensor, BFLOAT16) for tensor in _tensors(graph))


def computes_float16(graph: gs.Graph) -> bool:
    """True where `emulate_float16` serves: float16 tensors between inputs and outputs of other types."""
    inner = (tensor for body in all_graphs(graph) for tensor in _tensors(body) if body is not graph)
    is_open = any(_is_of(tensor, FLOAT16) for tensor in (*graph.inputs, *graph.outputs, *inner))
    return not is_open and any(_is_of(tensor, FLOAT16) for tensor in _tensors(graph))


def emulate_bfloat16(graph: gs.Graph) -> gs.Graph:
    """The twin of a graph that uses bfloat16; the graph itself is left as it is.

    Args:
        graph: its inputs and outputs have other types than bfloat16.
    """
    return _emulate(graph, BFLOAT16)


def emulate_float16(graph: gs.Graph) -> gs.Graph:
    """The twin of a graph that `computes_float16`; the graph itself is left as it is."""
    return _emulate(graph, FLOAT16)


def as_computed(graph: gs.Graph) -> gs.Graph:
    """The form of a built graph that ONNX Runtime computes as written: a twin, or the graph itself."""
    if uses_bfloat16(graph):
        return emulate_bfloat16(graph)
    return emulate_float16(graph) if computes_float16(graph) else graph


def _emulate(graph: gs.Graph, low: np.dtype[Any]) -> gs.Graph:
    twin = copy_graph(graph)
    names = UniqueNames(twin)
    for tensor in twin.tensors().values():
        if isinstance(tensor, gs.Constant) and _is_of(tensor, low):
            tensor.values = tensor.values.astype(np.float32)
            tensor.export_dtype = None  # a copied constant would otherwise still be exported as the low type
    nodes: list[gs.Node] = []
    for node in twin.nodes:
        nodes.append(node)
        for index, tensor in enumerate(list(node.outputs)):
            if _is_of(tensor, low):
                tensor.dtype = np.dtype(np.float32)
                if node.op not in _EXACT_OPS:
                    nodes.extend(_round_output(node, index, low, names))
        _emulate_attributes(node, low)
    twin.nodes = nodes
    return twin


def _round_output(node: gs.Node, index: int, low: np.dtype[Any], names: UniqueNames) -> list[gs.Node]:
    """Casts to the low type and back between the node and its output; the output keeps its name."""
    output = node.outputs[index]
    exact = gs.Variable(names.tensor(f"{output.name}_exact"), np.dtype(np.float32), output.shape)
    rounded = gs.Variable(names.tensor(f"{output.name}_rounded"), low, output.shape)
    node.outputs[index] = exact
    down = gs.Node("Cast", names.node(f"{exact.name}_Cast"), {"to": _onnx_type(low)}, [exact], [rounded])
    up = gs.Node("Cast", names.node(f"{rounded.name}_Cast"), {"to": int(onnx.TensorProto.FLOAT)}, [rounded], [output])
    return [down, up]


def _emulate_attributes(node: gs.Node, low: np.dtype[Any]) -> None:
    for key in _TYPE_ATTRIBUTES:
        if node.attrs.get(key) == _onnx_type(low):
            node.attrs[key] = int(onnx.TensorProto.FLOAT)
    if node.op == "ConstantOfShape" and "value" in node.attrs and _is_of(node.attrs["value"], low):
        node.attrs["value"] = gs.Constant("", node.attrs["value"].values.astype(np.float32))


def _tensors(graph: gs.Graph) -> Iterator[gs.Tensor]:
    return (tensor for node in graph.nodes for tensor in (*node.inputs, *node.outputs))


def _onnx_type(dtype: np.dtype[Any]) -> int:
    return int(onnx.helper.np_dtype_to_tensor_dtype(dtype))


def _is_of(tensor: gs.Tensor, dtype: np.dtype[Any]) -> bool:
    return tensor.dtype == _onnx_type(dtype) if isinstance(tensor.dtype, int) else tensor.dtype == dtype
