from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest

from trtforge.quantization.regions import Region
from trtforge.quantization.search import MAX_CONFIRMATIONS, MAX_REFINEMENTS, Evaluate, Kept, search


def regions_of(*flops: int) -> list[Region]:
    return [Region(f"r{index}", (f"r{index}",), count) for index, count in enumerate(flops)]


class Additive:
    """A model whose loss is the sum of its quantized regions' losses, times a factor, on top of the float type's."""

    def __init__(self, losses: dict[str, float], factor: float = 1.0, floor: float = 0.0) -> None:
        self.losses, self.factor, self.floor = losses, factor, floor
        self.calls: list[Kept] = []

    def __call__(self, kept: Kept) -> float:
        self.calls.append(kept)
        return self.floor + self.factor * math.fsum(loss for name, loss in self.losses.items() if name not in kept)


def cheapest(regions: list[Region], evaluate: Callable[[Kept], float], allowed: float) -> int:
    """FLOPs of the cheapest set that meets the budget, by trying all of them."""
    sets = (c for n in range(len(regions) + 1) for c in itertools.combinations(regions, n))
    return min(sum(r.flops for r in c) for c in sets if evaluate(frozenset(r.name for r in c)) <= allowed)


def test_nothing_is_kept_where_int8_alone_meets_the_budget() -> None:
    model = Additive({"r0": 0.001, "r1": 0.002})
    outcome = search(regions_of(1, 1), model.losses, model, 0.003)
    assert (outcome.kept, outcome.met) == (frozenset(), True)
    assert model.calls == [frozenset()]


def test_one_bad_region_is_kept_alone() -> None:
    losses = {f"r{index}": 1e-5 for index in range(20)} | {"r13": 0.05}
    model = Additive(losses)
    outcome = search(regions_of(*[100] * 20), losses, model, 0.001)
    assert (outcome.kept, outcome.met) == (frozenset({"r13"}), True)
    assert len(model.calls) <= 3


def test_of_equal_losses_the_one_with_fewer_flops_is_kept() -> None:
    losses = {"r0": 0.01, "r1": 0.01}
    outcome = search(regions_of(500, 100), losses, Additive(losses), 0.012)
    assert outcome.kept == {"r1"}


@pytest.mark.parametrize("seed", range(12))
def test_the_set_is_close_to_the_cheapest_one(seed: int) -> None:
    random = np.random.default_rng(seed)
    regions = regions_of(*(int(n) for n in random.integers(50, 500, size=9)))
    losses = {region.name: float(value) for region, value in zip(regions, random.exponential(size=9), strict=True)}
    model = Additive(losses, factor=0.6)
    allowed = 0.2 * math.fsum(losses.values())
    outcome = search(regions, losses, model, allowed)
    cost = sum(region.flops for region in regions if region.name in outcome.kept)
    assert outcome.met and model(outcome.kept) <= allowed
    assert cost <= cheapest(regions, model, allowed) + max(region.flops for region in regions)


def test_no_kept_region_can_be_lowered_again() -> None:
    # By loss per FLOP r0 comes first, yet with r1 in float it is not needed.
    losses = {"r0": 0.1, "r1": 0.5}
    outcome = search(regions_of(10, 100), losses, Additive(losses), 0.2)
    assert (outcome.kept, outcome.met) == (frozenset({"r1"}), True)


def test_predictions_follow_what_was_measured() -> None:
    losses = {f"r{index}": 0.01 * (index + 1) for index in range(8)}
    outcome = search(regions_of(*[10] * 8), losses, Additive(losses, factor=0.25), 0.04)
    first, *later = outcome.trials
    assert first.predicted == pytest.approx(4 * first.measured)
    assert [trial.predicted for trial in later] == pytest.approx([trial.measured for trial in later])


