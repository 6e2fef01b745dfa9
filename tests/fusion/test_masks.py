"""What a mask is said to mean, against what it hides; a mask that is not proved is a bias of its own."""

from __future__ import annotations

import numpy as np
import pytest
from region_models import INPUTS, MASK, POST, changed, model_of
from region_reference import Prepare, check_block, feeds_of

from trtforge.fusion.match import match_regions
from trtforge.fusion.regions import KeyPadding

LENGTH = 6
LOWER = np.tril(np.ones((LENGTH, LENGTH), bool))
TRIANGLE = np.where(LOWER, 0, -1e9).astype(np.float32)[None, None]
COUNT = "size = Shape<start=1, end=2>(mask) count = Squeeze(size, a0) "
RANGES = COUNT + """rows = Range(i0, count, i1) r1_ = Unsqueeze(rows, a1) k1_ = Unsqueeze(rows, a0) """
LATE = (
    COUNT
    + """rows = Range(i0, count, i1) more = Add(count, i1) late = Range(i1, more, i1)
    r1_ = Unsqueeze(late, a1) k1_ = Unsqueeze(rows, a0) """
)
SQUARE = COUNT + "square = Concat<axis=0>(size, size) ones = Expand(one, square) lows = Expand(low, square) "
CHOICE = " bias = Where(seen, zero, low) "
PADDED = "m1 = Unsqueeze(mask, axes12) pad = Cast<to=9>(m1) "
# Each case: what makes `bias`, whether it is causal, whether it is key padding, whether that is all of it.
CASES = {
    "padding": (MASK, False, True, True),
    "padding by a comparison": (
        "b2 = Equal(mask, n0) b3 = Not(b2) seen = Unsqueeze(b3, axes12)" + CHOICE,
        False,
        True,
        True,
    ),
    "nothing hidden": ("seen = Expand(true, shape)" + CHOICE, False, False, True),
    "constant triangle": ("bias = Identity(triangle) ", True, False, True),
    "compared positions": (RANGES + "seen = LessOrEqual(k1_, r1_)" + CHOICE, True, False, True),
    "positions that are not negative": (
        RANGES + "all_ = GreaterOrEqual(r1_, n0) tri = LessOrEqual(k1_, r1_) seen = And(all_, tri)" + CHOICE,
        True,
        False,
        True,
    ),
    "positive positions": (
        RANGES + "all_ = Greater(r1_, n0) tri = LessOrEqual(k1_, r1_) seen = And(all_, tri)" + CHOICE,
        False,
        False,
        False,
    ),
    "compared constants": (
        "k1_ = Unsqueeze(six, a0) r1_ = Unsqueeze(six, a1) seen = LessOrEqual(k1_, r1_)" + CHOICE,
        True,
        False,
        True,
    ),
    "compared the other way": (RANGES + "seen = GreaterOrEqual(r1_, k1_)" + CHOICE, True, False, True),
    "triangle of ones": (
        SQUARE + "t = Trilu<upper=0>(ones) z = Equal(t, zero) bias = Where(z, low, zero) ",
        True,
        False,
        True,
    ),
    "triangle of low numbers": (SQUARE + "bias = Trilu<upper=1>(lows, above) ", True, False, True),
    "triangle with its diagonal": (SQUARE + "bias = Trilu<upper=1>(lows) ", False, False, False),
    "upper triangle of ones": (SQUARE + "t = Trilu<upper=1>(ones) seen = Cast<to=9>(t)" + CHOICE, False, False, False),
    "causal and padding": (
        PADDED + RANGES + "tri = LessOrEqual(k1_, r1_) seen = And(pad, tri)" + CHOICE,
        True,
        True,
        True,
    ),
    "causal plus padding": (MASK.replace("bias =", "b1 =") + "bias = Add(b1, triangle) ", True, True, True),
    "strictly earlier keys": (RANGES + "seen = Less(k1_, r1_)" + CHOICE, False, False, False),
    "later keys": (RANGES + "seen = LessOrEqual(r1_, k1_)" + CHOICE, False, False, False),
    "positions from 1": (LATE + "seen = LessOrEqual(k1_, r1_)" + CHOICE, False, False, False),
    "padded queries": ("m1 = Unsqueeze(mask, axes13) seen = Cast<to=9>(m1)" + CHOICE, False, False, False),
    "a bias of its own": ("bias = Identity(relative) ", False, False, False),
    "triangle of one row": (
        COUNT + "row = Concat<axis=0>(i1_, size) ones = Expand(one, row) t = Trilu<upper=0>(ones) z = Equal(t, zero) "
        "bias = Where(z, low, zero) ",
        False,
        False,
        False,
    ),
    "flags of bools with a factor": (
        "f = Cast<to=9>(mask) g = Not(f) m1 = Unsqueeze(g, axes12) m2 = Cast<to=1>(m1) bias = Mul(m2, low) ",
        False,
        True,
        True,
    ),
    "fractions cut to integers": (
        "m0 = Cast<to=1>(mask) f = Mul(m0, half) m1 = Unsqueeze(f, axes12) m2 = Cast<to=7>(m1) m3 = Cast<to=9>(m2) "
        "bias = Where(m3, low, zero) ",
        False,
        False,
        False,
    ),
    "a bias cut to bools": (
        MASK.replace("bias =", "b1 =") + "b2 = Cast<to=9>(b1) bias = Cast<to=1>(b2) ",
        False,
        False,
        False,
    ),
    "a mild bias": (MASK.replace("low", "mild"), False, False, False),
    "padding or causal": (
        PADDED + RANGES + "tri = LessOrEqual(k1_, r1_) seen = Or(pad, tri)" + CHOICE,
        False,
        False,
        False,
    ),
}
CONSTANTS = {
    "triangle": TRIANGLE,
    "relative": np.random.default_rng(0).normal(size=(1, 2, LENGTH, LENGTH)).astype(np.float32),
    "true": np.array([True]),
    "shape": np.array([1, 1, LENGTH, LENGTH]),
    "above": np.array(1),
    "mild": np.array(-1.0, np.float32),
    "n0": np.array(0),
    "six": np.arange(6),
    "i0": np.array(0),
    "i1": np.array(1),
    "i1_": np.array([1]),
    "a0": np.array([0]),
    "a1": np.array([1]),
    "axes13": np.array([1, 3]),
}
FIXED = f"float[batch, {LENGTH}, 16] x, int64[batch, {LENGTH}] mask"


