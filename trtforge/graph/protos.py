"""Walk a ModelProto: every graph, node and tensor, wherever it is nested.

A model holds graphs in three places: the top graph, subgraphs in node attributes (If, Loop, Scan), and the bodies of
local functions. A tensor sits in an initializer list, a sparse initializer, or a node attribute of any of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx
from google.protobuf.message import Message

Body = onnx.GraphProto | onnx.FunctionProto


def find_damaged_text(message: Message) -> str | None:
    """The name of a text field that is not UTF-8, anywhere in a message; its Python value is then bytes."""
    pending = [message]
    while pending:
        current = pending.pop()
        if isinstance(current, onnx.TensorProto):
            # Listing the fields of a tensor would copy its data.
            if isinstance(current.name, bytes) or isinstance(current.doc_string, bytes):
                return "name of a tensor"
            pending.extend(current.external_data)
            continue
        for field, value in current.ListFields():
            values = [value] if isinstance(value, (str, bytes, Message)) else value
            if field.type == field.TYPE_STRING and any(isinstance(text, bytes) for text in values):
                return f"{field.name} of a {current.DESCRIPTOR.name}"
            if field.type == field.TYPE_MESSAGE:
                pending.extend(values)
    return None


def child_graphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The subgraphs that a node holds directly."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            yield from attribute.graphs


def all_bodies(model: onnx.ModelProto) -> Iterator[Body]:
    """The top graph, the function bodies, and every graph nested in them, outer before inner."""
    pending: list[Body] = [*reversed(model.functions), model.graph]
    while pending:
        body = pending.pop()
        yield body
        nested = [graph for node in body.node if node.attribute for graph in child_graphs(node)]
        pending.extend(reversed(nested))


def all_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Every node of a model, subgraphs and function bodies included."""
    for body in all_bodies(model):
        yield from body.node


def attribute_tensors(attribute: onnx.AttributeProto) -> Iterator[onnx.TensorProto]:
    """The tensors that an attribute holds directly, both halves of a sparse one included."""
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors
    sparse = [*attribute.sparse_tensors, *([attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else [])]
    for tensor in sparse:
        yield tensor.values
        yield tensor.indices


def all_tensors(model: onnx.ModelProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    """Every stored tensor of a model with the words that an error names it by."""
    for body in all_bodies(model):
        if isinstance(body, onnx.GraphProto):
            for tensor in body.initializer:
                yield f"initializer {tensor.name!r}", tensor
            for sparse in body.sparse_initializer:
                yield f"sparse initializer {sparse.values.name!r}", sparse.values
                yield f"indices of sparse initializer {sparse.values.name!r}", sparse.indices
        holders: Sequence[onnx.NodeProto] = body.node
        for node in holders:
            for attribute in node.attribute:
                for tensor in attribute_tensors(attribute):
                    yield f"attribute {attribute.name!r} of node {node.name!r} ({node.op_type})", tensor
        if isinstance(body, onnx.FunctionProto):
            for attribute in body.attribute_proto:
                for tensor in attribute_tensors(attribute):
                    yield f"attribute {attribute.name!r} of function {body.name!r}", tensor
