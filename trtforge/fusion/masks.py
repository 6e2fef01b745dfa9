"""What a mask hides, read from the arithmetic that makes it: later keys (causal), padded keys, or something of its own.

A mask [.., S, T] is added to the scores, or chooses where they count. Both are a formula over conditions; followed back
through And, Not, casts and layout nodes, each condition is one of

    causal       k <= q for two Ranges from 0 along the last two axes;  Trilu of ones;  a constant lower triangle
    key padding  a tensor [B, T] put along the last axis: Unsqueeze, Expand, or GatherND by Ranges of batch and key
    nothing      a constant that hides no key;  q >= 0 and the like
    other        anything else: the mask is then a bias that only the graph itself can compute

A condition that is not proved is "other". The terms themselves stay as they are: this only says what they mean.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trtforge.fusion.qkv_layout import constant_ints
from trtforge.fusion.regions import KeyPadding, Mask, MaskTerm
from trtforge.fusion.sizes import same_size
from trtforge.fusion.view import View, casts_to_float, number_of, op_name, producer_of, split_constant
from trtforge.graph.edit import is_array
from trtforge.graph.signature import tensor_dtype

# A score to which this is added counts for nothing: float16 softmax of -10000 is 0.
HIDDEN = -1e3
# Producers looked at per term; a mask of padding and causality by transformers 5 is twenty.
_MAX_STEPS = 64
# Elements of a constant that are looked at.
_MAX_ELEMENTS = 2**22
_LAYOUT_OPS = ("Cast", "Expand", "Identity", "Unsqueeze")
_MAX_LAYOUT_NODES = 8


@dataclasses.dataclass(slots=True)
class _Meaning:
    """What the conditions of a mask say together."""

    is_causal: bool = False
    padding: KeyPadding | None = None
    is_explained: bool = True
    steps: int = 0


def explain_mask(view: View, terms: Sequence[MaskTerm], tensors: Sequence[gs.Tensor], *, is_causal: bool) -> Mask:
    """A mask with what its terms mean.

    Args:
        tensors: of the terms.
        is_causal: attention is, whatever the terms say.
    """
    meaning = _Meaning(is_causal=is_causal)
    for term, tensor in zip(terms, tensors, strict=True):
        reader = _Reader(view, meaning)
        if term.kind == "additive":
            reader.read_bias(tensor)
        else:
            reader.read_condition(tensor, term.kind == "keep")
    return Mask(tuple(terms), meaning.is_causal, meaning.padding, meaning.is_explained)


class _Reader:
    def __init__(self, view: View, meaning: _Meaning) -> None:
        self._view = view
        self._meaning = meaning

    def read_bias(self, tensor: gs.Tensor) -> None:
        """A mask that is added to the scores."""
        pending = [tensor]
        while pending and self._is_within():
            current = pending.pop()
            if is_array(current):
                self._read_constant(np.asarray(current.values), hidden_is_low=True)
                continue
            node = producer_of(current)
            op = op_name(node)
            if node is None:
                self._meaning.is_explained = False
            elif self._keeps_matrix(node) and (op != "Cast" or casts_to_float(node)):
                pending.append(node.inputs[0])
            elif op == "Add":
                pending.extend(node.inputs)
            elif op == "Where":
                self._read_choice(node)
            elif op == "Mul":
                self._read_product(node)
            elif op == "Trilu":
                self._read_triangle(node, is_bias=True)
            else:
                self._meaning.is_explained = False

    def read_condition(self, tensor: gs.Tensor, is_keep: bool) -> None:
        """A bool tensor that is True where a key is seen (`is_keep`) or hidden."""
        pending = [(tensor, is_keep)]
        while pending and self._is_within():
            current, keep = pending.pop()
            node = producer_of(current)
            op = op_name(node)
            if is_array(current):
                self._read_constant(np.asarray(current.values) if keep else ~np.asarray(current.values, bool), False)
            elif node is not None and op == "Not":
                pending.append((node.inputs[0], not keep))
            elif node is not None and op == ("And" if keep else "Or"):
                pending.extend((operand, keep) for operand in node.inputs)
            elif not self._is_padding(current, keep) and not (node is not None and self._read_node(node, keep)):
                if node is not None and self._keeps_matrix(node):
                    pending.append((node.inputs[0], keep))
                else:
                    self._meaning.is_explained = False

    def _keeps_matrix(self, node: gs.Node) -> bool:
        """True for a Cast or layout node behind which 0 is still 0 and the last two axes are those of the scores."""
        if op_name(node) != "Unsqueeze":
            return op_name(node) == "Expand" or _keeps_zero(node)
        rank, axes = self._view.sizes.rank(node.outputs[0]), constant_ints(node, 1, [])
        return bool(axes) and all(-rank <= axis < rank and axis % rank < rank - 2 for axis in axes)

    def _is_within(self) -> bool:
        """Count a step; too many leave the mask unexplained."""
        self._meaning.steps += 1
        if self._meaning.steps > _MAX_STEPS:
            self._meaning.is_explained = False
            return False
        return True

    def _read_choice(self, node: gs.Node) -> None:
        """Where(condition, 0, low) or Where(condition, low, 0)."""
        values = [number_of(tensor) for tensor in node.inputs[1:3]]
        if len(values) == 2 and values[0] == 0 and values[1] is not None and values[1] <= HIDDEN:
            self.read_condition(node.inputs[0], True)
        elif len(values) == 2 and values[1] == 0 and values[0] is not None and values[0] <= HIDDEN:
            self.read_condition(node.inputs[0], False)
        else:
            self._meaning.is_explained = False

    def _read_product(self, node: gs.Node) -> None:
        """(1 - m) * low, where m is 1 for a key that is seen; or m * low, where it is 1 for one that is hidden."""
        operands = split_constant(node)
        low = None if operands is None else number_of(operands[1])
        if operands is None or low is None or low > HIDDEN:
            self._meaning.is_explained = False
            return
        difference = producer_of(_before_layout(operands[0]))
        if difference is not None and op_name(difference) == "Sub" and number_of(difference.inputs[0]) == 1.0:
            self.read_condition(difference.inputs[1], True)
        elif _is_flag(_before_layout(operands[0])):
            self.read_condition(operands[0], False)
        else:
            self._meaning.is_explained = False

    def _read_node(self, node: gs.Node, keep: bool) -> bool:
        """A comparison or a triangle; False where it is none that is known."""
        op = op_name(node)
        if op == "Trilu":
            return self._read_triangle(node, is_bias=False, keep=keep)
        if op in ("Equal", "Greater") and len(node.inputs) == 2 and number_of(node.inputs[1]) == 0:
            inner = producer_of(node.inputs[0])
            if inner is not None and op_name(inner) == "Trilu":
                return self._read_triangle(inner, is_bias=False, keep=keep if op == "Greater" else not keep)
        if op not in ("Less", "LessOrEqual", "Greater", "GreaterOrEqual") or not keep or len(node.inputs) != 2:
            return False
        low, high = node.inputs if op.startswith("Less") else node.inputs[::-1]
        if number_of(low) is not None and (number_of(low) or 0) <= 0 and self._range_axis(high) is not None:
            return op.endswith("OrEqual") or (number_of(low) or 0) < 0
        if op.endswith("OrEqual") and (self._range_axis(low), self._range_axis(high)) == (-1, -2):
            self._meaning.is_causal = True
            return True
        return False

    def _read_triangle(self, node: gs.Node, *, is_bias: bool, keep: bool = True) -> bool:
        """Trilu of ones (the lower triangle is seen), or of a low number above the diagonal; it is [.., S, S]."""
        rows, columns = (self._view.sizes.of(node.outputs[0]) or ())[-2:] or (None, None)
        are_numbers = isinstance(rows, int) and isinstance(columns, int)
        may_be_square = 1 not in (rows, columns) and not (are_numbers and rows != columns)
        value = fill_of(node.inputs[0])
        offset = 0 if len(node.inputs) < 2 or not node.inputs[1].name else number_of(node.inputs[1])
        is_upper = bool(node.attrs.get("upper", 1))
        if is_bias:
            is_causal = is_upper and offset == 1 and value is not None and value <= HIDDEN
        else:
            is_causal = (
                value is not None and value > 0 and (is_upper, offset, keep) in ((False, 0, True), (True, 1, False))
            )
        if is_causal and may_be_square:
            self._meaning.is_causal = True
            return True
        if is_bias:
            self._meaning.is_explained = False
        return False

    def _read_constant(self, values: np.ndarray[tuple[int, ...], np.dtype[np.generic]], hidden_is_low: bool) -> None:
        """A constant mask: nothing hidden, or the upper triangle of a square."""
        if values.size > _MAX_ELEMENTS or values.dtype.kind not in "fbiuV":
            self._meaning.is_explained = False
            return
        numbers = values.astype(np.float64)
        seen, hidden = (numbers == 0, numbers <= HIDDEN) if hidden_is_low else (numbers != 0, numbers == 0)
        if seen.all():
            return
        rows, columns = values.shape[-2:] if values.ndim >= 2 else (0, 1)
        triangle = np.tril(np.ones((rows, columns), bool))
        if rows == columns and bool((seen == triangle).all()) and bool((hidden == ~triangle).all()):
            self._meaning.is_causal = True
        else:
            self._meaning.is_explained = False

    def _is_padding(self, tensor: gs.Tensor, keep: bool) -> bool:
        """Note a tensor [B, T] that is put along the first and the last axis of the four that the scores have."""
        if self._view.sizes.rank(tensor) != 4:
            return False
        for _ in range(8):
            node, sizes = producer_of(tensor), self._view.sizes.of(tensor)
            op = op_name(node)
            if node is None:
                return False
            if op == "Unsqueeze" and sizes is not None and self._view.sizes.rank(node.inputs[0]) == 2:
                axes = {axis % len(sizes) for axis in constant_ints(node, 1, []) if -len(sizes) <= axis < len(sizes)}
                # [B, T] becomes [B, 1, T] or [B, 1, 1, T].
                if axes != set(range(1, len(sizes) - 1)):
                    return False
                return self._note_padding(node.inputs[0], keep)
            if op == "GatherND":
                return self._is_gathered(node) and self._note_padding(node.inputs[0], keep)
            comparison = _compared_with_zero(node, keep)
            if comparison is not None:
                tensor, is_nonzero = comparison
                keep = keep if is_nonzero else not keep
            elif op == "Not":
                tensor, keep = node.inputs[0], not keep
            elif _keeps_zero(node) or self._is_key_axis_kept(node):
                tensor = node.inputs[0]
            else:
                return False
        return False

    def _is_key_axis_kept(self, node: gs.Node) -> bool:
        """[B, T] or [B, 1, T] to [B, 1, T] or [B, 1, 1, T], by sizes; [B, T] itself ends the search elsewhere.

        An Expand adds no axes.
        """
        if op_name(node) == "Expand":
            return self._view.sizes.rank(node.inputs[0]) == self._view.sizes.rank(node.outputs[0])
        if op_name(node) not in ("Unsqueeze", "Reshape"):
            return False
        before, after = self._view.sizes.of(node.inputs[0]), self._view.sizes.of(node.outputs[0])
        if before is None or after is None or len(before) < 3:
            return False
        ends = same_size(before[0], after[0]) and same_size(before[-1], after[-1])
        return ends and all(size == 1 for size in (*before[1:-1], *after[1:-1]))

    def _note_padding(self, tensor: gs.Tensor, keep: bool) -> bool:
        """Note the [B, T] tensor that says which keys are padding, as near to the model's own input as it says so."""
        node = producer_of(tensor)
        for _ in range(8):
            comparison = None if node is None else _compared_with_zero(node, keep)
            if node is not None and op_name(node) == "Not":
                tensor, keep = node.inputs[0], not keep
            elif node is not None and op_name(node) in ("Cast", "Identity") and _is_whole(node.inputs[0]):
                tensor = node.inputs[0]
            elif comparison is not None and self._view.sizes.rank(comparison[0]) == 2:
                tensor, keep = comparison[0], keep if comparison[1] else not keep
            else:
                break
            node = producer_of(tensor)
        padding = KeyPadding(str(tensor.name), keep)
        if self._meaning.padding not in (None, padding):
            return False
        self._meaning.padding = padding
        return True

    def _is_gathered(self, node: gs.Node) -> bool:
        """True for mask[b, t] with b along the first axis and t along the last, as torch.vmap's indexing exports."""
        indices = producer_of(node.inputs[1])
        if node.attrs.get("batch_dims", 0) or self._view.sizes.rank(node.inputs[0]) != 2 or indices is None:
            return False
        if op_name(indices) != "Concat" or len(indices.inputs) != 2:
            return False
        rank = self._view.sizes.rank(node.outputs[0])
        # Behind the index pair's own axis, the last one of the mask is the last but one.
        axes = [self._range_axis(tensor) for tensor in indices.inputs]
        return rank > 1 and axes == [-rank - 1, -2]

    def _range_axis(self, tensor: gs.Tensor) -> int | None:
        """The axis, counted from the last as -1, along which a tensor counts 0, 1, 2 ...; None where it does not."""
        inserted: list[tuple[list[int], int]] = []
        for _ in range(12):
            node = producer_of(tensor)
            op = op_name(node)
            if node is None:
                return _counted_axis(tensor, inserted)
            if op == "Unsqueeze":
                inserted.append((constant_ints(node, 1, []), self._view.sizes.rank(node.outputs[0])))
            elif op == "Range":
                starts = [number_of(node.inputs[0]), number_of(node.inputs[2])] if len(node.inputs) == 3 else []
                return _axis_behind(0, 1, inserted) if starts == [0.0, 1.0] else None
            elif op == "Expand":
                ranks = [self._view.sizes.rank(end) for end in (node.inputs[0], node.outputs[0])]
                if ranks[0] != ranks[1] or ranks[0] < 0:
                    return None
            elif op not in ("Cast", "Identity"):
                return None
            tensor = node.inputs[0]
        return None


