"""The search: find where Triton's default ends, try every candidate from there on, confirm the best one against it.

Short trials come first, and only the best candidates get longer ones. What a search picks looks better than it is, as
it was picked for its luck as well; so the gain is taken from fresh measurements, in which the default and the best take
turns (ABAB), each time on a server of its own. Their repeats give the noise band of noise.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from trtforge.loadtest.compare import LEAST_BAND
from trtforge.loadtest.noise import Band, center, paired_band
from trtforge.loadtest.objective import Objective
from trtforge.loadtest.tuning.candidate import DEFAULT, Candidate
from trtforge.loadtest.tuning.plans import LoadKind, Plan, around, climb, load_of, only
from trtforge.loadtest.tuning.trial import Capacity, Stage, Trial, capacity_of

REPEATS = 3
_NUM_FINALISTS = 3
_MAX_CLIMB = 12
_SURVEY_PROBES = 6
# Of the loads of neighbouring probes.
_FIRST_RATIO, _SURVEY_RATIO = 1.6, 1.3
# Of the rate that one user reaches: a load that the slowest configuration bears.
_FIRST_SHARE = 0.5

# Measured with MiniLM on two cores: starting and stopping a server, and what a probe takes beside its measurement
# (the warm-up, the last answers).
START_S, PROBE_S = 6.0, 2.0

RunTrial = Callable[[Stage, Candidate, int, Plan], Trial]


@dataclasses.dataclass(frozen=True, slots=True)
class Gain:
    """A figure of the best against that of the default, from repeats that took turns.

    Attributes:
        default, best: repeat by repeat; a throughput is 0 where the objectives were met at no load.
        change: relative, of the geometric means; None where the default has nothing to compare with.
        noise: what chance explains (99 %); None with fewer than three pairs of repeats, or where one is 0.
    """

    default: tuple[float, ...]
    best: tuple[float, ...]
    change: float | None
    noise: Band | None

    @property
    def is_beyond_noise(self) -> bool:
        """Whether the change, in either direction, is no chance."""
        return self.change is not None and self.noise is not None and not self.noise.holds(self.change)


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a search found.

    Attributes:
        trials: all of them.
        capacities: of every candidate that was tried, from its longest trial.
        best: the candidate that was confirmed against the default; None where none of them meets the objectives.
        throughput: within the objectives; None without a best.
        latency: of the first objective's statistic at one load for both, in ms, of the pairs that both have answers
            in; None without any.
        equal_load: that load; None without a best.
        left_out: candidates that time did not allow.
    """

    trials: tuple[Trial, ...]
    capacities: Mapping[Candidate, Capacity]
    best: Candidate | None
    throughput: Gain | None
    latency: Gain | None
    equal_load: float | None
    left_out: tuple[Candidate, ...]

    @property
    def is_better(self) -> bool:
        """Whether the best beats the default beyond the noise: in throughput, or in latency at no loss of it."""
        if self.throughput is None or min(self.throughput.best) == 0:
            return False
        if max(self.throughput.default) == 0:
            return True
        if self.throughput.is_beyond_noise:
            return (self.throughput.change or 0.0) > 0
        return self.latency is not None and self.latency.is_beyond_noise and (self.latency.change or 0.0) < 0


