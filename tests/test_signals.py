from __future__ import annotations

import os
import subprocess
import sys

import pytest

LOST = """
import os, signal, sys, weakref
from trtforge.cli import signals
from trtforge.cli.render import progress_reporter
from trtforge.progress import Event

class Thing: ...

def callback(_):
    os.kill(os.getpid(), signal.SIGTERM)

signals.install()
thing = Thing()
reference = weakref.ref(thing, callback)
del thing  # the handler's exception is dropped here
print("went on", flush=True)
try:
    with progress_reporter() as report:
        report(Event("build"))
except signals.Terminated as err:
    sys.exit(128 + err.number)
"""


def test_a_signal_whose_exception_python_dropped_is_raised_at_the_next_report() -> None:
    done = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, check=False)
    assert done.stdout == "went on\n"
    assert done.returncode == 143


@pytest.mark.skipif(os.name != "posix", reason="nohup is POSIX")
def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    code = "import os, signal; from trtforge.cli import signals; signals.install(); os.kill(os.getpid(), signal.SIGHUP)"
    command = ["nohup", sys.executable, "-c", code + "; print('alive')"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "alive\n"
