"""Regions of a graph as data: what was found, which node has which role, and what nearly was one.

Nodes and tensors are named, never referred to: names stay when the graph is quantized, cast and copied, so that a
region that was matched once on the clean graph is found again when it is lowered last.

Shapes: B batch, S queries, T keys, H width of the block, N heads, G heads of key and value, D head size, F inner width.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

ActivationKind = Literal["gelu", "gelu_tanh", "gelu_sigmoid", "relu", "silu"]


@dataclasses.dataclass(frozen=True, slots=True)
class Linear:
    """x [.., K] times a constant weight [K, W], plus a bias [W].

    Attributes:
        product: the MatMul or Gemm.
        weight: what it reads: a constant, or the floats of one behind Q/DQ; [W, K] where `is_transposed`.
        bias: the constant that is added; None for none.
        bias_add: the Add node; None where the Gemm adds it, or nothing does.
        is_transposed: a Gemm with transB.
        x: the tensor that it multiplies, before a Reshape to rows [B * S, K].
        output: [.., W] behind the bias and behind the Reshape back.
        width: W.
        nodes: all of them, Reshapes to rows and back included.
    """

    product: str
    weight: str
    bias: str | None
    bias_add: str | None
    is_transposed: bool
    x: str
    output: str
    width: int
    nodes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer, or columns of one, that gives the heads of query, key or value.

    Head n, element d is column `first + n * head_stride + d * element_stride` of the weight.

    Attributes:
        linear: the whole product; a fused one is the same for query, key and value.
        first, head_stride, element_stride: where the columns are.
        num_heads: N, or G of grouped queries.
        head_size: D.
        rows: sizes of batch and sequence that attention sees, as numbers or names.
        is_sequence_first: its x is [S, B, K].
    """

    linear: Linear
    first: int
    head_stride: int
    element_stride: int
    num_heads: int
    head_size: int
    rows: tuple[int | str | None, int | str | None]
    is_sequence_first: bool = False

    def columns(self) -> list[int]:
        """The columns of the weight, head by head."""
        return [
            self.first + head * self.head_stride + element * self.element_stride
            for head in range(self.num_heads)
            for element in range(self.head_size)
        ]


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
    """Where something that was looked for ended, and why."""

    node: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Heads:
    """One of query, key and value as attention reads it.

    Attributes:
        tensor: [B, N, S, D]; [B * N, S, D] where the product has three axes; [B, S, N * D] for an `Attention` node.
        is_transposed: key only: the last two axes are swapped.
        scale: number that it is multiplied with between its projection and attention.
        repeats: how often each head of the projection is used (grouped queries).
        projection: where it comes from; None where something else stands between.
        stop: what stands between.
        nodes: between projection and attention.
    """

    tensor: str
    is_transposed: bool
    scale: float
    repeats: int
    projection: Projection | None
    stop: Stop | None
    nodes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class KeyPadding:
    """Which keys are padding, by a tensor [B, T].

    Attributes:
        tensor: a tensor of the graph.
        is_padding_zero: keys with 0 (False) are hidden; else those with another value are.
    """

    tensor: str
    is_padding_zero: bool


