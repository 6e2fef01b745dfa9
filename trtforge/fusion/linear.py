"""Products with a constant weight, their bias, and the Reshapes to rows and back around them.

    x [.., K] -> (Reshape [M, K]) -> MatMul or Gemm -> Add [W] and Reshape [.., W], in either order, both optional

The Reshapes keep the last axis, so that a row stays a row; which sizes the axes before it have is for the reader of the
result to prove. A reader that is neither bias nor Reshape ends the layer.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from trtforge.fusion.regions import Linear
from trtforge.fusion.sizes import DAMAGE, same_size
from trtforge.fusion.view import View, is_vector, op_name, producer_of, source_of, split_constant

# Reshapes in a row that are looked through: one to rows, one by an exporter's flattening before it.
_MAX_RESHAPES = 4


class Linears:
    """Every linear layer of a graph, by its product, its x and its output."""

    def __init__(self, view: View) -> None:
        self._view = view
        self.all: list[Linear] = []
        self._by_output: dict[str, Linear] = {}
        self._by_product: dict[str, Linear] = {}
        self.tensors: dict[str, gs.Tensor] = {}
        for node in view.graph.nodes:
            try:
                linear = self._linear_of(node)
            except DAMAGE:
                continue
            if linear is not None:
                self.all.append(linear)
                self._by_product[linear.product] = linear
                self._by_output[linear.output] = linear

    def behind(self, tensor: gs.Tensor) -> Linear | None:
        """The layer that gives a tensor, Reshapes that keep rows aside."""
        found = self._by_output.get(source_of(tensor).name)
        return found or self._by_output.get(rows_of(self._view, tensor).name)

    def of_product(self, node: gs.Node) -> Linear | None:
        """The layer of a product."""
        return self._by_product.get(node.name)

    def tensor(self, name: str) -> gs.Tensor:
        """x or output of a layer."""
        return self.tensors[name]

    def _linear_of(self, node: gs.Node) -> Linear | None:
        weight = _weight_of(node)
        if weight is None:
            return None
        view, is_transposed = self._view, op_name(node) == "Gemm" and bool(node.attrs.get("transB", 0))
        width = int(weight.shape[0 if is_transposed else 1])
        nodes: list[gs.Node] = [*_reshapes_before(view, node.inputs[0]), node]
        bias: gs.Tensor | None = node.inputs[2] if len(node.inputs) > 2 and node.inputs[2].name else None
        bias_add: gs.Node | None = None
        if bias is not None and not is_vector(source_of(bias), width):
            return None
        output = node.outputs[0]
        for _ in range(3):
            reader = view.only_reader(output)
            operands = split_constant(reader) if op_name(reader) == "Add" and reader is not None else None
            if reader is None:
                break
            if operands is not None and bias is None and is_vector(operands[1], width):
                bias, bias_add = operands[1], reader
            elif not _keeps_rows(view, reader):
                break
            nodes.append(reader)
            output = reader.outputs[0]
        x = rows_of(view, node.inputs[0])
        self.tensors |= {x.name: x, output.name: output}
        names = tuple(dict.fromkeys(str(member.name) for member in nodes))
        add_name = None if bias_add is None else str(bias_add.name)
        bias_name = None if bias is None else str(bias.name)
        return Linear(
            node.name, str(node.inputs[1].name), bias_name, add_name, is_transposed, x.name, output.name, width, names
        )  # fmt: skip


def rows_of(view: View, tensor: gs.Tensor) -> gs.Tensor:
    """The tensor in front of the Reshapes that keep its rows, and of Q/DQ."""
    tensor = source_of(tensor)
    for node in _reshapes_before(view, tensor):
        tensor = source_of(node.inputs[0])
    return tensor


def same_rows(view: View, one: gs.Tensor, other: gs.Tensor) -> bool:
    """True where two tensors are known to have the same axes but for the last; also where both are plain rows."""
    first, second = view.sizes.of(one), view.sizes.of(other)
    if first is None or second is None or len(first) != len(second):
        return False
    return len(first) == 2 or all(same_size(a, b) for a, b in zip(first[:-1], second[:-1], strict=True))


def _reshapes_before(view: View, tensor: gs.Tensor) -> list[gs.Node]:
    """The Reshapes that keep rows and end at a tensor, the last one first."""
    found: list[gs.Node] = []
    node = producer_of(tensor)
    while node is not None and len(found) < _MAX_RESHAPES and _keeps_rows(view, node):
        found.append(node)
        node = producer_of(node.inputs[0])
    return found


def _keeps_rows(view: View, node: gs.Node) -> bool:
    """True for a Reshape between [M, W] and [B, S, W]; with four axes, equal last ones may be a single head."""
    if op_name(node) != "Reshape":
        return False
    ends = (node.inputs[0], node.outputs[0])
    sizes = [view.sizes.last(tensor) for tensor in ends]
    return sizes[0] is not None and sizes[0] == sizes[1] and all(view.sizes.rank(end) in (2, 3) for end in ends)


def _weight_of(node: gs.Node) -> gs.Constant | None:
    """The constant [K, W] or [W, K] of a plain product, quantized or not."""
    op = op_name(node)
    if op == "Gemm":
        attrs = node.attrs
        if attrs.get("alpha", 1.0) != 1.0 or attrs.get("beta", 1.0) != 1.0 or attrs.get("transA", 0):
            return None
    if op not in ("MatMul", "Gemm") or len(node.inputs) < 2 or isinstance(node.inputs[0], gs.Constant):
        return None
    weight = node.inputs[1]
    for _ in range(2):
        if weight.inputs and op_name(weight.inputs[0]) in ("DequantizeLinear", "QuantizeLinear"):
            weight = weight.inputs[0].inputs[0]
    is_matrix = isinstance(weight, gs.Constant) and len(weight.shape) == 2 and 0 not in weight.shape
    return weight if is_matrix else None
