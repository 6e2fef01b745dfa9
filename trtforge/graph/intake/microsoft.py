"""ONNX Runtime's fused operators (domain com.microsoft) other than attention, in standard ONNX.

Definitions: onnxruntime/docs/ContribOperators.md. ONNX Runtime's optimiser writes them into files it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.graph.intake.emit import (
    FLOAT32,
    INT32,
    INT64,
    Emitter,
    constant_values,
    dtype_of,
    optional_input,
    rank_of,
    static_size,
)
from trtforge.graph.intake.rewrites import RefusedError

Results = Sequence[gs.Tensor | None]
Rule = Callable[[gs.Node, Emitter], Results]

_OPTIMISED_FILE = "save the model before ONNX Runtime's optimisation, or with ORT_ENABLE_BASIC"


def _epsilon(node: gs.Node, default: float = 1e-12) -> float:
    return float(node.attrs.get("epsilon", default))


def _layer_norm(emit: Emitter, x: gs.Tensor, gamma: gs.Tensor, beta: gs.Tensor | None, epsilon: float) -> gs.Variable:
    return emit("LayerNormalization", x, gamma, beta, dtype=dtype_of(gamma), shape=x.shape, axis=-1, epsilon=epsilon)


def _rms_norm(
    emit: Emitter, x: gs.Tensor, gamma: gs.Tensor, epsilon: float, axis: int = -1, dtype: Any = None
) -> gs.Variable:
    if emit.opset < 23:
        raise RefusedError(f"RMSNormalization needs opset 23; the model stays at {emit.opset}", _OPTIMISED_FILE)
    dtype = dtype or dtype_of(gamma)
    return emit("RMSNormalization", x, gamma, dtype=dtype, shape=x.shape, axis=axis, epsilon=epsilon)


def _skip_sum(node: gs.Node, emit: Emitter, bias: int) -> gs.Variable:
    """Input + skip + bias; the skip may have no batch axis."""
    x, dtype = node.inputs[0], dtype_of(node.inputs[2])
    total = emit("Add", x, node.inputs[1], dtype=dtype, shape=x.shape)
    extra = optional_input(node, bias)
    return total if extra is None else emit("Add", total, extra, dtype=dtype, shape=x.shape)


def _statistics_unused(node: gs.Node, emit: Emitter, *outputs: int) -> None:
    if any(emit.is_read(node, index) for index in outputs):
        raise RefusedError("its mean or inverse deviation is read, which only training does", _OPTIMISED_FILE)


def skip_layer_norm(node: gs.Node, emit: Emitter) -> Results:
    """Add and LayerNormalization."""
    _statistics_unused(node, emit, 1, 2)
    total = _skip_sum(node, emit, 4)
    return [_layer_norm(emit, total, node.inputs[2], optional_input(node, 3), _epsilon(node)), None, None, total]


def skip_rms_norm(node: gs.Node, emit: Emitter) -> Results:
    """Add and RMSNormalization."""
    _statistics_unused(node, emit, 1, 2)
    total = _skip_sum(node, emit, 3)
    return [_rms_norm(emit, total, node.inputs[2], _epsilon(node)), None, None, total]


def rms_norm(node: gs.Node, emit: Emitter) -> Results:
    """RMSNormalization."""
    _statistics_unused(node, emit, 1)
    axis = int(node.attrs.get("axis", -1))
    return [_rms_norm(emit, node.inputs[0], node.inputs[1], _epsilon(node, 1e-5), axis), None]


def embed_layer_norm(node: gs.Node, emit: Emitter) -> Results:
    """Gather, Add and LayerNormalization."""
    ids, segments, words, places = node.inputs[0], optional_input(node, 1), node.inputs[2], node.inputs[3]
    segment_table, gamma, beta = optional_input(node, 4), node.inputs[5], node.inputs[6]
    mask, position_ids = optional_input(node, 7), optional_input(node, 8)
    dtype = dtype_of(gamma)
    total = emit("Gather", words, ids, dtype=dtype, axis=0)
    if position_ids is None:
        length = emit.size_of(ids, 1)
        rows = emit("Slice", places, emit.ints(0), length, emit.ints(0), dtype=dtype)
    else:
        rows = emit("Gather", places, position_ids, dtype=dtype, axis=0)
    total = emit("Add", total, rows, dtype=dtype)
    if segments is not None and segment_table is not None:
        total = emit("Add", total, emit("Gather", segment_table, segments, dtype=dtype, axis=0), dtype=dtype)
    hidden = static_size(words, 1)
    total.shape = [*(ids.shape or [None, None]), hidden]
    if mask is not None:
        lengths = emit("ReduceSum", emit.cast(mask, INT32), emit.ints(1), dtype=INT32, shape=[None], keepdims=0)
    else:
        batch = emit.size_of(ids, 0)
        lengths = emit("ConstantOfShape", batch, dtype=INT32, value=gs.Constant("", np.zeros(1, np.int32)))
        lengths.shape = [None]
    return [_layer_norm(emit, total, gamma, beta, _epsilon(node)), lengths, total]


def _gelu(emit: Emitter, x: gs.Tensor, approximate: str) -> gs.Variable:
    if emit.opset < 20:
        raise RefusedError(f"Gelu needs opset 20; the model stays at {emit.opset}", _OPTIMISED_FILE)
    return emit("Gelu", x, dtype=x.dtype, shape=x.shape, approximate=approximate)


def _biased(node: gs.Node, emit: Emitter) -> gs.Tensor:
    x, bias = node.inputs[0], optional_input(node, 1)
    return (
        x if bias is None else emit("Add", x, bias, dtype=x.dtype if x.dtype is not None else bias.dtype, shape=x.shape)
    )


def gelu(node: gs.Node, emit: Emitter) -> Results:
    """Gelu."""
    return [_gelu(emit, _biased(node, emit), "none")]


def fast_gelu(node: gs.Node, emit: Emitter) -> Results:
    """Gelu with tanh."""
    return [_gelu(emit, _biased(node, emit), "tanh")]


def quick_gelu(node: gs.Node, emit: Emitter) -> Results:
    """Sigmoid and Mul."""
    x = node.inputs[0]
    dtype = dtype_of(x)
    scaled = emit("Mul", x, emit.constant(node.attrs.get("alpha", 1.702), dtype), dtype=dtype, shape=x.shape)
    return [emit("Mul", x, emit("Sigmoid", scaled, dtype=dtype, shape=x.shape), dtype=dtype, shape=x.shape)]


def _swapped(emit: Emitter, tensor: gs.Tensor, is_last: bool, is_batch: bool) -> gs.Tensor:
    """The tensor with its two last axes swapped; with `is_batch` the first axis goes in front of the last."""
    if not is_last and not is_batch:
        return tensor
    if is_last and is_batch:
        raise RefusedError("it transposes two ways at once", _OPTIMISED_FILE)
    rank = rank_of(tensor)
    order = list(range(rank))
    if is_batch and rank > 2:
        order = [*order[1:-1], 0, rank - 1]
    if is_last and rank > 1:
        order[-2:] = order[:-3:-1]
    return emit.transpose(tensor, *order)


def fused_matmul(node: gs.Node, emit: Emitter) -> Results:
    """Transpose, MatMul and Mul."""
    attrs = node.attrs
    first = _swapped(emit, node.inputs[0], bool(attrs.get("transA", 0)), bool(attrs.get("transBatchA", 0)))
    second = _swapped(emit, node.inputs[1], bool(attrs.get("transB", 0)), bool(attrs.get("transBatchB", 0)))
    alpha = float(attrs.get("alpha", 1.0))
    known = first.dtype if first.dtype is not None else second.dtype
    product = emit("MatMul", first, second, dtype=known)
    if alpha == 1.0:
        return [product]
    dtype = dtype_of(first if first.dtype is not None else second)
    return [emit("Mul", product, emit.constant(alpha, dtype), dtype=dtype)]


def _activated(emit: Emitter, x: gs.Tensor, kind: str, params: Sequence[float]) -> gs.Tensor:
    """One of the activations that FusedConv and FusedGemm know."""
    if kind in ("Relu", "Tanh", "Sigmoid"):
        return emit(kind, x, dtype=x.dtype)
    if kind == "LeakyRelu":
        return emit(kind, x, dtype=x.dtype, alpha=params[0] if params else 0.01)
    if kind == "HardSigmoid":
        alpha, beta = params if len(params) == 2 else (0.2, 0.5)
        return emit(kind, x, dtype=x.dtype, alpha=alpha, beta=beta)
    if kind == "Clip" and len(params) == 2:
        dtype = dtype_of(x)
        return emit(kind, x, *(emit.constant(bound, dtype) for bound in params), dtype=dtype)
    if kind == "":
        return x
    raise RefusedError(f"its activation {kind!r} is not known", _OPTIMISED_FILE)


def fused_conv(node: gs.Node, emit: Emitter) -> Results:
    """Conv, Add and the activation."""
    own = ("activation", "activation_params")
    attrs = {key: value for key, value in node.attrs.items() if key not in own}
    dtype = node.inputs[1].dtype
    result = emit("Conv", *node.inputs[:2], optional_input(node, 2), dtype=dtype, **attrs)
    extra = optional_input(node, 3)
    if extra is not None:
        result = emit("Add", result, extra, dtype=dtype)
    return [_activated(emit, result, node.attrs.get("activation", ""), node.attrs.get("activation_params", []))]


def fused_gemm(node: gs.Node, emit: Emitter) -> Results:
    """Gemm and the activation."""
    attrs = {key: value for key, value in node.attrs.items() if not key.startswith("activation")}
    result = emit("Gemm", *node.inputs[:2], optional_input(node, 2), dtype=node.inputs[1].dtype, **attrs)
    names = ("activation_alpha", "activation_beta", "activation_gamma")
    params = [float(node.attrs[name]) for name in names if name in node.attrs]
    return [_activated(emit, result, node.attrs.get("activation", ""), params)]


def matmul_nbits(node: gs.Node, emit: Emitter) -> Results:
    """MatMul with the weight's codes written out as floats; same numbers."""
    columns, rows = int(node.attrs["N"]), int(node.attrs["K"])
    bits, block = int(node.attrs.get("bits", 4)), int(node.attrs["block_size"])
    packed, scales = constant_values(node.inputs[1]), constant_values(node.inputs[2])
    zeros, groups = optional_input(node, 3), optional_input(node, 4)
    if packed is None or scales is None or (zeros is not None and constant_values(zeros) is None) or groups is not None:
        raise RefusedError("its weight is computed at run time or reordered", "store the weights as constants")
    if bits not in (2, 4, 8):
        raise RefusedError(f"it has {bits} bits for each weight", "quantize the float model again, to 4 or 8 bits")
    num_blocks = -(-rows // block)
    codes = _unpack(packed.reshape(columns, num_blocks, -1), bits)[:, :, :block]
    offsets: Any = 1 << (bits - 1)
    stored = constant_values(zeros)
    if stored is not None:
        is_packed = stored.dtype == np.uint8
        offsets = _unpack(stored.reshape(columns, -1), bits)[:, :num_blocks] if is_packed else stored
        offsets = np.asarray(offsets).reshape(columns, num_blocks, 1)
    steps = scales.reshape(columns, num_blocks, 1)
    values = ((codes - np.asarray(offsets).astype(np.float32)) * steps.astype(np.float32)).reshape(columns, -1)[
        :, :rows
    ]
    weight = emit.constant(np.ascontiguousarray(values.T), scales.dtype)
    product = emit("MatMul", node.inputs[0], weight, dtype=scales.dtype)
    bias = optional_input(node, 5)
    return [product if bias is None else emit("Add", product, bias, dtype=scales.dtype)]


def _unpack(packed: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    """Codes along the last axis; the lowest bits come first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (packed.view(np.uint8)[..., None] >> shifts) & ((1 << bits) - 1)
    return codes.reshape(*packed.shape[:-1], -1)


def rotary_embedding(node: gs.Node, emit: Emitter) -> Results:
    """RotaryEmbedding of ONNX."""
    attrs = node.attrs
    if attrs.get("is_packed_batching") or float(attrs.get("scale", 1.0)) != 1.0 or emit.opset < 23:
        raise RefusedError("its packed batches, scale or opset have no standard form", _OPTIMISED_FILE)
    x, ids, cosines, sines = node.inputs[:4]
    if rank_of(ids) == 1:
        # One offset for all: positions are offset, offset + 1 ...
        axis = 1 if rank_of(x) == 3 else 2
        ids = emit("Add", _positions_like(emit, x, axis), ids, dtype=INT64)
    else:
        ids = emit.cast(ids, INT64)
    heads, rotated = int(attrs.get("num_heads", 0)), int(attrs.get("rotary_embedding_dim", 0))
    is_flat = rank_of(x) == 3
    if is_flat and not heads:
        width, half = static_size(x, 2), static_size(cosines, 1)
        if width is None or half is None:
            raise RefusedError("its number of heads is not known", _OPTIMISED_FILE)
        heads = width // (2 * half)
    inputs = (x, cosines, sines, ids)
    given = {"interleaved": int(attrs.get("interleaved", 0)), "rotary_embedding_dim": rotated}
    return [
        emit("RotaryEmbedding", *inputs, dtype=x.dtype, shape=x.shape, num_heads=heads if is_flat else None, **given)
    ]


def _positions_like(emit: Emitter, x: gs.Tensor, axis: int) -> gs.Variable:
    """0, 1, 2 ... along an axis of x, as int64 `[B, S]`."""
    row = emit("Unsqueeze", emit.positions(emit.size_of(x, axis)), emit.ints(0), dtype=INT64)
    size = emit("Concat", emit.size_of(x, 0), emit.ints(1), dtype=INT64, shape=[2], axis=0)
    return emit("Expand", row, size, dtype=INT64, shape=[None, None])


def channels_last_pool(node: gs.Node, emit: Emitter) -> Results:
    """Transpose, MaxPool of the codes as float, Transpose; same numbers."""
    x = node.inputs[0]
    rank, dtype = rank_of(x), dtype_of(x)
    first = emit.transpose(emit.cast(x, FLOAT32), 0, rank - 1, *range(1, rank - 1))
    pooled = emit("MaxPool", first, dtype=FLOAT32, **node.attrs)
    return [emit.cast(emit.transpose(pooled, 0, *range(2, rank), 1), dtype)]


def expand_dims(node: gs.Node, emit: Emitter) -> Results:
    """Unsqueeze."""
    axis = emit.reshape(emit.cast(node.inputs[1], INT64), 1)
    return [emit("Unsqueeze", node.inputs[0], axis, dtype=node.inputs[0].dtype)]


def grid_sample(node: gs.Node, emit: Emitter) -> Results:
    """GridSample of ONNX."""
    modes = {"bilinear": "linear", "bicubic": "cubic"}
    mode = node.attrs.get("mode", "bilinear")
    attrs = {**node.attrs, "mode": modes.get(mode, mode)}
    return [emit("GridSample", *node.inputs, dtype=node.inputs[0].dtype, **attrs)]


def trilu(node: gs.Node, emit: Emitter) -> Results:
    """Trilu of ONNX."""
    return [emit("Trilu", *node.inputs, dtype=node.inputs[0].dtype, shape=node.inputs[0].shape, **node.attrs)]


RULES: Mapping[str, Rule] = {
    "SkipLayerNormalization": skip_layer_norm,
    "SkipSimplifiedLayerNormalization": skip_rms_norm,
    "SimplifiedLayerNormalization": rms_norm,
    "EmbedLayerNormalization": embed_layer_norm,
    "Gelu": gelu,
    "BiasGelu": gelu,
    "FastGelu": fast_gelu,
    "QuickGelu": quick_gelu,
    "FusedMatMul": fused_matmul,
    "TransposeMatMul": fused_matmul,
    "FusedConv": fused_conv,
    "FusedGemm": fused_gemm,
    "MatMulNBits": matmul_nbits,
    "RotaryEmbedding": rotary_embedding,
    "NhwcMaxPool": channels_last_pool,
    "ExpandDims": expand_dims,
    "GridSample": grid_sample,
    "Trilu": trilu,
}
"""By operator of com.microsoft."""