@dataclasses.dataclass(frozen=True, slots=True)
class MaskTerm:
    """One thing that is done to the scores.

    Attributes:
        node: the Add or Where on the scores, or the `Attention` node.
        tensor: what is added, or the condition.
        kind: "additive", or "keep" / "hide" for a bool tensor that is True where a key is seen / hidden.
        fill: what a hidden score becomes; None for an additive term, and for `Attention`, which hides by -inf.
    """

    node: str
    tensor: str
    kind: Literal["additive", "keep", "hide"]
    fill: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Mask:
    """All that hides keys or biases scores.

    Attributes:
        terms: in the order in which they are applied; the scores need these and nothing else.
        is_causal: queries are proved not to see later keys, by a term or by the `Attention` node.
        key_padding: the source of a term that hides padded keys.
        is_explained: every term is causal, key padding or nothing at all; False where a term is a bias of its own.
    """

    terms: tuple[MaskTerm, ...]
    is_causal: bool
    key_padding: KeyPadding | None
    is_explained: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Norm:
    """LayerNormalization or RMSNormalization over the last axis.

    Attributes:
        kind: "layer" or "rms".
        node: the one that gives the output.
        gamma, beta: constants [H]; None for none.
        x, output: tensors.
        nodes: one, or the chain that spells it.
    """

    kind: Literal["layer", "rms"]
    node: str
    epsilon: float
    gamma: str | None
    beta: str | None
    x: str
    output: str
    nodes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Activation:
    """An element-wise function of one tensor.

    Attributes:
        node: the one that gives the output.
        nodes: in graph order.
    """

    kind: ActivationKind
    node: str
    nodes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Attention:
    """softmax(scale Q K^T + mask) V, with the projections around it where they are plain.

    Attributes:
        name: of the `Attention` or Softmax node.
        spelling: "Attention" for the operator, "MatMul" for products around a Softmax.
        scores, softmax, context: Q K^T, the Softmax and P V; all the same node for `Attention`.
        scale: of Q K^T, besides the scales that query and key bring themselves (`softmax_scale` is all of them).
        num_heads: N.
        num_kv_heads: G; N unless queries are grouped.
        head_size: D.
        core_output: behind P V.
        output_projection: the linear layer that reads all heads side by side; None where none does.
        output_stop: what reads them instead.
        nodes: from Q K^T to P V, guard of masked rows included.
        output_nodes: between P V and the output projection.
        is_output_sequence_first: the output projection reads [S, B, N * D], or its rows.
    """

    pattern: ClassVar[str] = "attention"

    name: str
    spelling: Literal["Attention", "MatMul"]
    scores: str
    softmax: str
    context: str
    query: Heads
    key: Heads
    value: Heads
    scale: float
    num_heads: int
    num_kv_heads: int
    head_size: int
    mask: Mask
    core_output: str
    output_projection: Linear | None
    output_stop: Stop | None
    nodes: tuple[str, ...]
    output_nodes: tuple[str, ...]
    is_output_sequence_first: bool = False

    @property
    def softmax_scale(self) -> float:
        """What Q K^T of the bare projections is multiplied with."""
        return self.scale * self.query.scale * self.key.scale

    def shared_heads(self) -> str | None:
        """How heads are shared, as a reason; None where each of query, key and value has its own N."""
        is_repeated = any(part.repeats != 1 for part in (self.query, self.key, self.value))
        if self.num_kv_heads == self.num_heads and not is_repeated:
            return None
        if self.num_kv_heads < self.num_heads and self.query.repeats == 1:
            return f"grouped queries: {self.num_heads} heads of the query, {self.num_kv_heads} of the key"
        return f"heads of the query are shared: key and value have {self.num_kv_heads}"

    def roles(self) -> dict[str, str | None]:
        """Node by role."""
        heads = {"query": self.query, "key": self.key, "value": self.value}
        found: dict[str, str | None] = {}
        for role, part in heads.items():
            found |= _linear_roles(role, None if part.projection is None else part.projection.linear)
        found |= {"scores": self.scores, "softmax": self.softmax, "context": self.context}
        return found | _linear_roles("out", self.output_projection)

    def all_nodes(self) -> tuple[str, ...]:
        """Nodes of the core, of what leads to it and of the projections, each once."""
        parts = [self.query, self.key, self.value]
        names = [name for part in parts if part.projection for name in (*part.projection.linear.nodes, *part.nodes)]
        names += self.nodes
        if self.output_projection is not None:
            names += [*self.output_nodes, *self.output_projection.nodes]
        return tuple(dict.fromkeys(names))


