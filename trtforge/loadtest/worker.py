"""The process that Locust runs in: it sends the requests of one step after another and counts what happened.

gevent replaces parts of Python's standard library on import of this module, which is why it is imported in a process of
its own and nowhere else.
"""

from __future__ import annotations

# isort: off
import locust  # noqa: F401 - replaces sockets and threads by gevent's before anything else takes them

# isort: on
import random
import resource
import time

import gevent
import gevent.queue
from locust.env import Environment

from trtforge.frames import Arrays, Meta
from trtforge.isolation import Handler, Progress
from trtforge.loadtest.arrivals import poisson_arrivals
from trtforge.loadtest.objective import parse_objectives
from trtforge.loadtest.probe import LoopProbe
from trtforge.loadtest.recorder import Outcome, Recorder
from trtforge.loadtest.request import Request, RequestCell, unpack_cells
from trtforge.loadtest.results import ClientSide, Latency, Load, Measurement
from trtforge.loadtest.senders import Endpoint, Sender, SendError, open_sender
from trtforge.loadtest.sequence import RequestSequence
from trtforge.loadtest.server_side import ServerSide
from trtforge.loadtest.users import Work, offer_arrivals, user_class

# A request that is refused so often in turn is one that the server does not take; a single failure says little.
_TRIES = 3
# Seconds without any connection after which the server counts as gone.
_GONE_S = 3.0
_TICK_S = 0.05
# Seconds in which Locust starts the users, before the warm-up.
_LEAD_S = 0.2
# Of a core: above it the client is at its limit.
_BUSY = 0.9
# Of the p99 latency: what the client's own delay may be.
_LAG_SHARE = 0.25


class _State:
    """What lives from call to call."""

    sender: Sender
    endpoint: Endpoint
    protocol: str
    is_batched: bool
    tolerance: float
    cells: tuple[RequestCell, ...]
    sequence: RequestSequence


_state = _State()


def _open(meta: Meta, _: Arrays, __: Progress) -> tuple[Meta, Arrays]:
    """Connect: {protocol, endpoint, is_batched, tolerance}."""
    # Each request on its way over HTTP has a connection of its own.
    largest = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (largest, largest))
    if meta["protocol"] == "grpc":
        from grpc.experimental import gevent as grpc_gevent

        grpc_gevent.init_gevent()
    _state.protocol = meta["protocol"]
    _state.endpoint = Endpoint(**{**meta["endpoint"], "outputs": tuple(meta["endpoint"]["outputs"])})
    _state.sender = open_sender(_state.protocol, _state.endpoint)
    _state.is_batched, _state.tolerance = meta["is_batched"], meta["tolerance"]
    return {}, {}


def _load(meta: Meta, arrays: Arrays, _: Progress) -> tuple[Meta, Arrays]:
    """Take the requests of the next steps, and send one of each cell: {cells, seed} -> {refusals}."""
    _state.cells = unpack_cells(meta, arrays)
    _state.sequence = RequestSequence(_state.cells, _state.sender, meta["seed"])
    refusals = []
    for cell in _state.cells:
        refusal = _refusal(cell.requests[0])
        if refusal is not None:
            refusals.append({"cell": cell.name, "kind": refusal.kind, "text": refusal.example})
    return {"refusals": refusals}, {}


def _refusal(request: Request) -> SendError | None:
    """What the server says to a request that it does not take."""
    wire = _state.sender.prepare(request)
    for attempt in range(1, _TRIES + 1):
        try:
            _state.sender.send(wire)
        except SendError as err:
            if err.kind != "server" or attempt == _TRIES:
                return err
        else:
            break
    return None


def _run(meta: Meta, _: Arrays, report: Progress) -> tuple[Meta, Arrays]:
    """Run a step: {load, warmup_s, duration_s, max_in_flight, think, seed, repeat, objectives}.

    Returns:
        {measurement, begin, failure}; the measurement lacks the server's side, and is None where the run ended in the
        warm-up; begin is in seconds of time.monotonic().
    """
    return _StepRun(meta, report).run(), {}


