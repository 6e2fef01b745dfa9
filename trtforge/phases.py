"""The two phases of a decoder with a cache: prefill reads the prompt with an empty cache, decode adds one token."""

from __future__ import annotations

from collections.abc import Sequence

from trtforge.buckets import span_of, with_dims
from trtforge.errors import InputError
from trtforge.profile import DimFact, DimReport, ProfileSet
from trtforge.tensor import TensorSpec

PREFILL, DECODE = "prefill", "decode"


def phase_dims(specs: Sequence[TensorSpec], report: DimReport) -> tuple[DimFact, DimFact]:
    """The dim that counts new tokens, and the one that counts cached ones.

    Raises:
        InputError: the model has no cache, or no tokens beside it.
    """
    cached = next(iter(report.caches.values()), None)
    tokens = [
        fact
        for spec in specs
        if spec.dtype.startswith("int") and spec.shape is not None and len(spec.shape) == 2
        for fact in report.dims
        if (spec.name, 1) in fact.axes and fact.kind == "free" and fact.name != cached
    ]
    if cached is None or not tokens:
        missing = "input named past, cache or mems with an open length" if cached is None else "integer input [b, s]"
        raise InputError(
            "--prefill-decode is for decoders with a cache",
            f"the model has no {missing}; its inputs are {', '.join(spec.describe() for spec in specs)}",
            "leave the option out",
        )
    return tokens[0], report.dim(cached)


def phase_profiles(profiles: ProfileSet, specs: Sequence[TensorSpec], report: DimReport) -> ProfileSet:
    """Both phases within the ranges of the first profile; a phase's opt is max where the profile's is not of it.

    Raises:
        InputError: see `phase_dims`; or the graph does not take an empty cache.
    """
    tokens, cached = phase_dims(specs, report)
    base = profiles.first
    new, past = span_of(base, tokens), span_of(base, cached)
    prompt = (new[0], new[1] if new[1] > 1 else new[2], new[2])
    cache = (max(1, past[0]), max(1, past[1] or past[2]), max(1, past[2]))
    return ProfileSet(
        (
            with_dims(base, PREFILL, {tokens.name: prompt, cached.name: (0, 0, 0)}, report),
            with_dims(base, DECODE, {tokens.name: (1, 1, 1), cached.name: cache}, report),
        ),
        profiles.source,
    )


def phase_template(specs: Sequence[TensorSpec], report: DimReport) -> str:
    """The `profiles:` section of a template, with the two phases."""
    tokens, cached = phase_dims(specs, report)
    derived = report.following([tokens.name, cached.name])
    extra = "".join(f", {fact.name}: {{min: ?, opt: ?, max: ?}}" for fact in derived)
    sums = "".join(f"; {fact.name} = {fact.formula}" for fact in derived)
    return (
        "profiles:\n"
        f"  - {{name: {PREFILL}, dims: {{{cached.name}: 0{extra}}}}}  # the prompt, with an empty cache{sums}\n"
        f"  - {{name: {DECODE}, dims: {{{tokens.name}: 1{extra}}}}}  # one token at a time\n"
    )
