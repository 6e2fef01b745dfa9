"""Nodes have what their operators require: every pass counts on it. Runs in native.py's child process."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import onnx

from trtforge.errors import InputError
from trtforge.graph.opset import default_opset, schema_of
from trtforge.graph.protos import all_bodies
from trtforge.graph.validate import DEFAULT_DOMAINS

_EXPORT_AGAIN = "export the model again"
_Kind = onnx.AttributeProto.AttributeType


@dataclasses.dataclass(frozen=True, slots=True)
class _Needs:
    """What an operator requires of its nodes.

    Attributes:
        inputs: for each of the inputs that a node must at least have, whether it must be there too.
        num_outputs: outputs that it must at least have.
        attributes: names of those that it must have.
        kinds: the kind of each attribute, by name.
    """

    inputs: tuple[bool, ...]
    num_outputs: int
    attributes: tuple[str, ...]
    kinds: Mapping[str, int]


# Every operator of a few opsets; onnx copies what a schema holds with each look.
@functools.lru_cache(maxsize=1024)
def _needs_of(schema: onnx.defs.OpSchema) -> _Needs:
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    attributes = schema.attributes
    return _Needs(
        tuple(parameter.option != optional for parameter in schema.inputs[: schema.min_input]),
        schema.min_output,
        # A hint of opsets before 6 that nothing reads.
        tuple(name for name, wanted in attributes.items() if wanted.required and name != "consumed_inputs"),
        {name: _Kind.Value(str(wanted.type).removeprefix("AttrType.")) for name, wanted in attributes.items()},
    )


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
                needs = _needs_of(schema)
                _check_ports(node, needs)
                _check_attributes(node, needs)
                _check_bodies(node)


def _check_ports(node: onnx.NodeProto, needs: _Needs) -> None:
    given = [bool(name) for name in node.input]
    is_complete = len(given) >= len(needs.inputs) and all(
        is_given or not is_needed for is_given, is_needed in zip(given, needs.inputs, strict=False)
    )
    if not is_complete or len(node.output) < needs.num_outputs:
        raise InputError(
            f"node {node.name!r} ({node.op_type}) lacks an input or output that it needs",
            f"it has {sum(given)} inputs and {len(node.output)} outputs; it needs "
            f"{len(needs.inputs)} and {needs.num_outputs}",
            _EXPORT_AGAIN,
        )


def _check_attributes(node: onnx.NodeProto, needs: _Needs) -> None:
    given = {attribute.name: attribute for attribute in node.attribute}
    for name in needs.attributes:
        if name not in given:
            raise InputError(
                f"node {node.name!r} ({node.op_type}) lacks the attribute {name!r}", "it needs one", _EXPORT_AGAIN
            )
    for name, attribute in given.items():
        kind = needs.kinds.get(name, attribute.type)
        if attribute.type != kind and not attribute.ref_attr_name:
            raise InputError(
                f"attribute {name!r} of node {node.name!r} ({node.op_type}) cannot be used",
                f"its kind is {_Kind.Name(attribute.type)}; it has to be {_Kind.Name(kind)}",
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
