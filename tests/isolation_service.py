"""The service that test_isolation.py runs in its children."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import time
from pathlib import Path

import numpy as np

from trtforge.errors import BuildError, Diagnosis, InputError

_calls = []


class _OwnError(InputError):
    pass


def _echo(meta, arrays, progress):
    return meta, arrays


def _count(meta, arrays, progress):
    _calls.append(meta)
    return {"calls": len(_calls)}, {}


def _environment(meta, arrays, progress):
    stdin = os.fstat(0)
    return {
        "path": sys.path,
        "null_stdin": stdin.st_rdev == Path(os.devnull).stat().st_rdev,
        "variable": os.environ.get("TRTFORGE_TEST"),
        "oom_score_adj": Path("/proc/self/oom_score_adj").read_text().strip(),
    }, {}


def _report(meta, arrays, progress):
    for step in range(3):
        progress({"phase": "tactics", "step": step})
    return {}, {}


def _raise(meta, arrays, progress):
    if meta["kind"] == "build":
        diagnosis = Diagnosis("no-kernel", "the op is new", "update", "conv_7", "Conv", ("x float32[1]",), "no runner")
        raise BuildError("no kernel", "the op is new", "update", node="conv_7", diagnosis=diagnosis)
    if meta["kind"] == "subclass":
        raise _OwnError("bad", "because", "mend it")
    if meta["kind"] == "memory":
        raise MemoryError
    if meta["kind"] == "mmap":
        raise OSError(errno.ENOMEM, "Cannot allocate memory")
    raise ZeroDivisionError("deep inside")


def _crash(meta, arrays, progress):
    progress({"phase": "parsing weights"})
    print("python says hello")
    ctypes.CDLL(None).puts(b"native says hello")
    ctypes.CDLL(None).fflush(None)
    ctypes.string_at(0)


def _exit(meta, arrays, progress):
    os._exit(meta["code"])


def _signal(meta, arrays, progress):
    os.kill(os.getpid(), meta["signal"])
    return {"alive": True}, {}


def _sleep(meta, arrays, progress):
    progress({"phase": "asleep"})
    time.sleep(60)


def _hold_interpreter_lock(meta, arrays, progress):
    progress({"phase": "native"})
    ctypes.PyDLL(None).sleep(60)


def _write_raw(meta, arrays, progress):
    """Answer with bytes of the test's choice, as a child that was taken over could."""
    os.write(_reply_fd(), bytes(arrays["raw"]))
    time.sleep(60)


def _reply_fd():
    pipes = [fd for fd in range(3, 64) if _is_pipe(fd)]
    return pipes[1]


def _is_pipe(fd):
    try:
        return str(Path(f"/proc/self/fd/{fd}").readlink()).startswith("pipe:")
    except OSError:
        return False


def _return_objects(meta, arrays, progress):
    return {}, {"x": np.array([object()])}


SERVICE = {
    "echo": _echo,
    "count": _count,
    "environment": _environment,
    "report": _report,
    "raise": _raise,
    "crash": _crash,
    "exit": _exit,
    "signal": _signal,
    "sleep": _sleep,
    "hold_interpreter_lock": _hold_interpreter_lock,
    "write_raw": _write_raw,
    "return_objects": _return_objects,
}
