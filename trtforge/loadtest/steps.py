"""Run every step of a traffic file against one server, as often as it asks."""

from __future__ import annotations

import dataclasses
import math
import resource
from collections.abc import Callable, Iterator
from typing import Literal

from trtforge.errors import ChildDiedError, InputError, TrtForgeError, UnavailableError
from trtforge.frames import Meta
from trtforge.loadtest.results import Load, Measurement, Step
from trtforge.loadtest.session import LoadSession
from trtforge.loadtest.traffic import Ramp, Traffic
from trtforge.progress import Event, Reporter

STAGE = "load test"
# Files that the process opens beside its connections.
_OTHER_FILES = 64


@dataclasses.dataclass(frozen=True, slots=True)
class _Turn:
    """One measurement to make.

    Attributes:
        step: its place in the plan.
        load, batch: see `Step`.
        repeat: 1, 2, ...
        name: for people.
        number, total: of this measurement among all.
    """

    step: int
    load: Load
    batch: int | None
    repeat: int
    name: str
    number: int
    total: int


def loads_of(traffic: Traffic) -> Iterator[Load]:
    """The loads of a traffic file: closed ones first, in the file's order."""
    yield from (_load("closed", users) for users in traffic.load.users)
    yield from (_load("open", rate) for rate in traffic.load.rates)


def planned_steps(traffic: Traffic) -> list[str]:
    """The keys of the steps that a traffic file asks for."""
    return [Step(load=turn.load, batch=turn.batch, measurements=()).key for turn in _turns(traffic) if turn.repeat == 1]


def run_steps(session: LoadSession, traffic: Traffic, report: Reporter) -> tuple[tuple[Step, ...], str | None]:
    """Run all steps once, then all of them again, until the repeats are done.

    Args:
        session: with the model.
        traffic: its loads, batch sizes and times.
        report: takes progress.

    Returns:
        The steps with what was measured, and why the run ended early; None where it did not.

    Raises:
        InputError: requests cannot be made, or the server refuses them.
        UnavailableError: the server was gone before anything was measured.
    """
    _check_connections(traffic)
    for batch in traffic.batch_steps:
        report(Event("requests", "making requests and their right answers"))
        session.prepare(batch)
    measured: dict[int, list[Measurement]] = {}
    failure = None
    turns = list(_turns(traffic))
    for turn in turns:
        try:
            result = session.run_step(turn.load, turn.batch, repeat=turn.repeat, tell=_teller(turn, traffic, report))
        except TrtForgeError as err:
            if not measured:
                raise
            if isinstance(err, ChildDiedError):
                failure = f"the client died in {turn.name!r}: {err.what}"
            elif session.is_server_alive():
                raise
            else:
                failure = f"the server was gone before {turn.name!r}: {err.why}"
            break
        if result.measurement is not None:
            measured.setdefault(turn.step, []).append(result.measurement)
        if result.failure is not None:
            failure = f"the server stopped answering in {turn.name!r}: {result.failure}"
            break
    if not measured:
        fix = "see the server's log"
        raise UnavailableError("the server stopped answering before anything was measured", failure or "", fix)
    firsts = {turn.step: turn for turn in turns if turn.repeat == 1}
    steps = (
        Step(load=firsts[place].load, batch=firsts[place].batch, measurements=tuple(found))
        for place, found in sorted(measured.items())
    )
    return tuple(steps), failure


def _check_connections(traffic: Traffic) -> None:
    """Over HTTP each request on its way has a connection of its own, and the system bounds them."""
    largest = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    needed = max(
        traffic.max_in_flight if load.kind == "open" else int(max(load.start, load.end)) for load in loads_of(traffic)
    )
    if traffic.protocol == "http" and largest != resource.RLIM_INFINITY and needed > largest - _OTHER_FILES:
        why = f"a process may open {largest} files here"
        fix = "raise the limit with `ulimit -Hn`, test fewer users or lower `max_in_flight`, or use --protocol grpc"
        raise InputError(f"{needed} connections at a time cannot be opened", why, fix)


def _turns(traffic: Traffic) -> Iterator[_Turn]:
    plan = [(load, batch) for batch in traffic.batch_steps for load in loads_of(traffic)]
    total = len(plan) * traffic.repeats
    for number in range(total):
        repeat, place = number // len(plan) + 1, number % len(plan)
        load, batch = plan[place]
        key = Step(load=load, batch=batch, measurements=()).key
        name = key if traffic.repeats == 1 else f"{key}, repeat {repeat}"
        yield _Turn(place, load, batch, repeat, name, number, total)


def _teller(turn: _Turn, traffic: Traffic, report: Reporter) -> Callable[[Meta], None]:
    seconds = traffic.warmup_s + traffic.duration_s

    def tell(meta: Meta) -> None:
        detail = f"{turn.name}: {meta['phase']}, {meta['ok']} of {meta['requests']} answers right"
        left = meta["left_s"] + (traffic.duration_s if meta["phase"] == "warm-up" else 0)
        done = (turn.number + 1) * seconds - left
        report(Event(STAGE, detail, done=math.floor(done), total=math.ceil(turn.total * seconds)))

    return tell


def _load(kind: Literal["closed", "open"], level: float | Ramp) -> Load:
    if isinstance(level, Ramp):
        return Load(kind=kind, start=level.start, end=level.end)
    return Load(kind=kind, start=level, end=level)