@dataclasses.dataclass(frozen=True, slots=True)
class Ffn:
    """x -> up -> activation -> down."""

    pattern: ClassVar[str] = "ffn"

    name: str
    up: Linear
    activation: Activation
    down: Linear

    def roles(self) -> dict[str, str | None]:
        """Node by role."""
        return {
            **_linear_roles("up", self.up),
            "activation": self.activation.node,
            **_linear_roles("down", self.down),
        }

    def all_nodes(self) -> tuple[str, ...]:
        """Nodes, each once."""
        return (*self.up.nodes, *self.activation.nodes, *self.down.nodes)


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionFfnBlock:
    """One transformer block, x [B, S, H] -> y [B, S, H].

    post-norm: h = norm1(x + attention(x)),  y = norm2(h + ffn(h))
    pre-norm:  h = x + attention(norm1(x)),  y = h + ffn(norm2(h))

    Attributes:
        name: of its attention.
        residual1, residual2: the Adds.
        out_bias_add, down_bias_add: an Add of the bias behind the residual, as ONNX Runtime's fused operators come out.
        out_bias, down_bias: its constant.
        x, output: tensors.
        nodes: all of them, in graph order; nothing but `size_readers` reads what they give, besides `output`.
        size_readers: nodes outside that only want the sizes of a tensor inside, for Reshapes and masks of this block.
    """

    pattern: ClassVar[str] = "attention_ffn_block"

    name: str
    order: Literal["pre", "post"]
    attention: Attention
    ffn: Ffn
    norm1: Norm
    norm2: Norm
    residual1: str
    residual2: str
    out_bias_add: str | None
    out_bias: str | None
    down_bias_add: str | None
    down_bias: str | None
    x: str
    output: str
    nodes: tuple[str, ...]
    size_readers: tuple[str, ...]

    def roles(self) -> dict[str, str | None]:
        """Node by role."""
        found = self.attention.roles() | self.ffn.roles()
        found["out_bias"] = self.out_bias_add or found["out_bias"]
        found["down_bias"] = self.down_bias_add or found["down_bias"]
        found |= {"residual1": self.residual1, "residual2": self.residual2}
        return found | {"norm1": self.norm1.node, "norm2": self.norm2.node}

    def all_nodes(self) -> tuple[str, ...]:
        """Nodes, each once, in graph order."""
        return self.nodes


Region = Attention | Ffn | AttentionFfnBlock


@dataclasses.dataclass(frozen=True, slots=True)
class NearMiss:
    """A place that began like a pattern and is none.

    Attributes:
        pattern: the nearest.
        anchor: the node from which it was looked for: Softmax, `Attention`, or the FFN's second product.
        node: where it stopped.
        reason: why.
    """

    pattern: str
    anchor: str
    node: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Matches:
    """What a graph holds.

    Attributes:
        regions: in graph order; an attention or FFN that is part of a block is in the block alone.
        near_misses: in graph order.
    """

    regions: tuple[Region, ...]
    near_misses: tuple[NearMiss, ...]

    def blocks(self) -> tuple[AttentionFfnBlock, ...]:
        """The whole blocks."""
        return tuple(region for region in self.regions if isinstance(region, AttentionFfnBlock))

    def attentions(self) -> tuple[Attention, ...]:
        """Every attention, those in blocks too."""
        inner = [r.attention if isinstance(r, AttentionFfnBlock) else r for r in self.regions]
        return tuple(region for region in inner if isinstance(region, Attention))

    def ffns(self) -> tuple[Ffn, ...]:
        """Every FFN, those in blocks too."""
        inner = [r.ffn if isinstance(r, AttentionFfnBlock) else r for r in self.regions]
        return tuple(region for region in inner if isinstance(region, Ffn))


def region_to_dict(region: Region) -> dict[str, Any]:
    """A region as JSON values: its pattern, the node of each role, and every fact."""
    roles = {role: node for role, node in region.roles().items() if node is not None}
    return {"pattern": region.pattern, "roles": roles, **dataclasses.asdict(region)}


def _linear_roles(role: str, linear: Linear | None) -> dict[str, str | None]:
    if linear is None:
        return {role: None, f"{role}_bias": None}
    return {role: linear.product, f"{role}_bias": linear.bias_add}
