"""Which lengths texts are padded to: as few length buckets as keep padding under a bound, or what the profiles say.

Padding is the share of the tokens sent to a model that are no real ones: 1 - sum(length) / sum(length of its bucket).
Each bucket is a model of its own, with its own memory, so fewer are better.

    1. lengths that are given are taken
    2. with texts: the fewest buckets whose padding, counted on these texts, is at most the bound
    3. with several profiles that end at different lengths: those lengths, which the engine is tuned for
    4. else powers of two up to the profile's maximum: a text longer than half the first is padded by less than half
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trtforge.buckets import MAX_BUCKETS, choose_buckets
from trtforge.errors import InputError
from trtforge.limits import DEFAULT_LIMITS, Limits
from trtforge.textfile import read_text

DEFAULT_MAX_PADDING = 0.25
# The first power of two; shorter texts are cheap, and each bucket is one more model.
_SMALLEST_POWER = 16
# Products of a matrix run best where its sizes are multiples of this; other lengths are tried where these do not do.
_STEP = 8
# Of one text; the front takes as many bytes.
_MAX_CHARS = 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class PaddingCount:
    """What lengths cost on given texts.

    Attributes:
        texts: their number.
        real: tokens of the texts.
        sent: tokens with padding.
        too_long: texts longer than the last bucket; they count with its length.
    """

    texts: int
    real: int
    sent: int
    too_long: int

    @property
    def padding(self) -> float:
        """Share of what is sent."""
        return 1.0 - self.real / self.sent if self.sent else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class LengthBuckets:
    """The lengths that texts are padded to.

    Attributes:
        lengths: ascending; the last is the most tokens that a text may have.
        reason: where they come from.
        count: what they cost on the given texts; None without texts.
    """

    lengths: tuple[int, ...]
    reason: str
    count: PaddingCount | None = None

    def describe(self) -> str:
        """One line for people."""
        listed = f"length buckets {', '.join(map(str, self.lengths))} ({self.reason})"
        if self.count is None:
            return listed
        found = self.count
        long = f"; {found.too_long} of the texts are longer than the last" if found.too_long else ""
        return (
            f"{listed}: {found.real} real of {found.sent} tokens sent for {found.texts} texts, "
            f"padding {found.padding:.1%}{long}"
        )


def given_buckets(lengths: Sequence[int], spans: Sequence[tuple[int, int]]) -> LengthBuckets:
    """Case 1.

    Args:
        lengths: that the user gives.
        spans: smallest and largest length of each profile.

    Raises:
        InputError: a length that no profile takes.
    """
    for length in lengths:
        if not any(low <= length <= high for low, high in spans):
            taken = ", ".join(f"{low} to {high}" for low, high in spans)
            raise InputError(
                f"--buckets {length} cannot be had",
                f"the artifact's profiles take lengths of {taken}",
                "give lengths in that range, or build with other profiles",
            )
    if len(lengths) > MAX_BUCKETS:
        raise InputError(
            f"--buckets has {len(lengths)} lengths", f"at most {MAX_BUCKETS} can be served", "give fewer lengths"
        )
    return LengthBuckets(tuple(sorted(set(lengths))), "as given")


def measured_buckets(
    found: Sequence[int], spans: Sequence[tuple[int, int]], max_padding: float, source: str
) -> LengthBuckets:
    """Case 2.

    Args:
        found: tokens of each text.
        spans: smallest and largest length of each profile.
        max_padding: share of what is sent.
        source: of the texts, for people.

    Raises:
        InputError: no number of buckets keeps the bound.
    """
    if not 0 < max_padding < 1:
        raise InputError(
            f"--max-padding {max_padding} cannot be used", "it is a share between 0 and 1", "for example 0.25"
        )
    low, high = min(span[0] for span in spans), max(span[1] for span in spans)
    least = 1.0
    for step in (_STEP, 1):
        rounded = [_into_a_span(min(-(-length // step) * step, high), spans) for length in found]
        lengths, count = _fewest_buckets(found, rounded, high, max_padding)
        if count.padding <= max_padding:
            return LengthBuckets(lengths, f"fewest with at most {max_padding:.1%} padding on {source}", count)
        least = min(least, count.padding)
    raise InputError(
        f"--max-padding {max_padding} cannot be kept",
        f"the least that {MAX_BUCKETS} buckets from {low} to {high} tokens give on {source} is {least:.3f}",
        f"give {np.ceil(least * 1000) / 1000:.3f} or more, or build with a profile that starts at a shorter length",
    )


def _fewest_buckets(
    found: Sequence[int], rounded: Sequence[int], high: int, max_padding: float
) -> tuple[tuple[int, ...], PaddingCount]:
    """The fewest buckets at rounded lengths that keep the bound, and their cost; the most there may be if none do."""

    @functools.cache
    def count_with(number: int) -> tuple[tuple[int, ...], PaddingCount]:
        lengths = choose_buckets(rounded, number, lambda sizes: sizes, high).caps
        return lengths, count_padding(found, lengths)

    # One more bucket never pads more, so not every number is tried; few cost the least to try.
    most = 1
    while most < MAX_BUCKETS and count_with(most)[1].padding > max_padding:
        most = min(2 * most, MAX_BUCKETS)
    numbers = range(most // 2 + 1, most)
    failed = bisect.bisect_left(numbers, -max_padding, key=lambda number: -count_with(number)[1].padding)
    return count_with(numbers.start + failed)


def default_buckets(spans: Sequence[tuple[int, int]]) -> LengthBuckets:
    """Cases 3 and 4."""
    ends = sorted({high for _, high in spans})
    if len(ends) > 1:
        return LengthBuckets(tuple(ends[-MAX_BUCKETS:]), "where the profiles end")
    low, high = min(span[0] for span in spans), ends[0]
    powers = [2**power for power in range(31) if max(low, _SMALLEST_POWER) <= 2**power < high]
    return LengthBuckets((*powers, high), "powers of two" if powers else "the profile's only length")


def count_padding(found: Sequence[int], lengths: Sequence[int]) -> PaddingCount:
    """What lengths cost on texts of `found` tokens."""
    sizes = np.asarray(found, np.int64)
    kept = np.minimum(sizes, lengths[-1])
    sent = np.asarray(lengths)[np.searchsorted(lengths, kept)]
    return PaddingCount(len(sizes), int(kept.sum()), int(sent.sum()), int((sizes > lengths[-1]).sum()))


def read_lines(path: Path, limits: Limits = DEFAULT_LIMITS) -> list[str]:
    """The texts of a file, one a line; empty lines are none.

    Raises:
        InputError: it cannot be read, or holds no text.
    """
    # Only line feeds end a line: a text may hold the other characters that Python would split at.
    texts = [line for line in read_text(path, "texts", limits).split("\n") if line.strip()]
    if not texts:
        raise InputError(f"texts {path} cannot be used", "it holds no text", "give a file with one text a line")
    long = next((place for place, line in enumerate(texts) if len(line) > _MAX_CHARS), None)
    if long is not None:
        raise InputError(
            f"texts {path} cannot be used",
            f"text {long} has {len(texts[long])} characters; the limit is {_MAX_CHARS}",
            "give a file with one text a line",
        )
    return texts


def _into_a_span(length: int, spans: Sequence[tuple[int, int]]) -> int:
    """The length itself where a profile takes it, else the next longer one that a profile takes."""
    if any(low <= length <= high for low, high in spans):
        return length
    return min(low for low, _ in spans if low > length)
