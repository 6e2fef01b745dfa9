"""The Locust users of a step. In a closed loop each sends its own requests; in an open one they take arrivals.

Every request goes through Locust's `request` event, where the recorder listens.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import gevent
import gevent.queue
import gevent.socket
from locust import User, task
from locust.exception import StopUser

from trtforge.loadtest.answers import difference
from trtforge.loadtest.arrivals import PreciseTimer
from trtforge.loadtest.recorder import Outcome
from trtforge.loadtest.request import Request
from trtforge.loadtest.senders import Reply, Sender, SendError
from trtforge.loadtest.sequence import Prepared

# Seconds that a user waits after a refused connection: a server that is gone answers at once.
_BACK_OFF_S = 0.1


@dataclasses.dataclass(slots=True)
class Work:
    """What the users of a step share.

    Attributes:
        sender: sends.
        requests: the sequence, which all users take from.
        cells: names of the cells, for Locust's own statistics.
        tolerance: of answers, see answers.py.
        has_batch_axis: of the model.
        think: seconds between an answer and the next request, from and to.
        thinking: decides the think times.
        arrivals: of the open loop: when the next request was to be sent.
        is_sending: False after the end.
        in_flight: requests on their way.
        on_sent: told of the moment at which each request is sent.
    """

    sender: Sender
    requests: Iterator[Prepared]
    cells: Sequence[str]
    tolerance: float
    has_batch_axis: bool
    think: tuple[float, float]
    thinking: random.Random
    arrivals: gevent.queue.Queue
    on_sent: Callable[[float], None]
    is_sending: bool = True
    in_flight: int = 0

    def send(self, user: User, protocol: str, intended: float | None) -> None:
        """Send the next request, look at its answer, and tell Locust.

        Args:
            user: that sends.
            protocol: for Locust's own statistics.
            intended: when it was to be sent, seconds of time.monotonic(); None means now.
        """
        prepared = next(self.requests)
        sent = time.monotonic()
        self.on_sent(sent)
        self.in_flight += 1
        reply, failure = Reply(None, 0), None
        try:
            reply = self.sender.send(prepared.wire)
        except SendError as err:
            failure = err
        done = time.monotonic()
        self.in_flight -= 1
        failure = failure or self._judge(reply, prepared.request)
        begin = sent if intended is None else intended
        user.environment.events.request.fire(
            request_type=protocol,
            name=self.cells[prepared.cell],
            response_time=(done - begin) * 1000,
            response_length=reply.num_bytes,
            # Locust keeps every error that differs from the others, with all that it refers to.
            exception=None if failure is None else failure.kind,
            context={},
            outcome=Outcome(prepared.cell, begin, sent, done, failure, reply.moments),
        )
        if failure is not None and failure.kind == "unreachable":
            gevent.sleep(_BACK_OFF_S)

    def _judge(self, reply: Reply, request: Request) -> SendError | None:
        if not request.expected:
            return None
        try:
            outputs = self.sender.outputs(reply, list(request.expected))
        except Exception as err:  # what the server sent may be anything
            return SendError("server", f"the answer cannot be read: {type(err).__name__}: {err}")
        wrong = difference(outputs, request.expected, self.tolerance, self.has_batch_axis)
        return None if wrong is None else SendError("wrong answer", wrong)


class _ClosedUser(User):
    """Sends, waits for the answer, thinks, and sends again."""

    abstract = True
    work: Work
    protocol: str

    def wait_time(self) -> float:
        """Its think time."""
        low, high = self.work.think
        return self.work.thinking.uniform(low, high) if high else 0.0

    @task
    def send_next(self) -> None:
        """One request."""
        if not self.work.is_sending:
            raise StopUser
        self.work.send(self, self.protocol, None)


class _OpenUser(User):
    """Takes the next arrival, and sends its request at once."""

    abstract = True
    work: Work
    protocol: str

    def wait_time(self) -> float:
        """It never rests: the arrivals pace it."""
        return 0.0

    @task
    def send_next(self) -> None:
        """One request."""
        intended = self.work.arrivals.get()
        if not self.work.is_sending:
            self.work.arrivals.put(intended)
            raise StopUser
        self.work.send(self, self.protocol, intended)


def user_class(work: Work, kind: Literal["closed", "open"], protocol: str) -> type[User]:
    """The class of a step's users, for Locust's Environment."""
    base = _OpenUser if kind == "open" else _ClosedUser
    return type("TrafficUser", (base,), {"work": work, "protocol": protocol, "abstract": False})


def offer_arrivals(work: Work, moments: Iterator[float], begin: float) -> None:
    """Put each arrival into the users' queue when its moment comes; ends with the last one.

    Args:
        work: of the users.
        moments: seconds since `begin`.
        begin: of the measurement, seconds of time.monotonic().
    """
    with PreciseTimer(gevent.socket.wait_read) as timer:
        for moment in moments:
            try:
                timer.wait_until(begin + moment)
            finally:
                # Also where this is ended while it waits: an arrival that was taken from `moments` is counted.
                work.arrivals.put(begin + moment)
