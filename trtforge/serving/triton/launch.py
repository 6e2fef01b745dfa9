"""Become the server: tie this process to its parent, pin it to cores, and replace it by a program.

Run as a script with one argument, a JSON object: `command`, `cpus` (null leaves them as they are), `lifeline` (a pipe's
read end whose only writer is the parent) and `parent`. The kernel sends SIGTERM when the parent is gone, and whoever
it was that started the server, the server stops and takes the processes of its models with it. It is a script and no
`preexec_fn`, because Python may not run between fork and exec in a process with threads.
"""

import fcntl
import json
import os
import select
import signal
import sys
from typing import NoReturn


def launch(command: list[str], cpus: list[int] | None, lifeline: int, parent: int) -> NoReturn:
    """Replace this process by the command."""
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    os.set_inheritable(lifeline, True)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGTERM)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | fcntl.FASYNC)
    poll = select.poll()
    poll.register(lifeline, 0)
    if os.getppid() != parent or poll.poll(0):
        os._exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    launch(**json.loads(sys.argv[1]))
