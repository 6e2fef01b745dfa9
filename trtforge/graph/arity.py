"""Nodes have what their operators require: every pass counts on it. Runs in native.py's child process."""

from __future__ import annotations

import onnx

from trtforge.errors import InputError
from trtforge.graph.opset import default_opset, schema_of
from trtforge.graph.protos import all_bodies
from trtforge.graph.validate import DEFAULT_DOMAINS

_EXPORT_AGAIN = "export the model again"


def check_arity(model: onnx.ModelProto) -> None:
    """Refuse nodes that lack an input, output, attribute or body that their operator requires.

    Raises:
        InputError: the first such node.
    """
    opset = default_opset(model)
    for body in all_bodies(model):
        if isinstance(body, onnx.FunctionProto):
            # Its own opset, for the bodies nested in it as well, which come next.
            opset = next((entry.version for entry in body.opset_import if entry.domain in DEFAULT_DOMAINS), opset)
        for node in body.node:
            schema = schema_of(node, opset)
            if schema is not None:
                _check_ports(node, schema)
                _check_attributes(node, schema)
                _check_bodies(node)


def _check_ports(node: onnx.NodeProto, schema: onnx.defs.OpSchema) -> None:
    formal = schema.inputs[: schema.min_input]
    given = [bool(name) for name in node.input]
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    is_complete = len(given) >= schema.min_input and all(
        name or parameter.option == optional for name, parameter in zip(given, formal, strict=False)
    )
    if not is_complete or len(node.output) < schema.min_output:
        raise InputError(
            f"node {node.name!r} ({node.op_type}) lacks an input or output that it needs",
            f"it has {sum(given)} inputs and {len(node.output)} outputs; it needs "
            f"{schema.min_input} and {schema.min_output}",
            _EXPORT_AGAIN,
        )


def _check_attributes(node: onnx.NodeProto, schema: onnx.defs.OpSchema) -> None:
    given = {attribute.name: attribute for attribute in node.attribute}
    for name, wanted in schema.attributes.items():
        # A hint of opsets before 6 that nothing reads.
        if name not in given and wanted.required and name != "consumed_inputs":
            raise InputError(
                f"node {node.name!r} ({node.op_type}) lacks the attribute {name!r}", "it needs one", _EXPORT_AGAIN
            )
        if name not in given or given[name].ref_attr_name:
            continue
        kind = onnx.AttributeProto.AttributeType.Name(given[name].type)
        expected = str(wanted.type).removeprefix("AttrType.")
        if kind != expected:
            raise InputError(
                f"attribute {name!r} of node {node.name!r} ({node.op_type}) cannot be used",
                f"its kind is {kind}; it has to be {expected}",
                _EXPORT_AGAIN,
            )


def _check_bodies(node: onnx.NodeProto) -> None:
    """The ports of a body are as many as those of its node."""
    bodies = {attribute.name: attribute.g for attribute in node.attribute if attribute.HasField("g")}
    if node.op_type == "If":
        expected = {name: (0, len(node.output)) for name in bodies}
    elif node.op_type == "Loop":
        expected = {name: (len(node.input), 1 + len(node.output)) for name in bodies}
    else:
        return
    for name, body in bodies.items():
        if (len(body.input), len(body.output)) != expected[name]:
            raise InputError(
                f"the {name} of node {node.name!r} ({node.op_type}) does not fit the node",
                f"it has {len(body.input)} inputs and {len(body.output)} outputs; "
                f"{expected[name][0]} and {expected[name][1]} were expected",
                _EXPORT_AGAIN,
            )
