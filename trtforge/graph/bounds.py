"""What the sizes that the profiles allow say of shape arithmetic.

Every integer or bool tensor that follows from shapes has, element by element, a smallest and a largest value; they are
followed in node order through the operators that exporters compute shapes and conditions with. Where both are equal,
the tensor is a constant, whatever the sizes: `batch == 1` is false when every profile has a batch of 2 or more.
Bounds are float64: exact up to 2^53, and infinite where nothing is known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.graph.edit import is_array, is_onnx_op
from trtforge.graph.signature import tensor_dtype

Array = np.ndarray[Any, Any]
Span = tuple[Array, Array]
"""Smallest and largest value of each element of a tensor."""
SizeRanges = Mapping[str, tuple[int, int]]
"""Smallest and largest size of a dim, by its symbolic name."""

# Elements of a tensor whose bounds are followed.
_MAX_ELEMENTS = 256
# Up to here float64 holds every integer.
_EXACT = 2**53
_TRUTH_OPS = frozenset(["And", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "Or"])
_ARITHMETIC_OPS = frozenset(["Add", "Div", "Mul", "ReduceProd", "Sub"])
# Integers up to here are exact in the float types that exporters compare them in.
_EXACT_IN = {np.dtype(np.float32): 2**24, np.dtype(np.float64): _EXACT}
_TYPES = (np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.bool_))


def dim_range(dim: Any, sizes: SizeRanges) -> tuple[float, float]:
    """Smallest and largest size of one dim."""
    if isinstance(dim, int) and dim >= 0:
        return dim, dim
    return sizes.get(dim, (0, np.inf)) if isinstance(dim, str) else (0, np.inf)


@dataclasses.dataclass(frozen=True, slots=True)
class KnownSizes:
    """What is known of a graph's inputs beyond their declared shapes.

    Attributes:
        dims: smallest and largest size, by symbolic name.
        values: smallest and largest value of the elements of integer inputs, by name.
    """

    dims: SizeRanges
    values: Mapping[str, Span]


NOTHING_KNOWN = KnownSizes({}, {})


class Bounds:
    """Bounds of the tensors of one graph and those nested in it, learnt node by node."""

    def __init__(self, known: KnownSizes = NOTHING_KNOWN) -> None:
        self._known = known
        self._spans: dict[int, Span | None] = {}
        self._dtypes: dict[int, np.dtype[Any] | None] = {}

    def visit(self, node: gs.Node) -> Array | None:
        """Learn the bounds of a node's result; its value, where it can have only one.

        Args:
            node: its producers were visited before.
        """
        follow = _FOLLOW.get(node.op)
        if follow is None or not is_onnx_op(node) or len(node.outputs) != 1 or not node.inputs:
            return None
        try:
            with np.errstate(all="ignore"):
                span = follow(self, node)
        except (AttributeError, ValueError, IndexError, TypeError, KeyError):
            # Inputs or attributes that do not fit the operator: nothing is known.
            return None
        if span is None or span[0].size > _MAX_ELEMENTS or np.isnan(span).any():
            return None
        if not fits_shape(node.outputs[0], span[0]):
            return None
        dtype = self._dtypes[id(node.outputs[0])] = self._dtype_of(node)
        if node.op in _ARITHMETIC_OPS and dtype not in _TYPES:
            return None
        self._spans[id(node.outputs[0])] = span
        return _only_value(span, dtype)

    def _dtype_of(self, node: gs.Node) -> np.dtype[Any] | None:
        """The type of a result; where inference did not tell, that of the first input."""
        dtype = tensor_dtype(node.outputs[0].dtype)
        if dtype is not None:
            return dtype
        if node.op in ("Shape", "Size"):
            return np.dtype(np.int64)
        if node.op in _TRUTH_OPS:
            return np.dtype(np.bool_)
        if node.op in ("Cast", "Where"):
            return tensor_dtype(node.attrs["to"]) if node.op == "Cast" else None
        return self._dtypes.get(id(node.inputs[0])) or tensor_dtype(node.inputs[0].dtype)

    def span_of(self, tensor: gs.Tensor) -> Span | None:
        """The bounds of a tensor, if anything is known."""
        if id(tensor) not in self._spans:
            self._spans[id(tensor)] = self._given(tensor)
        return self._spans[id(tensor)]

    def _given(self, tensor: gs.Tensor) -> Span | None:
        if not tensor.inputs and tensor.name in self._known.values:
            return self._known.values[tensor.name]
        if not is_array(tensor) or tensor.values.size > _MAX_ELEMENTS or tensor.values.dtype.kind not in "biuf":
            return None
        value = tensor.values.astype(np.float64)
        return (value, value) if bool(np.all(np.abs(value) < _EXACT)) else None

    def spans_of(self, node: gs.Node) -> list[Span] | None:
        """The bounds of all inputs, or None where one is unknown."""
        spans = [self.span_of(tensor) for tensor in node.inputs]
        return None if any(span is None for span in spans) else [span for span in spans if span is not None]

    def shape_of(self, tensor: gs.Tensor) -> Span | None:
        """The bounds of a tensor's sizes, where its rank is known."""
        if tensor.shape is None:
            return None
        ranges = np.array([dim_range(dim, self._known.dims) for dim in tensor.shape], np.float64).reshape(-1, 2)
        return ranges[:, 0], ranges[:, 1]


