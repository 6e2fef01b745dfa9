"""SIGTERM and SIGHUP unwind a command like Ctrl-C, so that nothing is left behind.

Python drops an exception that a signal handler raises inside an import hook or a weak reference's callback, so the
signal is remembered too, and raised again at the command's next report.
"""

from __future__ import annotations

import signal
from types import FrameType

_arrived: list[int] = []


class Terminated(BaseException):
    """The signal arrived.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def install() -> None:
    """Handle the signals from now on; one that is ignored, as under nohup, stays so."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _on_signal)


def raise_if_arrived() -> None:
    """Raise Terminated where a signal arrived and its exception was lost."""
    if _arrived:
        raise Terminated(_arrived[0])


def _on_signal(number: int, _: FrameType | None) -> None:
    _arrived.append(number)
    raise Terminated(number)
