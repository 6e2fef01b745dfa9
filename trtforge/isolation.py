"""A Python child process that serves calls, for native code that may crash and models that nobody trusts.

Parent and child share nothing but the frames of frames.py: a child taken over by a hostile model can give wrong
numbers, but it cannot run code in the parent, nor make it allocate more than `MAX_REPLY_BYTES`.

The child never outlives the parent, not even inside a native call that holds the interpreter's lock: the kernel sends
it SIGKILL when the lifeline pipe loses its last writer, which only the parent holds. A process that the parent forks
without exec would hold it too, so the child also asks for SIGKILL at its parent's death; as Linux means the creating
*thread* by that, only a child made by the main thread asks.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import faulthandler
import fcntl
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import numpy.typing as npt

from trtforge import errors
from trtforge.errors import BuildError, ChildDiedError, Diagnosis, InternalError, TrtForgeError
from trtforge.frames import Arrays, BadFrameError, GoneError, LateError, Meta, pack_frame, read_frame, write_buffers

__all__ = ["Arrays", "Child", "Handler", "Meta", "Progress", "serve"]

Progress = Callable[[Meta], None]
Handler = Callable[[Meta, Arrays, Progress], tuple[Meta, Arrays]]

# Bytes of arrays in one reply: above the largest batch of activations that `Limits.data_bytes` lets in.
MAX_REPLY_BYTES = 16 * 2**30
# Linux lets an unprivileged process have pipes of 1 MiB (/proc/sys/fs/pipe-max-size).
_PIPE_BYTES = 2**20
# Linux prctl(2).
_PR_SET_PDEATHSIG = 1
# Bytes at the end of the child's log that an error may quote, and lines of them.
_TAIL_BYTES = 4096
_TAIL_LINES = 4

_ERRORS = {name: cls for name, cls in vars(errors).items() if isinstance(cls, type) and issubclass(cls, TrtForgeError)}
# What faulthandler writes at a crash starts with this; it is for the log, not for a one-line quote.
_CRASH_REPORT = "Fatal Python error"
_MORE_MEMORY = "close other programs, lower the largest shapes, or use a machine with more memory"
_BOOTSTRAP = "import sys,json;c=json.loads(sys.argv[1]);sys.path[:]=c['path'];import trtforge.isolation as i;i.serve(c)"


class Child:
    """A running child process that serves the calls of one service.

    It starts at once, so that its imports overlap with the parent's own work. Use it as a context manager.

    Args:
        service: "package.module:NAME", where NAME is a `dict[str, Handler]`; the module's state lives between calls.
        purpose: what an error calls the process, e.g. "engine build"; by default the module's name.
        log: file to which everything that the child prints is appended, native prints too; by default it is dropped.
        env: environment variables to set in the child only.

    Raises:
        ChildDiedError: the process cannot be started or the log cannot be opened.
    """

    def __init__(
        self, service: str, *, purpose: str = "", log: Path | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        self.purpose = purpose or service.partition(":")[0].rpartition(".")[2]
        self.log = log
        self._last_progress: Meta = {}
        self._stopped = False
        self._lock = threading.RLock()
        with ExitStack() as on_error, ExitStack() as child_ends:
            try:
                self._start(service, env, on_error, child_ends)
            except OSError as err:
                raise ChildDiedError(
                    f"the {self.purpose} process cannot be started",
                    f"{err.strerror}{f': {err.filename}' if err.filename else ''}",
                    "free memory, disk space or file handles and try again",
                ) from err
            on_error.pop_all()

    def _start(
        self, service: str, env: Mapping[str, str] | None, parent_ends: ExitStack, child_ends: ExitStack
    ) -> None:
        def open_pipe() -> tuple[FileIO, FileIO]:
            read, write = map(_above_standard_streams, os.pipe())
            with suppress(OSError):
                fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            return FileIO(read, "rb"), FileIO(write, "wb")

        requests, self._requests = open_pipe()
        self._replies, replies = open_pipe()
        lifeline, self._lifeline = open_pipe()
        for pipe in (self._requests, self._replies, self._lifeline):
            parent_ends.enter_context(pipe)
        for pipe in (requests, replies, lifeline):
            child_ends.enter_context(pipe)
        output = child_ends.enter_context((self.log or Path(os.devnull)).open("ab"))
        fds = [requests.fileno(), replies.fileno(), lifeline.fileno()]
        config = {
            "path": [os.fspath(entry) for entry in sys.path],
            "service": service,
            "fds": fds,
            "parent": os.getpid(),
            "in_main_thread": threading.current_thread() is threading.main_thread(),
        }
        # -P: without it the child would also import from the current directory.
        flags = ["-I" if sys.flags.isolated else "-P", "-u"]
        self._process = subprocess.Popen(
            [sys.executable, *flags, "-c", _BOOTSTRAP, json.dumps(config)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=fds,
            env=None if env is None else {**os.environ, **env},
        )

    @property
    def pid(self) -> int:
        """The process id, of a process that may have ended."""
        return self._process.pid

    def call(
        self,
        method: str,
        meta: Meta,
        arrays: Mapping[str, npt.NDArray[Any]] | None = None,
        on_progress: Progress | None = None,
        *,
        timeout_s: float | None = None,
    ) -> tuple[Meta, Arrays]:
        """Run one handler in the child and wait for its answer.

        Args:
            method: key of the service's dict.
            meta: a JSON object.
            arrays: numpy arrays, ml_dtypes types included.
            on_progress: called here with each object that the handler reports.
            timeout_s: seconds after which the child is killed; by default it may take forever.

        Returns:
            The handler's meta and arrays.

        Raises:
            TrtForgeError: the handler raised it; the same class, with the same text.
            InternalError: the handler raised any other exception; `detail` has the child's traceback.
            ChildDiedError: the child ended, ran out of memory, or did not answer in time. It is closed then.
            TypeError: an array's type cannot cross.
        """
        request = pack_frame("call", {"method": method, "meta": meta}, arrays or {})
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            if self._requests.closed:
                raise self._death()
            try:
                kind, answer, outputs = self._exchange(request, on_progress, deadline)
            except LateError as err:
                self.close()
                what = f"the {self.purpose} process did not answer within {timeout_s:g} s"
                raise ChildDiedError(what, self._circumstances(), "the model may trigger an endless loop") from err
            except BadFrameError as err:
                self.close()
                what = f"the {self.purpose} process sent an answer that trtforge does not accept"
                raise ChildDiedError(what, str(err), "do not trust this model") from err
            except GoneError as err:
                raise self._death() from err
            except BaseException:
                self.close()
                raise
        if kind == "error":
            raise self._error_from_answer(answer)
        return answer, outputs

    def _exchange(
        self, request: list[memoryview], on_progress: Progress | None, deadline: float | None
    ) -> tuple[str, Meta, Arrays]:
        write_buffers(self._requests, request)
        while True:
            kind, meta, arrays = read_frame(self._replies, MAX_REPLY_BYTES, deadline)
            if kind in {"result", "error"}:
                return kind, meta, arrays
            if kind != "progress":
                raise BadFrameError(f"a frame of kind {kind[:40]!r}")
            self._last_progress = meta
            if on_progress is not None:
                on_progress(meta)

    def kill(self) -> None:
        """End the child at once; a call that waits in another thread raises ChildDiedError."""
        self._stopped = True
        self._process.kill()

    def close(self) -> None:
        """End the child, wait for it and close the pipes; harmless when repeated."""
        self.kill()
        self._process.wait()
        # A call that waits in another thread has to leave the pipes first.
        with self._lock:
            for pipe in (self._requests, self._replies, self._lifeline):
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _death(self) -> ChildDiedError:
        """The error for a child that ended on its own, which is closed here."""
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            # It closed its pipe and lives on: as good as an end without an answer.
            code = 0
        was_stopped = self._stopped
        self.close()
        if was_stopped:
            return ChildDiedError(f"the {self.purpose} process was stopped", "trtforge ended it", "start it again")
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        if code == -signal.SIGKILL:
            what, why = f"was killed by signal {-code} ({name})", "usually the system ran out of memory"
            fix = _MORE_MEMORY
        elif code in {-signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT}:
            what, why = f"was ended by signal {-code} ({name})", "another program asked it to end"
            fix = "run the command again"
        elif code < 0:
            what, why = f"crashed with {name}", "native code failed while it worked on this model"
            fix = "check that the model is intact and runs elsewhere; if it does, this is a defect of a native library"
        else:
            what, why = f"exited with {code}", "it ended without an answer"
            fix = "this is a defect: report it together with the log"
        return ChildDiedError(f"the {self.purpose} process {what}", f"{why}{self._circumstances('; ')}", fix)

    def _error_from_answer(self, answer: Meta) -> TrtForgeError:
        if answer.get("class") != "MemoryError":
            return _error_from_meta(answer)
        why = f"its allocation failed{self._circumstances('; ')}"
        self.close()
        return ChildDiedError(f"the {self.purpose} process ran out of memory", why, _MORE_MEMORY)

    def _circumstances(self, prefix: str = "") -> str:
        """What the child said last: its last progress and the end of its log."""
        known = []
        if self._last_progress:
            known.append(f"last progress: {str(self._last_progress.get('phase', self._last_progress))[:200]}")
        if self.log is not None:
            with suppress(OSError), self.log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                text = log.read(_TAIL_BYTES).decode("utf-8", "replace")
                lines = text.partition(_CRASH_REPORT)[0].splitlines()
                printable = ["".join(c for c in line if c.isprintable())[:200] for line in lines if line.strip()]
                known += [f"{self.log.name} ends: {' | '.join(printable[-_TAIL_LINES:])}"] if printable else []
        return prefix + "; ".join(known) if known else ""


def _above_standard_streams(fd: int) -> int:
    """The same pipe end as 3 or higher: 0, 1 and 2 are free where the caller closed them, and are the child's own."""
    if fd > 2:
        return fd
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return moved


