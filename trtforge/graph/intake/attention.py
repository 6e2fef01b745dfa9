"""The arithmetic that all attention operators share, in MatMul, Softmax and MatMul: the builder fuses these itself.

Shapes: B batch, N heads, S queries, T keys (past ones included), D size of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import ml_dtypes
import onnx_graphsurgeon as gs

from trtforge.graph.intake.emit import BOOL, INT64, Dtype, Emitter


def split_heads(emit: Emitter, tensor: gs.Tensor, num_heads: int) -> gs.Variable:
    """`[B, S, N * D]` as `[B, N, S, D]`."""
    return emit.transpose(emit.reshape(tensor, 0, 0, num_heads, -1), 0, 2, 1, 3)


def join_heads(emit: Emitter, tensor: gs.Tensor) -> gs.Variable:
    """`[B, N, S, D]` as `[B, S, N * D]`."""
    return emit.reshape(emit.transpose(tensor, 0, 2, 1, 3), 0, 0, -1)


def repeat_heads(emit: Emitter, tensor: gs.Tensor, times: int) -> gs.Tensor:
    """`[B, N, T, D]` as `[B, N * times, T, D]`, each head followed by its copies."""
    if times == 1:
        return tensor
    column = emit("Unsqueeze", tensor, emit.ints(2))
    grid = emit("Expand", column, emit.ints(1, 1, times, 1, 1))
    sizes = emit("Shape", grid, dtype=INT64, shape=[5])
    parts = [emit.slice(sizes, 0, 0, 1), emit.ints(-1), emit.slice(sizes, 0, 3, 5)]
    return emit("Reshape", grid, emit("Concat", *parts, dtype=INT64, shape=[4], axis=0))


def attend(
    emit: Emitter,
    query: gs.Tensor,
    key: gs.Tensor,
    value: gs.Tensor,
    *,
    scale: float,
    dtype: Dtype,
    biases: Sequence[gs.Tensor] = (),
    softcap: float = 0.0,
) -> gs.Variable:
    """softmax(query key^T scale + biases) value, all of shape `[B, N, S or T, D]`.

    Args:
        scale: of the products.
        dtype: of all tensors.
        biases: are added to the scores `[B, N, S, T]`; they broadcast.
        softcap: limits the scores to this absolute value by tanh; 0 for none.
    """
    scores: gs.Tensor = emit("MatMul", query, emit.transpose(key, 0, 1, 3, 2), dtype=dtype)
    scores = emit("Mul", scores, emit.constant(scale, dtype), dtype=dtype)
    if softcap:
        cap = emit.constant(softcap, dtype)
        scores = emit("Mul", emit("Tanh", emit("Div", scores, cap, dtype=dtype), dtype=dtype), cap, dtype=dtype)
    for bias in biases:
        scores = emit("Add", scores, bias, dtype=dtype)
    return emit("MatMul", emit("Softmax", scores, dtype=dtype, axis=-1), value, dtype=dtype)


def default_scale(head_size: int) -> float:
    """1 / sqrt(D)."""
    return 1.0 / math.sqrt(head_size)


def is_visible(
    emit: Emitter, query: gs.Tensor, key: gs.Tensor, window: int = 0, *, is_last_aligned: bool = True
) -> gs.Variable:
    """bool `[S, T]`: the key is no later than the query.

    Args:
        is_last_aligned: the last query sees the last key; else the first query sees the first key only.
        window: a query sees this many keys at most, itself included; 0 for all.
    """
    num_queries, num_keys = emit.size_of(query, 2), emit.size_of(key, 2)
    rows = emit.positions(num_queries)
    if is_last_aligned:
        rows = emit("Add", rows, emit("Sub", num_keys, num_queries, dtype=INT64, shape=[1]), dtype=INT64)
    rows = emit("Unsqueeze", rows, emit.ints(1), dtype=INT64, shape=[None, 1])
    columns = emit("Unsqueeze", emit.positions(num_keys), emit.ints(0), dtype=INT64, shape=[1, None])
    visible = emit("LessOrEqual", columns, rows, dtype=BOOL, shape=[None, None])
    if window > 0:
        first = emit("Sub", rows, emit.constant(window, INT64), dtype=INT64)
        visible = emit("And", visible, emit("Greater", columns, first, dtype=BOOL), dtype=BOOL)
    return visible


def mask_bias(emit: Emitter, visible: gs.Tensor, dtype: Dtype, hidden: float | None = None) -> gs.Variable:
    """What is added to the scores: 0 where a key is visible, `hidden` (by default the lowest number) elsewhere."""
    if hidden is None:
        hidden = float(ml_dtypes.finfo(dtype).min)  # type: ignore[no-untyped-call]
    return emit("Where", visible, emit.constant(0, dtype), emit.constant(hidden, dtype), dtype=dtype)