def test_the_number_of_evaluations_is_bounded() -> None:
    random = np.random.default_rng(3)
    regions = regions_of(*(int(n) for n in random.integers(1, 1000, size=300)))
    losses = {region.name: float(value) for region, value in zip(regions, random.exponential(size=300), strict=True)}
    # The measured loss disagrees with the regions' own losses.
    model = Additive({name: loss * random.uniform(0.2, 5.0) for name, loss in losses.items()})
    outcome = search(regions, losses, model, 20.0)
    assert outcome.met
    assert len(model.calls) <= 1 + 2 * math.ceil(math.log2(300)) + MAX_REFINEMENTS


def test_an_unreachable_budget_gives_the_best_set_tried() -> None:
    losses = {"r0": 0.03, "r1": 0.02, "r2": 0.01}
    outcome = search(regions_of(1, 1, 1), losses, Additive(losses, floor=0.004), 0.003)
    assert not outcome.met
    assert outcome.kept == {"r0", "r1", "r2"}
    assert not any(trial.met for trial in outcome.trials)


def test_without_regions_the_empty_set_is_judged() -> None:
    assert search((), {}, Additive({}), 0.0).met
    outcome = search((), {}, Additive({}, floor=1.0), 0.5)
    assert (outcome.kept, outcome.met) == (frozenset(), False)


def test_a_set_that_is_not_finite_misses_the_budget() -> None:
    losses = {"r0": 2.0, "r1": 0.001}

    def evaluate(kept: Kept) -> float:
        return 0.001 if "r0" in kept else math.inf

    outcome = search(regions_of(1, 1), losses, evaluate, 0.01)
    assert (outcome.kept, outcome.met) == (frozenset({"r0"}), True)


def confirmation(model: Additive, factor: float) -> Evaluate:
    return Additive(model.losses, model.factor * factor)


@pytest.mark.parametrize("factor", [1.5, 2.0])
def test_samples_that_lose_more_make_it_keep_more(factor: float) -> None:
    losses = {f"r{index}": 0.001 * (index + 1) for index in range(10)}
    model = Additive(losses)
    alone = search(regions_of(*[10] * 10), losses, model, 0.02)
    confirm = confirmation(model, factor)
    outcome = search(regions_of(*[10] * 10), losses, model, 0.02, confirm, 0.02)
    assert outcome.met and outcome.kept > alone.kept
    assert confirm(outcome.kept) <= 0.02
    assert sum(trial.data == "confirmed" for trial in outcome.trials) == 2


def test_confirmation_decides_although_the_first_samples_see_no_loss() -> None:
    losses = {"r0": 0.02, "r1": 0.01, "r2": 0.005}
    outcome = search(regions_of(1, 1, 1), losses, lambda kept: 0.0, 0.01, Additive(losses), 0.016)
    assert outcome.met and outcome.kept == {"r0"}


def test_the_search_gives_up_after_some_confirmations() -> None:
    losses = {f"r{index}": 0.01 for index in range(9)}
    outcome = search(regions_of(*[1] * 9), losses, lambda kept: 0.0, 0.01, Additive(losses, floor=1.0), 0.01)
    assert not outcome.met
    confirmed = [trial for trial in outcome.trials if trial.data == "confirmed"]
    assert len(confirmed) == MAX_CONFIRMATIONS
    assert outcome.kept == min(confirmed, key=lambda trial: trial.measured).kept


def test_a_region_stays_float_with_one_that_it_needs() -> None:
    # r2 needs r1, which spoils the outputs.
    losses = {"r0": 0.001, "r1": 0.1, "r2": 0.002, "r3": 0.001}
    needs = {"r2": frozenset({"r1"}), "r3": frozenset({"r2"})}
    model = Additive(losses)
    outcome = search(regions_of(10, 10, 10, 10), losses, model, 0.05, needs=needs)
    assert outcome.met and outcome.kept == {"r1", "r2", "r3"}
    assert all({"r2", "r3"} <= kept for kept in model.calls if "r1" in kept)


def test_a_region_that_needs_another_can_stay_float_alone() -> None:
    losses = {"r0": 0.001, "r1": 0.001, "r2": 0.1}
    outcome = search(regions_of(10, 10, 0), losses, Additive(losses), 0.05, needs={"r2": frozenset({"r1"})})
    assert outcome.kept == {"r2"}
