"""When the requests of an open loop are meant to arrive: a Poisson process, whatever the server does.

The rate r(t) is constant, or grows or falls evenly over the measurement. With the expected number of arrivals
R(t) = integral of r from 0 to t, the k-th arrival is at R^-1(e_1 + ... + e_k) for exponential e_i of mean 1.
"""

from __future__ import annotations

import ctypes
import math
import os
import random
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

# Linux timerfd_create(2) and timerfd_settime(2).
_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1


def poisson_arrivals(start: float, end: float, warmup_s: float, duration_s: float, seed: int) -> Iterator[float]:
    """Arrivals in seconds since the measurement began, ascending; those of the warm-up are negative.

    Args:
        start: requests per second in the warm-up and when the measurement begins.
        end: requests per second when it ends.
        warmup_s, duration_s: of the step.
        seed: equal seeds give equal arrivals.
    """
    random_ = random.Random(seed)
    slope = (end - start) / duration_s
    expected = 0.0
    while True:
        expected += random_.expovariate(1.0)
        in_measurement = expected - start * warmup_s
        if in_measurement < 0:
            yield in_measurement / start
            continue
        # start t + slope t^2 / 2 = in_measurement, solved without cancellation for small slopes.
        discriminant = start * start + 2 * slope * in_measurement
        if discriminant <= 0:
            return
        moment = 2 * in_measurement / (start + math.sqrt(discriminant))
        if moment >= duration_s:
            return
        yield moment


class _TimerSpec(ctypes.Structure):
    """struct itimerspec."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class PreciseTimer:
    """Waits for a moment to a few microseconds: an event loop's own timers are late by up to a millisecond.

    Use it as a context manager.

    Args:
        wait_readable: waits until a file descriptor can be read, and lets others run meanwhile.

    Raises:
        OSError: no file handle is left.
    """

    def __init__(self, wait_readable: Callable[[int], object]) -> None:
        self._wait_readable = wait_readable
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def wait_until(self, moment: float) -> None:
        """Return at `moment`, in seconds of `time.monotonic()`; at once where it has passed."""
        whole = int(moment)
        spec = _TimerSpec(0, 0, whole, int((moment - whole) * 1e9))
        self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None)
        self._wait_readable(self._fd)
        os.read(self._fd, 8)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)
