from __future__ import annotations

import itertools

import numpy as np
import pytest

from trtforge.buckets import bucket_profiles, choose_buckets, fit_work, length_dim
from trtforge.errors import InputError
from trtforge.profile import DimFact, DimReport, Profile, ProfileSet, ShapeRange

SEQ = DimFact("seq", (("x", 1), ("m", 1)), "free")
TOTAL = DimFact("total", (("t", 1),), "derived", terms=(("seq", 2),), offset=3)
BATCH = DimFact("batch", (("x", 0), ("m", 0), ("t", 0)), "free")
REPORT = DimReport((BATCH, SEQ, TOTAL), {})


def span(low: tuple[int, ...], opt: tuple[int, ...], high: tuple[int, ...]) -> ShapeRange:
    return ShapeRange(low, opt, high)


BASE = Profile(
    "default",
    {
        "x": span((1, 10), (8, 20), (8, 50)),
        "m": span((1, 10), (8, 20), (8, 50)),
        "t": span((1, 23), (8, 43), (8, 103)),
    },
)


def square(lengths: np.ndarray) -> np.ndarray:
    return lengths + 0.01 * lengths**2


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_buckets_are_the_best_of_all(count: int) -> None:
    lengths = [int(n) for n in np.random.default_rng(count).integers(1, 25, 40)]
    found = choose_buckets(lengths, count, square)
    distinct = sorted(set(lengths))

    def total(caps: tuple[int, ...]) -> float:
        return sum(float(square(np.array([min(c for c in caps if c >= n)]))[0]) for n in lengths)

    best = min(total((*rest, distinct[-1])) for rest in itertools.combinations(distinct[:-1], count - 1))
    assert total(found.caps) == pytest.approx(best)
    assert found.caps[-1] == max(lengths)
    assert sum(found.samples) == 40
    one = total((distinct[-1],))
    assert found.saved == pytest.approx(1 - best / one)
    assert found.padding_of_one == pytest.approx(1 - sum(float(square(np.array([n]))[0]) for n in lengths) / one)


def test_fewer_lengths_than_buckets_need_no_padding() -> None:
    found = choose_buckets([5, 5, 9], 4, square)
    assert (found.caps, found.samples, found.padding) == ((5, 9), (2, 1), 0.0)
    assert "2 buckets (samples up to 5: 2, up to 9: 1): padding takes 0.0% of the work" in found.describe()


def test_the_last_bucket_reaches_what_the_data_is_padded_to() -> None:
    found = choose_buckets([5, 9], 2, square, largest=16)
    assert found.caps == (9, 16)
    assert found.samples == (2, 0)


def test_many_distinct_lengths_are_rounded_up_and_stay_near_the_best() -> None:
    lengths = list(range(1, 5001))
    found = choose_buckets(lengths, 2, lambda sizes: sizes)
    assert found.caps[0] == pytest.approx(2500, abs=4)
    assert found.caps[1] == 5000
    assert sum(found.samples) == 5000


@pytest.mark.parametrize("count", [0, -1, 33])
def test_a_senseless_count_is_refused(count: int) -> None:
    with pytest.raises(InputError, match=f"--buckets {count} cannot be used"):
        choose_buckets([1], count, square)


def test_work_is_fitted_exactly_where_it_is_a_polynomial() -> None:
    work = fit_work([16, 64, 128], [float(square(np.array([n]))[0]) for n in (16, 64, 128)])
    assert work(np.array([90.0])) == pytest.approx(square(np.array([90.0])))
    assert fit_work([7], [3.0])(np.array([9.0])) == pytest.approx(3.0)
    assert fit_work([1, 2], [0.0, 0.0])(np.array([9.0])) == pytest.approx(9.0)


def test_bucket_profiles_follow_each_other_and_move_what_is_derived() -> None:
    profiles = bucket_profiles(BASE, SEQ, REPORT, 4, (16, 50))
    assert [(p.name, p.inputs["x"], p.inputs["t"]) for p in profiles.profiles] == [
        ("up_to_16", span((1, 4), (8, 16), (8, 16)), span((1, 11), (8, 35), (8, 35))),
        ("up_to_50", span((1, 17), (8, 50), (8, 50)), span((1, 37), (8, 103), (8, 103))),
    ]


def test_what_follows_from_a_derived_dim_is_moved_too() -> None:
    double = DimFact("double", (("d", 0),), "derived", terms=(("total", 2),))
    base = Profile("default", {**BASE.inputs, "d": span((46,), (86,), (206,))})
    (first,) = bucket_profiles(base, SEQ, DimReport((double, BATCH, SEQ, TOTAL), {}), 4, (16,)).profiles
    assert first.inputs["t"] == span((1, 11), (8, 35), (8, 35))
    assert first.inputs["d"] == span((22,), (70,), (70,))


def test_the_length_is_the_one_dim_that_varies() -> None:
    assert length_dim(ProfileSet((BASE,), "data"), REPORT) is SEQ
    two = DimReport((BATCH, SEQ, DimFact("w", (("t", 1),), "free")), {})
    with pytest.raises(InputError, match="in which one dimension varies") as caught:
        length_dim(ProfileSet((BASE,), "data"), two)
    assert caught.value.why == "seq, w vary in it"
    with pytest.raises(InputError, match="in which one dimension varies") as caught:
        length_dim(ProfileSet((BASE,), "data"), DimReport((BATCH,), {}))
    assert caught.value.why == "all samples have one shape"
