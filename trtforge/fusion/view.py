"""What matching asks of a graph: who made a tensor, who reads it, what a constant holds, and where a match stopped.

Q/DQ pairs are looked through, so that a model that arrives quantized has the regions of its float form.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.fusion.qkv_layout import op_of
from trtforge.fusion.sizes import KnownSizes
from trtforge.graph.edit import is_array, pinned_names

_QDQ_OPS = ("DequantizeLinear", "QuantizeLinear")
# onnx's numbers of float32, float16, float64 and bfloat16.
_FLOAT_TYPES = (1, 10, 11, 16)
# One Q/DQ pair is two nodes; more than two in a row is no quantized model.
_MAX_QDQ = 4


class StoppedError(Exception):
    """A pattern that began to match and did not go on; the text is the reason.

    Attributes:
        node: name of the node where it stopped.
    """

    def __init__(self, node: gs.Node, reason: str) -> None:
        super().__init__(reason)
        self.node = str(node.name)


class View:
    """One sorted graph, read only."""

    def __init__(self, graph: gs.Graph) -> None:
        self.graph = graph
        self.sizes = KnownSizes(graph)
        self._pinned = pinned_names(graph)
        self.order = {id(node): index for index, node in enumerate(graph.nodes)}

    def is_pinned(self, tensor: gs.Tensor) -> bool:
        """True for an output of the graph and for what a subgraph reads."""
        return tensor.name in self._pinned

    def is_last_axis(self, axis: object, tensor: gs.Tensor) -> bool:
        """True where an axis of a tensor is known to be its last."""
        return axis == -1 or axis == self.sizes.rank(tensor) - 1 >= 0

    def readers(self, tensor: gs.Tensor) -> list[gs.Node]:
        """The nodes that read a tensor, each once; behind Q/DQ too."""
        found: dict[int, gs.Node] = {}
        pending = [(tensor, 0)]
        while pending:
            current, depth = pending.pop(0)
            for node in current.outputs:
                if op_of(node) in _QDQ_OPS and depth < _MAX_QDQ and node.inputs[0] is current:
                    pending.append((node.outputs[0], depth + 1))
                else:
                    found[id(node)] = node
        return list(found.values())

    def only_reader(self, tensor: gs.Tensor) -> gs.Node | None:
        """The one node of the main graph that computes with a tensor; None for others, and where an output needs it.

        A Shape does not count: whether what it gives is needed elsewhere is asked of a whole block at its end.
        """
        readers = [node for node in self.readers(tensor) if op_of(node) != "Shape"]
        if len(readers) != 1 or self.is_pinned(tensor) or id(readers[0]) not in self.order:
            return None
        return readers[0]


def source_of(tensor: gs.Tensor) -> gs.Tensor:
    """The tensor in front of the Q/DQ pairs that give this one; a quantized constant stays."""
    for _ in range(_MAX_QDQ):
        node = tensor.inputs[0] if tensor.inputs else None
        if node is None or op_of(node) not in _QDQ_OPS or isinstance(node.inputs[0], gs.Constant):
            return tensor
        tensor = node.inputs[0]
    return tensor


def producer_of(tensor: gs.Tensor) -> gs.Node | None:
    """The node that makes a tensor, Q/DQ aside; None for inputs and constants."""
    source = source_of(tensor)
    return source.inputs[0] if source.inputs else None


def op_name(node: gs.Node | None) -> str:
    """Its operator; "" for none, and for one of another domain."""
    return "" if node is None else op_of(node)


def casts_to_float(node: gs.Node) -> bool:
    """True for a Cast to a float type, which keeps numbers up to rounding; one to integers or bool cuts them."""
    return op_of(node) == "Cast" and node.attrs.get("to") in _FLOAT_TYPES


def number_of(tensor: gs.Tensor) -> float | None:
    """The value of a constant with one number that is finite or infinite, not NaN."""
    if not is_array(tensor) or tensor.values.size != 1 or tensor.values.dtype.kind not in "fiubV":
        return None
    try:
        value = float(np.asarray(tensor.values).astype(np.float64).ravel()[0])
    except (TypeError, ValueError):
        return None
    return None if math.isnan(value) else value


def is_vector(tensor: gs.Tensor, width: int | None) -> bool:
    """True for a constant of `width` numbers along the last axis, any other axes being of size 1."""
    shape = tuple(tensor.shape or ()) if isinstance(tensor, gs.Constant) else ()
    return bool(shape) and shape[-1] == width and math.prod(shape) == width


def split_constant(node: gs.Node) -> tuple[gs.Tensor, gs.Tensor] | None:
    """The operand that is computed and the one that is constant, of a node with one of each."""
    if len(node.inputs) != 2:
        return None
    constants = [tensor for tensor in node.inputs if isinstance(tensor, gs.Constant)]
    others = [tensor for tensor in node.inputs if not isinstance(tensor, gs.Constant)]
    return (others[0], constants[0]) if len(constants) == len(others) == 1 else None


def scaled_input(node: gs.Node) -> tuple[gs.Tensor, float] | None:
    """x and c of a node that gives x * c with one number c: Mul, or Div by 1 / c."""
    op = op_of(node)
    operands = split_constant(node) if op in ("Mul", "Div") else None
    if operands is None or (op == "Div" and operands[0] is not node.inputs[0]):
        return None
    value = number_of(operands[1])
    if value is None or not math.isfinite(value) or value == 0:
        return None
    return operands[0], value if op == "Mul" else 1.0 / value


def perm_of(node: gs.Node, rank: int) -> list[int] | None:
    """The order of axes of a Transpose of a tensor with `rank` axes; None where it does not fit."""
    perm = node.attrs.get("perm", list(range(rank))[::-1])
    return [int(axis) for axis in perm] if sorted(perm) == list(range(rank)) else None