def _axis_behind(axis: int, rank: int, inserted: Sequence[tuple[Sequence[int], int]]) -> int | None:
    """Where an axis is after Unsqueezes, the last of which comes first in `inserted`."""
    for axes, after in reversed(inserted):
        if after != rank + len(axes) or any(not -after <= new < after for new in axes):
            return None
        places = {new % after for new in axes}
        axis = [place for place in range(after) if place not in places][axis]
        rank = after
    return axis - rank


def _counted_axis(tensor: gs.Tensor, inserted: Sequence[tuple[Sequence[int], int]]) -> int | None:
    """The axis of a constant 0, 1, 2 ..., behind Unsqueezes."""
    if not is_array(tensor) or tensor.values.dtype.kind not in "iuf":
        return None
    values = np.asarray(tensor.values)
    long = [axis for axis, size in enumerate(values.shape) if size != 1]
    if len(long) != 1 or not bool((values.ravel() == np.arange(values.size)).all()):
        return None
    return _axis_behind(long[0], values.ndim, inserted)


def _before_layout(tensor: gs.Tensor) -> gs.Tensor:
    """The tensor in front of the casts and layout nodes that give this one."""
    for _ in range(_MAX_LAYOUT_NODES):
        node = producer_of(tensor)
        if node is None or op_name(node) not in _LAYOUT_OPS:
            break
        tensor = node.inputs[0]
    return tensor


