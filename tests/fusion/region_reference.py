"""What a matched region says is computed, computed from its data alone, and compared with the model in ONNX Runtime.

Every role, column, scale, mask term, epsilon and residual has to be right for the numbers to agree: weights are looked
up by the names in the region, activations are taken from the model's own run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime

from trtforge.fusion.activation import KINDS
from trtforge.fusion.regions import Attention, AttentionFfnBlock, Ffn, Heads, Linear, Mask, MaskTerm, Norm, Projection

Array = np.ndarray
# The fixture `prepare`.
Prepare = Callable[[Path | onnx.ModelProto], gs.Graph]
# Both sides compute in float32 and float64; activations are near 1. A wrong role shows as 1e-2 and more.
MAX_ERROR = 1e-4


def feeds_of(graph: gs.Graph, seed: int = 0, **sizes: int) -> dict[str, Array]:
    """Random inputs; integers are ids below 50, and a mask hides the end of every sample but the first."""
    random = np.random.default_rng(seed)
    named = {"batch": 2, "seq": 6} | sizes
    feeds: dict[str, Array] = {}
    for tensor in graph.inputs:
        shape = [size if isinstance(size, int) else _size(size, axis, named) for axis, size in enumerate(tensor.shape)]
        if "mask" in tensor.name:
            lengths = np.arange(shape[1], shape[1] - shape[0], -1)[:, None]
            feeds[tensor.name] = (np.arange(shape[1])[None] < lengths).astype(tensor.dtype)
        elif np.issubdtype(tensor.dtype, np.integer):
            low, high = (0, 2) if "type" in tensor.name else (5, 50)
            feeds[tensor.name] = random.integers(low, high, shape).astype(tensor.dtype)
        else:
            feeds[tensor.name] = random.normal(size=shape).astype(tensor.dtype)
    return feeds


def _size(name: object, axis: int, named: Mapping[str, int]) -> int:
    return named[name] if name in named else named[("batch", "seq")[axis]]


def run(graph: gs.Graph, feeds: Mapping[str, Array], names: Iterable[str]) -> dict[str, Array]:
    """The values of tensors, computed as written; constants and inputs too."""
    tensors, wanted = graph.tensors(), set(names)
    values = {name: feeds[name] for name in wanted if name in feeds}
    values |= {name: tensors[name].values for name in wanted if isinstance(tensors[name], gs.Constant)}
    copy = graph.copy()
    copied = copy.tensors()
    computed = sorted(wanted - values.keys())
    copy.outputs = [copied[name] for name in computed]
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(gs.export_onnx(copy).SerializeToString(), options, ["CPUExecutionProvider"])
    used = {entry.name for entry in session.get_inputs()}
    results = session.run(None, {name: value for name, value in feeds.items() if name in used})
    return values | dict(zip(computed, results, strict=True))


class Replay:
    """The arithmetic of regions over a graph's constants, in float64."""

    def __init__(self, graph: gs.Graph, values: Mapping[str, Array]) -> None:
        self._constants = {n: t.values for n, t in graph.tensors().items() if isinstance(t, gs.Constant)}
        self._values = values

    def block(self, block: AttentionFfnBlock) -> Array:
        """y."""
        x = _as_batch(self._value(block.x), self._value(block.attention.core_output))
        is_pre = block.order == "pre"
        read = self.norm(block.norm1, x) if is_pre else x
        hidden = x + self.attention(block.attention, read) + self._optional(block.out_bias)
        hidden = hidden if is_pre else self.norm(block.norm1, hidden)
        inner = self.norm(block.norm2, hidden) if is_pre else hidden
        y = hidden + self.ffn(block.ffn, inner) + self._optional(block.down_bias)
        return y if is_pre else self.norm(block.norm2, y)

    def attention(self, attention: Attention, x: Array) -> Array:
        """The output projection's result."""
        q, k, v = (self.heads(part, x) for part in (attention.query, attention.key, attention.value))
        context = self.core(attention, q, k, v, attention.softmax_scale)
        joined = context.transpose(0, 2, 1, 3).reshape(*x.shape[:-1], -1)
        assert attention.output_projection is not None
        return self.linear(attention.output_projection, joined)

    def core(self, attention: Attention, q: Array, k: Array, v: Array, scale: float) -> Array:
        """softmax(scale q k^T + mask) v."""
        scores = self.masked(attention.mask, q @ k.swapaxes(-1, -2) * scale)
        with np.errstate(invalid="ignore"):
            exp = np.exp(scores - scores.max(-1, keepdims=True))
            weights = exp / exp.sum(-1, keepdims=True)
        return np.nan_to_num(weights) @ v

    def masked(self, mask: Mask, scores: Array) -> Array:
        """The scores behind every term of a mask, and the operator's own causal mask."""
        for term in mask.terms:
            scores = self._apply(term, scores)
        if mask.is_causal and not mask.terms:
            scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
        return scores

    def _apply(self, term: MaskTerm, scores: Array) -> Array:
        value = self._value(term.tensor)
        if term.kind == "additive":
            return scores + value.astype(np.float64)
        fill = -np.inf if term.fill is None else term.fill
        return np.where(value.astype(bool) == (term.kind == "keep"), scores, fill)

    def heads(self, part: Heads, x: Array) -> Array:
        """[B, N, S, D], unscaled."""
        assert part.projection is not None
        return np.repeat(self.projection(part.projection, x), part.repeats, axis=1)

    def projection(self, projection: Projection, x: Array) -> Array:
        """[B, N, S, D]."""
        columns = self.linear(projection.linear, x)[..., projection.columns()]
        return columns.reshape(*x.shape[:2], projection.num_heads, projection.head_size).transpose(0, 2, 1, 3)

    def ffn(self, ffn: Ffn, x: Array) -> Array:
        """The second layer's result."""
        return self.linear(ffn.down, KINDS[ffn.activation.kind](self.linear(ffn.up, x)))

    def linear(self, linear: Linear, x: Array) -> Array:
        """x w + b."""
        weight = self._constant(linear.weight)
        return x @ (weight.T if linear.is_transposed else weight) + self._optional(linear.bias)

    def norm(self, norm: Norm, x: Array) -> Array:
        """LayerNormalization."""
        deviation = x - x.mean(-1, keepdims=True)
        scaled = deviation / np.sqrt((deviation**2).mean(-1, keepdims=True) + norm.epsilon)
        return scaled * (1.0 if norm.gamma is None else self._constant(norm.gamma)) + self._optional(norm.beta)

    def _optional(self, name: str | None) -> Array | float:
        return 0.0 if name is None else self._constant(name)

    def _constant(self, name: str) -> Array:
        return np.asarray(self._constants.get(name, self._values.get(name))).astype(np.float64)

    def _value(self, name: str) -> Array:
        return np.asarray(self._values[name])


