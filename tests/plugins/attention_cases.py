"""Attention on the emulated GPU, and the same in float64 with a bound on the error that the kernel may make."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from case_count import count_cases
from emulation_build import TYPES, sanitizer_environment

# Named dims: B batch, S sequence, N heads, D head size.

# Unit roundoff: half the distance from 1 to the next number.
ROUNDOFF = {"half": 2.0**-11, "bf16": 2.0**-8, "float": 2.0**-24}
# Half the distance between subnormals: what a number too small for the type is off by.
UNDERFLOW = {"half": 2.0**-25, "bf16": 2.0**-134}

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Attention:
    """One call: q, k, v [B, S, N, D], bias broadcastable to [B, N, S, S], lengths [B] or None."""

    type: str
    q: npt.NDArray[np.generic]
    k: npt.NDArray[np.generic]
    v: npt.NDArray[np.generic]
    bias: npt.NDArray[np.generic]
    softmax_scale: float
    is_causal: bool = False
    lengths: npt.NDArray[np.int32] | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, sequence, num_heads, head_size = self.q.shape
        return batch, sequence, num_heads, head_size

    def with_values(self, **arrays: npt.NDArray[np.generic]) -> Attention:
        """The same call with some of q, k, v and bias replaced, rounded to the type."""
        dtype = TYPES[self.type]
        return replace(self, **{name: array.astype(dtype) for name, array in arrays.items()})


def random_attention(
    seed: int,
    shape: tuple[int, int, int, int],
    type: str = "half",
    bias_shape: tuple[int, int, int, int] = (1, 1, 1, 1),
    is_causal: bool = False,
    lengths: list[int] | None = None,
    softmax_scale: float | None = None,
) -> Attention:
    """Normal q, k, v and bias (a bias of one element is zero, as for a model without one)."""
    random = np.random.default_rng(seed)
    q, k, v = (random.normal(size=shape).astype(TYPES[type]) for _ in range(3))
    bias = random.normal(size=bias_shape) * 2 if np.prod(bias_shape) > 1 else np.zeros(bias_shape)
    return Attention(
        type,
        q,
        k,
        v,
        bias.astype(TYPES[type]),
        softmax_scale=shape[3] ** -0.5 if softmax_scale is None else softmax_scale,
        is_causal=is_causal,
        lengths=None if lengths is None else np.array(lengths, np.int32),
    )


@dataclass(frozen=True)
class Run:
    """What the runner is told beside the tensors."""

    program: Path
    seed: int = 0  # of the emulator's schedule; 0 runs the threads in sequence
    options: dict[str, object] = field(default_factory=dict)  # runner arguments that replace those of the tensors


def start(attention: Attention, run: Run) -> subprocess.CompletedProcess[bytes]:
    batch, sequence, num_heads, head_size = attention.shape
    is_packed = bool(run.options.get("packed"))
    arguments: dict[str, object] = {
        "type": list(TYPES).index(attention.type),
        "batch": batch,
        "sequence": sequence,
        "num_heads": num_heads,
        "head_size": head_size,
        "causal": int(attention.is_causal),
        "softmax_scale": attention.softmax_scale,
        "bias_shape": ",".join(map(str, attention.bias.shape)),
        "has_lengths": int(attention.lengths is not None),
    } | run.options
    tensors = [attention.q, attention.k, attention.v]
    if is_packed:
        tensors = [np.stack(tensors, axis=2)]
    tensors.append(attention.bias)
    if attention.lengths is not None:
        tensors.append(attention.lengths)
    count_cases(1)
    return subprocess.run(
        [run.program, *(f"{name}={value}" for name, value in arguments.items())],
        input=b"".join(np.ascontiguousarray(tensor).tobytes() for tensor in tensors),
        capture_output=True,
        timeout=300,
        env=sanitizer_environment() | {"TRTFORGE_EMULATION_SEED": str(run.seed)},
        check=False,
    )


def compute(attention: Attention, run: Run) -> npt.NDArray[np.generic]:
    """The kernel's output [B, S, N, D] in its own type."""
    done = start(attention, run)
    assert done.returncode == 0, done.stderr.decode()
    return np.frombuffer(done.stdout, TYPES[attention.type]).reshape(attention.shape)


