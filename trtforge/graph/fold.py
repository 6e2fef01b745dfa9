"""Constant folding: a node whose inputs are all known becomes a constant.

1. A node with constant inputs and an op of evaluate.py's list is computed.
2. Shape arithmetic whose result does not depend on the sizes that are open is known too (bounds.py).
3. Never folded: nodes that give a graph output (its name must stay), quantization, random and stateful ops, nodes with
   subgraphs - none of these is on the list - and a node whose result contradicts the inferred type.
4. A result may not take much more memory than its inputs: up to 16 MiB more, or no more elements than the largest of
   them (a Cast of compressed weights). All results of one call together stay within a budget, since constants can
   be copied without end.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trtforge.graph.bounds import NOTHING_KNOWN, Bounds, KnownSizes, fits_shape
from trtforge.graph.edit import all_graphs, is_array, is_onnx_op, remove_nodes, subgraphs_of
from trtforge.graph.evaluate import EVALUABLE_OPS, count_output_elements, evaluate_node
from trtforge.graph.messages import write_node
from trtforge.graph.signature import tensor_dtype

Array = np.ndarray[Any, Any]

# Bytes that one folded result may add.
_GROWTH_BYTES = 16 * 2**20
# Bytes that all folded results of one call may take, on top of 8 times the constants there were.
_BASE_BUDGET_BYTES = 256 * 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class FoldReport:
    """What folding changed.

    Attributes:
        num_folded: nodes that became constants.
        skipped: names of nodes that were not folded because the result would be too large.
    """

    num_folded: int
    skipped: tuple[str, ...]


def fold_constants(graph: gs.Graph, known: KnownSizes = NOTHING_KNOWN) -> FoldReport:
    """Fold every node that can be folded, in place, subgraphs included.

    Args:
        graph: sorted, with inferred types.
        known: sizes and values of its inputs.
    """
    folder = _Folder(graph, known)
    for current in all_graphs(graph):
        kept_outputs = {id(tensor) for tensor in current.outputs}
        for node in current.nodes:
            folder.visit(node, is_kept=any(id(tensor) in kept_outputs for tensor in node.outputs))
    remove_nodes(graph, lambda node: id(node) in folder.folded)
    return FoldReport(len(folder.folded), tuple(folder.skipped))


class _Folder:
    """The state of one folding run: what was folded and the memory left."""

    def __init__(self, graph: gs.Graph, known: KnownSizes) -> None:
        self._bounds = Bounds(known)
        self.folded: set[int] = set()
        self.skipped: list[str] = []
        self._opset = graph.opset
        constants = {id(t): t.values.nbytes for t in _array_constants(graph)}
        self._budget_bytes = _BASE_BUDGET_BYTES + 8 * sum(constants.values())

    def visit(self, node: gs.Node, is_kept: bool) -> None:
        """Fold a node if the rules allow it; one that is kept is only learnt from."""
        if node.op not in EVALUABLE_OPS or not is_onnx_op(node) or subgraphs_of(node):
            return
        value = self._bounds.visit(node)
        if is_kept:
            return
        results = [value] if value is not None else self._constant_results(node)
        if results is None or not all(_fits_type(t, r) for t, r in zip(node.outputs, results, strict=False) if t.name):
            return
        for tensor, result in zip(node.outputs, results, strict=False):
            if tensor.name:
                self._budget_bytes -= result.nbytes
                tensor.to_constant(result)
        self.folded.add(id(node))

    def _constant_results(self, node: gs.Node) -> list[Array] | None:
        if not node.inputs or not all(not t.name or is_array(t) for t in node.inputs):
            return None
        inputs = [tensor.values if tensor.name else None for tensor in node.inputs]
        try:
            proto = onnx.NodeProto()
            write_node(node, proto)
            num_elements = count_output_elements(proto, inputs)
            itemsize = max((dtype.itemsize for t in node.outputs if (dtype := tensor_dtype(t.dtype))), default=8)
            if self._is_too_large(inputs, num_elements, itemsize):
                self.skipped.append(node.name)
                return None
            return _split_results(node, evaluate_node(proto, inputs, self._opset))
        except Exception:
            # The reference implementation raises anything on inputs that do not fit: the node stays as it is.
            return None

    def _is_too_large(self, inputs: list[Array | None], num_elements: int, itemsize: int) -> bool:
        given = {id(array): array for array in inputs if array is not None}.values()
        has_grown = num_elements > max((array.size for array in given), default=0)
        added_bytes = num_elements * itemsize - sum(array.nbytes for array in given)
        return num_elements * itemsize > self._budget_bytes or (has_grown and added_bytes > _GROWTH_BYTES)


def _array_constants(graph: gs.Graph) -> list[gs.Constant]:
    tensors = [tensor for holder in all_graphs(graph) for node in holder.nodes for tensor in node.inputs]
    return [tensor for tensor in tensors if is_array(tensor)]


def _split_results(node: gs.Node, results: list[Array]) -> list[Array]:
    """One result for each output of a node, in order; omitted outputs get an empty one."""
    given = iter(results)
    return [next(given) if tensor.name else np.empty(0) for tensor in node.outputs]


def _fits_type(tensor: gs.Tensor, result: Array) -> bool:
    """True unless a result contradicts the inferred element type or a static dim."""
    expected = tensor_dtype(tensor.dtype)
    return (expected is None or result.dtype == expected) and fits_shape(tensor, result)
