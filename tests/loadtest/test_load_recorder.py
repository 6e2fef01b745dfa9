"""Arrivals, distributions, and the counts of a step."""

from __future__ import annotations

import select
import time

import gevent
import numpy as np
import pytest
from hdrh.histogram import HdrHistogram

from trtforge.loadtest.arrivals import PreciseTimer, poisson_arrivals
from trtforge.loadtest.distribution import Distribution
from trtforge.loadtest.objective import parse_objectives
from trtforge.loadtest.probe import LoopProbe
from trtforge.loadtest.recorder import Outcome, Recorder
from trtforge.loadtest.senders import SendError


def arrivals(start: float, end: float, warmup_s: float, duration_s: float, seed: int = 1) -> np.ndarray:
    return np.array(list(poisson_arrivals(start, end, warmup_s, duration_s, seed)))


@pytest.mark.parametrize(("start", "end"), [(100, 100), (20, 180), (180, 20), (100, 100.001)])
def test_arrivals_follow_the_rate(start: float, end: float) -> None:
    moments = arrivals(start, end, 10, 60)
    assert np.all(np.diff(moments) >= 0)
    assert moments[0] >= -10
    assert moments[-1] < 60
    for low, high in ((-10, 0), (0, 30), (30, 60)):
        rates = [start if low < 0 else start + (end - start) * moment / 60 for moment in (low, high)]
        expected = (high - low) * sum(rates) / 2
        count = np.count_nonzero((moments >= low) & (moments < high))
        # A Poisson count is within five standard deviations of its mean, but for one time in two million.
        assert abs(count - expected) < 5 * expected**0.5


def test_times_between_arrivals_are_exponential() -> None:
    gaps = np.diff(arrivals(1000, 1000, 0, 60))
    # Mean and standard deviation of an exponential distribution are equal.
    assert np.std(gaps) == pytest.approx(np.mean(gaps), rel=0.05)


def test_seed_decides_the_arrivals() -> None:
    assert np.array_equal(arrivals(50, 90, 1, 5, seed=3), arrivals(50, 90, 1, 5, seed=3))
    assert not np.array_equal(arrivals(50, 90, 1, 5, seed=3)[:9], arrivals(50, 90, 1, 5, seed=4)[:9])


def test_timer_never_wakes_early() -> None:
    def wait_readable(fd: int) -> None:
        select.select([fd], [], [])

    with PreciseTimer(wait_readable) as timer:
        for delay in (0.001, 0.0123, -1.0):
            moment = time.monotonic() + delay
            timer.wait_until(moment)
            assert time.monotonic() >= moment


def test_probe_waits_in_the_queue_that_users_wait_in() -> None:
    """Fifty users who each work for two milliseconds keep one another waiting for a tenth of a second.

    The probe first waits for the end of a round, then for a whole one.
    """

    def work() -> None:
        while True:
            time.sleep(0.002)
            gevent.sleep(0)

    probe = LoopProbe()
    greenlets = [gevent.spawn(run) for run in (probe.watch, *[work] * 50)]
    gevent.sleep(1.5)
    gevent.killall(greenlets)
    assert probe.lag_ms() >= 120


def test_distribution_agrees_with_the_values() -> None:
    values = np.random.default_rng(1).lognormal(-5, 1, 20_000)
    distribution = Distribution()
    for value in values:
        distribution.record(float(value))
    summary = distribution.summarize()
    assert summary.count == len(values)
    assert summary.too_few == ()
    for name, percent in (("p50", 50), ("p90", 90), ("p95", 95), ("p99", 99), ("p99.9", 99.9)):
        exact = np.sort(values)[round(percent / 100 * len(values)) - 1] * 1000
        # Three digits, and values in whole microseconds.
        assert summary.percentiles_ms[name] == pytest.approx(exact, rel=0.001, abs=0.001)
    assert summary.mean_ms == pytest.approx(values.mean() * 1000, rel=0.001)
    assert HdrHistogram.decode(summary.hdr.encode()).get_total_count() == len(values)


@pytest.mark.parametrize(
    ("count", "too_few"),
    [
        (10, ("p50", "p75", "p90", "p95", "p99", "p99.9")),
        (1000, ("p99.9",)),
        (20, ("p75", "p90", "p95", "p99", "p99.9")),
        (10_000, ()),
    ],
)
def test_percentiles_with_fewer_than_ten_values_above_are_named(count: int, too_few: tuple[str, ...]) -> None:
    distribution = Distribution()
    for _ in range(count):
        distribution.record(0.001)
    assert distribution.summarize().too_few == too_few


def test_empty_distribution_has_no_figures() -> None:
    summary = Distribution().summarize()
    assert (summary.count, summary.mean_ms, summary.percentiles_ms) == (0, None, {})


CELLS = [("short", 1), ("long", 4)]
BEGIN, END = 100.0, 110.0


def recorder(*objectives: str) -> Recorder:
    return Recorder(CELLS, parse_objectives(objectives), BEGIN, END)


