from __future__ import annotations

import pytest

from trtforge.errors import InputError
from trtforge.phases import phase_profiles, phase_template
from trtforge.profile import DimFact, DimReport, Profile, ProfileSet, ShapeRange
from trtforge.tensor import TensorSpec

SPECS = (
    TensorSpec("ids", "int64", ("batch", "seq")),
    TensorSpec("past_key", "float32", ("batch", 2, "past", 4)),
    TensorSpec("mask", "int64", ("batch", "total")),
)
BATCH = DimFact("batch", (("ids", 0), ("past_key", 0), ("mask", 0)), "free")
SEQ = DimFact("seq", (("ids", 1),), "free")
PAST = DimFact("past", (("past_key", 2),), "free")
TOTAL = DimFact("total", (("mask", 1),), "derived", terms=(("seq", 1), ("past", 1)))
REPORT = DimReport((BATCH, SEQ, PAST, TOTAL), {}, {"past_key": "past"})


def test_prefill_has_an_empty_cache_and_decode_one_token() -> None:
    base = Profile(
        "default",
        {
            "ids": ShapeRange((1, 1), (1, 1), (1, 128)),
            "past_key": ShapeRange((1, 2, 0, 4), (1, 2, 40, 4), (1, 2, 256, 4)),
            "mask": ShapeRange((1, 1), (1, 41), (1, 384)),
        },
    )
    prefill, decode = phase_profiles(ProfileSet((base,), "data"), SPECS, REPORT).profiles
    assert (prefill.name, decode.name) == ("prefill", "decode")
    assert prefill.inputs == {
        "ids": ShapeRange((1, 1), (1, 128), (1, 128)),
        "past_key": ShapeRange((1, 2, 0, 4), (1, 2, 0, 4), (1, 2, 0, 4)),
        "mask": ShapeRange((1, 1), (1, 128), (1, 128)),
    }
    assert decode.inputs == {
        "ids": ShapeRange((1, 1), (1, 1), (1, 1)),
        "past_key": ShapeRange((1, 2, 1, 4), (1, 2, 40, 4), (1, 2, 256, 4)),
        "mask": ShapeRange((1, 2), (1, 41), (1, 257)),
    }


def test_data_with_an_empty_cache_only_still_give_decode_a_token_to_read() -> None:
    base = Profile(
        "default",
        {
            "ids": ShapeRange((1, 1), (1, 8), (1, 16)),
            "past_key": ShapeRange((1, 2, 0, 4), (1, 2, 0, 4), (1, 2, 0, 4)),
            "mask": ShapeRange((1, 1), (1, 8), (1, 16)),
        },
    )
    _, decode = phase_profiles(ProfileSet((base,), "data"), SPECS, REPORT).profiles
    assert decode.inputs["past_key"] == ShapeRange((1, 2, 1, 4), (1, 2, 1, 4), (1, 2, 1, 4))


def test_the_template_says_what_follows() -> None:
    assert phase_template(SPECS, REPORT) == (
        "profiles:\n"
        "  - {name: prefill, dims: {past: 0, total: {min: ?, opt: ?, max: ?}}}  "
        "# the prompt, with an empty cache; total = seq + past\n"
        "  - {name: decode, dims: {seq: 1, total: {min: ?, opt: ?, max: ?}}}  # one token at a time\n"
    )


def test_the_template_asks_for_what_follows_from_a_sum_too() -> None:
    square = DimFact("square", (("bias", 0),), "derived", terms=(("total", 2),))
    text = phase_template(SPECS, DimReport((square, BATCH, SEQ, PAST, TOTAL), {}, {"past_key": "past"}))
    assert text.count("square: {min: ?, opt: ?, max: ?}") == 2
    assert "; total = seq + past; square = 2*total\n" in text


def test_a_model_without_a_cache_or_tokens_has_no_phases() -> None:
    with pytest.raises(InputError, match="--prefill-decode is for decoders") as caught:
        phase_template(SPECS[:1], DimReport((BATCH, SEQ), {}))
    assert "no input named past" in caught.value.why
    with pytest.raises(InputError, match="--prefill-decode is for decoders") as caught:
        phase_template(SPECS[1:2], DimReport((PAST,), {}, {"past_key": "past"}))
    assert "no integer input [b, s]" in caught.value.why
