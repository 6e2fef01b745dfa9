"""The values of small integer tensors that are computed from sizes: the targets of Reshape and Expand.

Exporters write `Concat(Shape(x)[0], Shape(x)[1], -1, 16)` in many ways. Each value is a number, or the name of a size.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.fusion.qkv_layout import constant_ints, op_of
from trtforge.graph.edit import is_array

Size = int | str | None
Sizes = tuple[Size, ...]

# A target has as many values as a tensor has axes.
_MAX_VALUES = 16
_SAME_OPS = ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze")


class ShapeValues:
    """The values that nodes give, visited in order; None stands for a value that is not known.

    Args:
        sizes_of: gives the sizes of a tensor.
    """

    def __init__(self, sizes_of: Callable[[gs.Tensor], Sizes | None]) -> None:
        self._sizes_of = sizes_of
        self._values: dict[int, Sizes] = {}

    def of(self, tensor: gs.Tensor) -> Sizes | None:
        """The values in order; None where not even their number is known."""
        if is_array(tensor):
            values = np.asarray(tensor.values)
            is_small = values.size <= _MAX_VALUES and values.dtype.kind in "iu"
            return tuple(int(value) for value in values.ravel()) if is_small else None
        return self._values.get(id(tensor))

    def visit(self, node: gs.Node) -> None:
        """Note what a node gives."""
        if not node.outputs or not node.inputs:
            return
        values = self._compute(node)
        if values is not None and len(values) <= _MAX_VALUES:
            self._values[id(node.outputs[0])] = values

    def _compute(self, node: gs.Node) -> Sizes | None:
        op = op_of(node)
        if op == "Shape":
            sizes = self._sizes_of(node.inputs[0])
            return None if sizes is None else sizes[node.attrs.get("start", 0) : node.attrs.get("end")]
        if op == "Concat":
            return self._joined(node)
        first = self.of(node.inputs[0])
        if op == "Where" and len(node.inputs) == 3:
            return self._chosen(node)
        if first is None:
            return None
        if op in _SAME_OPS:
            return first
        if op == "Gather" and node.attrs.get("axis", 0) in (0, -1):
            indices = constant_ints(node, 1, [])
            is_inside = indices and all(-len(first) <= index < len(first) for index in indices)
            return tuple(first[index] for index in indices) if is_inside else None
        if op == "Slice" and constant_ints(node, 3, [0]) in ([0], [-1]) and constant_ints(node, 4, [1]) == [1]:
            starts, ends = constant_ints(node, 1, []), constant_ints(node, 2, [])
            return first[starts[0] : ends[0]] if len(starts) == len(ends) == 1 else None
        return self._calculated(node, first)

    def _joined(self, node: gs.Node) -> Sizes | None:
        """The parts of a Concat one after another; a part of known length may be unknown."""
        joined: list[Size] = []
        for tensor in node.inputs:
            part, sizes = self.of(tensor), self._sizes_of(tensor)
            length = sizes[0] if sizes is not None and len(sizes) == 1 else None
            if part is None and not isinstance(length, int):
                return None
            joined += part if part is not None else [None] * min(int(length or 0), _MAX_VALUES + 1)
            if len(joined) > _MAX_VALUES:
                return None
        return tuple(joined)

    def _chosen(self, node: gs.Node) -> Sizes | None:
        """Where with a constant condition."""
        condition, (yes, no) = node.inputs[0], (self.of(tensor) for tensor in node.inputs[1:])
        if not is_array(condition) or yes is None or no is None or condition.values.dtype != np.bool_:
            return None
        chosen = np.asarray(condition.values).ravel()
        if not len(chosen) == len(yes) == len(no):
            return None
        return tuple(a if pick else b for pick, a, b in zip(chosen, yes, no, strict=True))

    def _calculated(self, node: gs.Node, first: Sizes) -> Sizes | None:
        """A sum, difference, product or quotient of two numbers, and a product with 1."""
        op, second = op_of(node), self.of(node.inputs[1]) if len(node.inputs) == 2 else None
        if op not in ("Add", "Div", "Mul", "Sub") or second is None or len(first) != 1 or len(second) != 1:
            return None
        a, b = first[0], second[0]
        if isinstance(a, int) and isinstance(b, int):
            if op == "Div":
                return (a // b,) if a >= 0 and b > 0 else None
            return (a + b if op == "Add" else a - b if op == "Sub" else a * b,)
        if op in ("Mul", "Div") and b == 1:
            return (a,)
        return (b,) if op == "Mul" and a == 1 else (None,)