class Search:
    """One search.

    Args:
        kind: of the load.
        objectives: all must be met.
        run: makes a trial, or gives the one that an interrupted search made.
        has_time: whether another candidate may be surveyed.
        repeats: of the confirmation; fewer than three do not tell the noise.
    """

    def __init__(
        self,
        kind: LoadKind,
        objectives: Sequence[Objective],
        run: RunTrial,
        has_time: Callable[[], bool],
        repeats: int = REPEATS,
    ) -> None:
        self._kind = kind
        self._objectives = objectives
        self._run = run
        self._has_time = has_time
        self._repeats = repeats
        self._trials: list[Trial] = []

    def find_best(self, candidates: Sequence[Candidate]) -> Outcome:
        """Try candidates and confirm the best; the default is tried whether it is among them or not."""
        first = self._first_load()
        plan = climb(self._kind, first, _FIRST_RATIO, _MAX_CLIMB, may_descend=True)
        default = self._capacity(self._try("default", DEFAULT, plan))
        surveyed: dict[Candidate, Trial] = {}
        left_out = []
        for candidate in candidates:
            if candidate == DEFAULT:
                continue
            if self._has_time():
                plan = climb(self._kind, default.load or first, _SURVEY_RATIO, _SURVEY_PROBES)
                surveyed[candidate] = self._try("survey", candidate, plan)
            else:
                left_out.append(candidate)
        refined = dict(self._refine(surveyed, default, first))
        capacities = {DEFAULT: default, **{one: self._capacity(trial) for one, trial in surveyed.items()}, **refined}
        rivals = [candidate for candidate in refined if candidate != DEFAULT and refined[candidate].throughput > 0]
        best = max(rivals, key=lambda candidate: refined[candidate].throughput, default=None)
        throughput, latency, equal_load = None, None, None
        if best is not None:
            throughput, latency, equal_load = self._confirm(best, refined[best], capacities[DEFAULT])
        return Outcome(tuple(self._trials), capacities, best, throughput, latency, equal_load, tuple(left_out))

    def _try(self, stage: Stage, candidate: Candidate, plan: Plan, repeat: int = 1) -> Trial:
        trial = self._run(stage, candidate, repeat, plan)
        self._trials.append(trial)
        return trial

    def _capacity(self, trial: Trial) -> Capacity:
        return capacity_of(trial.probes, self._objectives)

    def _first_load(self) -> float:
        """One user; in an open loop half of the rate that one user reaches."""
        if self._kind == "closed":
            return 1.0
        trial = self._try("idle", DEFAULT, only(load_of("closed", 1)))
        return max((_FIRST_SHARE * probe.throughput for probe in trial.probes), default=0.0) or 1.0

    def _refine(
        self, surveyed: Mapping[Candidate, Trial], default: Capacity, first: float
    ) -> Iterator[tuple[Candidate, Capacity]]:
        """Longer trials of the best candidates, and of the default where it meets the objectives at all.

        One that meets them at no load in its longer trial, and did in the short one, keeps the figure of that: the
        confirmation has the last word.
        """
        finalists = sorted(surveyed, key=lambda candidate: self._rank(surveyed[candidate]))[:_NUM_FINALISTS]
        for candidate in (*((DEFAULT,) if default.throughput else ()), *finalists):
            before = default if candidate == DEFAULT else self._capacity(surveyed[candidate])
            near = before.load or default.load or first
            found = self._capacity(self._try("refine", candidate, around(self._kind, near)))
            yield candidate, found if found.throughput else before

    def _rank(self, trial: Trial) -> tuple[float, float]:
        """Of a survey: by throughput within the objectives; without one, by the latency at the load that all tried."""
        statistic = self._objectives[0].statistic
        latencies = [probe.statistics_ms.get(statistic, math.inf) for probe in trial.probes[:1]]
        return -self._capacity(trial).throughput, latencies[0] if latencies else math.inf

    def _confirm(self, best: Candidate, at: Capacity, default: Capacity) -> tuple[Gain, Gain | None, float]:
        """The default and the best in turns: throughput within the objectives, and latency at one load."""
        equal_load = default.load if default.throughput else at.load
        plans = {
            DEFAULT: around(self._kind, default.load) if default.throughput else only(load_of(self._kind, equal_load)),
            best: around(self._kind, at.load, (equal_load,)),
        }
        found: dict[Candidate, list[Trial]] = {DEFAULT: [], best: []}
        for repeat in range(1, self._repeats + 1):
            for candidate, plan in plans.items():
                found[candidate].append(self._try("confirm", candidate, plan, repeat))
        sides = (found[DEFAULT], found[best])
        throughput = gain(*([self._capacity(trial).throughput for trial in one] for one in sides))
        measured = zip(*([self._latency(trial, equal_load) for trial in one] for one in sides), strict=True)
        pairs = [(before, after) for before, after in measured if before is not None and after is not None]
        return throughput, gain(*zip(*pairs, strict=True)) if pairs else None, equal_load

    def _latency(self, trial: Trial, load: float) -> float | None:
        """Of the first objective's statistic, at the probe of that load."""
        at = min(trial.probes, key=lambda probe: abs(probe.load.end - load), default=None)
        is_there = at is not None and abs(at.load.end - load) <= 0.01 * load + 0.5
        return at.statistics_ms.get(self._objectives[0].statistic) if at is not None and is_there else None


def gain(default: Sequence[float], best: Sequence[float]) -> Gain:
    """The change from one group of repeats to the other, which took turns."""
    before = center(default)
    noise = paired_band(default, best, LEAST_BAND)
    return Gain(tuple(default), tuple(best), center(best) / before - 1 if before else None, noise)


def estimate_s(num_candidates: int, seconds: float, repeats: int = REPEATS) -> float:
    """How long a search takes.

    Args:
        num_candidates: beside the default.
        seconds: of a short probe; those of the last two stages take twice as long.
        repeats: of the confirmation.
    """
    # A climb ends after about six probes where nothing is known yet, after two or three later on.
    num_probes = 6 + 2.5 * num_candidates
    first_stages_s = (1 + num_candidates) * START_S + num_probes * (PROBE_S + seconds)
    return first_stages_s + final_stages_s(num_candidates, seconds, repeats)


def final_stages_s(num_candidates: int, seconds: float, repeats: int = REPEATS) -> float:
    """What of that the last two stages take."""
    num_refined = 1 + min(num_candidates, _NUM_FINALISTS)
    num_probes = 3.5 * num_refined + 7 * repeats
    return (num_refined + 2 * repeats) * START_S + num_probes * (PROBE_S + 2 * seconds)