@pytest.mark.parametrize(
    ("spelling", "padding"),
    [
        ("f = Greater(mask, n0) seen = Unsqueeze(f, axes12)" + CHOICE, KeyPadding("mask", True)),
        ("f = Greater(mask, n0) g = Unsqueeze(f, axes12) bias = Where(g, low, zero) ", KeyPadding("f", False)),
        ("f = Unsqueeze(mask, axes12) g = Greater(f, n0) bias = Where(g, low, zero) ", None),
    ],
)
def test_a_negative_number_is_never_taken_for_padding(
    spelling: str, padding: KeyPadding | None, prepare: Prepare
) -> None:
    graph = prepare(model_of(changed(POST, (MASK, spelling)), **CONSTANTS))
    (block,) = match_regions(graph).blocks()
    assert (block.attention.mask.key_padding, block.attention.mask.is_explained) == (padding, padding is not None)


UNPROVED = {
    "triangle of minus ones": SQUARE
    + "ones_ = Expand(mild, square) t = Trilu<upper=0>(ones_) seen = Greater(t, zero)"
    + CHOICE,
    "flags of integers with a factor": MASK.replace("m3 = Sub(one, m2) bias = Mul(m3, low)", "bias = Mul(m2, low)"),
}


@pytest.mark.parametrize("name", UNPROVED)
def test_a_mask_of_numbers_that_may_have_either_sign_is_a_bias(name: str, prepare: Prepare) -> None:
    graph = prepare(model_of(changed(POST, (MASK, UNPROVED[name])), INPUTS, **CONSTANTS))
    (block,) = match_regions(graph).blocks()
    mask = block.attention.mask
    assert (mask.is_explained, mask.is_causal, mask.key_padding) == (False, False, None)


HEADS = "float[2, 6, 16] x, int64[2, 6] mask, float[1, 1, 6, 6] own"


def test_a_mask_for_each_head_is_no_padding(prepare: Prepare) -> None:
    per_head = MASK.replace("axes12", "i1_").replace("bias =", "b1 =") + "bias = Add(b1, own) "
    graph = prepare(model_of(changed(POST, (MASK, per_head)), HEADS, **CONSTANTS))
    (block,) = match_regions(graph).blocks()
    assert block.attention.mask.key_padding is None


def test_a_triangle_along_other_axes_is_not_causal(prepare: Prepare) -> None:
    spelling = RANGES + "tri = LessOrEqual(k1_, r1_) seen = Unsqueeze(tri, axes23)" + CHOICE
    graph = prepare(model_of(changed(POST, (MASK, spelling)), INPUTS, **CONSTANTS, axes23=np.array([2, 3])))
    (block,) = match_regions(graph).blocks()
    assert not block.attention.mask.is_causal
    check_block(graph, block, feeds_of(graph, batch=2, seq=2))


@pytest.mark.parametrize("name", CASES)
def test_mask_means(name: str, prepare: Prepare) -> None:
    spelling, is_causal, is_padding, is_explained = CASES[name]
    # With a fixed length, positions are folded to constants.
    inputs = INPUTS if COUNT in spelling else FIXED
    graph = prepare(model_of(changed(POST, (MASK, spelling)), inputs, **CONSTANTS))
    (block,) = match_regions(graph).blocks()
    mask = block.attention.mask
    assert mask.is_explained == is_explained
    assert len(mask.terms) == 1
    if is_explained:
        assert (mask.is_causal, mask.key_padding is not None) == (is_causal, is_padding)
    check_block(graph, block, feeds_of(graph))