def _meta_from_error(error: BaseException, service: str) -> Meta:
    """A handler's exception as JSON; a class that errors.py does not know crosses as its nearest base."""
    if isinstance(error, TrtForgeError):
        name = next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _ERRORS)
        meta: Meta = {"class": name, "what": error.what, "why": error.why, "fix": error.fix}
        meta["diagnosis"] = None if error.diagnosis is None else dataclasses.asdict(error.diagnosis)
        return meta | {key: getattr(error, key) for key in ("node", "detail") if hasattr(error, key)}
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return {"class": "MemoryError"}
    detail = "".join(traceback.format_exception(error))
    what = f"{service} failed with {type(error).__name__}"
    return {"class": "InternalError", "what": what, "why": str(error), "fix": "report it", "detail": detail}


def _error_from_meta(meta: Meta) -> TrtForgeError:
    """The exception that `_meta_from_error` described; any other content gives a plain TrtForgeError."""
    texts = {key: str(meta.get(key, "")) for key in ("what", "why", "fix")}
    if meta.get("class") == "BuildError":
        node = None if meta.get("node") is None else str(meta["node"])
        return BuildError(**texts, node=node, diagnosis=_diagnosis_from_meta(meta.get("diagnosis")))
    if meta.get("class") == "InternalError":
        return InternalError(**texts, detail=str(meta.get("detail", "")))
    return _ERRORS.get(str(meta.get("class")), TrtForgeError)(**texts)


