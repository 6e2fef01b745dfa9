"""The search for batching settings, on servers whose behaviour is a formula, so that the best is known."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tune_cases import BATCHED, LIMITS, OBJECTIVES, PAIRED, SLOW, Formula, probe

from trtforge.errors import InputError
from trtforge.loadtest.tuning.candidate import DEFAULT, Candidate, candidates
from trtforge.loadtest.tuning.page import candidate_rows, render_tuning
from trtforge.loadtest.tuning.plans import LoadKind, Plan, around, climb, load_of
from trtforge.loadtest.tuning.records import TrialFile
from trtforge.loadtest.tuning.result import TuneResult
from trtforge.loadtest.tuning.search import Outcome, Search, estimate_s, gain
from trtforge.loadtest.tuning.trial import Stage, Trial, capacity_of, pareto_front


def search(server: Formula, kind: LoadKind = "open", found: Sequence[Candidate] = tuple(LIMITS)) -> Outcome:
    return Search(kind, OBJECTIVES, server.run, lambda: True).find_best(found)


def test_best_candidate_is_found_and_confirmed_in_turns() -> None:
    server = Formula(LIMITS, jitter=0.01)
    outcome = search(server)
    assert outcome.best == BATCHED
    assert outcome.is_better
    # p99 = 10 / (1 - rate / limit) reaches 50 at 0.8 of the limit: 80 against 144. The straight line between probes
    # 1.18 apart misses the curve by less than the jitter of 1 % and 3 % more.
    assert outcome.throughput is not None
    assert outcome.throughput.change == pytest.approx(0.8, abs=0.8 * 0.04)
    assert outcome.capacities[DEFAULT].throughput == pytest.approx(80, rel=0.04)
    assert outcome.latency is not None
    assert outcome.latency.change is not None
    assert outcome.latency.change < -0.5
    turns = [call[1:] for call in server.calls if call[0] == "confirm"]
    assert turns == [(one, repeat) for repeat in (1, 2, 3) for one in (DEFAULT, BATCHED)]


def test_equal_candidates_are_no_gain() -> None:
    outcome = search(Formula(dict.fromkeys(LIMITS, 100.0), jitter=0.02))
    assert outcome.best is not None
    assert not outcome.is_better


def test_candidate_worse_than_the_default_is_no_gain() -> None:
    outcome = search(Formula({DEFAULT: 100.0, PAIRED: 80.0}), found=(DEFAULT, PAIRED))
    assert outcome.best == PAIRED
    assert outcome.throughput is not None
    assert outcome.throughput.change == pytest.approx(-0.2, abs=0.03)
    assert not outcome.is_better


def test_server_that_dies_in_a_trial_fails_that_candidate_alone() -> None:
    outcome = search(Formula(LIMITS, broken=(BATCHED,)))
    assert outcome.best == SLOW
    assert outcome.capacities[BATCHED].throughput == 0
    (failed,) = (trial for trial in outcome.trials if trial.candidate == BATCHED and trial.stage == "survey")
    assert failed.failure == "the server died (signal 9): no connection for 3 s"


def test_objective_that_nothing_meets_has_no_best() -> None:
    outcome = search(Formula(LIMITS, idle_ms=dict.fromkeys(LIMITS, 60.0)))
    assert outcome.best is None
    assert all(capacity.throughput == 0 for capacity in outcome.capacities.values())
    word, meaning = result_of(outcome).verdict()
    assert word == "MISSED"
    assert "p99=50ms" in meaning


def test_objective_that_the_default_never_meets_is_a_gain_of_its_own() -> None:
    outcome = search(Formula(LIMITS, idle_ms={DEFAULT: 60.0}), found=(DEFAULT, BATCHED))
    assert outcome.best == BATCHED
    assert outcome.is_better
    assert outcome.throughput is not None
    assert outcome.throughput.change is None


def test_disturbed_trials_do_not_rule_out_what_was_found_before() -> None:
    outcome = search(Formula(LIMITS, slow_stages=("refine",)))
    assert outcome.best == BATCHED
    assert outcome.is_better
    disturbed = search(Formula(LIMITS, slow_stages=("refine", "confirm")))
    assert disturbed.best == BATCHED
    assert not disturbed.is_better


@pytest.mark.parametrize(("best", "is_better"), [([5.0, 6.0, 5.0], True), ([5.0, 0.0, 5.0], False)])
def test_objective_met_in_every_repeat_beats_one_never_met(best: list[float], is_better: bool) -> None:
    outcome = search(Formula(LIMITS))
    never = dataclasses.replace(outcome, throughput=gain([0.0, 0.0, 0.0], best), latency=None)
    assert never.is_better == is_better


def test_without_time_candidates_are_left_out_and_named() -> None:
    outcome = Search("open", OBJECTIVES, Formula(LIMITS).run, lambda: False).find_best(tuple(LIMITS))
    assert outcome.left_out == (BATCHED, SLOW, PAIRED)
    assert outcome.best is None
    assert "left out for want of time" in render_tuning(result_of(outcome))


def test_closed_loop_ends_where_more_users_bring_nothing() -> None:
    server = Formula(dict.fromkeys(LIMITS, 100.0))
    trial = server.run("default", DEFAULT, 1, climb("closed", 1, 1.6, 12))
    assert [one.load.end for one in trial.probes] == [1, 2]
    assert capacity_of(trial.probes, OBJECTIVES).throughput == 100.0


def test_capacity_lies_between_the_last_met_and_the_first_missed() -> None:
    loads = [load_of("open", value) for value in (10, 20, 40)]
    probes = [probe(loads[0], 10, 20), probe(loads[1], 20, 25), probe(loads[2], 40, 100)]
    found = capacity_of(probes, OBJECTIVES)
    assert found.throughput == pytest.approx(20 + 20 * 0.5)  # 50 is half way from 25 to 100 in logarithms
    assert found.load == pytest.approx(30)
    assert found.is_bounded
    assert not capacity_of(probes[:2], OBJECTIVES).is_bounded
    assert capacity_of(probes[2:], OBJECTIVES).throughput == 0


def test_errors_end_the_capacity_at_the_last_probe_without_them() -> None:
    probes = [probe(load_of("open", 10), 10, 20), probe(load_of("open", 20), 19, 21, errors=0.05)]
    assert capacity_of(probes, OBJECTIVES).throughput == 10


def test_plan_around_a_limit_widens_until_it_holds_it() -> None:
    server = Formula({DEFAULT: 100.0})
    low = server.run("refine", DEFAULT, 1, around("open", 60.0)).probes
    assert not low[-1].is_met
    assert low[-2].is_met
    high = server.run("refine", DEFAULT, 1, around("open", 150.0)).probes
    assert any(one.is_met for one in high)
    assert {one.load.end for one in server.run("refine", DEFAULT, 1, around("closed", 1.0)).probes} >= {1, 2}


def test_pareto_front_has_only_probes_that_none_beats_in_both() -> None:
    figures = [(10, 20), (20, 25), (15, 40), (40, 30), (50, 90)]
    probes = [probe(load_of("open", rate), rate, p99) for rate, p99 in figures]
    front = pareto_front([*probes, probe(load_of("open", 60), 60, 10, errors=0.1)], OBJECTIVES[0])
    assert [(one.throughput, one.statistics_ms["p99"]) for one in front] == [(10, 20), (20, 25), (40, 30), (50, 90)]


def test_what_slows_the_machine_for_a_while_cancels_in_pairs() -> None:
    before = [79.7, 64.8, 62.3, 68.6, 81.0]
    after = [92.2, 73.9, 75.8, 87.4, 100.6]
    found = gain(before, after)
    assert found.is_beyond_noise
    # t of 4 degrees of freedom (4.60) * deviation of the logarithms of the ratios / sqrt(5).
    assert found.noise is not None
    assert found.noise.high == pytest.approx(math.expm1(4.60 * np.log(np.divide(after, before)).std(ddof=1) / 5**0.5))
    assert not gain(before, after[1:] + after[:1]).is_beyond_noise


def test_pairs_of_equal_servers_stay_within_the_noise_in_99_of_100_cases() -> None:
    rng = np.random.default_rng(0)
    drift = rng.normal(0, 0.3, (2000, 1, 5))
    repeats = np.exp(drift + rng.normal(0, 0.1, (2000, 2, 5)))
    outside = sum(gain(*pair.tolist()).is_beyond_noise for pair in repeats)
    assert 5 <= outside <= 40


def test_gain_of_few_repeats_has_no_known_noise() -> None:
    assert gain([100.0, 101.0], [150.0, 149.0]).noise is None
    assert not gain([100.0, 101.0], [150.0, 149.0]).is_beyond_noise
    assert gain([100.0, 101.0, 99.0], [150.0, 149.0, 151.0]).is_beyond_noise


def test_interrupted_search_goes_on_where_it_ended(tmp_path: Path) -> None:
    path, conditions = tmp_path / "trials.jsonl", {"model": "m"}
    whole = Formula(LIMITS)
    expected = search(whole)

    class Interrupted(Formula):
        def run(self, stage: Stage, candidate: Candidate, repeat: int, plan: Plan) -> Trial:
            if len(self.calls) == 5:
                raise KeyboardInterrupt
            return super().run(stage, candidate, repeat, plan)

    with pytest.raises(KeyboardInterrupt):
        Search("open", OBJECTIVES, TrialFile(path, conditions, Interrupted(LIMITS).run).run, lambda: True).find_best(
            tuple(LIMITS)
        )
    path.write_text(path.read_text() + '{"kind": "trial", "tri')  # a line that a crash cut off
    rest = Formula(LIMITS)
    file = TrialFile(path, conditions, rest.run)
    assert file.num_known == 5
    outcome = Search("open", OBJECTIVES, file.run, lambda: True).find_best(tuple(LIMITS))
    assert rest.calls == whole.calls[5:]
    assert outcome.trials == expected.trials
    assert len(path.read_text().splitlines()) == 1 + len(expected.trials)


def test_trials_of_other_conditions_are_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    TrialFile(path, {"model": "m"}, Formula(LIMITS).run)
    with pytest.raises(InputError, match="another run") as caught:
        TrialFile(path, {"model": "n"}, Formula(LIMITS).run)
    assert "model" in caught.value.why


def test_damaged_trials_are_refused_with_their_place(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    TrialFile(path, {}, Formula(LIMITS).run)
    path.write_text(path.read_text() + json.dumps({"kind": "trial", "trial": {"stage": "survey"}}) + "\n")
    with pytest.raises(InputError, match="trial 1"):
        TrialFile(path, {}, Formula(LIMITS).run)


def test_estimate_grows_with_candidates_seconds_and_repeats() -> None:
    assert estimate_s(12, 2.0) > estimate_s(4, 2.0) > estimate_s(4, 1.0)
    assert estimate_s(4, 1.0, repeats=5) > estimate_s(4, 1.0, repeats=3)


def test_repeats_of_the_confirmation_can_be_chosen() -> None:
    outcome = Search("open", OBJECTIVES, Formula(LIMITS).run, lambda: True, repeats=5).find_best(tuple(LIMITS))
    assert outcome.throughput is not None
    assert len(outcome.throughput.default) == len(outcome.throughput.best) == 5


def result_of(outcome: Outcome) -> TuneResult:
    conditions = {"trtforge": "0.6.0", "triton": "2.51.0", "cpu": "<Xeon>"}
    diff = "--- m/config.pbtxt\n+  max_queue_delay_microseconds: 0"
    return TuneResult("<m>", OBJECTIVES, "open", outcome, {"m": "text"}, diff, False, conditions)


def test_page_shows_front_gain_settings_and_every_trial() -> None:
    outcome = search(Formula(LIMITS, jitter=0.01))
    page = render_tuning(result_of(outcome))
    assert "BETTER" in page
    assert 'class="front"' in page
    assert page.count('class="trial ') == sum(len(trial.probes) for trial in outcome.trials if trial.stage != "idle")
    assert "--- m/config.pbtxt\n+  max_queue_delay_microseconds: 0\n" in page
    assert "&lt;Xeon&gt;" in page
    assert "<Xeon>" not in page
    assert "Not written: --apply does it." in page


def test_what_makes_figures_doubtful_is_told() -> None:
    steady = result_of(search(Formula(LIMITS, broken=(SLOW,))))
    assert steady.warnings[0] == f"survey: {SLOW}: the server died (signal 9): no connection for 3 s"
    assert steady.warnings[-1].startswith("a probe has as few as 100 requests, and the p99 takes 1,000")
    assert "a probe has as few as 100 requests" in render_tuning(steady)


def test_rows_name_each_candidate_once_with_the_best_first() -> None:
    rows = candidate_rows(result_of(search(Formula(LIMITS))))
    assert [row[0] for row in rows][:2] == [str(BATCHED), str(SLOW)]
    assert len(rows) == len(LIMITS)


def test_json_has_every_trial_and_the_gain() -> None:
    value = json.loads(json.dumps(result_of(search(Formula(LIMITS, jitter=0.01))).to_dict()))
    assert value["best"] == {"delay_us": 0, "preferred": [], "instances": 1}
    assert value["gains"]["throughput"]["change"] == pytest.approx(0.8, abs=0.04)
    assert len(value["trials"]) > 12


def test_combinations_have_the_default_first_and_none_twice() -> None:
    found = candidates((0, 500), ((), "packaged", ()), (1, 2))
    assert found[0] == DEFAULT
    assert len(found) == 1 + 2 * 2 * 2
    assert len(set(found)) == len(found)
