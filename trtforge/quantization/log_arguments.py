"""Products whose result a Log reads: spectra, filter banks, and whatever else becomes decibels.

    samples -> MatMul (Fourier) -> square, add -> Sqrt -> MatMul (mel) -> Add epsilon -> Log

INT8 has one step for all values of a tensor, so its error is as large for quiet bands as for loud ones; Log turns that
into an error without bound. The walk back from a Log ends at the first operator that is not linear, a power or a change
of layout: behind an activation function or a Softmax the values are of one magnitude again.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from trtforge.graph.cost import GEMM_OPS
from trtforge.quantization.cast_ops import LAYOUT_OPS

_LINEAR_OPS = frozenset(("Add", "Div", "Mul", "Neg", "ReduceMean", "ReduceSum", "Sub"))
_POWER_OPS = frozenset(("Abs", "Clip", "Max", "Min", "Pow", "ReduceL2", "ReduceSumSquare", "Sqrt"))
_PASSED_OPS = LAYOUT_OPS | _LINEAR_OPS | _POWER_OPS | {"Cast", *GEMM_OPS}


def products_before_log(graph: gs.Graph) -> frozenset[int]:
    """The Convs, Gemms and MatMuls of the main graph of which a Log reads the result, by `id(node)`."""
    pending = [tensor for node in graph.nodes if node.op == "Log" for tensor in node.inputs]
    seen: set[int] = set()
    products: set[int] = set()
    while pending:
        for node in pending.pop().inputs:
            if id(node) in seen or node.op not in _PASSED_OPS or _scales_by_activation(node):
                continue
            seen.add(id(node))
            if node.op in GEMM_OPS:
                products.add(id(node))
            pending.extend(node.inputs)
    return frozenset(products)


def _scales_by_activation(node: gs.Node) -> bool:
    """True for a quotient or product of two activations, unlike a square: a norm or a gate."""
    if node.op not in ("Div", "Mul"):
        return False
    first, second = node.inputs[:2]
    return first is not second and bool(first.inputs) and bool(second.inputs)
