"""Which tensors get Q/DQ pairs, and why each remaining weighted node stays float.

A Conv, ConvTranspose, Gemm or MatMul with a constant float32 weight is quantized on its activation and its weight,
never on its output or bias (TensorRT, explicit quantization). Weight scales keep the output channel's axis:

    Conv [M, C/g, k...]            axis 0            Gemm transB=1 [N, K]    axis 0
    ConvTranspose [C, M/g, k...]   one scale         Gemm transB=0 [K, N]    axis 1
                                                     MatMul [..., K, N]      last axis
    (ConvTranspose's axis 1 is fragile in TensorRT, so it gets one scale per tensor.)

A node stays float where INT8 gains no speed (a side shorter than an INT8 tile, one row: such a product is bound by
reading the weight), where it costs accuracy, or where the builder has no kernel. Depthwise convolutions stay float by
default: they are bound by memory traffic, hold few weights, and on EfficientNet-lite0 quantizing them lost 6 points of
top-1 agreement. Products of two activations stay float: Q/DQ inside attention costs accuracy and can end its fusion
into one kernel.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.errors import InputError
from trtforge.graph.cost import GEMM_OPS, constant_weight
from trtforge.graph.edit import all_nodes
from trtforge.graph.signature import is_float32
from trtforge.recipe import QuantRecipe
from trtforge.target import BackendName

# Rows, columns or channels: the shortest side of an INT8 tensor-core tile (TensorRT best practices, channels of 16).
MIN_SIDE = 16
# Channels of an image: a first layer with at most this many is worth INT8 when its window is long enough.
_MAX_IMAGE_CHANNELS = 4
# What a builder runs in half precision although it stands between Q/DQ: quantizing it would only cost accuracy.
_WITHOUT_INT8: Mapping[BackendName, Mapping[str, str]] = {
    BackendName.TENSORRT_RTX: {
        "ConvTranspose": "TensorRT-RTX 1.7.1 runs ConvTranspose in half precision, even with Q/DQ"
    },
    BackendName.TENSORRT: {},
}
_ELEMENTWISE = ("Add", "Cast", "Clip", "Div", "Mul", "Reshape", "Sub", "Transpose", "Unsqueeze")


@dataclasses.dataclass(frozen=True, slots=True)
class ActivationSite:
    """An activation input that is quantized: one scale for the whole tensor."""

    node: str
    input_index: int
    tensor: str


@dataclasses.dataclass(frozen=True, slots=True)
class WeightSite:
    """A weight input that is quantized.

    Attributes:
        axis: the axis that keeps one scale per index; None is one scale for the tensor.
    """

    node: str
    input_index: int
    tensor: str
    axis: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class KeptFloat:
    """A node that could be thought to run in INT8 and does not."""

    node: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Where Q/DQ goes, in graph order."""

    activations: tuple[ActivationSite, ...]
    weights: tuple[WeightSite, ...]
    kept_float: tuple[KeptFloat, ...]

    @property
    def tensors(self) -> tuple[str, ...]:
        """The activations to calibrate, each once."""
        return tuple(dict.fromkeys(site.tensor for site in self.activations))

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes to quantize, each once."""
        return tuple(dict.fromkeys(site.node for site in self.activations))

    def without(self, reasons: Mapping[str, str]) -> Placement:
        """The placement with some of its nodes left float.

        Args:
            reasons: why, by node name.
        """
        dropped = tuple(KeptFloat(node, reasons[node]) for node in self.nodes if node in reasons)
        return Placement(
            tuple(site for site in self.activations if site.node not in reasons),
            tuple(site for site in self.weights if site.node not in reasons),
            self.kept_float + dropped,
        )


def plan_placement(
    graph: gs.Graph,
    shapes: Mapping[str, tuple[int, ...]],
    recipe: QuantRecipe,
    backend: BackendName = BackendName.TENSORRT_RTX,
) -> Placement:
    """Decide for every weighted node and attention product whether it runs in INT8.

    Args:
        graph: normalised, with unique node names.
        shapes: sizes by tensor name at the shapes that matter most (a profile's opt); tensors may be missing, then
            only the weight's shape is judged.
        recipe: exclusions and weight granularity.
        backend: the builder, some of which lack INT8 kernels.

    Raises:
        InputError: an exclude pattern that matches no node of these kinds.
    """
    activations: list[ActivationSite] = []
    weights: list[WeightSite] = []
    kept: list[KeptFloat] = []
    candidates = [node for node in all_nodes(graph) if node.op in (*GEMM_OPS, "Attention")]
    excluded = _match_patterns(recipe.exclude, [node.name for node in candidates])
    outer = {id(node) for node in graph.nodes}
    graph_inputs = {tensor.name for tensor in graph.inputs}
    for node in candidates:
        reason = (
            _reason_in_context(node, id(node) not in outer, excluded)
            or _WITHOUT_INT8[backend].get(node.op)
            or _reason_to_keep(node, shapes, graph_inputs)
        )
        if reason is not None:
            kept.append(KeptFloat(node.name, reason))
            continue
        activations.append(ActivationSite(node.name, 0, node.inputs[0].name))
        axis = None if recipe.weights == "per_tensor" else _channel_axis(node)
        weights.append(WeightSite(node.name, 1, node.inputs[1].name, axis))
    return Placement(tuple(activations), tuple(weights), tuple(kept))


def _match_patterns(patterns: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """The excluded nodes with the pattern that excluded each; `*` and `?` are the only special characters."""
    excluded: dict[str, str] = {}
    for pattern in patterns:
        regex = re.compile(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."), re.DOTALL)
        matched = [name for name in names if regex.fullmatch(name)]
        if not matched:
            close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
            raise InputError(
                f"the recipe's exclude pattern {pattern!r} matches no node that could be quantized",
                f"closest names: {', '.join(close) or 'none, the model has no Conv, Gemm or MatMul'}",
                "correct the pattern or remove it",
            )
        for name in matched:
            excluded.setdefault(name, pattern)
    return excluded


def _reason_in_context(node: gs.Node, is_inner: bool, excluded: Mapping[str, str]) -> str | None:
    if node.name in excluded:
        return f"excluded by the recipe's pattern {excluded[node.name]!r}"
    if is_inner:
        return "it lies in the body of an If, Loop or Scan"
    if node.op == "Attention":
        return "fused attention runs in the float type"
    return None


def _reason_to_keep(node: gs.Node, shapes: Mapping[str, tuple[int, ...]], graph_inputs: set[str]) -> str | None:
    """Why a weighted node stays float, or None."""
    for tensor in node.inputs[:2]:
        if tensor.inputs and tensor.inputs[0].op == "DequantizeLinear":
            return f"its input {tensor.name!r} is already quantized"
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
    if node.op == "Conv":
        return _conv_reason(node, graph_inputs)
    if node.op == "ConvTranspose":
        return _conv_transpose_reason(node)
    return _matmul_reason(node, shapes)


def _matmul_reason(node: gs.Node, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
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


def _conv_reason(node: gs.Node, graph_inputs: set[str]) -> str | None:
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


def _is_first_layer(node: gs.Node, graph_inputs: set[str]) -> bool:
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


def _channel_axis(node: gs.Node) -> int | None:
    """The weight's axis of output channels; None where one scale per tensor is the rule."""
    if node.op == "ConvTranspose":
        return None
    if node.op == "Conv" or node.attrs.get("transB", 0):
        return 0
    return len(node.inputs[1].shape) - 1


def _dtype_name(tensor: gs.Tensor) -> str:
    return "bfloat16" if isinstance(tensor.dtype, int) else str(np.dtype(tensor.dtype))
