"""Query, key and value followed back from attention to the columns of a weight.

Each axis of the tensor carries a label while it is followed back, and a node renames or moves labels:

    B batch   S sequence   N heads   D head size   P part (query, key or value)   BN batch and heads   1 size 1
    R batch and sequence   W what a Reshape cuts into N, D and P

What attention reads is [B, N, S, D] (key: [B, N, D, S]) or [BN, S, D]; what a projection gives is [B, S, width] or
[S, B, width], and a Reshape in between cuts the width into N, D and maybe P. Every order of these axes, and every way
to take a part, is then one rule:

1.  Transpose moves labels. Mul and Div by a number become part of the scale.
2.  Reshape [B, N, S, D] <-> [BN, S, D] joins or parts B and N where the other axes keep their sizes.
3.  Gather by a number, Squeeze, Unsqueeze, and Slice or Split to size 1 take part p of axis P.
4.  Unsqueeze, Expand, Reshape after key or value repeat each head (grouped queries).
5.  Reshape [B, S, width] -> [B, S, N, D] and the like ends it, where B and S are proved to stay.
6.  Split or Slice of the whole width takes columns; the linear layer behind gives the rest.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import onnx_graphsurgeon as gs

from trtforge.fusion.linear import Linears
from trtforge.fusion.qkv_layout import constant_ints, keeps_batch_and_sequence
from trtforge.fusion.regions import Heads, Linear, Projection, Stop
from trtforge.fusion.shape_values import Size
from trtforge.fusion.sizes import same_size
from trtforge.fusion.view import (
    StoppedError,
    View,
    op_name,
    perm_of,
    producer_of,
    scaled_input,
    source_of,
    split_constant,
)

# Nodes between attention and its projection; eleven were seen (PyTorch's sdpa of packed layouts).
_MAX_STEPS = 20


@dataclasses.dataclass(slots=True)
class _Walk:
    """What was found so far on the way back.

    Attributes:
        tensor, labels: where it is.
        nodes: gone over.
        order: labels that the width is made of, the slowest first; empty until a Reshape cuts it.
        counts: sizes of N, D and P as far as they are known.
        part: index of P.
        columns: first and number of the columns that a Split or Slice takes.
        rows: sizes of batch and sequence, once the width is cut.
    """

    tensor: gs.Tensor
    labels: list[str]
    nodes: list[gs.Node] = dataclasses.field(default_factory=list)
    scale: float = 1.0
    repeats: int = 1
    order: list[str] = dataclasses.field(default_factory=list)
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    part: int = 0
    columns: tuple[int, int] | None = None
    rows: tuple[Size, Size] = (None, None)


def follow_heads(
    view: View, linears: Linears, tensor: gs.Tensor, role: str, labels: Sequence[str], num_heads: int | None = None
) -> Heads:
    """Where query, key or value comes from.

    Args:
        tensor: what attention reads.
        role: "query", "key" or "value", for the reason.
        labels: of its axes.
        num_heads: N where the tensor is [B, S, N * D], with labels B, S, W.
    """
    walk = _Walk(source_of(tensor), list(labels))
    if num_heads is not None:
        walk.order, walk.counts = ["N", "D"], {"N": num_heads}
        sizes = view.sizes.of(tensor) or (None, None)
        walk.rows = (sizes[0], sizes[1])
    projection, stop = None, None
    try:
        projection = _Follower(view, linears, role).run(walk)
    except StoppedError as err:
        stop = Stop(err.node, str(err))
    names = tuple(dict.fromkeys(str(node.name) for node in reversed(walk.nodes)))
    is_transposed = role == "key" and labels[-1] == "S"
    return Heads(str(tensor.name), is_transposed, walk.scale, walk.repeats, projection, stop, names)


class _Follower:
    def __init__(self, view: View, linears: Linears, role: str) -> None:
        self._view = view
        self._linears = linears
        self._role = role

    def run(self, walk: _Walk) -> Projection:
        """The projection.

        Raises:
            StoppedError: something else stands in between.
        """
        for _ in range(_MAX_STEPS):
            if walk.labels[-1] == "W" and len(walk.labels) <= 3 and "P" not in walk.labels:
                linear = self._linears.behind(walk.tensor)
                if linear is not None:
                    return self._projection(walk, linear)
            node = producer_of(walk.tensor)
            if node is None:
                raise _input_stop(self._view, walk, self._role)
            if not (self._cut(walk, node) or self._take_columns(walk, node)):
                self._step(walk, node)
        raise StoppedError(walk.nodes[-1], f"more than {_MAX_STEPS} nodes stand between the {self._role} and its layer")

    def _step(self, walk: _Walk, node: gs.Node) -> None:
        """Go back over one node.

        Raises:
            StoppedError: it is none that rules 1 to 4 know.
        """
        op, scaled = op_name(node), scaled_input(node)
        if scaled is not None:
            walk.scale *= scaled[1]
            self._back(walk, node, scaled[0], walk.labels)
            return
        handler = {
            "Transpose": self._transpose,
            "Reshape": self._reshape,
            "Gather": self._gather,
            "Squeeze": self._squeeze,
            "Unsqueeze": self._unsqueeze,
            "Slice": self._slice,
            "Split": self._split,
        }.get(op)
        if handler is None:
            raise StoppedError(node, self._stands_between(node))
        handler(walk, node)

    def _back(self, walk: _Walk, node: gs.Node, tensor: gs.Tensor, labels: list[str]) -> None:
        walk.nodes.append(node)
        walk.tensor, walk.labels = source_of(tensor), labels

    def _stands_between(self, node: gs.Node) -> str:
        is_rotary = op_name(node) == "RotaryEmbedding" or (
            op_name(node) in ("Add", "Concat", "Sub") and all(op_name(producer_of(t)) == "Mul" for t in node.inputs)
        )
        what = f"a rotary embedding ({node.op})" if is_rotary else self._failed_bias(node) or f"{node.op}"
        return f"{what} stands between the {self._role} and its projection"

    def _failed_bias(self, node: gs.Node) -> str | None:
        """What a bias Add, or a product without one, lacks to be a linear layer; None for other nodes."""
        operands = split_constant(node) if op_name(node) == "Add" else None
        product = node if operands is None else producer_of(operands[0])
        if operands is not None and op_name(product) == "Cast":
            return "Cast"
        if product is None or op_name(product) not in ("MatMul", "Gemm"):
            return None
        if operands is not None and self._linears.of_product(product) is not None:
            return f"{node.op} of {list(operands[1].shape or ())}, which is no bias of one number for each column,"
        return f"{product.op} with {product.inputs[1].name!r}, which is no constant matrix,"

    def _stop(self, node: gs.Node, what: str) -> StoppedError:
        return StoppedError(node, f"the {self._role}: {what}")

    def _transpose(self, walk: _Walk, node: gs.Node) -> None:
        perm = perm_of(node, len(walk.labels))
        if perm is None:
            raise self._stop(node, "a Transpose of another rank")
        labels = [""] * len(perm)
        for place, axis in enumerate(perm):
            labels[axis] = walk.labels[place]
        self._back(walk, node, node.inputs[0], labels)

    def _reshape(self, walk: _Walk, node: gs.Node) -> None:
        """Rules 2 and 4."""
        before, after = (self._view.sizes.of(tensor) for tensor in (node.inputs[0], node.outputs[0]))
        if before is None or after is None:
            raise self._stop(node, "a Reshape of unknown rank")
        if before == after:
            self._back(walk, node, node.inputs[0], walk.labels)
            return
        keeps = all(same_size(a, b) for a, b in zip(before[-2:], after[-2:], strict=False))
        labels = walk.labels
        if labels[:2] == ["B", "N"] and len(before) == 3 and keeps:
            self._note(walk, node, "N", after[1])
            self._back(walk, node, node.inputs[0], ["BN", *labels[2:]])
        elif labels[0] == "BN" and len(labels) == 3 and len(before) == 4 and keeps:
            self._note(walk, node, "N", before[1])
            self._back(walk, node, node.inputs[0], ["B", "N", *labels[1:]])
        elif labels[:2] == ["B", "N"] and len(labels) == 4 and len(before) == 5 and keeps:
            self._repeat(walk, node)
        else:
            raise self._stop(node, f"the Reshape from {_text(before)} to {_text(after)} is no layout of heads")

    def _repeat(self, walk: _Walk, node: gs.Node) -> None:
        """Unsqueeze [B, G, 1, T, D], Expand [B, G, R, T, D], Reshape [B, G * R, T, D]."""
        expand = producer_of(node.inputs[0])
        unsqueeze = producer_of(expand.inputs[0]) if expand is not None and op_name(expand) == "Expand" else None
        if expand is None or unsqueeze is None or op_name(unsqueeze) != "Unsqueeze":
            raise self._stop(node, "heads are joined by a Reshape, not repeated")
        before, after = (self._view.sizes.of(tensor) for tensor in (expand.inputs[0], expand.outputs[0]))
        repeats = after[2] if after is not None and len(after) == 5 else None
        is_column = before is not None and len(before) == 5 and before[2] == 1
        if (
            constant_ints(unsqueeze, 1, []) not in ([2], [-3])
            or not is_column
            or not isinstance(repeats, int)
            or not repeats
        ):
            raise self._stop(expand, "the Expand does not repeat each head a known number of times")
        if walk.counts.get("N", repeats) % repeats:
            raise self._stop(node, f"{walk.counts['N']} heads are not {repeats} times others")
        if "N" in walk.counts:
            walk.counts["N"] //= repeats
        walk.repeats *= repeats
        walk.nodes += [node, expand]
        self._back(walk, unsqueeze, unsqueeze.inputs[0], walk.labels)

    def _gather(self, walk: _Walk, node: gs.Node) -> None:
        index = constant_ints(node, 1, [])
        rank = self._view.sizes.rank(node.inputs[0])
        if len(index) != 1 or rank < 1:
            raise StoppedError(node, self._stands_between(node))
        axis = int(node.attrs.get("axis", 0)) % rank
        labels = list(walk.labels)
        if rank == len(labels) + 1 and len(node.inputs[1].shape or ()) == 0:
            labels.insert(axis, "P")
        elif rank == len(labels) and labels[axis] == "1":
            labels[axis] = "P"
        else:
            raise StoppedError(node, self._stands_between(node))
        self._take_part(walk, node, axis, index[0], labels)

    def _squeeze(self, walk: _Walk, node: gs.Node) -> None:
        rank = self._view.sizes.rank(node.inputs[0])
        axes = constant_ints(node, 1, [])
        if rank != len(walk.labels) + len(axes) or not axes or any(not -rank <= axis < rank for axis in axes):
            raise self._stop(node, "a Squeeze of unknown axes")
        labels = list(walk.labels)
        for axis in sorted(axis % rank for axis in axes):
            labels.insert(axis, "1")
        self._back(walk, node, node.inputs[0], labels)

    def _unsqueeze(self, walk: _Walk, node: gs.Node) -> None:
        rank, axes = len(walk.labels), constant_ints(node, 1, [])
        places = {axis % rank for axis in axes if -rank <= axis < rank}
        if not places or len(places) != len(axes) or any(walk.labels[place] != "1" for place in places):
            raise self._stop(node, "an Unsqueeze adds an axis of the heads")
        labels = [label for place, label in enumerate(walk.labels) if place not in places]
        self._back(walk, node, node.inputs[0], labels)

    def _slice(self, walk: _Walk, node: gs.Node) -> None:
        axes, starts = constant_ints(node, 3, [0]), constant_ints(node, 1, [])
        rank = len(walk.labels)
        is_one = len(axes) == len(starts) == 1 and -rank <= axes[0] < rank and constant_ints(node, 4, [1]) == [1]
        axis = axes[0] % rank if is_one else 0
        if not is_one or walk.labels[axis] != "1":
            raise StoppedError(node, self._stands_between(node))
        self._take_part(walk, node, axis, starts[0], [*walk.labels[:axis], "P", *walk.labels[axis + 1 :]])

    def _split(self, walk: _Walk, node: gs.Node) -> None:
        rank, axis = len(walk.labels), int(node.attrs.get("axis", 0))
        index = next((i for i, output in enumerate(node.outputs) if output is walk.tensor), 0)
        if not -rank <= axis < rank or walk.labels[axis] != "1":
            label = walk.labels[axis] if -rank <= axis < rank else "?"
            raise self._stop(node, f"the Split cuts axis {label} of the heads")
        axis %= rank
        self._take_part(walk, node, axis, index, [*walk.labels[:axis], "P", *walk.labels[axis + 1 :]])

    def _take_part(self, walk: _Walk, node: gs.Node, axis: int, index: int, labels: list[str]) -> None:
        sizes = self._view.sizes.of(node.inputs[0])
        count = sizes[axis] if sizes is not None and len(sizes) == len(labels) else None
        if not isinstance(count, int) or labels.count("P") > 1 or not -count <= index < count:
            raise self._stop(node, "the part taken is not one of a known number")
        walk.part = index % count
        self._back(walk, node, node.inputs[0], labels)

    def _note(self, walk: _Walk, node: gs.Node, label: str, size: object) -> None:
        """Keep the size of an axis where it is known; two that differ end the match."""
        if not isinstance(size, int):
            return
        if walk.counts.setdefault(label, size) != size or size < 1:
            raise self._stop(node, f"axis {label} of its heads has sizes {walk.counts[label]} and {size}")

    def _cut(self, walk: _Walk, node: gs.Node) -> bool:
        """Go back over a Reshape that cuts the width, rule 5; False for another node.

        Raises:
            StoppedError: nothing proves that batch and sequence stay.
        """
        before, after = (self._view.sizes.of(tensor) for tensor in (node.inputs[0], node.outputs[0]))
        labels = walk.labels
        if op_name(node) != "Reshape" or before is None or after is None or len(after) != len(labels):
            return False
        if labels == ["S", "BN", "D"] and len(before) == 3:
            keeps, order, lead = same_size(before[0], after[0]), ["N", "D"], ["S", "B"]
        else:
            order, lead = labels[2:], labels[:2]
            is_heads = {"N", "D"} <= set(order) <= {"N", "D", "P"} and not walk.order
            is_cut = is_heads or sorted(order) == ["P", "W"]
            if set(lead) != {"B", "S"} or not is_cut or len(before) not in (2, 3):
                return False
            keeps = len(before) == 2 or self._keeps(node, before, after)
        if not keeps:
            what = f"the Reshape from {_text(before)} to {_text(after)} is not known to keep batch and sequence"
            raise self._stop(node, what)
        for label, size in zip(labels, after, strict=True):
            if label in ("N", "D", "P"):
                self._note(walk, node, label, size)
        if walk.rows == (None, None):
            batch = before[1] if "BN" in labels else after[lead.index("B")]
            walk.rows = (batch, after[lead.index("S")])
        outer = [label for part in order for label in (walk.order if part == "W" else [part])]
        walk.order = outer
        self._back(walk, node, node.inputs[0], [*(lead if len(before) == 3 else ["R"]), "W"])
        return True

    def _keeps(self, node: gs.Node, before: Sequence[object], after: Sequence[object]) -> bool:
        """True where the first two sizes are proved to stay: both are equal, or one number is and the width adds up."""
        equal = [old is not None and old == new for old, new in zip(before[:2], after[:2], strict=True)]
        numbers = [size for size in after[2:] if isinstance(size, int)]
        is_whole = len(numbers) == len(after) - 2 and math.prod(numbers) == before[2]
        is_number = any(same and isinstance(size, int) and size > 0 for same, size in zip(equal, after, strict=False))
        return all(equal) or (is_whole and is_number) or keeps_batch_and_sequence(node, node.inputs[0])

    def _take_columns(self, walk: _Walk, node: gs.Node) -> bool:
        """Go back over a Split or Slice of the whole width, rule 6; False for another node."""
        taken = self._taken_columns(node, walk.tensor) if walk.labels[-1] == "W" and "P" not in walk.labels else None
        if taken is None or walk.columns is not None:
            return False
        walk.columns = taken
        self._back(walk, node, node.inputs[0], walk.labels)
        return True

    def _taken_columns(self, node: gs.Node, tensor: gs.Tensor) -> tuple[int, int] | None:
        """The first of the columns that a Split or Slice of the last axis gives a tensor, and their number."""
        if op_name(node) not in ("Split", "Slice"):
            return None
        rank, total = self._view.sizes.rank(node.inputs[0]), self._view.sizes.last(node.inputs[0])
        if rank < 1 or total is None:
            return None
        if op_name(node) == "Split" and int(node.attrs.get("axis", 0)) in (-1, rank - 1):
            share = -(-total // len(node.outputs))
            equal = [min(share, total - share * i) for i in range(len(node.outputs))]
            sizes = constant_ints(node, 1, equal)
            index = next((i for i, output in enumerate(node.outputs) if output is tensor), -1)
            return (sum(sizes[:index]), sizes[index]) if 0 <= index < len(sizes) and sum(sizes) == total else None
        if op_name(node) == "Slice" and constant_ints(node, 3, [0]) in ([-1], [rank - 1]):
            starts, ends = constant_ints(node, 1, []), constant_ints(node, 2, [])
            if len(starts) == len(ends) == 1 and constant_ints(node, 4, [1]) == [1]:
                start, stop, _ = slice(starts[0], ends[0]).indices(total)
                return (start, stop - start) if stop > start else None
        return None

    def _projection(self, walk: _Walk, linear: Linear) -> Projection:
        """The columns of the linear layer that were reached."""
        first, width = walk.columns or (0, linear.width)
        counts = walk.counts
        if "P" not in walk.order:
            counts["P"] = 1
        missing = [label for label in ("N", "D") if label not in counts]
        known = math.prod(counts[label] for label in ("N", "D", "P") if label in counts)
        node = walk.nodes[-1] if walk.nodes else self._view.graph.nodes[0]
        if len(missing) > 1 or "P" not in counts or (missing and width % known):
            raise self._stop(node, "its head size is not known")
        if missing:
            counts[missing[0]] = width // known
        num_heads, head_size, num_parts = (counts[label] for label in ("N", "D", "P"))
        if num_heads * head_size * num_parts != width:
            what = f"{width} columns are not {num_parts} parts of {num_heads} heads of {head_size}"
            raise self._stop(node, what)
        strides: dict[str, int] = {}
        stride = 1
        for label in reversed(walk.order):
            strides[label] = stride
            stride *= counts[label]
        first += walk.part * strides.get("P", 0)
        is_sequence_first = walk.labels[0] == "S"
        return Projection(linear, first, strides["N"], strides["D"], num_heads, head_size, walk.rows, is_sequence_first)


def _text(sizes: Sequence[object]) -> str:
    return "[" + ", ".join("?" if str(size).startswith("?") else str(size) for size in sizes) + "]"


def _input_stop(view: View, walk: _Walk, role: str) -> StoppedError:
    node = walk.nodes[-1] if walk.nodes else next(iter(view.readers(walk.tensor)), view.graph.nodes[0])
    return StoppedError(node, f"the {role} is {walk.tensor.name!r}, no result of a linear layer")
