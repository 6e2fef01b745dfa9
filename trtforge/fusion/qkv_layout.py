"""What a graph proves about the packed layout of query, key and value: which index a node takes, and where B and S go.

A part is one constant index of one axis: a Gather by a scalar, or a Gather, Slice or Split that leaves an axis of
size 1 and then a Squeeze of it. All readers of a tensor count: together they take each index of one axis once, two or
three in all.

A Reshape [B, S, width] -> [B, S, ...] may be respelled with a target of [0, 0, ...] only if it keeps both B and S, and
its other sizes are numbers whose product is the width. What is not proved is refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.graph.edit import is_onnx_op

SELECTING_OPS = ("Gather", "Slice", "Split")


def op_of(node: gs.Node) -> str:
    """The operator of a node of ONNX's own domain; "" for any other, whatever its name."""
    return str(node.op) if is_onnx_op(node) else ""


class RefusalError(Exception):
    """A near miss found while matching; its text is the reason."""


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """One index of one axis of a tensor; the axis is gone behind the last of `nodes`."""

    axis: int
    index: int
    nodes: tuple[gs.Node, ...]
    output: gs.Variable


def selections_of(packed: gs.Variable, sizes: Sequence[object], outputs: Collection[str]) -> list[Selection]:
    """Every part that is read of a tensor with `sizes`, in the order of their indices.

    Args:
        outputs: names of the graph's outputs.

    Raises:
        RefusalError: they are not each index of one axis once.
    """
    readers = {id(reader): reader for reader in packed.outputs}.values()
    found = [selection for reader in readers for selection in _selections_by(reader, sizes, outputs)]
    found.sort(key=lambda selection: selection.index)
    axes = {selection.axis for selection in found}
    if len(axes) != 1 or [selection.index for selection in found] != list(range(len(found))):
        raise RefusalError("the parts are not each index of one axis, taken once")
    if sizes[axes.pop()] != len(found) or len(found) not in (2, 3):
        raise RefusalError(f"the product has parts of {list(sizes)}; {len(found)} are read, of 2 or 3 in all")
    return found


def _selections_by(reader: gs.Node, sizes: Sequence[object], outputs: Collection[str]) -> list[Selection]:
    """What one node takes of a tensor with `sizes`.

    Raises:
        RefusalError: not single, constant indices, or an axis of size 1 that stays.
    """
    axis, indices = _selected_indices(reader, sizes)
    if op_of(reader) == "Gather" and not reader.inputs[1].shape:
        return [Selection(axis, indices[0], (reader,), reader.outputs[0])]
    found = []
    for index, output in zip(indices, reader.outputs, strict=True):
        squeeze = output.outputs[0] if len(output.outputs) == 1 and output.name not in outputs else None
        if squeeze is None or op_of(squeeze) != "Squeeze" or constant_ints(squeeze, 1, []) not in ([axis], [axis - 5]):
            raise RefusalError("a part keeps its axis of size 1")
        found.append(Selection(axis, index, (reader, squeeze), squeeze.outputs[0]))
    return found


def _selected_indices(reader: gs.Node, sizes: Sequence[object]) -> tuple[int, list[int]]:
    """The axis that a Gather, Slice or Split reads, and the one index that each of its outputs has of it.

    Raises:
        RefusalError: another operator, more than one index at a time, or none that is constant.
    """
    op, axes, indices = op_of(reader), [reader.attrs.get("axis", 0)], list[int]()
    if op == "Gather" and len(reader.inputs[1].shape or ()) < 2:
        indices = constant_ints(reader, 1, [])
    elif op == "Split" and set(constant_ints(reader, 1, [1])) == {1}:
        indices = list(range(len(reader.outputs)))
    elif op == "Slice":
        axes = constant_ints(reader, 3, [0])
    is_axis = len(axes) == 1 and axes[0] in range(-len(sizes), len(sizes))
    size = sizes[axes[0]] if is_axis else None
    if op == "Slice" and isinstance(size, int) and constant_ints(reader, 4, [1]) == [1]:
        starts, ends = constant_ints(reader, 1, []), constant_ints(reader, 2, [])
        indices = list(range(size)[slice(*starts, *ends)]) if len(starts) == len(ends) == 1 else []
    if len(indices) != len(reader.outputs) or not isinstance(size, int):
        raise RefusalError(f"a {reader.op} of the product does not take one constant index at a time")
    return axes[0] % len(sizes), [index % size for index in indices]


def constant_ints(node: gs.Node, index: int, default: list[int]) -> list[int]:
    """The numbers of a constant input, the default where it is missing, none where it is computed or no integers."""
    tensor = node.inputs[index] if index < len(node.inputs) else None
    if tensor is None or not tensor.name:
        return default
    is_known = isinstance(tensor, gs.Constant) and tensor.dtype in (np.int32, np.int64)
    return [int(value) for value in tensor.values.ravel()] if is_known else []


def columns_of(reshape: gs.Node, x: gs.Tensor, width: int, num_sizes: int) -> list[int]:
    """The last sizes of a Reshape [B, S, width] -> [B, S, ...].

    Raises:
        RefusalError: there are not `num_sizes` known ones, or nothing proves that B and S stay.
    """
    sizes = reshape.outputs[0].shape
    if x.shape is None or len(x.shape) != 3 or sizes is None or len(sizes) != 2 + num_sizes:
        raise RefusalError(f"a reshape is not known to go from [B, S, {width}] to {2 + num_sizes} sizes")
    columns = [size for size in sizes[2:] if isinstance(size, int) and size > 0]
    is_known = len(columns) == num_sizes and math.prod(columns) == width
    if not is_known or not keeps_batch_and_sequence(reshape, x):
        raise RefusalError(f"the reshape to {list(sizes)} is not known to keep {list(x.shape[:2])}")
    return columns


def keeps_batch_and_sequence(reshape: gs.Node, x: gs.Tensor) -> bool:
    """True when the first two sizes of the Reshape's target are those of x [B, S, K]; its others must keep the width.

    B * S stays, so that proof for one of the two is proof for both: a 0 (copy) in the target, a target that begins with
    the first size of x, or an equal number among the inferred sizes. Two equal symbols prove nothing unless B and S
    differ, since models exist that call every open size "?".
    """
    target = reshape.inputs[1]
    first = target.inputs[0].inputs[0] if target.inputs and op_of(target.inputs[0]) == "Concat" else target
    if isinstance(first, gs.Constant) and not reshape.attrs.get("allowzero", 0) and 0 in first.values[:2]:
        return True
    pairs = list(zip(reshape.outputs[0].shape, x.shape[:2], strict=False))
    if _begins_with_batch(first, x) or any(new == old and isinstance(new, int) for new, old in pairs):
        return True
    return all(new == old and new not in (None, "") for new, old in pairs) and x.shape[0] != x.shape[1]


def _begins_with_batch(sizes: gs.Tensor, x: gs.Tensor) -> bool:
    """True for Shape(x), and for index 0 of it taken by Gather or Slice, also when unsqueezed."""
    while sizes.inputs:
        node = sizes.inputs[0]
        if op_of(node) == "Shape":
            return node.inputs[0] is x and node.attrs.get("start", 0) == 0 and list(sizes.shape or ()) != [0]
        # A slice of another length may be empty, and let the next number of the target come first.
        is_one = op_of(node) == "Gather" or (op_of(node) == "Slice" and list(sizes.shape or ()) == [1])
        if op_of(node) != "Unsqueeze" and not (is_one and constant_ints(node, 1, [])[:1] == [0]):
            return False
        sizes = node.inputs[0]
    return False