def fill_of(tensor: gs.Tensor) -> float | None:
    """The one number that a tensor is filled with, its shape being computed or not."""
    tensor = _before_layout(tensor)
    node = producer_of(tensor)
    if node is not None and op_name(node) == "ConstantOfShape":
        value = node.attrs.get("value")
        return number_of(value) if isinstance(value, gs.Constant) else 0.0
    if not is_array(tensor) or tensor.values.size <= 1 or tensor.values.size > _MAX_ELEMENTS:
        return number_of(tensor)
    values = np.asarray(tensor.values)
    is_number = values.dtype.kind in "fbiu" and bool((values == values.ravel()[0]).all())
    return float(values.ravel()[0]) if is_number else None


def _compared_with_zero(node: gs.Node, keep: bool) -> tuple[gs.Tensor, bool] | None:
    """x and whether the result is True where x is not 0, of Equal(x, 0) and Greater(x, 0).

    A negative x of Greater is taken for a key that is seen: where the result hides keys, x may not be negative.
    """
    op = op_name(node)
    if op not in ("Equal", "Greater") or len(node.inputs) != 2 or number_of(node.inputs[1]) != 0:
        return None
    if op == "Greater" and not keep and not _is_flag(node.inputs[0]):
        return None
    return node.inputs[0], op == "Greater"


def _keeps_zero(node: gs.Node) -> bool:
    """True for Identity and a Cast that makes nothing but 0 to 0, unlike one of fractions to integers."""
    if op_name(node) != "Cast":
        return op_name(node) == "Identity"
    return casts_to_float(node) or node.attrs.get("to") == onnx.TensorProto.BOOL or _is_whole(node.inputs[0])


def _is_flag(tensor: gs.Tensor) -> bool:
    """True for bools and unsigned integers: each is 0, or at least 1."""
    dtype = tensor_dtype(tensor.dtype)
    return dtype is not None and dtype.kind in "bu"


def _is_whole(tensor: gs.Tensor) -> bool:
    """True for integers and bools, of which a Cast to bool or float loses nothing."""
    dtype = tensor_dtype(tensor.dtype)
    return dtype is not None and dtype.kind in "biu"
