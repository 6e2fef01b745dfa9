"""Comparison with a baseline. Runs are drawn from distributions with a known spread, so the truth is known."""

import math

import numpy as np
import pytest
from run_cases import make_run

from trtforge.errors import InputError
from trtforge.load_testing import LoadTestResult
from trtforge.loadtest.compare import DEFAULT_BANDS, Change, Comparison, check_comparable, compare_runs
from trtforge.loadtest.noise import band, log_spread, rate_band, symmetric_band
from trtforge.loadtest.results import Run


def find(comparison: Comparison, step: str, metric: str, cell: str | None = None) -> Change:
    (change,) = (c for c in comparison.changes if (c.step, c.metric, c.cell) == (step, metric, cell))
    return change


def test_equal_servers_show_no_regression() -> None:
    comparison = compare_runs(make_run(repeats=3, seed=2), make_run(repeats=3, seed=1), "base.json")
    assert comparison.noise == "repeats"
    assert comparison.passed
    assert {change.metric for change in comparison.changes} == {"throughput", "p50", "p95", "p99", "error rate"}
    assert len([change for change in comparison.changes if change.metric == "p95"]) == 3 * (1 + 3)


def test_slower_server_is_a_regression_by_its_factor() -> None:
    slow = make_run(repeats=3, seed=2, slowdown=1.3)
    comparison = compare_runs(slow, make_run(repeats=3, seed=1), "base.json")
    change = find(comparison, "4 users, batch 1", "p50")
    # Each run's own factor has a spread of 2 %: the difference of two means of three lies within 4 sigma.
    assert change.change == pytest.approx(0.3, abs=1.3 * 4 * 0.02 * math.sqrt(2 / 3))
    assert change.is_regression
    assert find(comparison, "4 users, batch 1", "throughput").is_regression
    assert not comparison.passed
    faster = compare_runs(make_run(repeats=3, seed=1), slow, "base.json")
    assert faster.passed
    assert find(faster, "4 users, batch 1", "p50").is_improvement


def test_regression_is_a_problem_of_the_load_test() -> None:
    before, slow = make_run(repeats=3, seed=1), make_run(repeats=3, seed=2, slowdown=1.3)
    problems = LoadTestResult(slow, compare_runs(slow, before, "base.json")).problems
    assert "worse than the baseline: 4 users, batch 1: p50" in problems
    assert "worse than the baseline: 4 users, batch 1: 8-32, batch 1: p50" in problems
    assert LoadTestResult(before, compare_runs(before, before, "base.json")).problems == ()


def test_change_inside_a_wide_spread_is_noise() -> None:
    noisy = [make_run(repeats=3, seed=seed, spread=0.3, slowdown=slow) for seed, slow in ((1, 1.0), (2, 1.2))]
    assert compare_runs(noisy[1], noisy[0], "base.json").passed


def test_band_of_too_few_repeats_is_the_stated_default() -> None:
    comparison = compare_runs(make_run(repeats=2, slowdown=1.3), make_run(repeats=3), "base.json")
    assert comparison.noise == "default"
    change = find(comparison, "1 user, batch 1", "p50")
    assert change.noise == symmetric_band(DEFAULT_BANDS["p50"])
    assert change.is_regression


def test_errors_are_a_regression_beyond_what_counting_explains() -> None:
    before = make_run(repeats=3)
    few = compare_runs(make_run(repeats=3, error_share=0.0005), before, "base.json")
    assert not find(few, "1 user, batch 1", "error rate").is_regression
    many = compare_runs(make_run(repeats=3, error_share=0.05), before, "base.json")
    change = find(many, "1 user, batch 1", "error rate")
    assert change.change == pytest.approx(0.05, abs=0.005)
    assert change.is_regression


def test_percentile_with_too_few_samples_is_named_and_not_compared() -> None:
    short = make_run(users=(1,), repeats=3, seconds=4)
    comparison = compare_runs(short, short, "base.json")
    assert "1 user, batch 1: p99: too few samples" in comparison.not_compared
    assert not any(change.metric == "p99" for change in comparison.changes)


