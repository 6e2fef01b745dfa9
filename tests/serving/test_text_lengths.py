from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trtforge.buckets import choose_buckets
from trtforge.errors import InputError
from trtforge.serving.text.lengths import (
    count_padding,
    default_buckets,
    given_buckets,
    measured_buckets,
    read_lines,
)

ONE_SPAN = [(1, 128)]


def test_padding_is_the_share_of_tokens_that_are_not_real() -> None:
    count = count_padding([3, 8, 9, 40], (8, 16, 32))
    # 40 tokens are cut to 32: 8 + 8 + 16 + 32 are sent, 3 + 8 + 9 + 32 of them are real.
    assert (count.texts, count.real, count.sent, count.too_long) == (4, 52, 64, 1)
    assert count.padding == 12 / 64


@pytest.mark.parametrize("bound", [0.5, 0.25, 0.1, 0.03])
def test_measured_buckets_keep_the_bound_and_none_fewer_would(bound: float) -> None:
    lengths = np.random.default_rng(0).integers(1, 120, 500).tolist()
    found = measured_buckets(lengths, ONE_SPAN, bound, "texts.txt")
    assert found.count is not None
    assert found.count.padding <= bound
    assert found.lengths[-1] == 128
    own_count = sum(next(end for end in found.lengths if length <= end) for length in lengths)
    assert (found.count.real, found.count.sent) == (sum(lengths), own_count)
    rounded = [-(-length // 8) * 8 for length in lengths]
    for number in range(1, len(found.lengths)):
        best = choose_buckets(rounded, number, lambda sizes: sizes, 128).caps
        assert count_padding(lengths, best).padding > bound


def test_the_fewest_buckets_are_found() -> None:
    # Half of the texts have 16 tokens and half 64: two buckets and the profile's end pad nothing, two in all pad
    # (64 - 16) / 128 of what is sent at least.
    found = measured_buckets([16, 64] * 10, ONE_SPAN, 0.1, "texts.txt")
    assert found.lengths == (16, 64, 128)
    assert measured_buckets([16, 64] * 10, ONE_SPAN, 0.38, "texts.txt").lengths == (64, 128)


def test_lengths_are_multiples_of_8_where_these_keep_the_bound() -> None:
    assert measured_buckets([21, 45], ONE_SPAN, 0.2, "texts.txt").lengths == (24, 48, 128)
    assert measured_buckets([21, 45], ONE_SPAN, 0.01, "texts.txt").lengths == (21, 45, 128)


def test_a_bound_that_cannot_be_kept_names_the_least() -> None:
    # No profile takes fewer than 64 tokens, so 48 of 64 are padding.
    with pytest.raises(InputError, match="cannot be kept") as caught:
        measured_buckets([16] * 5, [(64, 128)], 0.25, "texts.txt")
    assert "0.750" in caught.value.why
    assert caught.value.fix.startswith("give 0.750 or more")


@pytest.mark.parametrize("bound", [0.0, 1.0, -0.1, float("nan")])
def test_a_bound_that_is_no_share_is_refused(bound: float) -> None:
    with pytest.raises(InputError, match="it is a share between 0 and 1"):
        measured_buckets([16], ONE_SPAN, bound, "texts.txt")


def test_lengths_between_two_profiles_go_to_the_next_one() -> None:
    found = measured_buckets([20] * 4, [(1, 16), (32, 64)], 0.5, "texts.txt")
    assert found.lengths == (32, 64)


def test_without_texts_buckets_are_powers_of_two() -> None:
    assert default_buckets([(1, 128)]).lengths == (16, 32, 64, 128)
    assert default_buckets([(1, 100)]).lengths == (16, 32, 64, 100)
    assert default_buckets([(40, 100)]).lengths == (64, 100)
    assert default_buckets([(8, 8)]).lengths == (8,)


def test_profiles_that_end_at_different_lengths_are_the_buckets() -> None:
    found = default_buckets([(1, 24), (25, 60), (61, 512)])
    assert found.lengths == (24, 60, 512)
    assert found.describe() == "length buckets 24, 60, 512 (where the profiles end)"


def test_given_lengths_are_sorted_and_checked() -> None:
    assert given_buckets([64, 16, 64], ONE_SPAN).lengths == (16, 64)
    with pytest.raises(InputError, match="--buckets 256 cannot be had") as caught:
        given_buckets([64, 256], ONE_SPAN)
    assert "1 to 128" in caught.value.why
    with pytest.raises(InputError, match="--buckets has 33 lengths"):
        given_buckets(range(1, 34), ONE_SPAN)


def test_the_description_gives_real_and_sent_tokens() -> None:
    found = measured_buckets([16, 64] * 10, ONE_SPAN, 0.1, "texts.txt")
    assert found.describe() == (
        "length buckets 16, 64, 128 (fewest with at most 10.0% padding on texts.txt): "
        "800 real of 800 tokens sent for 20 texts, padding 0.0%"
    )


def test_empty_lines_are_no_texts(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("one\n\n  \ntwo three\n")
    assert read_lines(tmp_path / "texts.txt") == ["one", "two three"]
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(InputError, match="it holds no text"):
        read_lines(tmp_path / "empty.txt")


def test_a_line_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("one\n" + "a" * (2**20 + 1))
    with pytest.raises(InputError, match="text 1 has 1048577 characters; the limit is 1048576"):
        read_lines(tmp_path / "texts.txt")