def _as_batch(x: Array, context: Array) -> Array:
    """x [B * S, H] as [B, S, H], by the sizes of attention's own result."""
    return x if x.ndim == 3 else x.reshape(context.shape[0], -1, x.shape[-1])


def tensors_of(block: AttentionFfnBlock) -> list[str]:
    """The activations that a replay starts from, and what it must give."""
    masks = [term.tensor for term in block.attention.mask.terms]
    padding = block.attention.mask.key_padding
    masks += [] if padding is None else [padding.tensor]
    linears = [part.projection.linear for part in _heads(block) if part.projection is not None]
    weights = [linear.weight for linear in (*linears, block.ffn.up, block.ffn.down)]
    if block.attention.output_projection is not None:
        weights.append(block.attention.output_projection.weight)
    return [block.x, block.output, block.attention.core_output, *masks, *weights]


def _heads(block: AttentionFfnBlock) -> list[Heads]:
    return [block.attention.query, block.attention.key, block.attention.value]


def check_block(graph: gs.Graph, block: AttentionFfnBlock, feeds: Mapping[str, Array]) -> None:
    """Assert that a block's data gives what the graph computes."""
    values = run(graph, feeds, tensors_of(block))
    wanted = values[block.output]
    found = Replay(graph, values).block(block).reshape(wanted.shape)
    assert np.abs(found - wanted).max() < MAX_ERROR * max(1.0, np.abs(wanted).max())
    check_mask(block.attention.mask, values)


def check_core(graph: gs.Graph, attention: Attention, feeds: Mapping[str, Array]) -> None:
    """Assert that query, key and value as they arrive give what the core computes."""
    parts = [attention.query, attention.key, attention.value]
    masks = [term.tensor for term in attention.mask.terms]
    values = run(graph, feeds, [*(part.tensor for part in parts), attention.core_output, *masks])
    q, k, v = (values[part.tensor].astype(np.float64) for part in parts)
    k = k.swapaxes(-1, -2) if attention.key.is_transposed else k
    k, v = (np.repeat(part, q.shape[1] // part.shape[1], axis=1) for part in (k, v))
    found, wanted = Replay(graph, values).core(attention, q, k, v, attention.scale), values[attention.core_output]
    assert np.abs(found - wanted).max() < MAX_ERROR * max(1.0, np.abs(wanted).max())


def check_mask(mask: Mask, values: Mapping[str, Array]) -> None:
    """Assert that what a mask is said to mean is what its terms hide, where that is all of it."""
    if not mask.is_explained or not mask.terms:
        return
    hidden = np.zeros((1, 1, 1, 1), bool)
    for term in mask.terms:
        value = np.asarray(values[term.tensor])
        is_hidden = value < -100 if term.kind == "additive" else value.astype(bool) == (term.kind == "hide")
        hidden = hidden | is_hidden
    length = hidden.shape[-1]
    meant = np.zeros((1, 1, length, length), bool)
    if mask.is_causal:
        meant = meant | ~np.tril(np.ones((length, length), bool))
    if mask.key_padding is not None:
        padding = np.asarray(values[mask.key_padding.tensor]) == 0
        meant = meant | (padding if mask.key_padding.is_padding_zero else ~padding)[:, None, None, :]
    assert not (hidden ^ meant).any()


__all__ = ["MAX_ERROR", "Replay", "check_block", "check_core", "check_mask", "feeds_of", "run"]
