"""A graph as an ONNX message; equal graphs give equal messages.

It has what onnx-graphsurgeon's exporter writes, in the same order, and is written here because a graph crosses to the
child process several times:

- Every message is filled in place, and each type is made once: a third of the time, and no second copy.
- A constant that a subgraph reads from outside is stored once, in the outermost graph that knows it:
  onnx-graphsurgeon would write a copy into every subgraph.
- 4-bit and 8-bit float types are written by onnx itself: onnx-graphsurgeon gives some the wrong size or type.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import AttributeProto, TensorProto, helper
from onnx_graphsurgeon.util.misc import convert_to_onnx_attr_type

from trtforge.errors import InputError
from trtforge.graph.edit import all_graphs, is_array
from trtforge.graph.protos import all_bodies
from trtforge.graph.storage import tensor_from_array
from trtforge.graph.validate import DEFAULT_DOMAINS

# Newest IR version that TensorRT-RTX 1.7's parser and ONNX Runtime 1.23 both read; opset 23 runs with it.
IR_VERSION = 10


def model_from_graph(graph: gs.Graph, stubs: Collection[int] = ()) -> onnx.ModelProto:
    """The model of a graph, made by trtforge, with sorted opset imports.

    Args:
        graph: it is not changed.
        stubs: ids of the constants of which type and dims are written, but no data.

    Raises:
        InputError: the graph cannot be written as ONNX.
    """
    model = onnx.ModelProto(ir_version=IR_VERSION, producer_name="trtforge", producer_version="")
    try:
        _write_graph(graph, model.graph, stubs)
        for function in graph.functions:
            _write_function(function, model.functions.add())
        model.opset_import.extend(_opset_imports(graph))
    except (TypeError, ValueError, KeyError, RuntimeError, AttributeError) as err:
        raise InputError(
            "the graph cannot be written as ONNX", str(err), "report the model: this may be a defect"
        ) from err
    if any(current is not graph for current in all_graphs(graph)):
        _store_once(model)
    return model


def write_node(node: gs.Node, proto: onnx.NodeProto, stubs: Collection[int] = ()) -> None:
    """Write a node, with the graphs that it holds, into an empty message."""
    proto.op_type = node.op
    proto.input.extend([tensor.name for tensor in node.inputs])
    proto.output.extend([tensor.name for tensor in node.outputs])
    if node.name:
        proto.name = node.name
    if node.domain is not None:
        proto.domain = node.domain
    for name, value in node.attrs.items():
        if isinstance(value, gs.Graph):
            _write_graph(value, proto.attribute.add(name=name, type=AttributeProto.GRAPH).g, stubs)
        else:
            proto.attribute.append(_attribute(name, value))


def _attribute(name: str, value: Any) -> AttributeProto:
    if isinstance(value, gs.Constant):
        return AttributeProto(name=name, type=AttributeProto.TENSOR, t=_tensor(value))
    if isinstance(value, gs.Node.AttributeRef):
        return AttributeProto(name=name, type=convert_to_onnx_attr_type(value.type), ref_attr_name=value.name)
    return helper.make_attribute(name, _element_type(value) if isinstance(value, type) else value)


def _tensor(constant: gs.Constant, with_data: bool = True) -> TensorProto:
    if is_array(constant):
        return tensor_from_array(constant.name, constant.values, with_data)
    # Text stays in its protobuf form.
    tensor = TensorProto()
    tensor.CopyFrom(constant._values.tensor)
    tensor.name = constant.name
    return tensor


def _write_graph(graph: gs.Graph, proto: onnx.GraphProto, stubs: Collection[int]) -> None:
    proto.name = graph.name
    if graph.doc_string:
        proto.doc_string = graph.doc_string
    for node in graph.nodes:
        write_node(node, proto.node.add(), stubs)
    for tensor in graph.inputs:
        _write_info(tensor, proto.input.add())
    for tensor in graph.outputs:
        _write_info(tensor, proto.output.add())
    ports = {tensor.name for tensor in (*graph.inputs, *graph.outputs)}
    for name, tensor in _tensors_of(graph).items():
        if isinstance(tensor, gs.Constant):
            proto.initializer.append(_tensor(tensor, id(tensor) not in stubs))
        elif name not in ports and (tensor.dtype is not None or tensor.shape is not None):
            _write_info(tensor, proto.value_info.add())


def _write_function(function: gs.Function, proto: onnx.FunctionProto) -> None:
    """Functions have no initializers: their constants are nodes."""
    proto.domain = function.domain or ""
    proto.name = function.name
    if function.doc_string:
        proto.doc_string = function.doc_string
    proto.input.extend([tensor.name for tensor in function.inputs])
    proto.output.extend([tensor.name for tensor in function.outputs])
    for name, tensor in _tensors_of(function).items():
        if isinstance(tensor, gs.Constant):
            proto.node.append(helper.make_node("Constant", [], [name], value=_tensor(tensor)))
    for node in function.nodes:
        write_node(node, proto.node.add())
    for name, default in function.attrs.items():
        if default is None:
            proto.attribute.append(name)
        else:
            proto.attribute_proto.append(_attribute(name, default))
    versions = {entry.domain: entry.version for entry in function.import_domains or []} or {"": function.opset}
    for domain in {node.domain for holder in all_graphs(function) for node in holder.nodes} - {None}:
        versions.setdefault(domain, 1)
    proto.opset_import.extend(helper.make_opsetid(domain, versions[domain]) for domain in sorted(versions))


def _tensors_of(graph: gs.Graph) -> dict[str, gs.Tensor]:
    """The tensors that a graph names, without those of its subgraphs, in the order of its nodes."""
    tensors = {tensor.name: tensor for tensor in graph.inputs}
    for node in graph.nodes:
        tensors.update({tensor.name: tensor for tensor in (*node.inputs, *node.outputs)})
    tensors.update({tensor.name: tensor for tensor in graph.outputs})
    # An omitted input or output.
    tensors.pop("", None)
    return tensors


def _write_info(tensor: gs.Tensor, info: onnx.ValueInfoProto) -> None:
    info.name = tensor.name
    if tensor.dtype is None:
        return
    element = _tensor_type(tensor.dtype, None if tensor.shape is None else tuple(tensor.shape))
    kind = "tensor_type" if isinstance(tensor, gs.Constant) else tensor.type
    if kind == "tensor_type":
        info.type.CopyFrom(element)
    elif kind == "sequence_type":
        info.type.sequence_type.elem_type.CopyFrom(element)


# A large model has few different types.
@functools.lru_cache(maxsize=4096)
def _tensor_type(dtype: Any, shape: tuple[int | str | None, ...] | None) -> onnx.TypeProto:
    return helper.make_tensor_type_proto(_element_type(dtype), shape)


def _element_type(dtype: Any) -> int:
    """A type, which onnx-graphsurgeon gives as a numpy or an ONNX one, as an ONNX one."""
    return dtype if isinstance(dtype, int) else helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def _opset_imports(graph: gs.Graph) -> list[onnx.OperatorSetIdProto]:
    versions = {entry.domain: entry.version for entry in graph.import_domains or []}
    versions = {domain: version for domain, version in versions.items() if domain not in DEFAULT_DOMAINS}
    used = {node.domain for holder in all_graphs(graph) for node in holder.nodes if node.domain}
    for domain in used - set(DEFAULT_DOMAINS):
        versions.setdefault(domain, 1)
    versions[""] = graph.opset
    return [helper.make_opsetid(domain, versions[domain]) for domain in sorted(versions)]


def _store_once(model: onnx.ModelProto) -> None:
    """Move the initializers of subgraphs to the top graph, each once; a name that means several things stays."""
    graphs = [body for body in all_bodies(model) if isinstance(body, onnx.GraphProto)]
    if len(graphs) == 1:
        return
    defined = {name for body in graphs for node in body.node for name in node.output}
    defined.update(port.name for body in graphs for port in body.input)
    first: dict[str, TensorProto] = {}
    for body in graphs:
        for tensor in body.initializer:
            if first.setdefault(tensor.name, tensor) is not tensor and first[tensor.name] != tensor:
                # ONNX Runtime would read the outer one everywhere.
                defined.add(tensor.name)
    stored = {tensor.name for tensor in model.graph.initializer}
    for body in graphs[1:]:
        kept = []
        for tensor in body.initializer:
            if tensor.name in defined:
                kept.append(TensorProto.FromString(tensor.SerializeToString()))
            elif tensor.name not in stored:
                model.graph.initializer.append(tensor)
                stored.add(tensor.name)
        del body.initializer[:]
        body.initializer.extend(kept)
