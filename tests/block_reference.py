"""A transformer block in float64, and operands for one: the reference of the op's body and of the kernels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from trtforge.ops.attention_ffn import Variant, inputs_of

Array = npt.NDArray[np.float64]
Operands = dict[str, npt.NDArray[np.generic]]

_erf = np.vectorize(math.erf, otypes=[np.float64])
ACTIVATIONS = {
    "gelu": lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
}
ROLES = ("qkv", "out", "up", "down")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A block's sizes, and what its attention bias is broadcast over."""

    batch: int = 2
    sequence: int = 7
    width: int = 64
    num_heads: int = 2
    inner: int = 96
    bias_dims: tuple[int, int, int, int] = (1, 1, 1, 1)
    epsilon: float = 1e-5

    @property
    def softmax_scale(self) -> float:
        return float(np.float32(1 / math.sqrt(self.width / self.num_heads)))


def make_operands(variant: Variant, sizes: Sizes, dtype: npt.DTypeLike, seed: int = 0) -> Operands:
    """Random operands of the op's inputs, in T, whose values keep each tensor's spread near one."""
    random = np.random.default_rng(seed)
    dims = {"H": sizes.width, "3H": 3 * sizes.width, "F": sizes.inner, "B": sizes.batch, "S": sizes.sequence}
    operands: Operands = {}
    for given in inputs_of(variant):
        if given.name == "attention_bias":
            operands[given.name] = random.normal(0, 1, sizes.bias_dims).astype(dtype)
        elif given.name == "lengths":
            lengths = random.integers(1, sizes.sequence + 1, sizes.batch)
            lengths[0] = max(1, sizes.sequence - 2)
            operands[given.name] = lengths.astype(np.int32)
        elif given.kind == "weight":
            shape = tuple(dims[name] for name in given.dims)
            weight = random.normal(0, shape[0] ** -0.5, shape)
            operands[given.name] = weight.astype(dtype)
            if variant.is_int8:
                scale = (np.abs(weight).max(axis=0) / 127).astype(np.float16).astype(np.float32)
                operands[given.name] = np.clip(np.rint(weight / scale), -127, 127).astype(np.int8).T.copy()
                operands[f"{given.name}_scale"] = scale
        elif given.kind == "value":
            centre = 1.0 if given.name.endswith("gamma") else 0.0
            spread = 1.0 if given.name == "x" else 0.2
            operands[given.name] = random.normal(centre, spread, [dims[name] for name in given.dims]).astype(dtype)
    return {given.name: operands[given.name] for given in inputs_of(variant)}


def input_scales(variant: Variant, sizes: Sizes, operands: Operands) -> dict[str, float]:
    """The scale of each product's input, from its own largest value, as a float16 value; empty unless int8."""
    if not variant.is_int8:
        return {}
    largest: dict[str, float] = {}
    block_in_float64(variant, sizes, operands, {}, largest)
    return {f"{role}_input_scale": float(np.float16(largest[role] / 127)) for role in ROLES}


def block_in_float64(
    variant: Variant,
    sizes: Sizes,
    operands: Operands,
    scales: dict[str, float],
    largest: dict[str, float] | None = None,
    rounded: Callable[[Array], Array] = lambda values: values,
) -> Array:
    """Compute y [B, S, H].

    Args:
        scales: by attribute; the input of a product is quantized where its scale is here.
        largest: is given the largest magnitude of each product's input.
        rounded: of every tensor that a step-by-step computation in T writes: the plain path of the same precision.
    """
    values = {name: value.astype(np.float64) for name, value in operands.items()}
    valid = np.arange(sizes.sequence) < np.full((sizes.batch, 1), sizes.sequence)
    if variant.has_lengths:
        valid = np.arange(sizes.sequence) < values["lengths"][:, None]

    def linear(x: Array, role: str) -> Array:
        if largest is not None:
            largest[role] = float(np.abs(x[valid]).max())
        weight = values[f"w_{role}"]
        if variant.is_int8:
            weight = (weight * values[f"w_{role}_scale"][:, None]).T
        if (scale := scales.get(f"{role}_input_scale")) is not None:
            x = np.clip(np.rint(x / scale), -128, 127) * scale
        return x @ weight + values[f"b_{role}"]

    def norm(x: Array, name: str) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + sizes.epsilon)
        return rounded(centred / deviation * values[f"{name}_gamma"] + values[f"{name}_beta"])

    def attention(x: Array) -> Array:
        head_size = sizes.width // sizes.num_heads
        packed = rounded(linear(x, "qkv")).reshape(sizes.batch, sizes.sequence, 3, sizes.num_heads, head_size)
        q, k, v = packed.transpose(2, 0, 3, 1, 4)
        scores = q @ k.swapaxes(-1, -2) * sizes.softmax_scale + values["attention_bias"]
        seen = np.broadcast_to(valid[:, None, None, :], scores.shape)
        if variant.is_causal:
            seen = seen & np.tri(sizes.sequence, dtype=bool)
        scores = np.where(seen, scores, -1e300)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        context = rounded(rounded(weights / weights.sum(-1, keepdims=True)) @ v)
        return linear(context.transpose(0, 2, 1, 3).reshape(x.shape), "out")

    def ffn(x: Array) -> Array:
        return linear(rounded(ACTIVATIONS[variant.activation](linear(x, "up"))), "down")

    x = values["x"]
    if variant.order == "pre":
        h = rounded(x + attention(norm(x, "ln1")))
        y = rounded(h + ffn(norm(h, "ln2")))
    else:
        h = norm(rounded(x + attention(x)), "ln1")
        y = norm(rounded(h + ffn(h)), "ln2")
    return np.where(valid[:, :, None], y, 0.0)
