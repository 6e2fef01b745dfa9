"""Sizes of tensors as far as matching needs them: what type inference left open is filled in where one rule gives it.

onnx's inference forgets a symbol when it meets an unknown size: [batch, seq, H] + [?, ?, H] is [?, ?, H] to it. In one
pass over the nodes, in order:

1.  An element-wise operator gives each axis the size that an operand knows there and that is not 1.
2.  Products, layout operators, attention and the normalisations pass on the sizes of what they read.
3.  A Reshape has the sizes of its target (`shape_values`). One that is open is what is left when all others and those
    of the input are cancelled.
4.  A size that nothing tells gets a name of its own, "?1", so that later ones can be known to equal it.

Rule 1 believes that an operand of unknown size broadcasts into the known one. Where it does not, at run time, the known
size is 1: the Reshapes that are proved with it keep the number of elements, which then contradicts itself.
Names that are no identifiers ("?", "") say nothing: exporters give them to unrelated axes.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Sequence

import onnx_graphsurgeon as gs

from trtforge.fusion.qkv_layout import constant_ints, op_of
from trtforge.fusion.shape_values import ShapeValues, Size, Sizes
from trtforge.graph.names import is_dim_name

# fmt: off
_SAME_OPS = frozenset((
    "Cast", "Clip", "DequantizeLinear", "Erf", "Gelu", "Identity", "IsNaN", "LayerNormalization", "Neg", "Not", "Relu",
    "QuantizeLinear", "RMSNormalization", "Reciprocal", "RotaryEmbedding", "Sigmoid", "Softmax", "Sqrt", "Swish",
    "Tanh", "Trilu",
))
# fmt: on
# What reading a damaged node raises: an attribute of another type, a missing input.
DAMAGE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_BROADCAST_OPS = frozenset(("Add", "And", "Div", "Max", "Min", "Mul", "Or", "Pow", "Sub", "Where"))


class KnownSizes:
    """The sizes of every tensor of a sorted graph, by one pass over its nodes."""

    def __init__(self, graph: gs.Graph) -> None:
        self._sizes: dict[int, Sizes | None] = {}
        self._values = ShapeValues(self.of)
        self._num_named = 0
        for node in graph.nodes:
            self._visit(node)

    def of(self, tensor: gs.Tensor) -> Sizes | None:
        """One entry for each axis, a number or a name; None where the rank is unknown."""
        if id(tensor) not in self._sizes:
            self._sizes[id(tensor)] = self._named(_stated(tensor))
        return self._sizes[id(tensor)]

    def rank(self, tensor: gs.Tensor) -> int:
        """The number of axes; -1 where unknown."""
        sizes = self.of(tensor)
        return -1 if sizes is None else len(sizes)

    def last(self, tensor: gs.Tensor) -> int | None:
        """The size of the last axis, where it is a number."""
        sizes = self.of(tensor)
        return sizes[-1] if sizes and isinstance(sizes[-1], int) else None

    def _visit(self, node: gs.Node) -> None:
        """Note the sizes of what a node gives; of a damaged one, what its outputs state."""
        for index, tensor in enumerate(node.outputs):
            try:
                derived = self._derive_split(node, tensor) if op_of(node) == "Split" else None
                derived = self._derive(node) if index == 0 and derived is None else derived
            except DAMAGE:
                derived = None
            self._sizes[id(tensor)] = self._named(_combine(_stated(tensor), derived))
        with contextlib.suppress(*DAMAGE):
            self._values.visit(node)

    def _named(self, sizes: Sizes | None) -> Sizes | None:
        """Rule 4."""
        if sizes is None or None not in sizes:
            return sizes
        result = list(sizes)
        for axis, size in enumerate(result):
            if size is None:
                self._num_named += 1
                result[axis] = f"?{self._num_named}"
        return tuple(result)

    def _derive(self, node: gs.Node) -> Sizes | None:
        op, inputs = op_of(node), [self.of(tensor) for tensor in node.inputs]
        first = inputs[0] if inputs else None
        if op in _SAME_OPS:
            return first
        if op in _BROADCAST_OPS:
            return _broadcast(inputs)
        if op == "MatMul" and len(inputs) == 2:
            return _product(first, inputs[1])
        if op == "Gemm" and len(inputs) >= 2:
            a = first[::-1] if first and node.attrs.get("transA", 0) else first
            b = inputs[1][::-1] if inputs[1] and node.attrs.get("transB", 0) else inputs[1]
            return _product(a, b)
        if op == "Gather" and len(inputs) == 2:
            return _gathered(first, inputs[1], int(node.attrs.get("axis", 0)))
        if op == "Attention" and len(inputs) >= 3:
            value = inputs[2]
            is_split = first is not None and value is not None and len(first) == len(value) == 4
            return (*first[:3], value[3]) if is_split and first and value else _leading(first)
        if first is None:
            return None
        if op == "Transpose":
            perm = node.attrs.get("perm", list(range(len(first)))[::-1])
            return tuple(first[axis] for axis in perm) if sorted(perm) == list(range(len(first))) else None
        if op in ("Squeeze", "Unsqueeze"):
            return _with_axes(first, constant_ints(node, 1, []), is_added=op == "Unsqueeze")
        if op == "Slice":
            cut = {axis % len(first) for axis in constant_ints(node, 3, []) if first}
            return tuple(None if axis in cut else size for axis, size in enumerate(first)) if cut else None
        return self._derive_target(node, first) if op in ("Expand", "Reshape") else None

    def _derive_split(self, node: gs.Node, output: gs.Tensor) -> Sizes | None:
        """All sizes but that of the axis that is cut, which inference knows."""
        sizes, stated = self.of(node.inputs[0]), _stated(output)
        axis = int(node.attrs.get("axis", 0))
        if sizes is None or not -len(sizes) <= axis < len(sizes):
            return None
        part = stated[axis] if stated is not None and len(stated) == len(sizes) else None
        axis %= len(sizes)
        return (*sizes[:axis], part, *sizes[axis + 1 :])

    def _derive_target(self, node: gs.Node, first: Sizes) -> Sizes | None:
        """Rule 3, and Expand."""
        target = self._values.of(node.inputs[1]) if len(node.inputs) > 1 else None
        if op_of(node) == "Expand":
            return None if target is None else _broadcast([first, target])
        sizes = _stated(node.outputs[0])
        if target is not None:
            copies = not node.attrs.get("allowzero", 0)
            known = tuple(
                first[axis] if size == 0 and copies and axis < len(first) else None if size == -1 else size
                for axis, size in enumerate(target)
            )
            sizes = _merge(known, sizes)
        return _reshaped(first, sizes)


def same_size(one: Size, other: Size) -> bool:
    """True where two sizes are known to be equal."""
    return one is not None and one == other


def _stated(tensor: gs.Tensor) -> Sizes | None:
    if tensor.shape is None:
        return None
    return tuple(_plain(size) for size in tensor.shape)


def _plain(size: object) -> Size:
    if isinstance(size, str):
        return size if is_dim_name(size) else None
    return int(size) if isinstance(size, int) and size >= 0 else None


def _is_own_name(size: Size) -> bool:
    """True for a name that rule 4 gave."""
    return isinstance(size, str) and size.startswith("?")


def _merge(stated: Sizes | None, derived: Sizes | None) -> Sizes | None:
    if stated is None or derived is None or len(stated) != len(derived):
        return derived if stated is None else stated
    return tuple(found if size is None else size for size, found in zip(stated, derived, strict=True))


def _combine(stated: Sizes | None, derived: Sizes | None) -> Sizes | None:
    """Sizes by what a tensor states and what its node tells: exporters give outputs names that no other tensor has."""
    if stated is None or derived is None or len(stated) != len(derived):
        return derived if stated is None else stated
    return tuple(
        found if not isinstance(size, int) and (size is None or not (found is None or _is_own_name(found))) else size
        for size, found in zip(stated, derived, strict=True)
    )


def _broadcast(inputs: Sequence[Sizes | None]) -> Sizes | None:
    known = [sizes for sizes in inputs if sizes is not None]
    if len(known) < len(inputs) or not known:
        return None
    rank = max(map(len, known))
    return tuple(
        _widest([sizes[axis] for sizes in known if len(sizes) >= -axis]) for axis in range(-rank, 0)
    )  # fmt: skip


def _widest(sizes: Sequence[Size]) -> Size:
    """The size that sizes broadcast to, by rule 1."""
    wide = [size for size in sizes if size != 1]
    if not wide:
        return 1
    told = [size for size in wide if size is not None and not _is_own_name(size)]
    numbers = [size for size in told if isinstance(size, int)]
    if told:
        return (numbers or told)[0]
    return wide[0] if len(set(wide)) == 1 else None


def _product(a: Sizes | None, b: Sizes | None) -> Sizes | None:
    if a is None or b is None or len(a) < 2 or len(b) < 2:
        return None
    return (*(_broadcast([a[:-2], b[:-2]]) or ()), a[-2], b[-1])


def _gathered(data: Sizes | None, indices: Sizes | None, axis: int) -> Sizes | None:
    if data is None or indices is None or not -len(data) <= axis < len(data):
        return None
    axis %= len(data)
    return (*data[:axis], *indices, *data[axis + 1 :])


def _with_axes(sizes: Sizes, axes: Sequence[int], *, is_added: bool) -> Sizes | None:
    """Sizes behind a Squeeze or Unsqueeze."""
    rank = len(sizes) + (len(axes) if is_added else 0)
    places = {axis % rank for axis in axes if -rank <= axis < rank}
    if not axes or len(places) != len(axes):
        return None
    if not is_added:
        return tuple(size for axis, size in enumerate(sizes) if axis not in places)
    rest = iter(sizes)
    return tuple(1 if axis in places else next(rest) for axis in range(rank))


def _leading(sizes: Sizes | None) -> Sizes | None:
    """All sizes but the last, which is another one."""
    return None if not sizes else (*sizes[:-1], None)


def _reshaped(source: Sizes, target: Sizes | None) -> Sizes | None:
    """The target with its one open size filled in."""
    if target is None or target.count(None) != 1:
        return target
    left = Counter(source)
    left.subtract(size for size in target if size is not None)
    over = math.prod(size**count for size, count in left.items() if isinstance(size, int) and count > 0)
    under = math.prod(size**-count for size, count in left.items() if isinstance(size, int) and count < 0)
    names = [size for size, count in left.items() if isinstance(size, str) and count]
    if not over or not under or over % under or any(left[name] != 1 for name in names):
        return target
    share = over // under
    if len(names) > 1 or (names and share != 1):
        return target
    return tuple((names[0] if names else share) if size is None else size for size in target)
