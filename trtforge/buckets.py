"""Length buckets: the profiles that waste the least work on padding, for the lengths in the data.

A sample is padded to the largest length of its bucket. Work is a polynomial of degree 2 in the length (products with
weights grow with it, attention with its square), fitted to FLOPs that are counted at three lengths. The buckets are the
exact optimum: dynamic programming over the distinct lengths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from trtforge.errors import InputError
from trtforge.profile import DimFact, DimReport, Profile, ProfileSet, ShapeRange

# Distinct lengths that the search works on; more are rounded up to that many.
_MAX_LENGTHS = 2048
MAX_BUCKETS = 32
Work = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True)
class Bucketing:
    """Buckets and what they save.

    Attributes:
        caps: the largest length of each bucket, ascending.
        samples: in each bucket.
        padding: share of the work that goes into padding, with these buckets.
        padding_of_one: the same with every sample padded to the largest length.
        saved: share of the work that these buckets save against one.
    """

    caps: tuple[int, ...]
    samples: tuple[int, ...]
    padding: float
    padding_of_one: float
    saved: float

    def describe(self) -> str:
        """One line for people."""
        listed = ", ".join(f"up to {cap}: {count}" for cap, count in zip(self.caps, self.samples, strict=True))
        return (
            f"{len(self.caps)} buckets (samples {listed}): padding takes {self.padding:.1%} of the work, with one "
            f"profile {self.padding_of_one:.1%}; {self.saved:.1%} of the work is saved"
        )


def choose_buckets(lengths: Sequence[int], count: int, work: Work, largest: int | None = None) -> Bucketing:
    """The buckets that minimise the work over samples of these lengths; fewer where there are fewer lengths.

    Args:
        lengths: of the samples.
        count: of buckets.
        work: FLOPs of one sample, by length.
        largest: what the last bucket must reach; by default the largest length.

    Raises:
        InputError: no lengths, or a count that is no sensible number.
    """
    if not 1 <= count <= MAX_BUCKETS:
        raise InputError(f"--buckets {count} cannot be used", f"it is 1 to {MAX_BUCKETS}", "give a number in between")
    found, weights = np.unique(np.asarray(lengths, np.int64), return_counts=True)
    if largest is not None and largest > found[-1]:
        found, weights = np.append(found, largest), np.append(weights, 0)
    sizes, counts = _thin_out(found, weights)
    cost = work(sizes.astype(np.float64))
    before = np.concatenate([[0], np.cumsum(counts)]).astype(np.float64)
    num_sizes = len(sizes)
    best = np.full(num_sizes + 1, np.inf)
    best[0] = 0.0
    choices = []
    for _ in range(min(count, num_sizes)):
        # Last bucket holds sizes[start:stop]: all of its samples are padded to sizes[stop - 1].
        totals = best[:-1, None] + cost[None, :] * (before[None, 1:] - before[:-1, None])
        totals[np.tril_indices(num_sizes, -1)] = np.inf
        starts = totals.argmin(axis=0)
        choices.append(starts)
        best = np.concatenate([[np.inf], totals[starts, np.arange(num_sizes)]])
    caps: list[int] = []
    stop = num_sizes
    for starts in reversed(choices):
        if stop == 0:
            break
        caps.append(int(sizes[stop - 1]))
        stop = int(starts[stop - 1])
    caps.reverse()
    return _judge(found, weights, caps, work)


def _thin_out(sizes: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most `_MAX_LENGTHS` lengths: neighbours are counted as the largest of them."""
    step = -(-len(sizes) // _MAX_LENGTHS)
    ends = np.arange(step - 1, len(sizes) + step - 1, step).clip(max=len(sizes) - 1)
    totals = np.cumsum(counts)[ends]
    return sizes[ends], np.diff(totals, prepend=0)


def _judge(sizes: np.ndarray, counts: np.ndarray, caps: Sequence[int], work: Work) -> Bucketing:
    bucket = np.searchsorted(np.asarray(caps), sizes)
    by_size, by_cap = work(sizes.astype(np.float64)), work(np.asarray(caps, np.float64))
    needed = float(counts @ by_size)
    used, used_by_one = float(counts @ by_cap[bucket]), float(counts.sum() * by_cap[-1])
    samples = np.bincount(bucket, weights=counts, minlength=len(caps)).astype(int)
    return Bucketing(
        caps=tuple(caps),
        samples=tuple(int(n) for n in samples),
        padding=1.0 - needed / used if used else 0.0,
        padding_of_one=1.0 - needed / used_by_one if used_by_one else 0.0,
        saved=1.0 - used / used_by_one if used_by_one else 0.0,
    )


def fit_work(sizes: Sequence[int], flops: Sequence[float]) -> Work:
    """The polynomial of lowest degree through up to three (length, FLOPs) pairs; without FLOPs, the length itself."""
    if not any(flops):
        return lambda lengths: lengths
    coefficients = np.polyfit(np.asarray(sizes, np.float64), np.asarray(flops, np.float64), len(set(sizes)) - 1)
    return lambda lengths: np.maximum(np.polyval(coefficients, lengths), 1.0)


def length_dim(profiles: ProfileSet, report: DimReport) -> DimFact:
    """The one dim that varies in the data, the batch and what follows from others left aside.

    Raises:
        InputError: none varies, or several do.
    """
    varying = []
    for fact in report.dims:
        name, axis = fact.axes[0]
        span = profiles.first.inputs[name]
        if axis > 0 and fact.kind != "derived" and span.min[axis] < span.max[axis]:
            varying.append(fact)
    if len(varying) != 1:
        listed = ", ".join(fact.name for fact in varying)
        raise InputError(
            "--buckets needs data in which one dimension varies",
            f"{listed} vary in it" if varying else "all samples have one shape",
            "write the profiles by hand: trtforge profile MODEL prints the file"
            if varying
            else "give a folder with one .npz file per length, or an attention_mask with zeros at padding",
        )
    return varying[0]


def bucket_profiles(base: Profile, dim: DimFact, report: DimReport, smallest: int, caps: Sequence[int]) -> ProfileSet:
    """One profile per bucket: from above the one before up to its own largest length, which is opt as well.

    Args:
        base: gives everything else.
        dim: the length.
        report: what follows from the length.
        smallest: the smallest length.
        caps: the largest length of each bucket.
    """
    low = smallest
    profiles = []
    for cap in caps:
        sizes = {dim.name: (low, cap, cap)}
        profiles.append(with_dims(base, f"up_to_{cap}", sizes, report))
        low = cap + dim.multiple
    return ProfileSet(tuple(profiles), "data")


def with_dims(base: Profile, name: str, sizes: dict[str, tuple[int, int, int]], report: DimReport) -> Profile:
    """A profile with other (min, opt, max) for some dims, by name, and for those that follow from them."""
    known = {fact.name: span_of(base, fact) for fact in report.dims} | sizes
    for fact in report.following(sizes):
        low, opt, high = (fact.total({term: span[i] for term, span in known.items()}) for i in range(3))
        known[fact.name] = (low, opt, high)
    inputs = {}
    for port, span in base.inputs.items():
        axes = [list(part) for part in (span.min, span.opt, span.max)]
        for fact in report.dims:
            for _, axis in (entry for entry in fact.axes if entry[0] == port):
                for part, size in zip(axes, known[fact.name], strict=True):
                    part[axis] = size
        inputs[port] = ShapeRange(*(tuple(part) for part in axes))
    return Profile(name, inputs, base.values)


def span_of(profile: Profile, fact: DimFact) -> tuple[int, int, int]:
    """min, opt and max of a dim."""
    name, axis = fact.axes[0]
    span = profile.inputs[name]
    return span.min[axis], span.opt[axis], span.max[axis]
