"""Run a tool that starts processes of its own, such as CMake or compute-sanitizer."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import BinaryIO


def run_with_children(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: BinaryIO,
    seconds: float | None = None,
    keep: Sequence[int] = (),
) -> int:
    """The exit status. Whatever ends the wait ends the command and its children too.

    Args:
        command: program and arguments.
        environment: all of it.
        output: takes what is printed, on stdout and stderr.
        seconds: to wait; None waits for the end.
        keep: open files that the command holds as well, such as a lock.

    Raises:
        subprocess.TimeoutExpired: it took longer.
    """
    process = subprocess.Popen(
        command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, pass_fds=keep
    )
    try:
        return process.wait(seconds)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
