"""A float32 twin of a bfloat16 or float16 graph, for ONNX Runtime on the CPU.

It has no bfloat16 kernels and few float16 ones. Operators without one run in float32, and the casts around them are
taken out where two meet, even with graph optimisation off: nothing rounds then, and nothing overflows. So every
tensor t of the low type becomes a float32 tensor that holds values of that type:

    t = float32(low(op(inputs)))

which is how a kernel behaves that reads the low type, computes in float32 and rounds its result once. Inputs and
outputs of the low type keep it, behind and before a Cast; subgraphs are treated like the graph around them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trtforge.graph.control_flow.sequences import SEQUENCE_OPS
from trtforge.graph.edit import all_graphs, all_nodes, copy_graph, replace_uses
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
    """True where `emulate_float16` serves: float16 tensors, and none in a sequence, whose type no tensor states."""
    if any(node.op in SEQUENCE_OPS for node in all_nodes(graph)):
        return False
    return any(_is_of(tensor, FLOAT16) for tensor in _tensors(graph))


def emulate_bfloat16(graph: gs.Graph) -> gs.Graph:
    """The twin of a graph that uses bfloat16; the graph itself is left as it is."""
    return _emulate(graph, BFLOAT16)


def emulate_float16(graph: gs.Graph) -> gs.Graph:
    """The twin of a graph that `computes_float16`; the graph itself is left as it is."""
    return _emulate(graph, FLOAT16)


def as_computed(graph: gs.Graph) -> gs.Graph:
    """The form of a built graph that ONNX Runtime computes as written: a twin, or the graph itself.

    Where a bfloat16 build has float16 parts, from a source that came with them, both types are rounded.
    """
    twin = emulate_bfloat16(graph) if uses_bfloat16(graph) else graph
    return emulate_float16(twin) if computes_float16(twin) else twin


def _emulate(graph: gs.Graph, low: np.dtype[Any]) -> gs.Graph:
    twin = copy_graph(graph)
    names = UniqueNames(twin)
    bodies = list(all_graphs(twin))
    raised = [_raise_input(tensor, bodies, names) for tensor in twin.inputs if _is_of(tensor, low)]
    lowered = [_lower_output(tensor, bodies, names) for tensor in twin.outputs if _is_of(tensor, low) and tensor.inputs]
    for body in bodies:
        if body is not twin:
            for tensor in body.inputs:
                _raise_type(tensor, low)
        _emulate_body(body, low, names)
    twin.nodes = [*raised, *twin.nodes, *lowered]
    return twin


def _emulate_body(body: gs.Graph, low: np.dtype[Any], names: UniqueNames) -> None:
    for tensor in body.tensors().values():
        if isinstance(tensor, gs.Constant) and _is_of(tensor, low):
            tensor.values = tensor.values.astype(np.float32)
            tensor.export_dtype = None  # a copied constant would otherwise still be exported as the low type
    nodes: list[gs.Node] = []
    for node in body.nodes:
        nodes.append(node)
        for index, tensor in enumerate(list(node.outputs)):
            if _raise_type(tensor, low) and node.op not in _EXACT_OPS:
                nodes.extend(_round_output(node, index, low, names))
        _emulate_attributes(node, low)
    body.nodes = nodes


def _raise_type(tensor: gs.Tensor, low: np.dtype[Any]) -> bool:
    """Whether a tensor was of the low type; it is float32 now."""
    if not _is_of(tensor, low):
        return False
    tensor.dtype = np.dtype(np.float32)
    return True


def _raise_input(tensor: gs.Tensor, bodies: Sequence[gs.Graph], names: UniqueNames) -> gs.Node:
    """The Cast behind an input of the low type; all that read the input read the Cast's result."""
    wide = gs.Variable(names.tensor(f"{tensor.name}_wide"), np.dtype(np.float32), tensor.shape)
    _replace(tensor, wide, bodies)
    return _cast(tensor, wide, names)


def _lower_output(tensor: gs.Tensor, bodies: Sequence[gs.Graph], names: UniqueNames) -> gs.Node:
    """The Cast before an output of the low type; all that read the output read what the Cast reads."""
    # Of the low type still: it is raised with the other results, which are rounded.
    wide = gs.Variable(names.tensor(f"{tensor.name}_wide"), tensor.dtype, tensor.shape)
    _replace(tensor, wide, bodies)
    producer = tensor.inputs[0]
    producer.outputs[next(index for index, output in enumerate(producer.outputs) if output is tensor)] = wide
    return _cast(wide, tensor, names)


def _replace(old: gs.Tensor, new: gs.Tensor, bodies: Sequence[gs.Graph]) -> None:
    replace_uses(old, new)
    for body in bodies[1:]:
        body.outputs = [new if tensor is old else tensor for tensor in body.outputs]


def _cast(source: gs.Tensor, target: gs.Tensor, names: UniqueNames) -> gs.Node:
    to = target.dtype if isinstance(target.dtype, int) else _onnx_type(np.dtype(target.dtype))
    return gs.Node("Cast", names.node(f"{source.name}_Cast"), {"to": to}, [source], [target])


def _round_output(node: gs.Node, index: int, low: np.dtype[Any], names: UniqueNames) -> list[gs.Node]:
    """Casts to the low type and back between the node and its output; the output keeps its name."""
    output = node.outputs[index]
    exact = gs.Variable(names.tensor(f"{output.name}_exact"), np.dtype(np.float32), output.shape)
    rounded = gs.Variable(names.tensor(f"{output.name}_rounded"), low, output.shape)
    node.outputs[index] = exact
    return [_cast(exact, rounded, names), _cast(rounded, output, names)]


def _emulate_attributes(node: gs.Node, low: np.dtype[Any]) -> None:
    for key in _TYPE_ATTRIBUTES:
        if node.attrs.get(key) == _onnx_type(low):
            node.attrs[key] = int(onnx.TensorProto.FLOAT)
    if node.op in ("Constant", "ConstantOfShape") and "value" in node.attrs and _is_of(node.attrs["value"], low):
        node.attrs["value"] = gs.Constant("", node.attrs["value"].values.astype(np.float32))


def _tensors(graph: gs.Graph) -> Iterator[gs.Tensor]:
    """Every tensor of a graph and of its bodies; some come more than once."""
    for body in all_graphs(graph):
        yield from (*body.inputs, *body.outputs)
        for node in body.nodes:
            yield from (*node.inputs, *node.outputs)


def _onnx_type(dtype: np.dtype[Any]) -> int:
    return int(onnx.helper.np_dtype_to_tensor_dtype(dtype))


def _is_of(tensor: gs.Tensor, dtype: np.dtype[Any]) -> bool:
    return tensor.dtype == _onnx_type(dtype) if isinstance(tensor.dtype, int) else tensor.dtype == dtype
