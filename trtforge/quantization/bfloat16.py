"""A float32 twin of a bfloat16 graph, for an executor that has no bfloat16 kernels (ONNX Runtime on the CPU).

Every bfloat16 tensor t becomes a float32 tensor that holds bfloat16 values:

    t = float32(bfloat16(op(inputs)))

which is how a kernel behaves that reads bfloat16, computes in float32 and rounds its result once.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trtforge.graph.edit import copy_graph
from trtforge.graph.names import UniqueNames
from trtforge.quantization.cast_ops import LAYOUT_OPS
from trtforge.quantization.op_types import BFLOAT16

# They only move values, so their results are rounded already.
_EXACT_OPS = LAYOUT_OPS | {"Where"}


def uses_bfloat16(graph: gs.Graph) -> bool:
    """True when a tensor of a graph is bfloat16: `cast_graph` made it so, or its source is."""
    return any(_is_bfloat16(tensor) for node in graph.nodes for tensor in (*node.inputs, *node.outputs))


def emulate_bfloat16(graph: gs.Graph) -> gs.Graph:
    """The twin of a graph that uses bfloat16; the graph itself is left as it is.

    Args:
        graph: its inputs and outputs have other types than bfloat16.
    """
    twin = copy_graph(graph)
    names = UniqueNames(twin)
    for tensor in twin.tensors().values():
        if isinstance(tensor, gs.Constant) and _is_bfloat16(tensor):
            tensor.values = tensor.values.astype(np.float32)
            tensor.export_dtype = None  # a copied constant would otherwise still be exported as bfloat16
    nodes: list[gs.Node] = []
    for node in twin.nodes:
        nodes.append(node)
        for index, tensor in enumerate(list(node.outputs)):
            if _is_bfloat16(tensor):
                tensor.dtype = np.dtype(np.float32)
                if node.op not in _EXACT_OPS:
                    nodes.extend(_round_output(node, index, names))
        _emulate_attributes(node)
    twin.nodes = nodes
    return twin


def _round_output(node: gs.Node, index: int, names: UniqueNames) -> list[gs.Node]:
    """Casts to bfloat16 and back between the node and its output; the output keeps its name."""
    output = node.outputs[index]
    exact = gs.Variable(names.tensor(f"{output.name}_exact"), np.dtype(np.float32), output.shape)
    rounded = gs.Variable(names.tensor(f"{output.name}_rounded"), BFLOAT16, output.shape)
    node.outputs[index] = exact
    down = gs.Node("Cast", names.node(f"{exact.name}_Cast"), {"to": int(onnx.TensorProto.BFLOAT16)}, [exact], [rounded])
    up = gs.Node("Cast", names.node(f"{rounded.name}_Cast"), {"to": int(onnx.TensorProto.FLOAT)}, [rounded], [output])
    return [down, up]


def _emulate_attributes(node: gs.Node) -> None:
    if node.op == "Cast" and node.attrs["to"] == onnx.TensorProto.BFLOAT16 and not _is_bfloat16(node.outputs[0]):
        node.attrs["to"] = int(onnx.TensorProto.FLOAT)
    elif node.op == "ConstantOfShape" and _is_bfloat16(node.attrs["value"]):
        node.attrs["value"] = gs.Constant("", node.attrs["value"].values.astype(np.float32))


def _is_bfloat16(tensor: gs.Tensor) -> bool:
    return tensor.dtype == onnx.TensorProto.BFLOAT16 if isinstance(tensor.dtype, int) else tensor.dtype == BFLOAT16