def fits_shape(tensor: gs.Tensor, value: Array) -> bool:
    """True unless a value contradicts what is known of its tensor's shape."""
    if tensor.shape is None:
        return True
    return len(tensor.shape) == value.ndim and all(
        not isinstance(dim, int) or dim < 0 or dim == size for dim, size in zip(tensor.shape, value.shape, strict=True)
    )


def _only_value(span: Span, dtype: np.dtype[Any] | None) -> Array | None:
    """The value that lies between bounds which meet, in the type of its tensor."""
    low, high = span
    if dtype not in _TYPES or not np.array_equal(low, high):
        return None
    limit = min(_EXACT, 2 if dtype == np.bool_ else np.iinfo(dtype).max)
    return np.asarray(low, dtype) if bool(np.all(np.abs(low) < limit)) else None


_Follow = Callable[[Bounds, gs.Node], Span | None]


def _shape(tracker: Bounds, node: gs.Node) -> Span | None:
    span = tracker.shape_of(node.inputs[0])
    part = slice(node.attrs.get("start", 0), node.attrs.get("end", None))
    return None if span is None else (span[0][part], span[1][part])


def _size(tracker: Bounds, node: gs.Node) -> Span | None:
    span = tracker.shape_of(node.inputs[0])
    return None if span is None else (np.asarray(np.prod(span[0])), np.asarray(np.prod(span[1])))


def _moved(move: Callable[[gs.Node, Array, list[Any]], Array]) -> _Follow:
    """An operator that only moves elements of its first input, by constants in the others (None: omitted)."""

    def follow(tracker: Bounds, node: gs.Node) -> Span | None:
        data = tracker.span_of(node.inputs[0])
        rest = node.inputs[1:]
        if data is None or not all(is_array(tensor) for tensor in rest if tensor.name):
            return None
        constants = [tensor.values if tensor.name else None for tensor in rest]
        return move(node, data[0], constants), move(node, data[1], constants)

    return follow


def _gather(node: gs.Node, data: Array, constants: list[Any]) -> Array:
    taken: Array = np.take(data, constants[0], axis=node.attrs.get("axis", 0))
    return taken


def _slice(_node: gs.Node, data: Array, constants: list[Any]) -> Array:
    starts, ends = constants[:2]
    if data.ndim != 1 or starts.size != 1:
        raise ValueError("only slices of vectors are followed")
    step = 1 if len(constants) < 4 or constants[3] is None else int(constants[3].item())
    # A step that is not positive has other rules for its ends.
    if step < 1:
        raise ValueError("a negative step")
    return data[int(starts.item()) : int(ends.item()) : step]


def _squeeze(_node: gs.Node, data: Array, constants: list[Any]) -> Array:
    axes = None if not constants or constants[0] is None else tuple(int(axis) for axis in constants[0].reshape(-1))
    return np.squeeze(data, axes)


def _unsqueeze(_node: gs.Node, data: Array, constants: list[Any]) -> Array:
    return np.expand_dims(data, tuple(int(axis) for axis in constants[0].reshape(-1)))


def _reshape(_node: gs.Node, data: Array, constants: list[Any]) -> Array:
    return data.reshape([int(size) for size in constants[0]])


def _concat(tracker: Bounds, node: gs.Node) -> Span | None:
    spans, axis = tracker.spans_of(node), node.attrs["axis"]
    if spans is None:
        return None
    return np.concatenate([s[0] for s in spans], axis), np.concatenate([s[1] for s in spans], axis)


def _cast(tracker: Bounds, node: gs.Node) -> Span | None:
    span, dtype = tracker.span_of(node.inputs[0]), tensor_dtype(node.attrs["to"])
    if span is None or dtype not in (*_TYPES, *_EXACT_IN):
        return None
    if dtype != np.bool_:
        limit = float(_EXACT_IN.get(dtype) or np.iinfo(dtype).max)
        is_inside = bool(np.all((span[0] >= -limit) & ((span[1] <= limit) | np.isinf(span[1]))))
        low, high = span if dtype in _EXACT_IN else (np.trunc(span[0]), np.trunc(span[1]))
        return (low, high) if is_inside else None
    has_zero = (span[0] <= 0) & (span[1] >= 0)
    return np.where(has_zero, 0.0, 1.0), np.where((span[0] == 0) & (span[1] == 0), 0.0, 1.0)