class _StepRun:
    """One step, once."""

    def __init__(self, meta: Meta, report: Progress) -> None:
        self._meta = meta
        self._report = report
        self._load = Load.model_validate(meta["load"])
        self._begin = time.monotonic() + _LEAD_S + meta["warmup_s"]
        end = self._begin + meta["duration_s"]
        objectives = parse_objectives(meta["objectives"])
        cells = [(cell.bucket, cell.batch) for cell in _state.cells]
        self._recorder = Recorder(cells, objectives, self._begin, end)
        self._work = Work(
            sender=_state.sender,
            requests=iter(_state.sequence),
            cells=[cell.name for cell in _state.cells],
            tolerance=_state.tolerance,
            has_batch_axis=_state.is_batched,
            think=tuple(meta["think"]),
            thinking=random.Random(meta["seed"]),
            arrivals=gevent.queue.Queue(),
            on_sent=self._recorder.add_sent,
        )
        users = user_class(self._work, self._load.kind, _state.protocol)
        self._environment = Environment(user_classes=[users])
        self._runner = self._environment.create_local_runner()
        self._environment.events.request.add_listener(self._on_request)
        self._environment.events.user_error.add_listener(self._on_defect)
        self._moments = poisson_arrivals(
            self._load.start, self._load.end, meta["warmup_s"], meta["duration_s"], meta["seed"]
        )
        self._is_behind = False
        self._defect: Exception | None = None
        self._probe = LoopProbe()

    def run(self) -> Meta:
        """See `_run`."""
        meta, load, runner = self._meta, self._load, self._runner
        if load.kind == "open":
            arrivals = gevent.spawn(offer_arrivals, self._work, self._moments, self._begin)
            runner.start(meta["max_in_flight"], spawn_rate=meta["max_in_flight"])
        else:
            runner.start(int(load.start), spawn_rate=load.start)
        failure = self._pass_time(self._begin, "warm-up")
        cpu_before, started = _cpu_s(), time.monotonic()
        probe = gevent.spawn(self._probe.watch)
        if failure is None:
            self._report({"phase": "begin"})
            self._ramp()
            failure = self._pass_time(self._recorder.end, "measurement")
        ended = time.monotonic()
        cpu = (_cpu_s() - cpu_before) / max(ended - started, 1e-9)
        probe.kill()
        if failure is not None:
            self._recorder.end = ended
        self._report({"phase": "end"})
        self._work.is_sending = False
        if load.kind == "open":
            # What would be offered only during the wait for answers was late for want of time, not of a connection.
            arrivals.kill()
        self._drain()
        if load.kind == "open":
            self._count_unsent()
        self._environment.stop_timeout = None
        runner.quit()
        if self._defect is not None:
            raise self._defect
        measurement = self._measurement(ended - self._begin, cpu) if ended > self._begin else None
        return {"measurement": measurement, "begin": self._begin, "failure": failure}

    def _ramp(self) -> None:
        """A closed loop's change of users; they leave when their request is answered."""
        start, end = self._load.start, self._load.end
        if self._load.kind == "closed" and start != end:
            self._environment.stop_timeout = _state.endpoint.timeout_s
            self._runner.start(int(end), spawn_rate=abs(end - start) / self._meta["duration_s"])

    def _pass_time(self, until: float, phase: str) -> str | None:
        """Let the users work until a moment; the reason where the server is gone before it."""
        reported = 0.0
        while (now := time.monotonic()) < until:
            broken = self._recorder.broken_since
            if broken is not None and now - broken > _GONE_S:
                return f"no connection for {_GONE_S:g} s"
            if now - reported >= 1:
                done = {"requests": self._recorder.requests, "ok": self._recorder.ok}
                self._report({"phase": phase, "left_s": round(until - now), **done})
                reported = now
            gevent.sleep(min(_TICK_S, until - now))
        return None

    def _drain(self) -> None:
        """Wait for the last answers; each has its own timeout."""
        latest = time.monotonic() + _state.endpoint.timeout_s + 1
        while self._work.in_flight and time.monotonic() < latest:
            gevent.sleep(0.01)

    def _count_unsent(self) -> None:
        """Arrivals that no user took, and those that this process was too slow to offer before the end."""
        recorder, requests = self._recorder, self._work.requests
        for _ in range(self._work.arrivals.qsize()):
            recorder.add_unsent(
                next(requests).cell, self._work.arrivals.get(), "all connections were busy until the end"
            )
        for moment in self._moments:
            if self._begin + moment >= recorder.end:
                break
            recorder.add_unsent(next(requests).cell, self._begin + moment, "the client was too slow to send it")
            self._is_behind = True

    def _on_request(self, outcome: Outcome, **_: object) -> None:
        try:
            self._recorder.add(outcome)
        except Exception as err:
            self._on_defect(err)

    def _on_defect(self, exception: Exception, **_: object) -> None:
        """Locust logs what goes wrong in users and listeners and goes on; an incomplete count is worth nothing."""
        self._defect = self._defect or exception

    def _measurement(self, duration_s: float, cpu: float) -> Meta:
        recorder = self._recorder
        total = recorder.total()
        throughput, samples_per_s = recorder.throughput(duration_s)
        first, between = recorder.streamed() if _state.endpoint.is_streamed else (None, None)
        measured = Measurement(
            repeat=self._meta["repeat"],
            duration_s=round(duration_s, 3),
            requests=recorder.requests,
            ok=recorder.ok,
            throughput=throughput,
            samples_per_s=samples_per_s,
            latency=total.latency,
            service=recorder.service(),
            first=first,
            between=between,
            errors=recorder.errors(),
            service_levels=total.service_levels,
            cells=recorder.cells(),
            timeline=recorder.timeline(),
            server=ServerSide(models=(), seconds=(), tokens=None, missing=""),
            client=self._client_side(cpu, total.latency),
        )
        return measured.model_dump(mode="json")

    def _client_side(self, cpu: float, latency: Latency) -> ClientSide:
        lag_ms = self._probe.lag_ms()
        p99_ms = latency.percentiles_ms.get("p99", float("inf"))
        is_slow = self._is_behind or cpu > _BUSY or lag_ms > _LAG_SHARE * p99_ms
        return ClientSide(cpu=cpu, lag_ms=lag_ms, is_saturated=is_slow)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


SERVICE: dict[str, Handler] = {"open": _open, "load": _load, "run": _run}
