"""How late the client's own event loop is: what it adds to the latencies that it measures."""

from __future__ import annotations

import time

import gevent
import gevent.socket

from trtforge.loadtest.arrivals import PreciseTimer
from trtforge.loadtest.distribution import Distribution

_PERIOD_S = 0.02


class LoopProbe:
    """Asks to be woken 50 times a second, and counts how late it is."""

    def __init__(self) -> None:
        self._late = Distribution()

    def watch(self) -> None:
        """Runs in a greenlet of its own until it is killed."""
        with PreciseTimer(gevent.socket.wait_read) as timer:
            while True:
                moment = time.monotonic() + _PERIOD_S
                timer.wait_until(moment)
                # Users that may send wait for their turn in this queue.
                gevent.sleep(0)
                self._late.record(time.monotonic() - moment)

    def lag_ms(self) -> float:
        """The 99th percentile; 0 where nothing was counted."""
        return self._late.summarize().percentiles_ms.get("p99", 0.0)