def reference(attention: Attention) -> tuple[Array, Array]:
    """softmax(scale * Q K^T + bias) V in float64, and how far from it the kernel may be, element by element.

    With u the roundoff of the type and f that of float, to first order:
    a score x_j is off by 2 D f scale |q||k_j| (products are exact, D sums that may truncate) + f |x_j| (the bias), and
    its weight w_j = exp(x_j - m) by that and 2 f |x_j - m| + 4 f (the exponent's roundings, ex2's 2 ulp), relatively;
    the sum of weights by the weighted mean of these and S f. P V rounds each weight to the type (u, or an underflow)
    and sums S products (2 f each), and the result is rounded once (u).
    """
    q, k, v, bias = (array.astype(np.float64) for array in (attention.q, attention.k, attention.v, attention.bias))
    batch, sequence, num_heads, head_size = attention.shape
    u, f, underflow = ROUNDOFF[attention.type], ROUNDOFF["float"], UNDERFLOW[attention.type]
    output, bound = np.zeros(q.shape), np.zeros(q.shape)
    for b in range(batch):
        length = sequence if attention.lengths is None else int(np.clip(attention.lengths[b], 0, sequence))
        if length == 0:
            continue
        rows = [np.moveaxis(array[b, :length], 0, 1) for array in (q, k, v)]  # [N, length, D]
        head_bias = np.broadcast_to(bias, (batch, num_heads, sequence, sequence))[b, :, :length, :length]
        scores = attention.softmax_scale * np.einsum("nqd,nkd->nqk", rows[0], rows[1]) + head_bias
        if attention.is_causal:
            scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
        size = abs(attention.softmax_scale) * np.einsum("nqd,nkd->nqk", abs(rows[0]), abs(rows[1]))
        with np.errstate(invalid="ignore"):
            distance = scores - scores.max(axis=-1, keepdims=True)
            weights = np.exp(distance)
            total = weights.sum(axis=-1, keepdims=True)
            weights = weights / total
            off = 2 * head_size * f * size + f * abs(scores) + 2 * f * abs(distance) + 4 * f
            off = np.where(np.isneginf(scores), 0.0, off)
            mean_off = (weights * off).sum(axis=-1, keepdims=True) + sequence * f
        values = np.einsum("nqk,nkd->nqd", weights, rows[2])
        spread = np.einsum("nqk,nkd->nqd", weights * (u + off + 2 * sequence * f + mean_off), abs(rows[2]))
        small = underflow * (1 + (abs(rows[2]).sum(axis=1, keepdims=True) / total))
        output[b, :length] = np.moveaxis(values, 1, 0)
        bound[b, :length] = np.moveaxis(spread + u * abs(values) + small, 1, 0)
    return output, bound


def check(attention: Attention, run: Run) -> float:
    """Compares kernel and reference; returns the largest share of the bound that was used."""
    actual = compute(attention, run).astype(np.float64)
    expected, bound = reference(attention)
    assert np.isfinite(expected).all(), "a case with NaN needs its own check"
    error = abs(actual - expected)
    outside = ~(error <= bound)  # true for NaN as well
    if outside.any():
        worst = np.unravel_index(np.argmax(np.where(np.isnan(error), np.inf, error - bound)), error.shape)
        raise AssertionError(
            f"{outside.sum()} of {error.size} elements are off; worst at [b, s, n, d] = {tuple(map(int, worst))}: "
            f"{actual[worst]} where {expected[worst]} +- {bound[worst]:.3g} is right"
        )
    return float((error / np.where(bound == 0, np.inf, bound)).max(initial=0.0))