def _diagnosis_from_meta(meta: object) -> Diagnosis | None:
    """The diagnosis that crossed; of a child that was taken over it holds text and nothing else."""
    if not isinstance(meta, dict):
        return None
    texts = {key: str(meta.get(key, "")) for key in ("cause", "reason", "remedy", "op", "message")}
    shapes = meta.get("shapes")
    return Diagnosis(
        **texts,
        node=None if meta.get("node") is None else str(meta["node"]),
        shapes=tuple(map(str, shapes)) if isinstance(shapes, list) else (),
    )


def _tie_to_parent(lifeline: int, parent: int, in_main_thread: bool) -> None:
    """Have the kernel kill this process when the parent ends; see the module's docstring."""
    if in_main_thread:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | fcntl.FASYNC)
    poll = select.poll()
    poll.register(lifeline, 0)
    if os.getppid() != parent or poll.poll(0):
        os._exit(1)


def _flush_native_output() -> None:
    """What C code printed reaches the log before the parent ends this process with SIGKILL."""
    ctypes.CDLL(None).fflush(None)


def serve(config: Meta) -> NoReturn:
    """The child's main loop: read a call, run its handler, answer; ends when the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for fd in config["fds"]:
        os.set_inheritable(fd, False)
    requests, replies = FileIO(config["fds"][0], "rb"), FileIO(config["fds"][1], "wb")
    _tie_to_parent(config["fds"][2], config["parent"], config["in_main_thread"])
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        # 500 of 1000: the kernel, when out of memory, ends this process before the parent.
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")
    service = config["service"]
    handlers: Mapping[str, Handler] = {}
    failed_import: Exception | None = None
    try:
        module, _, name = service.partition(":")
        handlers = getattr(importlib.import_module(module), name)
    except Exception as err:
        failed_import = err
    writing = threading.Lock()

    def report_progress(meta: Meta) -> None:
        with writing:
            write_buffers(replies, pack_frame("progress", meta, {}))

    while True:
        try:
            _, request, arrays = read_frame(requests, sys.maxsize)
        except GoneError:
            os._exit(0)
        try:
            if failed_import is not None:
                raise failed_import
            reply = pack_frame("result", *handlers[request["method"]](request["meta"], arrays, report_progress))
        except Exception as err:
            reply = pack_frame("error", _meta_from_error(err, f"{service} {request['method']}"), {})
        del request, arrays
        _flush_native_output()
        with writing:
            write_buffers(replies, reply)
        del reply
