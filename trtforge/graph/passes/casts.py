"""Remove casts that change nothing.

A cast loses nothing when its result type holds every value of its source: float16 -> float32, int32 -> int64,
int16 -> float32, bool -> anything. Behind such a cast, a second one may read the source itself. int32 -> int64 -> int32
therefore goes; float32 -> float16 -> float32 rounds, and int32 -> float32 -> int32 does from 2^24 on: they stay.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from trtforge.graph.edit import InputEdits, all_graphs, is_onnx_op
from trtforge.graph.signature import tensor_dtype

# Bits of an integer's magnitude, and whether it has a sign.
_INTEGERS = {
    "bool": (1, False),
    "uint8": (8, False),
    "uint16": (16, False),
    "uint32": (32, False),
    "uint64": (64, False),
    "int8": (7, True),
    "int16": (15, True),
    "int32": (31, True),
    "int64": (63, True),
}
# Integers up to 2^n that a float type holds, and which float types hold it.
_FLOATS = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}
_WIDER_FLOATS = {
    "float16": ("float32", "float64"),
    "bfloat16": ("float32", "float64"),
    "float32": ("float64",),
    "float64": (),
}
_ORDINARY = frozenset([*_INTEGERS, *_FLOATS])


def is_lossless(source: str, target: str) -> bool:
    """Whether a type holds every value of another one; types are numpy's names."""
    if source == target:
        return source in _INTEGERS or source in _FLOATS
    if source in _FLOATS:
        return target in _WIDER_FLOATS[source]
    if source not in _INTEGERS:
        return False
    bits, is_signed = _INTEGERS[source]
    if target in _FLOATS:
        return bits <= _FLOATS[target]
    # To bool, everything but 0 becomes 1.
    if target not in _INTEGERS or target == "bool":
        return False
    target_bits, target_signed = _INTEGERS[target]
    return bits <= target_bits and (target_signed or not is_signed)


def remove_casts(graph: gs.Graph) -> int:
    """Turn casts to a tensor's own type into Identity, and let casts read past lossless ones, in place.

    Args:
        graph: sorted, with inferred types.

    Returns:
        How many nodes changed; those that nothing reads any more are left for dead node removal.
    """
    num_changed = 0
    edits = InputEdits()
    sources: dict[int, gs.Tensor] = {}
    for current in all_graphs(graph):
        for node in current.nodes:
            if not _is_cast(node) or _target(node) not in _ORDINARY:
                continue
            source = sources.get(id(node.inputs[0]), node.inputs[0])
            if source is not node.inputs[0]:
                edits.replace(node, 0, source)
                num_changed += 1
            if _type_name(source) == _target(node):
                node.op = "Identity"
                node.attrs.clear()
                num_changed += 1
            elif _loses_nothing(source, node):
                sources[id(node.outputs[0])] = source
    edits.apply()
    return num_changed


def _is_cast(node: gs.Node) -> bool:
    return node.op == "Cast" and is_onnx_op(node) and len(node.inputs) == 1


def _loses_nothing(source: gs.Tensor, node: gs.Node) -> bool:
    name = _type_name(source)
    return name is not None and is_lossless(name, _target(node))


def _target(node: gs.Node) -> str:
    dtype = tensor_dtype(node.attrs["to"])
    return "" if dtype is None else str(dtype.name)


def _type_name(tensor: gs.Tensor) -> str | None:
    dtype = tensor_dtype(tensor.dtype)
    return None if dtype is None else str(dtype.name)
