"""Fold a BatchNormalization into the weights of the layer before it.

    BN(W x + b) = (s W) x + s (b - mean) + beta,    s = gamma / sqrt(variance + epsilon), one factor per output channel

Before calibration, so that ranges and weight scales are those of the kernel that runs. Only where every number is a
float32 or float64 constant and nothing else reads the layer's result; a layer whose weight comes out of a
DequantizeLinear stays as it is, and so does one whose weights would become too small for a float16 scale. The products
are formed in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.graph.edit import all_graphs, is_array, is_onnx_op, remove_nodes
from trtforge.graph.names import UniqueNames
from trtforge.graph.passes.cleanup import give_output

Array = np.ndarray[Any, Any]

# Below it an INT8 weight's scale, amax / 127, is no normal float16 number (the smallest is 2^-14).
_LEAST_AMAX = 127 * 2.0**-14


def fold_batch_norms(graph: gs.Graph) -> int:
    """Fold every BatchNormalization that follows a weighted layer, in place, subgraphs included.

    Returns:
        How many were folded.
    """
    folded: set[int] = set()
    names: UniqueNames | None = None
    for current in all_graphs(graph):
        outputs = {id(tensor) for tensor in current.outputs}
        local = {id(node) for node in current.nodes if node.op in _FOLD}
        for norm in current.nodes:
            layer = _layer_before(norm, outputs)
            if layer is None or id(layer) not in local:
                continue
            weights = _FOLD[layer.op](layer, *_scale_and_shift(norm))
            if weights is None or _becomes_tiny(layer.inputs[1].values, weights[0]):
                continue
            names = names or UniqueNames(graph)
            _set_weights(layer, *weights, names)
            if layer.op == "MatMul":
                norm.op, norm.attrs = "Add", {}
                bias = gs.Constant(names.tensor(f"{norm.name}_bias"), weights[1])
                _set_inputs(norm, [norm.inputs[0], bias])
                folded.add(-id(norm))
                continue
            result = norm.outputs[0]
            list.clear(norm.outputs)
            give_output(layer, 0, result)
            folded.add(id(norm))
    remove_nodes(graph, lambda node: id(node) in folded)
    return len(folded)


def _becomes_tiny(weight: Array, folded: Array) -> bool:
    """Whether folding takes a weight out of the range that INT8 with float16 scales has."""
    before, after = (float(np.abs(values).max(initial=0.0)) for values in (weight, folded))
    return after < _LEAST_AMAX <= before


def _layer_before(norm: gs.Node, outputs: set[int]) -> gs.Node | None:
    """The weighted layer whose result only this BatchNormalization reads."""
    if norm.op != "BatchNormalization" or not is_onnx_op(norm) or norm.attrs.get("training_mode", 0):
        return None
    if len(norm.inputs) != 5 or not all(_is_float(tensor) for tensor in norm.inputs[1:]):
        return None
    if len({tensor.values.size for tensor in norm.inputs[1:]}) != 1:
        return None
    source = norm.inputs[0]
    if not source.inputs or len(source.outputs) != 1 or id(source) in outputs:
        return None
    layer: gs.Node = source.inputs[0]
    if layer.op not in _FOLD or not is_onnx_op(layer) or not _is_float(layer.inputs[1]):
        return None
    has_bias = len(layer.inputs) > 2 and bool(layer.inputs[2].name)
    return layer if not has_bias or _is_float(layer.inputs[2]) else None


def _is_float(tensor: gs.Tensor) -> bool:
    return is_array(tensor) and tensor.values.dtype in (np.dtype(np.float32), np.dtype(np.float64))


def _scale_and_shift(norm: gs.Node) -> tuple[Array, Array]:
    """The factor and the summand of each channel."""
    gamma, beta, mean, variance = (tensor.values.astype(np.float64) for tensor in norm.inputs[1:])
    scale = gamma / np.sqrt(variance + norm.attrs.get("epsilon", 1e-5))
    return scale, beta - scale * mean


def _bias(layer: gs.Node, num_channels: int, factor: float = 1.0) -> Array | None:
    """The layer's bias per channel; None where it differs from row to row."""
    if len(layer.inputs) < 3 or not layer.inputs[2].name:
        return np.zeros(num_channels)
    values: Array = layer.inputs[2].values.astype(np.float64) * factor
    if values.ndim > 1 and values.size != values.shape[-1]:
        return None
    return np.broadcast_to(values.reshape(-1), num_channels)


Weights = tuple[Array, Array]


def _fold_conv(layer: gs.Node, scale: Array, shift: Array) -> Weights | None:
    weight = layer.inputs[1].values
    if weight.shape[0] != scale.size:
        return None
    return weight * scale.reshape(-1, *(1,) * (weight.ndim - 1)), _shifted(_bias(layer, scale.size), scale, shift)


def _fold_conv_transpose(layer: gs.Node, scale: Array, shift: Array) -> Weights | None:
    weight, group = layer.inputs[1].values, layer.attrs.get("group", 1)
    if weight.shape[1] * group != scale.size or weight.shape[0] % group:
        return None
    grouped = weight.reshape(group, -1, *weight.shape[1:])
    factor = scale.reshape(group, 1, weight.shape[1], *(1,) * (weight.ndim - 2))
    return (grouped * factor).reshape(weight.shape), _shifted(_bias(layer, scale.size), scale, shift)


def _fold_gemm(layer: gs.Node, scale: Array, shift: Array) -> Weights | None:
    weight = layer.inputs[1].values
    is_transposed = bool(layer.attrs.get("transB", 0))
    if weight.ndim != 2 or weight.shape[0 if is_transposed else 1] != scale.size:
        return None
    bias = _bias(layer, scale.size, layer.attrs.get("beta", 1.0))
    if bias is None:
        return None
    return weight * (scale[:, None] if is_transposed else scale), _shifted(bias, scale, shift)


def _fold_matmul(layer: gs.Node, scale: Array, shift: Array) -> Weights | None:
    weight, rank = layer.inputs[1].values, layer.outputs[0].shape
    # BatchNormalization's channels are axis 1, a MatMul's the last one.
    if weight.ndim != 2 or rank is None or len(rank) != 2 or weight.shape[1] != scale.size:
        return None
    return weight * scale, shift.astype(weight.dtype)


_FOLD = {"Conv": _fold_conv, "ConvTranspose": _fold_conv_transpose, "Gemm": _fold_gemm, "MatMul": _fold_matmul}


def _shifted(bias: Array | None, scale: Array, shift: Array) -> Array:
    assert bias is not None
    return bias * scale + shift


def _set_weights(layer: gs.Node, weight: Array, bias: Array, names: UniqueNames) -> None:
    dtype = layer.inputs[1].values.dtype
    layer.attrs.pop("beta", None)
    inputs = [layer.inputs[0], gs.Constant(names.tensor(f"{layer.inputs[1].name}_scaled"), weight.astype(dtype))]
    if layer.op != "MatMul":
        inputs.append(gs.Constant(names.tensor(f"{layer.name}_bias"), bias.astype(dtype)))
    _set_inputs(layer, inputs)


def _set_inputs(node: gs.Node, inputs: list[gs.Tensor]) -> None:
    """Replace a node's inputs; the first one stays what it was."""
    for tensor in node.inputs[1:]:
        list.__setitem__(tensor.outputs, slice(None), [reader for reader in tensor.outputs if reader is not node])
    list.__setitem__(node.inputs, slice(1, None), inputs[1:])
    for tensor in inputs[1:]:
        list.append(tensor.outputs, node)
