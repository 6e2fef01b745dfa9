"""Weighted nodes: which have a weight to quantize, along which axis, and where INT8 gains nothing.

Weight scales keep the output channel's axis:

    Conv [M, C/g, k...]            axis 0            Gemm transB=1 [N, K]    axis 0
    ConvTranspose [C, M/g, k...]   one scale         Gemm transB=0 [K, N]    axis 1
                                                     MatMul [..., K, N]      last axis
    (ConvTranspose's axis 1 is fragile in TensorRT, so it gets one scale per tensor.)

A node stays float where INT8 gains no speed (a side shorter than an INT8 tile, one row: such a product is bound by
reading the weight), where it costs accuracy, or where the builder has no kernel. Depthwise convolutions stay float by
default: they are bound by memory traffic, hold few weights, and on EfficientNet-lite0 quantizing them lost 6 points of
top-1 agreement.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.graph.cost import Shapes, constant_weight
from trtforge.graph.signature import is_float32
from trtforge.target import BackendName

# Rows, columns or channels: the shortest side of an INT8 tensor-core tile (TensorRT best practices, channels of 16).
MIN_SIDE = 16
# Channels of an image: a first layer with at most this many is worth INT8 when its window is long enough.
_MAX_IMAGE_CHANNELS = 4
# What a builder runs in half precision although it stands between Q/DQ: quantizing it would only cost accuracy.
WITHOUT_INT8: Mapping[BackendName, Mapping[str, str]] = {
    BackendName.TENSORRT_RTX: {
        "ConvTranspose": "TensorRT-RTX 1.7.1 runs ConvTranspose in half precision, even with Q/DQ"
    },
    BackendName.TENSORRT: {},
}
_ELEMENTWISE = ("Add", "Cast", "Clip", "Div", "Mul", "Reshape", "Sub", "Transpose", "Unsqueeze")


def weight_reason(node: gs.Node) -> str | None:
    """Why the node has no weight that can be quantized, or None."""
    weight = constant_weight(node)
    if weight is None:
        return "both inputs are activations; Q/DQ on an attention product can end its fusion into one kernel"
    index, constant = weight
    if index != 1:
        return "its weight is the left operand, for which TensorRT has no per-channel scale"
    if node.inputs[1] is not constant:
        return f"its weight {constant.name!r} goes through {node.inputs[1].inputs[0].op} first"
    if isinstance(node.inputs[0], gs.Constant):
        return "all its inputs are constants"
    if not is_float32(constant):
        return f"its weight is {_dtype_name(constant)}, not float32"
    return None


def size_reason(node: gs.Node, shapes: Shapes, graph_inputs: Collection[str]) -> str | None:
    """Why INT8 gains nothing at the sizes of a weighted node, or None.

    Args:
        node: whose second input, the weight, has a known shape.
        shapes: sizes by tensor name; tensors may be missing.
        graph_inputs: names.
    """
    if node.op == "Conv":
        return _conv_reason(node, graph_inputs)
    if node.op == "ConvTranspose":
        return _conv_transpose_reason(node)
    return _matmul_reason(node, shapes)


def _matmul_reason(node: gs.Node, shapes: Shapes) -> str | None:
    """MatMul: x [..., M, K], W [..., K, N]. Gemm: x [M, K], W [K, N] or, transB, [N, K]."""
    weight_shape = tuple(node.inputs[1].shape)
    if len(weight_shape) < 2:
        return "its weight is one vector"
    if node.attrs.get("transA", 0):
        return "transA=1 would put a transpose between Q/DQ and the product"
    k, n = weight_shape[::-1] if node.attrs.get("transB", 0) else weight_shape[-2:]
    shape = shapes.get(node.inputs[0].name)
    rows = None if shape is None else math.prod(shape[:-1] if len(weight_shape) == 2 else shape[-2:-1])
    if rows == 1 or n == 1:
        return f"it is a matrix times one vector (M = {rows}, N = {n})"
    for name, size in (("K", k), ("N", n)):
        if size < MIN_SIDE:
            return f"{name} is {size}; an INT8 tile needs {MIN_SIDE}"
    return None


def _conv_reason(node: gs.Node, graph_inputs: Collection[str]) -> str | None:
    """W [M, C/g, k...]."""
    out_channels, group_channels, *window = node.inputs[1].shape
    groups = node.attrs.get("group", 1)
    if groups > 1 and group_channels == 1:
        return "depthwise: INT8 saves no memory traffic here and costs accuracy"
    if out_channels // groups < MIN_SIDE:
        return f"it has {out_channels // groups} output channels per group; an INT8 tile needs {MIN_SIDE}"
    if group_channels >= MIN_SIDE:
        return None
    products = group_channels * math.prod(window)
    is_image_layer = group_channels <= _MAX_IMAGE_CHANNELS and products >= MIN_SIDE
    if groups == 1 and is_image_layer and _is_first_layer(node, graph_inputs):
        return None
    return f"it has {group_channels} input channels per group; an INT8 tile needs {MIN_SIDE}"


def _is_first_layer(node: gs.Node, graph_inputs: Collection[str]) -> bool:
    """True when only elementwise or layout operations lie between a graph input and the node."""
    tensor = node.inputs[0]
    while tensor.inputs and tensor.inputs[0].op in _ELEMENTWISE and tensor.inputs[0].inputs:
        tensor = tensor.inputs[0].inputs[0]
    return tensor.name in graph_inputs


def _conv_transpose_reason(node: gs.Node) -> str | None:
    """W [C, M/g, k...]."""
    in_channels, group_channels = node.inputs[1].shape[:2]
    if node.attrs.get("group", 1) > 1:
        return "grouped ConvTranspose has no INT8 kernel in some TensorRT releases"
    if min(in_channels, group_channels) < MIN_SIDE:
        return f"it has {in_channels} input and {group_channels} output channels; an INT8 tile needs {MIN_SIDE}"
    return None


def channel_axis(node: gs.Node) -> int | None:
    """The weight's axis of output channels; None where one scale per tensor is the rule."""
    if node.op == "ConvTranspose":
        return None
    if node.op == "Conv" or node.attrs.get("transB", 0):
        return 0
    return len(node.inputs[1].shape) - 1


def _dtype_name(tensor: gs.Tensor) -> str:
    return "bfloat16" if isinstance(tensor.dtype, int) else str(np.dtype(tensor.dtype))
