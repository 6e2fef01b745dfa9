"""Count what happened to each request of a step: latencies, errors, cells, seconds.

A request belongs to the measurement when it was to be sent in [begin, end); throughput counts the right answers that
arrived in it.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence

from trtforge.loadtest.distribution import Distribution
from trtforge.loadtest.objective import Objective
from trtforge.loadtest.results import Cell, ErrorCount, ErrorKind, Latency, Second, ServiceLevel
from trtforge.loadtest.senders import SendError

# Classes of errors that are told apart; a server that puts a new text in every error could make any number.
_MAX_ERRORS = 50
_OTHER = "other errors"


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What happened to a request; moments are seconds of time.monotonic().

    Attributes:
        cell: its place in the list of cells.
        intended: when it was to be sent.
        sent: when it was.
        done: when its full answer, or its failure, was there.
        failure: None with a right answer.
        moments: of its streamed answers.
    """

    cell: int
    intended: float
    sent: float
    done: float
    failure: SendError | None
    moments: tuple[float, ...] = ()


class Recorder:
    """Takes the outcomes of a step as they happen.

    Args:
        cells: bucket and batch size of each.
        objectives: whose service levels are counted.
        begin, end: of the measurement, seconds of time.monotonic().

    Attributes:
        requests, ok: of the measurement.
        broken_since: since when every request has failed for want of a connection; None while some do not.
    """

    def __init__(
        self, cells: Sequence[tuple[str | None, int]], objectives: Sequence[Objective], begin: float, end: float
    ) -> None:
        self._begin = begin
        self.end = end
        self._cells = [_CellCount(bucket, batch, objectives) for bucket, batch in cells]
        self._all = _CellCount(None, 0, objectives)
        self._service = Distribution()
        self._first = Distribution()
        self._between = Distribution()
        self._errors: dict[tuple[str, str], _ErrorTally] = {}
        self._seconds = _Seconds(begin)
        self._arrived = 0
        self._arrived_samples = 0
        self.broken_since: float | None = None

    @property
    def requests(self) -> int:
        """Of the measurement so far."""
        return self._all.requests

    @property
    def ok(self) -> int:
        """Of the measurement so far, with a right answer."""
        return self._all.ok

    def add_sent(self, moment: float) -> None:
        """A request was sent."""
        self._seconds.add_sent(moment)

    def add(self, outcome: Outcome) -> None:
        """A request is done."""
        failure = outcome.failure
        is_broken = failure is not None and failure.kind == "unreachable"
        self.broken_since = (self.broken_since or outcome.done) if is_broken else None
        latency = outcome.done - outcome.intended
        self._seconds.add_done(outcome.done, None if failure is not None else latency)
        cell = self._cells[outcome.cell]
        if failure is None and self._begin <= outcome.done < self.end:
            self._arrived += 1
            self._arrived_samples += cell.batch
        if not self._begin <= outcome.intended < self.end:
            return
        for count in (cell, self._all):
            count.add(None if failure is not None else latency)
        if failure is not None:
            self._count_error(failure.kind, failure.text, failure.example)
            return
        self._service.record(outcome.done - outcome.sent)
        if outcome.moments:
            self._first.record(outcome.moments[0] - outcome.sent)
            for before, after in zip(outcome.moments, outcome.moments[1:], strict=False):
                self._between.record(after - before)

    def add_unsent(self, cell: int, intended: float, why: str) -> None:
        """A request that was to be sent, and was not when the measurement ended."""
        if self._begin <= intended < self.end:
            self._cells[cell].add(None)
            self._all.add(None)
            self._count_error("not sent", why, "")

    def throughput(self, duration_s: float) -> tuple[float, float]:
        """Right answers and samples per second."""
        return self._arrived / duration_s, self._arrived_samples / duration_s

    def cells(self) -> tuple[Cell, ...]:
        """By bucket and batch size."""
        return tuple(cell.summarize() for cell in self._cells)

    def total(self) -> Cell:
        """Over all cells."""
        return self._all.summarize()

    def service(self) -> Latency:
        """From the actual send."""
        return self._service.summarize()

    def streamed(self) -> tuple[Latency, Latency]:
        """Until the first answer, and between answers."""
        return self._first.summarize(), self._between.summarize()

    def errors(self) -> tuple[ErrorCount, ...]:
        """Most frequent first."""
        counts = [
            ErrorCount(kind=kind, text=text, count=tally.count, example=tally.example)
            for (kind, text), tally in self._errors.items()
        ]
        return tuple(sorted(counts, key=lambda error: (-error.count, error.kind, error.text)))

    def timeline(self) -> tuple[Second, ...]:
        """Of the warm-up too."""
        return self._seconds.summarize()

    def _count_error(self, kind: ErrorKind, text: str, example: str) -> None:
        is_known = (kind, text) in self._errors
        key = (kind, text if is_known or len(self._errors) < _MAX_ERRORS else _OTHER)
        self._errors.setdefault(key, _ErrorTally(example)).count += 1


