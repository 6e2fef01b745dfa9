"""Which weights are stored in INT8 or INT4 and multiplied in the float type, and why the others are not.

    INT8   one scale per output channel          MatMul, Gemm, Conv, ConvTranspose
    INT4   one scale per 128 rows of a column    MatMul [K, N] and Gemm, K a multiple of 128

Activations stay float, so no calibration is needed; with rows of the activations the codes are chosen by the layers'
outputs (weight_only_codes.py). TensorRT-RTX 1.7.1 reads such a weight inside the GEMM on sm_80 and newer; on sm_75, and
in front of a convolution, a kernel of its own expands it on every run.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from trtforge.graph.cost import GEMM_OPS, constant_weight
from trtforge.graph.edit import all_nodes
from trtforge.quantization.formats import INT4, NumberFormat
from trtforge.quantization.placement import match_patterns
from trtforge.quantization.sites import ActivationSite, KeptFloat, Placement, WeightSite
from trtforge.quantization.weighted import MIN_SIDE, weight_reason
from trtforge.recipe import QuantRecipe

# Rows of a column that share one INT4 scale: what the tools around TensorRT use, and 1/8 bit per weight in float16.
INT4_BLOCK = 128


def plan_weight_only(graph: gs.Graph, recipe: QuantRecipe, number_format: NumberFormat) -> Placement:
    """Decide for every weighted node whether its weight is stored in the format.

    Args:
        graph: normalised, with unique node names.
        recipe: its exclusions count.
        number_format: INT8 or INT4.

    Returns:
        The weights; as activations, the tensors `[..., K]` that `[K, N]` weights multiply: they stay float, but rows of
        them help to choose codes.

    Raises:
        InputError: an exclude pattern that matches no such node.
    """
    candidates = [node for node in all_nodes(graph) if node.op in GEMM_OPS and constant_weight(node) is not None]
    excluded = match_patterns(recipe.exclude, [node.name for node in candidates])
    outer = {id(node) for node in graph.nodes}
    activations, weights, kept = [], [], []
    for node in candidates:
        if node.name in excluded:
            reason: str | None = f"excluded by the recipe's pattern {excluded[node.name]!r}"
        elif id(node) not in outer:
            reason = "it lies in the body of an If, Loop or Scan"
        else:
            reason = weight_reason(node) or _shape_reason(node, number_format)
        if reason is not None:
            kept.append(KeptFloat(node.name, reason))
            continue
        weights.append(WeightSite(node.name, 1, node.inputs[1].name, _channel_axis(node)))
        if _is_product(node) and len(node.inputs[1].shape) == 2:
            activations.append(ActivationSite(node.name, 0, node.inputs[0].name))
    return Placement(tuple(activations), tuple(weights), tuple(kept))


def _is_product(node: gs.Node) -> bool:
    return node.op in ("Gemm", "MatMul") and not node.attrs.get("transA", 0)


def _shape_reason(node: gs.Node, number_format: NumberFormat) -> str | None:
    """Why the weight's shape keeps it float, or None."""
    shape = tuple(node.inputs[1].shape)
    if len(shape) < 2:
        return "its weight is one vector"
    if number_format is INT4:
        return _int4_reason(node, shape)
    channels = shape[_channel_axis(node)]
    depth = node.inputs[1].values.size // max(1, channels)
    if min(channels, depth) < MIN_SIDE:
        return f"its weight has {depth} numbers for each of {channels} output channels, too few to save anything"
    return None


def _int4_reason(node: gs.Node, shape: tuple[int, ...]) -> str | None:
    if node.op not in ("Gemm", "MatMul"):
        return f"TensorRT-RTX 1.7.1 refuses an INT4 weight of {node.op}"
    if len(shape) != 2:
        return f"its weight has {len(shape)} axes; INT4 blocks lie along one of two"
    depth = shape[1 - _channel_axis(node)]
    if depth == 0 or depth % INT4_BLOCK:
        return f"K is {depth}, not a multiple of the INT4 block of {INT4_BLOCK}"
    return None


def _channel_axis(node: gs.Node) -> int:
    """The weight's axis of output channels; the groups of a ConvTranspose share their scales."""
    if node.op == "ConvTranspose":
        return 1
    if node.op == "Conv" or node.attrs.get("transB", 0):
        return 0
    return len(node.inputs[1].shape) - 1
