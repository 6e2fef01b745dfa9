"""Constant folding: a node whose inputs are all known becomes a constant.

1. A node with constant inputs and an op of evaluate.py's list is computed.
2. `Shape` and `Size` of a tensor with static dims are known, and so is a `Gather` or `Slice` that picks only static
   dims from a `Shape`.
3. Never folded: nodes that give a graph output (its name must stay), quantization, random and stateful ops, nodes with
   subgraphs - none of these is on the list - and a node whose result contradicts the inferred type.
4. A result may not take much more memory than its inputs: up to 16 MiB more, or no more elements than the largest of
   them (a Cast of compressed weights). All results together stay within a budget, since constants can be copied
   without end.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter

from trtforge.graph.edit import all_graphs, is_array, is_onnx_op, remove_nodes, subgraphs_of
from trtforge.graph.evaluate import EVALUABLE_OPS, count_output_elements, evaluate_node
from trtforge.graph.signature import tensor_dtype

Array = np.ndarray[Any, Any]

# Bytes that one folded result may add.
_GROWTH_BYTES = 16 * 2**20
# Bytes that all folded results of one call may take, on top of 8 times the constants there were.
_BASE_BUDGET_BYTES = 256 * 2**20
# Two stand-ins for an unknown dim: a result that is the same with both does not depend on it.
_PROBES = (7919, 104729)


@dataclasses.dataclass(frozen=True, slots=True)
class FoldReport:
    """What folding changed.

    Attributes:
        num_folded: nodes that became constants.
        skipped: names of nodes that were not folded because the result would be too large.
    """

    num_folded: int
    skipped: tuple[str, ...]


def fold_constants(graph: gs.Graph) -> FoldReport:
    """Fold every node that can be folded, in place, subgraphs included.

    Args:
        graph: sorted, with inferred types.
    """
    folder = _Folder(graph)
    for current in all_graphs(graph):
        kept_outputs = {id(tensor) for tensor in current.outputs}
        for node in current.nodes:
            if not any(id(tensor) in kept_outputs for tensor in node.outputs):
                folder.visit(node)
    remove_nodes(graph, lambda node: id(node) in folder.folded)
    return FoldReport(len(folder.folded), tuple(folder.skipped))


class _Folder:
    """The state of one folding run: what was folded and the memory left."""

    def __init__(self, graph: gs.Graph) -> None:
        self.folded: set[int] = set()
        self.skipped: list[str] = []
        self._opset = graph.opset
        constants = {id(t): t.values.nbytes for t in _array_constants(graph)}
        self._budget_bytes = _BASE_BUDGET_BYTES + 8 * sum(constants.values())

    def visit(self, node: gs.Node) -> None:
        """Fold a node if the rules allow it."""
        if node.op not in EVALUABLE_OPS or not is_onnx_op(node) or subgraphs_of(node):
            return
        results = self._shape_results(node)
        if results is None:
            results = self._constant_results(node)
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
            proto = OnnxExporter.export_node(node)
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

    def _shape_results(self, node: gs.Node) -> list[Array] | None:
        """Results that follow from the shape of a tensor (rule 2)."""
        if node.op in ("Shape", "Size"):
            dims = node.inputs[0].shape if node.inputs and node.inputs[0].name else None
        elif node.op in ("Gather", "Slice"):
            source = node.inputs[0].inputs[0] if node.inputs and node.inputs[0].inputs else None
            if source is None or source.op != "Shape" or source.attrs or not all(is_array(t) for t in node.inputs[1:]):
                return None
            dims = source.inputs[0].shape
        else:
            return None
        if dims is None:
            return None
        try:
            first, second = (self._evaluate_on_shape(node, [_static(dim, probe) for dim in dims]) for probe in _PROBES)
        except Exception:
            # As above: indices that do not fit leave the node as it is.
            return None
        return [first] if np.array_equal(first, second) else None

    def _evaluate_on_shape(self, node: gs.Node, dims: list[int]) -> Array:
        proto = OnnxExporter.export_node(node)
        if node.op in ("Shape", "Size"):
            # A stand-in of that shape that takes no memory.
            return evaluate_node(proto, [np.broadcast_to(np.int8(0), dims)], self._opset)[0]
        inputs = [np.array(dims, np.int64), *(tensor.values for tensor in node.inputs[1:])]
        return evaluate_node(proto, inputs, self._opset)[0]


def _array_constants(graph: gs.Graph) -> list[gs.Constant]:
    tensors = [tensor for holder in all_graphs(graph) for node in holder.nodes for tensor in node.inputs]
    return [tensor for tensor in tensors if is_array(tensor)]


def _static(dim: Any, probe: int) -> int:
    return dim if isinstance(dim, int) and dim >= 0 else probe


def _split_results(node: gs.Node, results: list[Array]) -> list[Array]:
    """One result for each output of a node, in order; omitted outputs get an empty one."""
    given = iter(results)
    return [next(given) if tensor.name else np.empty(0) for tensor in node.outputs]


def _fits_type(tensor: gs.Tensor, result: Array) -> bool:
    """True unless a result contradicts the inferred element type or a static dim."""
    expected = tensor_dtype(tensor.dtype)
    if expected is not None and result.dtype != expected:
        return False
    if tensor.shape is None:
        return True
    if len(tensor.shape) != result.ndim:
        return False
    return all(
        not isinstance(dim, int) or dim < 0 or dim == size for dim, size in zip(tensor.shape, result.shape, strict=True)
    )
