"""What a trial measured, and how its probes become one figure: the throughput that the objectives allow.

A probe is one load for some seconds. With rising load throughput and latency rise; the figure of a trial is the
throughput at which the first objective is missed, between the last probe that meets all and the first above it that
does not, by a straight line through throughput and the logarithm of the latency.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Literal

from trtforge.loadtest.objective import Objective
from trtforge.loadtest.results import Load, Measurement
from trtforge.loadtest.tuning.candidate import Candidate
from trtforge.textfile import FileModel

Stage = Literal["idle", "default", "survey", "refine", "confirm"]


class Probe(FileModel):
    """One load under one configuration.

    Attributes:
        load: users, or requests per second.
        seconds: measured, without warm-up.
        requests: that were to be answered.
        throughput: right answers per second.
        statistics_ms: latency by the names that objectives use.
        error_share: of the requests, without a right answer.
        is_met: every objective, errors included.
        mean_batch: samples per execution over the tuned models; None where the server does not say.
        queue_ms, compute_ms: mean per request by the server's own clocks, of the model that was asked.
        padding_share: of the tokens, where a text front counts them.
        is_client_saturated: the client was at its limit.
    """

    load: Load
    seconds: float
    requests: int
    throughput: float
    statistics_ms: dict[str, float]
    error_share: float
    is_met: bool
    mean_batch: float | None = None
    queue_ms: float | None = None
    compute_ms: float | None = None
    padding_share: float | None = None
    is_client_saturated: bool = False


class Trial(FileModel):
    """One start of the server with one configuration.

    Attributes:
        stage: "idle" asks, before an open loop, what one user reaches; "default" finds where Triton's own settings end;
            "survey" tries every candidate from there on; "refine" measures the best ones longer; "confirm" repeats the
            best and the default in turns.
        repeat: 1, 2, ... within the stage.
        probes: in ascending load.
        failure: why it ended early: the server did not start, or died; None where it is complete.
        seconds: that it took, with starting and stopping.
    """

    stage: Stage
    candidate: Candidate
    repeat: int = 1
    probes: tuple[Probe, ...]
    failure: str | None = None
    seconds: float

    @property
    def key(self) -> tuple[Stage, Candidate, int]:
        """What it was for; a run has each once."""
        return self.stage, self.candidate, self.repeat


@dataclasses.dataclass(frozen=True, slots=True)
class Capacity:
    """The throughput that the objectives allow.

    Attributes:
        throughput: right answers per second; 0 where no probe met the objectives.
        load: users or requests per second that go with it.
        is_bounded: a higher load was tried and missed them; else the throughput is a lower bound.
    """

    throughput: float
    load: float
    is_bounded: bool


NO_CAPACITY = Capacity(0.0, 0.0, True)


def probe_of(measured: Measurement, load: Load, tuned_models: Iterable[str]) -> Probe:
    """What a trial keeps of a measurement."""
    statistics = {name: ms for name, ms in measured.latency.statistics_ms.items() if ms is not None}
    asked = measured.server.models[0] if measured.server.models else None
    names = set(tuned_models)
    works = [work for work in measured.server.models if work.name in names]
    executions = sum(work.executions for work in works)
    tokens = measured.server.tokens
    return Probe(
        load=load,
        seconds=measured.duration_s,
        requests=measured.requests,
        throughput=measured.throughput,
        statistics_ms=statistics,
        error_share=measured.error_rate,
        is_met=all(level.is_met for level in measured.service_levels),
        mean_batch=sum(work.inferences for work in works) / executions if executions else None,
        queue_ms=asked.queue_ms if asked else None,
        compute_ms=asked.compute_ms if asked else None,
        padding_share=tokens.padding_share if tokens else None,
        is_client_saturated=measured.client.is_saturated,
    )


def capacity_of(probes: Sequence[Probe], objectives: Sequence[Objective]) -> Capacity:
    """The throughput at which the first objective is missed; see the module's docstring."""
    ordered = sorted(probes, key=lambda probe: probe.load.end)
    met = [number for number, probe in enumerate(ordered) if probe.is_met]
    if not met:
        return NO_CAPACITY
    last, above = ordered[met[-1]], ordered[met[-1] + 1 :]
    fastest = max((ordered[number] for number in met), key=lambda probe: probe.throughput)
    if not above:
        return Capacity(fastest.throughput, fastest.load.end, False)
    share = min(_crossing(last, above[0], objective) for objective in objectives)
    throughput = last.throughput + share * (above[0].throughput - last.throughput)
    load = last.load.end + share * (above[0].load.end - last.load.end)
    return Capacity(max(throughput, fastest.throughput), load, True)


def _crossing(met: Probe, missed: Probe, objective: Objective) -> float:
    """Where between two probes a limit is reached: 0 at the first, 1 at the second or beyond it."""
    name, limit = objective.statistic, math.log(objective.limit_ms)
    if name not in met.statistics_ms or name not in missed.statistics_ms:
        return 0.0
    low, high = math.log(met.statistics_ms[name]), math.log(missed.statistics_ms[name])
    if high <= limit:
        # It is met at both: another objective, or errors, end it.
        return 1.0 if missed.error_share <= met.error_share else 0.0
    return min(max((limit - low) / (high - low), 0.0), 1.0)


def pareto_front(probes: Iterable[Probe], objective: Objective) -> list[Probe]:
    """The probes without errors that no other beats in both throughput and latency, in ascending throughput."""
    known = [probe for probe in probes if objective.statistic in probe.statistics_ms and probe.error_share == 0]
    front: list[Probe] = []
    for probe in sorted(known, key=lambda one: (-one.throughput, one.statistics_ms[objective.statistic])):
        if not front or probe.statistics_ms[objective.statistic] < front[-1].statistics_ms[objective.statistic]:
            front.append(probe)
    return front[::-1]
