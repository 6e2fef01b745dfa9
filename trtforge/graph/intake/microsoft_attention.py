"""ONNX Runtime's attention operators (domain com.microsoft), as MatMul, Softmax and MatMul.

Definitions: onnxruntime/docs/ContribOperators.md; where it is silent, ONNX Runtime 1.32's CPU kernels were tried.
Shapes as in attention.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import onnx_graphsurgeon as gs

from trtforge.graph.intake.attention import (
    attend,
    default_scale,
    is_visible,
    join_heads,
    mask_bias,
    repeat_heads,
    split_heads,
)
from trtforge.graph.intake.emit import (
    BOOL,
    INT64,
    Dtype,
    Emitter,
    dtype_of,
    optional_input,
    rank_of,
    static_size,
)
from trtforge.graph.intake.rewrites import NotYetError, RefusedError

Results = Sequence[gs.Tensor | None]
Rule = Callable[[gs.Node, Emitter], Results]

_EXPORT_PLAIN = "export the model without fused attention"


@dataclasses.dataclass(frozen=True, slots=True)
class _Heads:
    """Query, key and value as `[B, N, S or T, D]`, and the model's own past joined to key and value."""

    query: gs.Tensor
    key: gs.Tensor
    value: gs.Tensor


def _refuse_shared_cache(node: gs.Node) -> None:
    if node.attrs.get("past_present_share_buffer", 0):
        raise RefusedError(
            "its cache is one buffer that is written in place", "export it with separate past and present"
        )


def attention(node: gs.Node, emit: Emitter) -> Results:
    """MatMul, Softmax and MatMul."""
    x, weight, bias = node.inputs[0], node.inputs[1], optional_input(node, 2)
    dtype = dtype_of(weight)
    packed = emit("MatMul", x, weight, dtype=dtype)
    packed = packed if bias is None else emit("Add", packed, bias, dtype=dtype)
    return attention_on_projection(node, emit, packed, dtype, mask=3, past=4, extra=5)