def test_steps_that_were_not_measured_again_are_named() -> None:
    comparison = compare_runs(make_run(users=(1,)), make_run(users=(1, 4)), "base.json")
    assert comparison.not_compared[0] == "4 users, batch 1: not in this run"
    assert {change.step for change in comparison.changes} == {"1 user, batch 1"}


def test_no_common_step_is_refused_with_both_lists() -> None:
    with pytest.raises(InputError, match="has no step of this run") as caught:
        compare_runs(make_run(users=(2,)), make_run(users=(1,)), "base.json")
    assert "1 user, batch 1" in caught.value.why
    assert "2 users, batch 1" in caught.value.why


def other(run: Run, part: str, **changes: object) -> Run:
    return run.model_copy(update={part: getattr(run, part).model_copy(update=changes)})


def test_runs_under_other_conditions_are_refused_with_the_difference() -> None:
    run = make_run(users=(1,))
    different = {
        "traffic": run.model_copy(update={"traffic_sha256": "8" * 64}),
        "protocol": run.model_copy(update={"protocol": "grpc"}),
        "GPU": other(run, "server", gpus=("H100",)),
        "processor": other(run, "environment", client_cpu="EPYC"),
        "number of client cores": other(run, "environment", client_cores=1),
        "place of the server": other(run, "server", is_local=False),
    }
    for what, now in different.items():
        with pytest.raises(InputError, match=r"base\.json cannot be compared") as caught:
            check_comparable(now, run, "base.json")
        assert caught.value.why.startswith(f"its {what} is ")


def test_other_model_and_settings_are_allowed_and_shown() -> None:
    before = make_run(users=(1,))
    config = {**(before.model.config or {}), "max_batch_size": 8, "dynamic_batching": {}}
    now = other(before, "model", artifact_sha256="b" * 64, config=config)
    comparison = compare_runs(now, before, "base.json")
    assert comparison.differences == (
        ("artifact", "a" * 12, "b" * 12),
        ("config max_batch_size", "32", "8"),
        ("config dynamic_batching.max_queue_delay_microseconds", "500", "-"),
    )


def test_a_server_that_answers_nothing_is_a_regression() -> None:
    comparison = compare_runs(make_run(users=(1,), error_share=1.0), make_run(users=(1,)), "base.json")
    change = find(comparison, "1 user, batch 1", "throughput")
    assert change.now == 0
    assert change.change == -1
    assert change.is_regression
    assert "1 user, batch 1: p50: a repeat has no right answer" in comparison.not_compared


def test_band_holds_equal_groups_in_99_of_100_cases() -> None:
    random = np.random.default_rng(0)
    outside, trials = 0, 4000
    for _ in range(trials):
        first, second = np.exp(random.normal(0, 0.05, (2, 3)))
        spread = log_spread(first.tolist(), second.tolist())
        assert spread is not None
        change = np.exp(np.log(second).mean() - np.log(first).mean()) - 1
        outside += not band(spread, 3, 3, least=0.0).holds(change)
    # Binomial: 1 % of 4,000 is 40 with a deviation of 6.3; five of them either way.
    assert 40 - 32 <= outside <= 40 + 32


def test_band_narrows_with_the_repeats() -> None:
    # Student's t with 4 and 8 degrees of freedom, two-sided 99 %.
    assert band(0.1, 3, 3, least=0.0).high == pytest.approx(math.expm1(4.60 * 0.1 * math.sqrt(2 / 3)))
    assert band(0.1, 5, 5, least=0.0).high == pytest.approx(math.expm1(3.36 * 0.1 * math.sqrt(2 / 5)))


def test_band_of_a_ratio_reaches_as_far_down_as_up_in_logarithms() -> None:
    wide = band(0.5, 3, 3, least=0.03)
    assert (1 + wide.low) * (1 + wide.high) == pytest.approx(1)
    assert str(band(0.0, 3, 3, least=0.03)) == "-3.0 to +3.0 %"


def test_band_of_rates_shrinks_with_the_requests() -> None:
    assert rate_band(0, 100, 100) > 9 * rate_band(0, 10_000, 10_000)
    assert log_spread([1.0, 2.0], [1.0, 2.0, 3.0]) is None
    assert log_spread([0.0, 1.0, 2.0], [1.0, 2.0, 3.0]) is None