def outcome(sent: float, latency: float, cell: int = 0, failure: SendError | None = None, **more: object) -> Outcome:
    return Outcome(cell, sent, sent, sent + latency, failure, **more)  # type: ignore[arg-type]


def test_requests_belong_by_their_sending_and_throughput_by_arrival() -> None:
    counts = recorder()
    for one in (outcome(99.4, 1), outcome(99.5, 1), outcome(100, 1), outcome(104, 1, cell=1), outcome(109.5, 1)):
        counts.add(one)
    counts.add(outcome(105, 1, failure=SendError("server", "no")))
    counts.add(outcome(110, 1))
    assert counts.requests == 4
    assert counts.ok == 3
    # Of the first two, sent in the warm-up, the answers arrived in the measurement; that of the fifth did not.
    assert counts.throughput(10) == (0.4, 0.7)
    assert [cell.requests for cell in counts.cells()] == [3, 1]


def test_latency_is_from_the_intended_moment_and_service_from_the_actual_one() -> None:
    counts = recorder()
    counts.add(Outcome(0, intended=101.0, sent=103.0, done=104.0, failure=None))
    assert counts.total().latency.mean_ms == pytest.approx(3000, rel=0.001)
    assert counts.service().mean_ms == pytest.approx(1000, rel=0.001)


def test_streamed_answers_are_timed_from_the_sending() -> None:
    counts = recorder()
    counts.add(Outcome(0, 101.0, 102.0, 102.6, None, moments=(102.2, 102.3, 102.5)))
    first, between = counts.streamed()
    assert first.mean_ms == pytest.approx(200, rel=0.001)
    assert (between.count, between.mean_ms) == (2, pytest.approx(150, rel=0.001))


def test_failed_and_unsent_requests_miss_every_objective() -> None:
    counts = recorder("p50=20ms", "p90=20ms", "mean=20ms")
    for _ in range(8):
        counts.add(outcome(101, 0.01))
    counts.add(outcome(101, 0.01, failure=SendError("server", "no")))
    counts.add_unsent(1, 105, "busy")
    counts.add_unsent(1, 120, "busy")
    assert (counts.requests, counts.ok) == (10, 8)
    levels = counts.total().service_levels
    assert [level.share for level in levels] == [0.8, 0.8, 0.8]
    assert [level.is_met for level in levels] == [True, False, False]
    assert [error.kind for error in counts.errors()] == ["not sent", "server"]


@pytest.mark.parametrize(("late", "is_met"), [(1, True), (2, False)])
def test_p99_allows_one_request_of_a_hundred(late: int, is_met: bool) -> None:
    counts = recorder("p99=20ms")
    for place in range(100):
        counts.add(outcome(101, 0.03 if place < late else 0.01))
    (level,) = counts.total().service_levels
    assert level.is_met is is_met


def test_errors_of_one_class_are_counted_together() -> None:
    counts = recorder()
    for number in (17, 18, 18.5):
        counts.add(outcome(101, 0.1, failure=SendError("server", f"HTTP 400: batch {number} is too large")))
    counts.add(outcome(101, 0.1, failure=SendError("timeout", "no answer within 1 s")))
    first, second = counts.errors()
    assert (first.kind, first.count, first.text) == ("server", 3, "HTTP #: batch # is too large")
    assert first.example == "HTTP 400: batch 17 is too large"
    assert (second.kind, second.count) == ("timeout", 1)


def test_a_server_with_a_new_text_for_every_error_fills_no_memory() -> None:
    counts = recorder()
    for number in range(200):
        counts.add(outcome(101, 0.1, failure=SendError("server", "x" * (number + 1))))
    errors = counts.errors()
    assert len(errors) == 51
    assert errors[0].text == "other errors"
    assert sum(error.count for error in errors) == 200


def test_server_is_gone_while_nothing_but_refused_connections_arrives() -> None:
    counts = recorder()
    counts.add(outcome(101, 0.1, failure=SendError("unreachable", "refused")))
    counts.add(outcome(102, 0.1, failure=SendError("unreachable", "refused")))
    assert counts.broken_since == pytest.approx(101.1)
    counts.add(outcome(103, 0.1, failure=SendError("timeout", "late")))
    assert counts.broken_since is None


def test_timeline_has_every_second_and_what_is_on_its_way() -> None:
    counts = recorder()
    for moment in (98.5, 100.2, 100.4, 103.1):
        counts.add_sent(moment)
    counts.add(outcome(98.5, 0.1))
    counts.add(outcome(100.2, 0.3))
    counts.add(outcome(100.4, 1.1, failure=SendError("timeout", "late")))
    counts.add(outcome(103.1, 0.2))
    seconds = {one.second: one for one in counts.timeline()}
    assert list(seconds) == [-2, -1, 0, 1, 2, 3]
    assert [one.in_flight for one in seconds.values()] == [0, 0, 1, 0, 0, 0]
    assert [(one.ok, one.errors) for one in seconds.values()] == [(1, 0), (0, 0), (1, 0), (0, 1), (0, 0), (1, 0)]
    assert seconds[0].p99_ms == pytest.approx(300)
    assert seconds[1].p50_ms is None
