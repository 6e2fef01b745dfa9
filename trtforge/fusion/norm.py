"""Normalisation over the last axis: the operators, and the chains that older exporters and TensorFlow write.

    chain 1   d = x - mean(x);  d / sqrt(mean(d^2) + eps) * gamma + beta
    chain 2   s = gamma / sqrt(mean((x - mean(x))^2) + eps);  x * s + (beta - mean(x) * s), as TensorFlow's

d^2 is Pow(d, 2) or d * d, and 1 / sqrt may be Div, or Reciprocal and Mul. gamma and beta may be missing in chain 1.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.fusion.linear import rows_of
from trtforge.fusion.regions import Norm
from trtforge.fusion.sizes import DAMAGE
from trtforge.fusion.view import View, is_vector, number_of, op_name, producer_of, source_of, split_constant


class Norms:
    """Every normalisation of a graph, by what it reads and by what it gives."""

    def __init__(self, view: View) -> None:
        self._view = view
        self.of: dict[str, list[Norm]] = {}
        self._by_output: dict[str, tuple[Norm, gs.Tensor, gs.Tensor]] = {}
        for node in view.graph.nodes:
            try:
                found = _operator(view, node) or _chain_1(view, node) or _chain_2(view, node)
            except DAMAGE:
                continue
            if found is None:
                continue
            norm, x, output = found
            # Only the end of a chain counts: gamma * d / s without beta is the beginning of one with it.
            self._by_output[norm.output] = (norm, x, output)
        inner = {name for norm, _, _ in self._by_output.values() for name in norm.nodes if name != norm.node}
        self._by_output = {name: found for name, found in self._by_output.items() if found[0].node not in inner}
        for norm, _, _ in self._by_output.values():
            self.of.setdefault(norm.x, []).append(norm)

    def behind(self, tensor: gs.Tensor) -> tuple[Norm, gs.Tensor] | None:
        """The normalisation that gives a tensor, and what it normalises."""
        found = self._by_output.get(source_of(tensor).name) or self._by_output.get(rows_of(self._view, tensor).name)
        return None if found is None else found[:2]

    def output(self, norm: Norm) -> gs.Tensor:
        """Its output."""
        return self._by_output[norm.output][2]


_Found = tuple[Norm, gs.Tensor, gs.Tensor]


def _operator(view: View, node: gs.Node) -> _Found | None:
    op = op_name(node)
    if op not in ("LayerNormalization", "RMSNormalization") or len(node.inputs) < 2:
        return None
    x, gamma = node.inputs[0], node.inputs[1]
    beta = node.inputs[2] if len(node.inputs) > 2 and node.inputs[2].name else None
    width = view.sizes.last(x)
    is_last = view.is_last_axis(node.attrs.get("axis", -1), x)
    if not is_last or not is_vector(gamma, width) or not (beta is None or is_vector(beta, width)):
        return None
    if any(tensor.name for tensor in node.outputs[1:]):
        return None
    kind = "layer" if op == "LayerNormalization" else "rms"
    return _found(view, kind, [node], x, float(node.attrs.get("epsilon", 1e-5)), gamma, beta)


def _found(
    view: View,
    kind: str,
    nodes: list[gs.Node],
    x: gs.Tensor,
    epsilon: float,
    gamma: gs.Tensor | None,
    beta: gs.Tensor | None,
) -> _Found:
    """A normalisation; its node is the first of `nodes`."""
    x, output = rows_of(view, x), nodes[0].outputs[0]
    norm = Norm(
        "layer" if kind == "layer" else "rms",
        str(nodes[0].name),
        epsilon,
        None if gamma is None else str(gamma.name),
        None if beta is None else str(beta.name),
        str(x.name),
        str(output.name),
        tuple(dict.fromkeys(str(node.name) for node in nodes)),
    )
    return norm, x, output


@dataclasses.dataclass(slots=True)
class _Deviation:
    """x - mean(x), and the nodes that make it."""

    x: gs.Tensor
    mean: gs.Tensor
    nodes: list[gs.Node]


def _chain_1(view: View, node: gs.Node) -> _Found | None:
    nodes: list[gs.Node] = []
    gamma: gs.Tensor | None = None
    beta: gs.Tensor | None = None
    width = view.sizes.last(node.outputs[0]) if node.outputs else None
    current: gs.Node | None = node
    for op in ("Add", "Mul"):
        operands = split_constant(current) if current is not None and op_name(current) == op else None
        if current is not None and operands is not None and is_vector(operands[1], width):
            beta, gamma = (operands[1], gamma) if op == "Add" else (beta, operands[1])
            nodes.append(current)
            current = producer_of(operands[0])
    if current is None or op_name(current) not in ("Div", "Mul") or len(current.inputs) != 2:
        return None
    for top, bottom in ((0, 1), (1, 0)) if op_name(current) == "Mul" else ((0, 1),):
        deviation = _deviation(view, current.inputs[top])
        inverse = _deviation_size(view, current.inputs[bottom], is_inverse=op_name(current) == "Mul")
        if deviation is not None and inverse is not None and inverse[1].x is deviation.x:
            every = [*nodes, current, *deviation.nodes, *inverse[2], *inverse[1].nodes]
            return _found(view, "layer", every, deviation.x, inverse[0], gamma, beta)
    return None


def _chain_2(view: View, node: gs.Node) -> _Found | None:
    if op_name(node) != "Add" or len(node.inputs) != 2:
        return None
    width = view.sizes.last(node.outputs[0])
    for first, second in ((0, 1), (1, 0)):
        product, shift = producer_of(node.inputs[first]), producer_of(node.inputs[second])
        if product is None or shift is None or op_name(product) != "Mul" or op_name(shift) != "Sub":
            continue
        shifted = producer_of(shift.inputs[1]) if len(shift.inputs) == 2 else None
        if shifted is None or op_name(shifted) != "Mul" or not is_vector(shift.inputs[0], width):
            continue
        for x, scale in (product.inputs, product.inputs[::-1]):
            factor = producer_of(scale)
            operands = split_constant(factor) if op_name(factor) == "Mul" and factor is not None else None
            if factor is None or operands is None or not is_vector(operands[1], width):
                continue
            size = _deviation_size(view, operands[0], is_inverse=True)
            if size is None or size[1].x is not source_of(x) or not _reads(shifted, size[1].mean, scale):
                continue
            every = [node, product, shift, shifted, factor, *size[2], *size[1].nodes]
            return _found(view, "layer", every, size[1].x, size[0], operands[1], shift.inputs[0])
    return None


def _reads(node: gs.Node, mean: gs.Tensor, scale: gs.Tensor) -> bool:
    names = sorted(source_of(tensor).name for tensor in node.inputs)
    return names == sorted((mean.name, source_of(scale).name))


def _deviation(view: View, tensor: gs.Tensor) -> _Deviation | None:
    node = producer_of(tensor)
    if node is None or op_name(node) != "Sub" or len(node.inputs) != 2:
        return None
    mean = producer_of(node.inputs[1])
    x = source_of(node.inputs[0])
    if mean is None or not _is_mean(view, mean) or source_of(mean.inputs[0]) is not x:
        return None
    return _Deviation(x, mean.outputs[0], [node, mean])


def _deviation_size(
    view: View, tensor: gs.Tensor, *, is_inverse: bool
) -> tuple[float, _Deviation, list[gs.Node]] | None:
    """epsilon, x - mean(x) and the nodes of sqrt(mean(d^2) + eps), or of 1 over it."""
    nodes: list[gs.Node] = []
    node = producer_of(tensor)
    if is_inverse:
        top = number_of(node.inputs[0]) if node is not None and op_name(node) == "Div" else None
        if node is None or not (op_name(node) == "Reciprocal" or top == 1.0):
            return None
        nodes.append(node)
        node = producer_of(node.inputs[-1])
    if node is None or op_name(node) not in ("Sqrt", "Pow"):
        return None
    if op_name(node) == "Pow" and number_of(node.inputs[1]) != 0.5:
        return None
    nodes.append(node)
    total = producer_of(node.inputs[0])
    operands = split_constant(total) if total is not None and op_name(total) == "Add" else None
    if total is None or operands is None:
        return None
    epsilon, mean = number_of(operands[1]), producer_of(operands[0])
    square = producer_of(mean.inputs[0]) if mean is not None and _is_mean(view, mean) else None
    if epsilon is None or mean is None or square is None or len(square.inputs) != 2:
        return None
    is_square = op_name(square) == "Pow" and number_of(square.inputs[1]) == 2.0
    is_product = op_name(square) == "Mul" and source_of(square.inputs[0]) is source_of(square.inputs[1])
    deviation = _deviation(view, square.inputs[0]) if is_square or is_product else None
    return None if deviation is None else (epsilon, deviation, [*nodes, total, mean, square])


def _is_mean(view: View, node: gs.Node) -> bool:
    """True for a mean over the last axis that keeps it."""
    if op_name(node) != "ReduceMean" or not node.attrs.get("keepdims", 1):
        return False
    axes = node.attrs.get("axes")
    if axes is None and len(node.inputs) > 1 and isinstance(node.inputs[1], gs.Constant):
        axes = np.asarray(node.inputs[1].values).ravel().tolist()
    return axes is not None and len(axes) == 1 and view.is_last_axis(axes[0], node.inputs[0])