def attention_on_projection(
    node: gs.Node, emit: Emitter, packed: gs.Tensor, dtype: Dtype, *, mask: int, past: int, extra: int | None
) -> Results:
    """The rest of Attention and QAttention behind the projection.

    Args:
        packed: query, key and value along the last axis.
        mask, past, extra: indices of these inputs; extra is added to the scores.
    """
    _refuse_shared_cache(node)
    if node.attrs.get("do_rotary", 0):
        raise RefusedError("it rotates positions inside", _EXPORT_PLAIN)
    num_heads = int(node.attrs["num_heads"])
    sizes = _hidden_sizes(node)
    names = emit.many("Split", [packed, emit.ints(*sizes)], [dtype] * 3, axis=2)
    heads = _Heads(*(split_heads(emit, part, num_heads) for part in names))
    cache = optional_input(node, past)
    present: gs.Tensor | None = None
    if cache is not None:
        olds = emit.many("Split", [cache], [dtype] * 2, axis=0, num_outputs=2)
        olds = [emit("Squeeze", old, emit.ints(0), dtype=dtype) for old in olds]
        key = emit("Concat", olds[0], heads.key, dtype=dtype, axis=2)
        value = emit("Concat", olds[1], heads.value, dtype=dtype, axis=2)
        heads = _Heads(heads.query, key, value)
    if emit.is_read(node, 1):
        columns = [emit("Unsqueeze", part, emit.ints(0), dtype=dtype) for part in (heads.key, heads.value)]
        present = emit("Concat", *columns, dtype=dtype, axis=0)
    biases = _key_mask(node, emit, optional_input(node, mask), heads, dtype)
    added = optional_input(node, extra) if extra is not None else None
    if added is not None:
        biases.append(added)
    if node.attrs.get("unidirectional", 0):
        biases.append(mask_bias(emit, is_visible(emit, heads.query, heads.key), dtype))
    scale = float(node.attrs.get("scale", 0.0)) or default_scale(sizes[0] // num_heads)
    result = attend(emit, heads.query, heads.key, heads.value, scale=scale, dtype=dtype, biases=biases)
    return [join_heads(emit, result), present]


def _hidden_sizes(node: gs.Node) -> list[int]:
    given = node.attrs.get("qkv_hidden_sizes")
    if given:
        return [int(size) for size in given]
    width = static_size(node.inputs[1], 1)
    if width is None:
        raise NotYetError("the width of its weight")
    return [width // 3] * 3


def _key_mask(node: gs.Node, emit: Emitter, mask: gs.Tensor | None, heads: _Heads, dtype: Dtype) -> list[gs.Tensor]:
    """What hides padded keys, as addends of the scores."""
    if mask is None:
        return []
    hidden = float(node.attrs.get("mask_filter_value", -10000.0))
    rank = rank_of(mask)
    if rank == 1:
        return [mask_bias(emit, _before_lengths(emit, mask, heads, static_size(node.inputs[0], 0)), dtype, hidden)]
    if rank not in (2, 3):
        raise RefusedError(f"its mask has {rank} axes", _EXPORT_PLAIN)
    seen = mask if dtype_of(mask) == BOOL else emit("Greater", mask, emit.constant(0, dtype_of(mask)), dtype=BOOL)
    visible = emit("Unsqueeze", seen, emit.ints(1, 2) if rank == 2 else emit.ints(1), dtype=BOOL)
    return [mask_bias(emit, visible, dtype, hidden)]


def _before_lengths(emit: Emitter, lengths: gs.Tensor, heads: _Heads, batch: int | None) -> gs.Variable:
    """bool `[B, 1, 1, T]`: keys before each sample's length; with twice as many numbers, from its start on too."""
    count = static_size(lengths, 0)
    if count is not None and batch is not None and count not in (batch, 2 * batch):
        raise RefusedError("its mask holds cumulated lengths of a packed batch", _EXPORT_PLAIN)
    keys = emit.positions(emit.size_of(heads.key, 2))
    numbers = emit("Unsqueeze", emit.cast(lengths, INT64), emit.ints(1, 2, 3), dtype=INT64)
    if count is None or count == batch or batch is None:
        return emit("Less", keys, numbers, dtype=BOOL)
    ends, starts = emit.slice(numbers, 0, 0, batch), emit.slice(numbers, 0, batch, 2 * batch)
    before = emit("Less", keys, ends, dtype=BOOL)
    return emit("And", before, emit("GreaterOrEqual", keys, starts, dtype=BOOL), dtype=BOOL)


def multi_head_attention(node: gs.Node, emit: Emitter) -> Results:
    """MatMul, Softmax and MatMul."""
    num_heads = int(node.attrs["num_heads"])
    if len(node.inputs) > 8 and any(tensor.name for tensor in node.inputs[8:]):
        raise RefusedError(
            "its cache is one buffer that is written in place", "export it with separate past and present"
        )
    if emit.is_read(node, 3):
        raise RefusedError("its scores are read", _EXPORT_PLAIN)
    dtype = dtype_of(node.inputs[0])
    query, key, value, size = _multi_heads(node, emit, num_heads, dtype)
    for index, old in ((6, "key"), (7, "value")):
        past = optional_input(node, index)
        if past is not None:
            joined = emit("Concat", past, key if old == "key" else value, dtype=dtype, axis=2)
            key, value = (joined, value) if old == "key" else (key, joined)
    heads = _Heads(query, key, value)
    biases = _key_mask(node, emit, optional_input(node, 4), heads, dtype)
    extra = optional_input(node, 5)
    if extra is not None:
        biases.append(extra)
    if node.attrs.get("unidirectional", 0):
        biases.append(mask_bias(emit, is_visible(emit, query, key), dtype))
    scale = float(node.attrs.get("scale", 0.0)) or default_scale(size)
    result = attend(emit, query, key, value, scale=scale, dtype=dtype, biases=biases)
    return [join_heads(emit, result), key, value]


def _multi_heads(
    node: gs.Node, emit: Emitter, num_heads: int, dtype: Dtype
) -> tuple[gs.Tensor, gs.Tensor, gs.Tensor, int]:
    """Query, key and value of MultiHeadAttention as `[B, N, S or T, D]`, and D."""
    query, key, value = node.inputs[0], optional_input(node, 1), optional_input(node, 2)
    rank = rank_of(query)
    if rank == 5:
        width = static_size(query, 4)
        parts = emit.many("Split", [query], [dtype] * 3, axis=3, num_outputs=3)
        flat = [emit.reshape(part, 0, 0, -1) for part in parts]
        hidden = None if width is None else width * num_heads
    else:
        hidden = static_size(query, 2)
        if key is None:
            raise RefusedError("it has no key", _EXPORT_PLAIN)
        flat = [query, *_keys_and_values(emit, key, value, dtype)]
    if hidden is None:
        raise NotYetError("the width of its query")
    bias = optional_input(node, 3)
    if bias is not None:
        spans = [(0, hidden), (hidden, 2 * hidden), (2 * hidden, 2**31 - 1)]
        pieces = [emit.slice(bias, 0, *span) for span in spans]
        flat = [
            emit("Add", part, piece, dtype=dtype) if part.shape is None or len(part.shape) == 3 else part
            for part, piece in zip(flat, pieces, strict=True)
        ]
    split = [
        part if part.shape is not None and len(part.shape) == 4 else split_heads(emit, part, num_heads) for part in flat
    ]
    return (split[0], split[1], split[2], hidden // num_heads)


def _keys_and_values(emit: Emitter, key: gs.Tensor, value: gs.Tensor | None, dtype: Dtype) -> list[gs.Tensor]:
    """Key and value as `[B, T, N * D]`, or `[B, N, T, D]` where they come that way."""
    if value is not None:
        rank_of(key)
        rank_of(value)
        return [key, value]
    if rank_of(key) != 5:
        raise RefusedError("it has no value", _EXPORT_PLAIN)
    parts = emit.many("Split", [key], [dtype] * 2, axis=3, num_outputs=2)
    return [emit.reshape(part, 0, 0, -1) for part in parts]


def group_query_attention(node: gs.Node, emit: Emitter) -> Results:
    """MatMul, Softmax and MatMul, with past keys and values in front of the new ones."""
    attrs = node.attrs
    num_heads, num_groups = int(attrs["num_heads"]), int(attrs["kv_num_heads"])
    query, key, value = node.inputs[0], optional_input(node, 1), optional_input(node, 2)
    dtype, lengths = dtype_of(query), node.inputs[5]
    _refuse_grouped(node, emit)
    width = static_size(query, 2)
    if width is None:
        raise NotYetError("the width of its query")
    if key is None or value is None:
        size = width // (num_heads + 2 * num_groups)
        spans = emit.ints(num_heads * size, num_groups * size, num_groups * size)
        parts: list[gs.Tensor] = list(emit.many("Split", [query, spans], [dtype] * 3, axis=2))
    else:
        size, parts = width // num_heads, [query, key, value]
    past_key, past_value = optional_input(node, 3), optional_input(node, 4)
    if attrs.get("do_rotary", 0):
        parts = _rotate(node, emit, parts, past_key, dtype)
    counts = (num_heads, num_groups, num_groups)
    query, key, value = (split_heads(emit, part, count) for part, count in zip(parts, counts, strict=True))
    if past_key is not None and past_value is not None:
        key = emit("Concat", past_key, key, dtype=dtype, axis=2)
        value = emit("Concat", past_value, value, dtype=dtype, axis=2)
    window = int(attrs.get("local_window_size", -1))
    visible = is_visible(emit, query, key, max(window, 0))
    last = emit("Unsqueeze", emit.cast(lengths, INT64), emit.ints(1, 2, 3), dtype=INT64)
    held = emit("LessOrEqual", emit.positions(emit.size_of(key, 2)), last, dtype=BOOL)
    biases: list[gs.Tensor] = [mask_bias(emit, emit("And", held, visible, dtype=BOOL), dtype)]
    extra = optional_input(node, 10)
    if extra is not None:
        biases.append(extra)
    repeats = num_heads // num_groups
    result = attend(
        emit,
        query,
        repeat_heads(emit, key, repeats),
        repeat_heads(emit, value, repeats),
        scale=float(attrs.get("scale", 0.0)) or default_scale(size),
        dtype=dtype,
        biases=biases,
        softcap=float(attrs.get("softcap", 0.0)),
    )
    return [join_heads(emit, result), key, value]


def _refuse_grouped(node: gs.Node, emit: Emitter) -> None:
    if node.attrs.get("smooth_softmax", 0) > 0 or optional_input(node, 11) is not None:
        raise RefusedError("its Softmax has an extra term", _EXPORT_PLAIN)
    if len(node.inputs) > 12 and any(tensor.name for tensor in node.inputs[12:]):
        raise RefusedError("its cache is quantized or its heads are normalised inside", _EXPORT_PLAIN)
    if emit.is_read(node, 3):
        raise RefusedError("its scores are read", _EXPORT_PLAIN)
    rank_of(node.inputs[5])
    past = optional_input(node, 3)
    if past is not None and static_size(past, 2) not in (None, 0):
        raise RefusedError(
            "its cache has a fixed length, so it is one buffer that is written in place",
            "export it with a cache whose length is a dimension of its own",
        )


def _rotate(
    node: gs.Node, emit: Emitter, parts: list[gs.Tensor], past: gs.Tensor | None, dtype: Dtype
) -> list[gs.Tensor]:
    """Query and key with their positions; the first new one follows the past."""
    cosines, sines, ids = optional_input(node, 7), optional_input(node, 8), optional_input(node, 9)
    if cosines is None or sines is None or emit.opset < 23:
        raise RefusedError("it has no tables of positions, or its opset is below 23", _EXPORT_PLAIN)
    if ids is None:
        row = emit.positions(emit.size_of(parts[0], 1))
        if past is not None:
            row = emit("Add", row, emit.size_of(past, 2), dtype=INT64)
        size = emit("Concat", emit.size_of(parts[0], 0), emit.ints(1), dtype=INT64, shape=[2], axis=0)
        ids = emit("Expand", emit("Unsqueeze", row, emit.ints(0), dtype=INT64), size, dtype=INT64)
    interleaved = int(node.attrs.get("rotary_interleaved", 0))
    counts = (int(node.attrs["num_heads"]), int(node.attrs["kv_num_heads"]))
    turned: list[gs.Tensor] = [
        emit(
            "RotaryEmbedding", part, cosines, sines, emit.cast(ids, INT64),
            dtype=dtype, interleaved=interleaved, num_heads=count,
        )
        for part, count in zip(parts[:2], counts, strict=True)
    ]  # fmt: skip
    return [*turned, parts[2]]


RULES: Mapping[str, Rule] = {
    "Attention": attention,
    "MultiHeadAttention": multi_head_attention,
    "GroupQueryAttention": group_query_attention,
}
"""By operator of com.microsoft."""
