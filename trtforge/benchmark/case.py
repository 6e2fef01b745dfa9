"""The transformer blocks that are measured: their sizes, their work, and the order in which they tell most.

Work of a block, counted on rows that are not padding (sum over samples of their lengths L, S where there are none):

    FLOPs of the products   2 L (3 H^2 + H^2 + 2 H F)
    FLOPs of attention      4 H x (pairs of a row and a key that it sees): L^2, or L (L + 1) / 2 where causal
    bytes                   x, y, weights, biases and norms once each, as if everything between stayed on the chip
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

from trtforge.errors import InputError
from trtforge.ops.attention_ffn import HEAD_SIZES, INT8_K_MULTIPLE, WIDTH_MULTIPLE, Activation, NormOrder

Dtype = Literal["fp16", "bf16", "int8"]
Mask = Literal["none", "causal", "lengths", "bias"]

# The most telling first: what is measured when time is short.
BATCHES = (8, 1, 32)
SEQUENCES = (512, 128, 384, 64, 2048)
WIDTHS = (768, 384, 1024)
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
MASKS: tuple[Mask, ...] = get_args(Mask)
_ELEMENT_BYTES = 2  # fp16 and bf16
_LENGTH_SEED = 5


@dataclasses.dataclass(frozen=True, slots=True)
class BlockCase:
    """One block.

    Attributes:
        batch: B.
        sequence: S.
        width: H.
        num_heads: N, of size H / N.
        inner_width: F.
        dtype: of the products; inputs and outputs of an int8 block are fp16.
        mask: "lengths" pads each sample to S, "bias" adds a full [1, N, S, S] to the scores.
        order: of LayerNorms and residual Adds.
        activation: between the two products of the FFN.
    """

    batch: int
    sequence: int
    width: int
    num_heads: int
    inner_width: int
    dtype: Dtype = "fp16"
    mask: Mask = "none"
    order: NormOrder = "post"
    activation: Activation = "gelu"

    @property
    def key(self) -> str:
        """A name that tells cases apart, as in `b8-s512-h768-n12-f3072-fp16-none-post-gelu`."""
        sizes = f"b{self.batch}-s{self.sequence}-h{self.width}-n{self.num_heads}-f{self.inner_width}"
        return f"{sizes}-{self.dtype}-{self.mask}-{self.order}-{self.activation}"

    @property
    def head_size(self) -> int:
        """D."""
        return self.width // self.num_heads

    @property
    def element_type(self) -> Literal["fp16", "bf16"]:
        """T, of everything but the operands of an int8 block's products."""
        return "bf16" if self.dtype == "bf16" else "fp16"

    @property
    def lengths(self) -> tuple[int, ...]:
        """The rows of each sample that are not padding; the same for the same sizes."""
        if self.mask != "lengths":
            return (self.sequence,) * self.batch
        random = np.random.default_rng([_LENGTH_SEED, self.batch, self.sequence])
        return tuple(
            int(length) for length in random.integers(max(1, self.sequence // 4), self.sequence + 1, self.batch)
        )

    @property
    def bias_dims(self) -> tuple[int, int, int, int]:
        """The attention bias; one zero where the case has none."""
        return (1, self.num_heads, self.sequence, self.sequence) if self.mask == "bias" else (1, 1, 1, 1)

    @property
    def product_flops(self) -> int:
        """Of the four products with weights."""
        return 2 * sum(self.lengths) * self.width * (4 * self.width + 2 * self.inner_width)

    @property
    def attention_flops(self) -> int:
        """Of the two products of attention."""
        pairs = (n * (n + 1) // 2 if self.mask == "causal" else n * n for n in self.lengths)
        return 4 * self.width * sum(pairs)

    @property
    def flops(self) -> int:
        """All that count."""
        return self.product_flops + self.attention_flops

    @property
    def min_bytes(self) -> int:
        """What any implementation reads and writes at least."""
        rows = sum(self.lengths) + self.batch * self.sequence  # padding is written, not read
        weights = self.width * (4 * self.width + 2 * self.inner_width)
        vectors = 9 * self.width + self.inner_width  # biases of the four products, two norms
        bias = int(np.prod(self.bias_dims))
        weight_bytes = 1 if self.dtype == "int8" else _ELEMENT_BYTES
        scales = 4 * (5 * self.width + self.inner_width) if self.dtype == "int8" else 0
        return _ELEMENT_BYTES * (rows * self.width + vectors + bias) + weight_bytes * weights + scales

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """Cases as a product of sizes. Empty `heads` and `inner_widths` mean what models of that width have."""

    batches: Sequence[int] = BATCHES
    sequences: Sequence[int] = SEQUENCES
    widths: Sequence[int] = WIDTHS
    heads: Sequence[int] = ()
    inner_widths: Sequence[int] = ()
    dtypes: Sequence[Dtype] = ("fp16",)
    masks: Sequence[Mask] = ("none",)
    order: NormOrder = "post"
    activation: Activation = "gelu"

    def cases(self) -> tuple[BlockCase, ...]:
        """Every case once, the most telling first: those whose sizes stand early in all lists.

        Raises:
            InputError: a size that the kernels do not take.
        """
        ranked: dict[BlockCase, int] = {}
        lists = (self.dtypes, self.masks, self.batches, self.sequences, self.widths)
        for places in itertools.product(*(range(len(values)) for values in lists)):
            in_dtypes, in_masks, in_batches, in_sequences, in_widths = places
            width = self.widths[in_widths]
            sizes = itertools.product(self.heads or (_usual_heads(width),), self.inner_widths or (4 * width,))
            for heads, inner in sizes:
                case = BlockCase(
                    self.batches[in_batches],
                    self.sequences[in_sequences],
                    width,
                    heads,
                    inner,
                    self.dtypes[in_dtypes],
                    self.masks[in_masks],
                    self.order,
                    self.activation,
                )
                _check(case)
                ranked.setdefault(case, sum(places))
        return tuple(sorted(ranked, key=lambda case: ranked[case]))


def _usual_heads(width: int) -> int:
    """12 heads of 32 in MiniLM's 384; of 64 in BERT's 768 and 1,024; else the first size that divides."""
    sizes = (32, *HEAD_SIZES) if width == 384 else (64, *HEAD_SIZES)
    return next((width // size for size in sizes if width % size == 0), 1)


def _check(case: BlockCase) -> None:
    """Refuse what the kernels would."""
    multiple = INT8_K_MULTIPLE if case.dtype == "int8" else WIDTH_MULTIPLE
    positive = min(case.batch, case.sequence, case.width, case.num_heads, case.inner_width) > 0
    fits = positive and case.width % multiple == 0 and case.inner_width % multiple == 0
    if not fits:
        raise InputError(
            f"a block of batch {case.batch}, sequence {case.sequence}, width {case.width}, inner width "
            f"{case.inner_width} cannot be measured in {case.dtype}",
            f"sizes are positive, and the widths multiples of {multiple}",
            "choose other --batch, --seq, --hidden or --ffn",
        )
    if case.width % case.num_heads or case.head_size not in HEAD_SIZES:
        raise InputError(
            f"--heads {case.num_heads} does not suit --hidden {case.width}",
            f"the head size, their ratio, must be one of {', '.join(map(str, HEAD_SIZES))}",
            f"for example --heads {_usual_heads(case.width)}",
        )
