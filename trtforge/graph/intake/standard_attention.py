"""ONNX's Attention in the forms that the builder does not take: a past, a softcap, more than one output, lengths.

Query, key and value are `[B, N, S or T, D]`, or `[B, S or T, N * D]` with the numbers of heads as attributes. A causal
mask hides keys later than the query where there is a past; without one it starts at the upper left (ONNX opset 23).
"""

from __future__ import annotations

from collections.abc import Sequence

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
from trtforge.graph.intake.emit import BOOL, INT64, Dtype, Emitter, dtype_of, optional_input, rank_of, static_size
from trtforge.graph.intake.rewrites import NotYetError, RefusedError
from trtforge.graph.signature import tensor_dtype

Results = Sequence[gs.Tensor | None]

_KNOWN = frozenset(("is_causal", "kv_num_heads", "q_num_heads", "qk_matmul_output_mode", "scale", "softcap"))
_PRECISION = "softmax_precision"
_MASK, _PAST_KEY, _PAST_VALUE, _LENGTHS = 3, 4, 5, 6


def is_refused_form(node: gs.Node) -> bool:
    """True for a form of Attention that TensorRT-RTX 1.7 refuses, or takes and computes something else."""
    if any(tensor.name for tensor in node.outputs[1:]) or node.attrs.get("softcap", 0.0):
        return True
    if any(optional_input(node, index) is not None for index in (_PAST_KEY, _PAST_VALUE, _LENGTHS)):
        return True
    if optional_input(node, _MASK) is not None and node.attrs.get("is_causal", 0):
        return True
    return _value_size_differs(node) or not _KNOWN.issuperset(node.attrs)


def _value_size_differs(node: gs.Node) -> bool:
    """True where a head of value has another size than one of query."""
    if optional_input(node, 2) is None:
        return False  # no valid Attention: left to the check of operators
    query, value = (static_size(node.inputs[index], -1) for index in (0, 2))
    counts = (node.attrs.get("q_num_heads", 1), node.attrs.get("kv_num_heads", 1))
    return query is not None and value is not None and query * counts[1] != value * counts[0]


def attention(node: gs.Node, emit: Emitter) -> Results:
    """Concat of the past, MatMul, Softmax and MatMul."""
    attrs, dtype = node.attrs, dtype_of(node.inputs[0])
    unknown = sorted(set(attrs) - _KNOWN - {_PRECISION})
    if unknown:
        raise RefusedError(f"its attribute {unknown[0]} is not known", "export the model at opset 23")
    precision = tensor_dtype(attrs.get(_PRECISION, dtype))
    if precision != dtype:
        raise RefusedError(
            f"its softmax is computed in {precision or 'an unknown type'} and its tensors are {dtype}",
            f"export the model without {_PRECISION}",
        )
    if emit.is_read(node, 3):
        raise RefusedError("its scores are read", "export the model without that output")
    if optional_input(node, _LENGTHS) is not None and attrs.get("is_causal", 0):
        raise RefusedError(
            "it has lengths and a causal mask at once", "export the model with an explicit mask, at opset 23"
        )
    is_flat = rank_of(node.inputs[0]) == 3
    counts = _head_counts(node, is_flat)
    query, key, value = (
        split_heads(emit, tensor, count) if is_flat else tensor
        for tensor, count in zip(node.inputs[:3], (counts[0], counts[1], counts[1]), strict=True)
    )
    size = static_size(node.inputs[0], -1)
    if size is None:
        raise NotYetError("the size of its heads")
    past = optional_input(node, _PAST_KEY)
    past_value = optional_input(node, _PAST_VALUE)
    if past is not None and past_value is not None:
        key = emit("Concat", past, key, dtype=dtype, axis=2)
        value = emit("Concat", past_value, value, dtype=dtype, axis=2)
    result = attend(
        emit,
        query,
        repeat_heads(emit, key, counts[0] // counts[1]),
        repeat_heads(emit, value, counts[0] // counts[1]),
        scale=float(attrs.get("scale", 0.0)) or default_scale(size // counts[0] if is_flat else size),
        dtype=dtype,
        biases=_biases(node, emit, query, key, dtype),
        softcap=float(attrs.get("softcap", 0.0)),
    )
    return [join_heads(emit, result) if is_flat else result, key, value]


def _head_counts(node: gs.Node, is_flat: bool) -> tuple[int, int]:
    if is_flat:
        return int(node.attrs["q_num_heads"]), int(node.attrs["kv_num_heads"])
    counts = [static_size(tensor, 1) for tensor in node.inputs[:2]]
    if counts[0] is None or counts[1] is None:
        raise NotYetError("the number of its heads")
    return counts[0], counts[1]


def _biases(node: gs.Node, emit: Emitter, query: gs.Tensor, key: gs.Tensor, dtype: Dtype) -> list[gs.Tensor]:
    """What is added to the scores; a key that is hidden twice is hidden once, or the sum would be -inf."""
    biases: list[gs.Tensor] = []
    visible: list[gs.Tensor] = []
    mask, lengths = optional_input(node, _MASK), optional_input(node, _LENGTHS)
    if mask is not None:
        (visible if dtype_of(mask) == BOOL else biases).append(mask)
    if lengths is not None:
        ends = emit("Unsqueeze", emit.cast(lengths, INT64), emit.ints(1, 2, 3), dtype=INT64)
        visible.append(emit("Less", emit.positions(emit.size_of(key, 2)), ends, dtype=BOOL))
    if node.attrs.get("is_causal", 0):
        has_past = optional_input(node, _PAST_KEY) is not None
        visible.append(is_visible(emit, query, key, is_last_aligned=has_past))
    if visible:
        both = visible[0]
        for other in visible[1:]:
            both = emit("And", both, other, dtype=BOOL)
        biases.append(mask_bias(emit, both, dtype))
    return biases