@dataclasses.dataclass(slots=True)
class _ErrorTally:
    """Errors of one class."""

    example: str
    count: int = 0


class _CellCount:
    """Requests of one cell."""

    def __init__(self, bucket: str | None, batch: int, objectives: Sequence[Objective]) -> None:
        self.bucket = bucket
        self.batch = batch
        self.requests = 0
        self.ok = 0
        self._objectives = objectives
        self._within = [0] * len(objectives)
        self._latency = Distribution()

    def add(self, latency: float | None) -> None:
        """One more request; None where it has no right answer."""
        self.requests += 1
        if latency is None:
            return
        self.ok += 1
        self._latency.record(latency)
        for place, objective in enumerate(self._objectives):
            self._within[place] += latency * 1000 <= objective.limit_ms

    def summarize(self) -> Cell:
        latency = self._latency.summarize()
        levels = zip(self._objectives, self._within, strict=True)
        return Cell(
            bucket=self.bucket,
            batch=self.batch,
            requests=self.requests,
            ok=self.ok,
            latency=latency,
            service_levels=tuple(self._level(objective, within, latency) for objective, within in levels),
        )

    def _level(self, objective: Objective, within: int, latency: Latency) -> ServiceLevel:
        share = within / self.requests if self.requests else None
        if objective.statistic == "mean":
            is_met = self.ok == self.requests and objective.is_met(latency.statistics_ms)
        else:
            # As integers, in per mille: 0.99 has no exact binary form.
            is_met = share is not None and within * 1000 >= round(float(objective.statistic[1:]) * 10) * self.requests
        return ServiceLevel(objective=str(objective), limit_ms=objective.limit_ms, share=share, is_met=is_met)


class _Seconds:
    """The timeline. Answers come in the order of time, so that only one second's latencies are held."""

    def __init__(self, begin: float) -> None:
        self._begin = begin
        self._sent: dict[int, int] = {}
        self._done: dict[int, tuple[int, int, float | None, float | None]] = {}
        self._now: int | None = None
        self._latencies: list[float] = []
        self._errors = 0

    def add_sent(self, moment: float) -> None:
        """See `Recorder`."""
        second = math.floor(moment - self._begin)
        self._sent[second] = self._sent.get(second, 0) + 1

    def add_done(self, moment: float, latency: float | None) -> None:
        """An answer, or a failure where there is no latency."""
        second = math.floor(moment - self._begin)
        if second != self._now:
            self._close()
            self._now = second
        if latency is None:
            self._errors += 1
        else:
            bisect.insort(self._latencies, latency)

    def _close(self) -> None:
        if self._now is not None:
            ranks = (math.ceil(share * len(self._latencies)) - 1 for share in (0.5, 0.99))
            p50, p99 = (self._latencies[rank] * 1000 if self._latencies else None for rank in ranks)
            self._done[self._now] = (len(self._latencies), self._errors, p50, p99)
        self._latencies, self._errors = [], 0

    def summarize(self) -> tuple[Second, ...]:
        """Every second from the first to the last in which something happened."""
        self._close()
        self._now = None
        known = self._sent.keys() | self._done.keys()
        seconds: list[Second] = []
        in_flight = 0
        for second in range(min(known), max(known) + 1) if known else ():
            sent = self._sent.get(second, 0)
            ok, errors, p50, p99 = self._done.get(second, (0, 0, None, None))
            in_flight += sent - ok - errors
            seconds.append(
                Second(
                    second=second,
                    sent=sent,
                    ok=ok,
                    errors=errors,
                    in_flight=in_flight,
                    p50_ms=p50,
                    p99_ms=p99,
                )
            )
        return tuple(seconds)
