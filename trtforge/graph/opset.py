"""Raise a model's opset with onnx's converter, and repair what that gets wrong. Runs in native.py's child process.

Tried op by op against ONNX Runtime (onnx 1.23, opsets 5 to 22 raised to 23), the converter

    fails on      operators that it does not know; a broadcast before opset 7 (attributes `axis`, `broadcast`) along an
                  axis or of dims with names; Cast to a type's name (before 6); BatchNormalization with spatial = 0
    gets wrong    Upsample, and Resize of opset 10: their grid is asymmetric and rounded down, newer defaults are not;
                  Hardmax before 13: it works on the input flattened to two dims; PRelu before 7: a slope per channel
    mistypes      the bounds of Clip and the value of Pad (attributes before opset 11) of a tensor that is not float32
    goes beyond   ONNX Runtime, which has no kernel of opset 22 for some operators.

Such nodes are written in the form of the new opsets before, and parked in a domain that the converter does not look
into: it keeps neither names of nodes nor of tensors, so nothing could be found again after it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, shape_inference, version_converter

from trtforge.errors import InputError
from trtforge.graph.protos import all_bodies, all_nodes
from trtforge.graph.validate import DEFAULT_DOMAINS

# The lowest opset that the other stages accept: fp16 scales of Q/DQ.
LOWEST_OPSET = 19
# The converter knows only registered operators; nodes of other domains pass through it unchanged.
_PARKED_DOMAIN = "trtforge.parked"
# Operators that ONNX Runtime 1.32 computes on a CPU up to opset 21 but not in their version of opset 22.
_NO_KERNEL_FROM_22 = frozenset(
    ["Bernoulli", "GlobalLpPool", "MaxRoiPool", "Multinomial", "RandomNormalLike", "RandomUniformLike", "RoiAlign"]
)
# Operators that are repaired, and the newest opset whose form is.
_REPAIRED_UP_TO = {
    "BatchNormalization": 8,
    "Cast": 5,
    "Clip": 10,
    "Hardmax": 12,
    "Pad": 10,
    "Resize": 10,
    "Upsample": 9,
}
_OLD_BROADCAST_OPS = frozenset(
    ["Add", "And", "Div", "Equal", "Greater", "Less", "Mul", "Or", "Pow", "Sub", "Xor", "Gemm", "PRelu"]
)


def default_opset(model: onnx.ModelProto) -> int:
    """The version of the default domain."""
    return int(next(entry.version for entry in model.opset_import if entry.domain in DEFAULT_DOMAINS))


def schema_of(node: onnx.NodeProto, opset: int) -> onnx.defs.OpSchema | None:
    """The schema of a node of the default domain; None for an unknown op or another domain."""
    if node.domain not in DEFAULT_DOMAINS:
        return None
    return _schema(node.op_type, opset)


# Every operator of a few opsets; a lookup takes longer than what is done with its result.
@functools.lru_cache(maxsize=1024)
def _schema(op_type: str, opset: int) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        return None


def raise_opset(model: onnx.ModelProto, opset: int) -> tuple[onnx.ModelProto, str]:
    """The model at a higher opset, or as high as the converter gets.

    Args:
        model: changed in place; its functions keep their own opset.
        opset: the one wanted; 21 is the most where ONNX Runtime lacks a kernel.

    Returns:
        The model, and the converter's reason where it could not be raised to what was wanted.
    """
    current = default_opset(model)
    nodes = list(all_nodes(model))
    if current < 22 and any(node.op_type in _NO_KERNEL_FROM_22 for node in nodes):
        opset = min(opset, 21)
    if current >= opset:
        return model, ""
    # The converter drops local functions.
    functions = list(model.functions)
    if any(_is_repaired(node, current) for node in nodes):
        # What follows a parked node has known types only where they are written down.
        with contextlib.suppress(Exception):
            # InferenceError, RuntimeError and pybind's types: what the file declares is then all there is.
            model = shape_inference.infer_shapes(model)
    is_parked = _Repairs(model, current).run()
    reason = ""
    for wanted in range(opset, max(current, min(opset, LOWEST_OPSET) - 1), -1):
        try:
            converted = version_converter.convert_version(model, wanted)
        except Exception as err:
            # The converter raises RuntimeError, its own ConvertError, and pybind's types.
            reason = reason or str(err) or type(err).__name__
            continue
        if is_parked:
            _unpark(converted)
        converted.functions.extend(functions)
        return converted, reason
    if is_parked:
        _unpark(model)
    return model, reason


def _unpark(model: onnx.ModelProto) -> None:
    for node in all_nodes(model):
        if node.domain == _PARKED_DOMAIN:
            node.domain = ""
    imports = [entry for entry in model.opset_import if entry.domain != _PARKED_DOMAIN]
    kept = [helper.make_opsetid(entry.domain, entry.version) for entry in imports]
    del model.opset_import[:]
    model.opset_import.extend(kept)


@dataclasses.dataclass(frozen=True, slots=True)
class _Types:
    """What inference knows of the tensors before conversion, by name."""

    dtypes: Mapping[str, int]
    ranks: Mapping[str, int]


def _types_of(model: onnx.ModelProto) -> _Types:
    dtypes: dict[str, int] = {}
    ranks: dict[str, int] = {}
    for body in all_bodies(model):
        if not isinstance(body, onnx.GraphProto):
            continue
        for info in (*body.value_info, *body.input, *body.output):
            dtypes[info.name] = info.type.tensor_type.elem_type
            if info.type.tensor_type.HasField("shape"):
                ranks[info.name] = len(info.type.tensor_type.shape.dim)
        for tensor in body.initializer:
            dtypes[tensor.name], ranks[tensor.name] = tensor.data_type, len(tensor.dims)
    return _Types(dtypes, ranks)


class _Repairs:
    """The repairs before one conversion."""

    def __init__(self, model: onnx.ModelProto, opset: int) -> None:
        self._model = model
        self._opset = opset

    @functools.cached_property
    def _types(self) -> _Types:
        return _types_of(self._model)

    def run(self) -> bool:
        """Write every node that the converter fails on or misreads in its new form, and park it; whether any was."""
        is_parked = False
        for graph in [body for body in all_bodies(self._model) if isinstance(body, onnx.GraphProto)]:
            nodes: list[onnx.NodeProto] = []
            for node in graph.node:
                is_repaired = _is_repaired(node, self._opset)
                nodes += self._repair(node) if is_repaired else [node]
                is_unknown = node.domain in DEFAULT_DOMAINS and schema_of(node, self._opset) is None
                if is_unknown or (is_repaired and node.op_type != "BatchNormalization"):
                    node.domain = _PARKED_DOMAIN
                    is_parked = True
            if len(nodes) > len(graph.node):
                copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
                del graph.node[:]
                graph.node.extend(copies)
        if is_parked:
            self._model.opset_import.append(helper.make_opsetid(_PARKED_DOMAIN, 1))
        return is_parked

    def _repair(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """A node in its new form, with those that must stand around it."""
        if node.op_type == "Cast":
            _name_to_type(node)
        elif node.op_type in _OLD_BROADCAST_OPS:
            return [*self._old_broadcast(node), node]
        elif node.op_type == "BatchNormalization":
            self._batch_norm(node)
        elif node.op_type in ("Upsample", "Resize"):
            return [*self._old_resize(node), node]
        elif node.op_type == "Hardmax":
            return _old_hardmax(node)
        elif node.op_type in ("Clip", "Pad"):
            return [*self._constants_as_inputs(node), node]
        return [node]

    def _old_broadcast(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """Give the second operand the trailing axes that numpy's rules need."""
        attributes = {attribute.name: attribute.i for attribute in node.attribute}
        rank, other = (self._types.ranks.get(name) for name in node.input[:2])
        axis = attributes.get("axis")
        if node.op_type == "PRelu":
            axis = 1 if other == 1 else None
        kept = [a for a in node.attribute if a.name not in ("axis", "broadcast", "consumed_inputs")]
        copies = [onnx.AttributeProto.FromString(attribute.SerializeToString()) for attribute in kept]
        del node.attribute[:]
        node.attribute.extend(copies)
        if node.op_type == "Gemm" or axis is None or not rank or other is None:
            return
        trailing = rank - axis % rank - other
        if trailing > 0:
            name = f"{node.output[0]}_operand"
            axes = list(range(other, other + trailing))
            yield helper.make_node("Unsqueeze", [node.input[1]], [name], name=name, axes=axes)
            node.input[1] = name

    def _batch_norm(self, node: onnx.NodeProto) -> None:
        """Drop `spatial` where parameters are per channel anyway."""
        spatial = next((attribute for attribute in node.attribute if attribute.name == "spatial"), None)
        if spatial is not None and self._types.ranks.get(node.input[3]) == 1:
            node.attribute.remove(spatial)

    def _old_resize(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """Upsample and the first Resize: an asymmetric grid, rounded down; ONNX Runtime rounds up where it shrinks."""
        attributes = {attribute.name: attribute for attribute in node.attribute}
        if "scales" in attributes:
            name = f"{node.output[0]}_scales"
            scales = np.array(attributes["scales"].floats, np.float32)
            yield _constant(name, scales)
            node.input.append(name)
        rounding = "ceil" if node.op_type == "Resize" and self._shrinks(node) else "floor"
        mode = attributes["mode"].s.decode() if "mode" in attributes else "nearest"
        kept = {"mode": mode, "coordinate_transformation_mode": "asymmetric", "nearest_mode": rounding}
        _set_attributes(node, kept)
        node.op_type = "Resize"
        node.input[:] = [node.input[0], "", *node.input[1:]]

    def _constants_as_inputs(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """The attributes of Clip and Pad as inputs, in the type of the tensor that they go with."""
        values = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        number = self._types.dtypes.get(node.input[0], 0) or TensorProto.FLOAT
        if number == TensorProto.STRING:
            raise InputError(
                f"node {node.name!r} ({node.op_type}) cannot be used", "it takes text", "export the model again"
            )
        dtype = helper.tensor_dtype_to_np_dtype(number)
        names = ("min", "max") if node.op_type == "Clip" else ("pads", "value")
        if node.op_type == "Pad":
            values.setdefault("value", 0.0)
        for key in names:
            if key not in values:
                node.input.append("")
                continue
            name = f"{node.output[0]}_{key}"
            yield _constant(name, np.array(values[key], np.int64 if key == "pads" else dtype))
            node.input.append(name)
        _set_attributes(node, {"mode": values["mode"].decode()} if "mode" in values else {})

    def _shrinks(self, node: onnx.NodeProto) -> bool:
        """Whether a Resize makes an axis smaller: ONNX Runtime then rounds its grid up."""
        stored = {t.name: t for body in all_bodies(self._model) for t in getattr(body, "initializer", ())}
        made = {maker.output[0]: maker.attribute[0].t for maker in all_nodes(self._model) if _is_constant(maker)}
        scales = (stored | made).get(node.input[1]) if len(node.input) > 1 else None
        return scales is not None and bool((numpy_helper.to_array(scales) < 1).any())


def _old_hardmax(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Hardmax over everything from an axis on, as up to opset 12."""
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
    source, result = node.input[0], node.output[0]
    shape, flat, hard = (f"{result}_{part}" for part in ("shape", "flat", "hard"))
    del node.attribute[:]
    node.attribute.append(helper.make_attribute("axis", 1))
    node.input[0], node.output[0] = flat, hard
    return [
        helper.make_node("Shape", [source], [shape], name=shape),
        helper.make_node("Flatten", [source], [flat], name=flat, axis=axis),
        node,
        helper.make_node("Reshape", [hard, shape], [result], name=f"{result}_reshape"),
    ]


def _is_repaired(node: onnx.NodeProto, opset: int) -> bool:
    """Whether a node of an opset is one that the converter would fail on or misread."""
    if node.domain not in DEFAULT_DOMAINS:
        return False
    newest = _REPAIRED_UP_TO.get(node.op_type, 6 if node.op_type in _OLD_BROADCAST_OPS else 0)
    return opset <= newest and (opset == 10 or node.op_type != "Resize")


def _name_to_type(node: onnx.NodeProto) -> None:
    """Before opset 6 a Cast names its type: "FLOAT16"."""
    for attribute in node.attribute:
        if attribute.name == "to" and attribute.type == onnx.AttributeProto.STRING:
            name = attribute.s.decode(errors="replace")
            number = dict(TensorProto.DataType.items()).get(name.upper())
            if not number:
                what = f"node {node.name!r} (Cast) cannot be used"
                raise InputError(what, f"{name!r} is no element type", "export the model again")
            attribute.CopyFrom(helper.make_attribute("to", number))


def _is_constant(node: onnx.NodeProto) -> bool:
    return node.op_type == "Constant" and len(node.attribute) == 1 and node.attribute[0].HasField("t")


def _constant(name: str, values: np.ndarray[Any, Any]) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], name=name, value=numpy_helper.from_array(values, name))


def _set_attributes(node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    del node.attribute[:]
    node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
