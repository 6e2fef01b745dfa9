"""A server whose behaviour is a formula, so that the best settings of a search are known."""

from __future__ import annotations

import dataclasses

from trtforge.loadtest.objective import Objective
from trtforge.loadtest.results import Load
from trtforge.loadtest.tuning.candidate import DEFAULT, Candidate
from trtforge.loadtest.tuning.plans import Plan
from trtforge.loadtest.tuning.trial import Probe, Stage, Trial

OBJECTIVES = (Objective("p99", 50.0),)
BATCHED, SLOW, PAIRED = Candidate(delay_us=0), Candidate(delay_us=5000), Candidate(delay_us=0, instances=2)
# Requests per second at which each would be fully busy.
LIMITS = {DEFAULT: 100.0, BATCHED: 180.0, SLOW: 140.0, PAIRED: 90.0}
IDLE_MS = 10.0


def probe(load: Load, throughput: float, p99: float, errors: float = 0.0) -> Probe:
    is_met = p99 <= 50.0 and not errors
    statistics = {"p50": p99 / 2, "p99": p99}
    return Probe(
        load=load, seconds=1.0, requests=100, throughput=throughput, statistics_ms=statistics,
        error_share=errors, is_met=is_met,
    )  # fmt: skip


@dataclasses.dataclass
class Formula:
    """A server whose latency in an open loop is that of an idle one over its free share; in a closed loop users queue.

    `jitter` makes its limit differ from trial to trial; in `slow_stages` something else uses the machine.
    """

    limits: dict[Candidate, float]
    idle_ms: dict[Candidate, float] = dataclasses.field(default_factory=dict)
    jitter: float = 0.0
    broken: tuple[Candidate, ...] = ()
    slow_stages: tuple[Stage, ...] = ()
    calls: list[tuple[Stage, Candidate, int]] = dataclasses.field(default_factory=list)

    def run(self, stage: Stage, candidate: Candidate, repeat: int, plan: Plan) -> Trial:
        self.calls.append((stage, candidate, repeat))
        if candidate in self.broken:
            failure = "the server died (signal 9): no connection for 3 s"
            return Trial(stage=stage, candidate=candidate, repeat=repeat, probes=(), failure=failure, seconds=1.0)
        limit = self.limits[candidate] * (1 + self.jitter * (len(self.calls) % 3 - 1))
        idle_ms = 1_000.0 if stage in self.slow_stages else self.idle_ms.get(candidate, IDLE_MS)
        probes: list[Probe] = []
        while (load := plan(probes)) is not None:
            if load.kind == "open":
                rate = min(load.end, limit)
                p99 = idle_ms / (1 - load.end / limit) if load.end < limit else 10_000.0
            else:
                rate = min(load.end * 1e3 / idle_ms, limit)
                p99 = max(idle_ms, load.end * 1e3 / limit)
            probes.append(probe(load, rate, p99))
        return Trial(stage=stage, candidate=candidate, repeat=repeat, probes=tuple(probes), seconds=1.0)