def _monotonic(operation: Callable[..., Array]) -> _Follow:
    """An operator that grows with each of its inputs."""

    def follow(tracker: Bounds, node: gs.Node) -> Span | None:
        spans = tracker.spans_of(node)
        if spans is None:
            return None
        low, high = spans[0]
        for other_low, other_high in spans[1:]:
            low, high = operation(low, other_low), operation(high, other_high)
        return low, high

    return follow


def _of_corners(operation: Callable[[Array, Array], Array]) -> _Follow:
    """An operator of two inputs whose extremes lie at those of its inputs."""

    def follow(tracker: Bounds, node: gs.Node) -> Span | None:
        spans = tracker.spans_of(node)
        if spans is None:
            return None
        corners = [operation(a, b) for a in spans[0] for b in spans[1]]
        return np.minimum.reduce(corners), np.maximum.reduce(corners)

    return follow


def _divide(tracker: Bounds, node: gs.Node) -> Span | None:
    """Integer division truncates; a divisor that may be 0 or negative is not followed."""
    spans = tracker.spans_of(node)
    if spans is None or np.any(spans[1][0] <= 0):
        return None
    corners = [np.trunc(a / b) for a in spans[0] for b in spans[1]]
    return np.minimum.reduce(corners), np.maximum.reduce(corners)


def _product(tracker: Bounds, node: gs.Node) -> Span | None:
    """ReduceProd over all elements, none of them negative."""
    span = tracker.span_of(node.inputs[0])
    is_whole = len(node.inputs) < 2 or not node.inputs[1].name
    if span is None or np.any(span[0] < 0) or not (is_whole or span[0].ndim == 1):
        return None
    shape = (1,) * span[0].ndim if node.attrs.get("keepdims", 1) else ()
    return np.prod(span[0]).reshape(shape), np.prod(span[1]).reshape(shape)


def _truth(low: Any, high: Any) -> Span:
    return np.asarray(low, np.float64), np.asarray(high, np.float64)


def _compared(compare: Callable[[Span, Span], Span]) -> _Follow:
    def follow(tracker: Bounds, node: gs.Node) -> Span | None:
        spans = tracker.spans_of(node)
        return None if spans is None else compare(spans[0], spans[1])

    return follow


def _equal(a: Span, b: Span) -> Span:
    is_sure = (a[0] == a[1]) & (b[0] == b[1]) & (a[0] == b[0])
    return _truth(is_sure, (a[0] <= b[1]) & (b[0] <= a[1]))


def _less(a: Span, b: Span) -> Span:
    return _truth(a[1] < b[0], a[0] < b[1])


def _less_or_equal(a: Span, b: Span) -> Span:
    return _truth(a[1] <= b[0], a[0] <= b[1])


def _not(tracker: Bounds, node: gs.Node) -> Span | None:
    span = tracker.span_of(node.inputs[0])
    return None if span is None else (1 - span[1], 1 - span[0])


def _where(tracker: Bounds, node: gs.Node) -> Span | None:
    spans = tracker.spans_of(node)
    if spans is None:
        return None
    (sure, possible), yes, no = spans
    low = np.where(sure == 1, yes[0], np.where(possible == 0, no[0], np.minimum(yes[0], no[0])))
    high = np.where(sure == 1, yes[1], np.where(possible == 0, no[1], np.maximum(yes[1], no[1])))
    return low, high


_FOLLOW: Mapping[str, _Follow] = {
    "Shape": _shape,
    "Size": _size,
    "Identity": _moved(lambda _node, data, _constants: data),
    "Gather": _moved(_gather),
    "Slice": _moved(_slice),
    "Squeeze": _moved(_squeeze),
    "Unsqueeze": _moved(_unsqueeze),
    "Reshape": _moved(_reshape),
    "Concat": _concat,
    "Cast": _cast,
    "Add": _monotonic(np.add),
    "Max": _monotonic(np.maximum),
    "Min": _monotonic(np.minimum),
    "Sub": _of_corners(np.subtract),
    "Mul": _of_corners(np.multiply),
    "Div": _divide,
    "ReduceProd": _product,
    "Equal": _compared(_equal),
    "Less": _compared(_less),
    "LessOrEqual": _compared(_less_or_equal),
    "Greater": _compared(lambda a, b: _less(b, a)),
    "GreaterOrEqual": _compared(lambda a, b: _less_or_equal(b, a)),
    "Not": _not,
    "And": _monotonic(np.minimum),
    "Or": _monotonic(np.maximum),
    "Where": _where,
}
