"""Integer inputs whose values become shapes, cuts, trip counts or conditions: profiles give them ranges."""

from __future__ import annotations

import onnx
from onnx import TensorProto

from trtforge.graph.protos import all_bodies

# Inputs of an operator whose values decide shapes.
_SHAPING: dict[str, tuple[int, ...]] = {
    "CenterCropPad": (1,),
    "ConstantOfShape": (0,),
    "Expand": (1,),
    "If": (0,),
    "Loop": (0, 1),
    "OneHot": (1,),
    "Pad": (1,),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Resize": (2, 3),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Unsqueeze": (1,),
    "Upsample": (1,),
}
# What a value passes through on its way; an activation's arithmetic ends at anything else.
# fmt: off
_CARRIERS = frozenset([
    "Abs", "Add", "And", "Cast", "CastLike", "Ceil", "Clip", "Concat", "Div", "Equal", "Expand", "Flatten", "Floor",
    "Gather", "Greater", "GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg",
    "Not", "Or", "Pow", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "Round", "Sign", "Slice",
    "Split", "Sqrt", "Squeeze", "Sub", "Tile", "Unsqueeze", "Where",
])
# fmt: on
_INTEGERS = frozenset([TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL])


def find_shape_inputs(model: onnx.ModelProto) -> dict[str, str]:
    """By input name, the node that its values decide; inputs of two and more axes hold no shape.

    Args:
        model: names are unique across subgraphs.
    """
    stored = {tensor.name for tensor in model.graph.initializer}
    candidates = {
        port.name
        for port in model.graph.input
        if port.name not in stored
        and port.type.tensor_type.elem_type in _INTEGERS
        and port.type.tensor_type.HasField("shape")
        and len(port.type.tensor_type.shape.dim) < 2
    }
    if not candidates:
        return {}
    nodes = [node for body in all_bodies(model) for node in body.node]
    producers = {name: node for node in nodes for name in node.output if name}
    found: dict[str, str] = {}
    visited: set[str] = set()
    for node in nodes:
        pending = [node.input[i] for i in _SHAPING.get(node.op_type, ()) if i < len(node.input)]
        while pending:
            name = pending.pop()
            if name in visited or not name:
                continue
            visited.add(name)
            if name in candidates:
                found[name] = f"node {node.name!r} ({node.op_type})"
            producer = producers.get(name)
            if producer is not None and producer.op_type in _CARRIERS:
                pending.extend(producer.input)
    return {name: found[name] for name in (port.name for port in model.graph.input) if name in found}
