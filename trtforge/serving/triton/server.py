"""Run a Triton server on this machine: start it, wait until its models are ready, and stop it.

with TritonServer(find_triton(default_places()), Path("models"), log=Path("triton.log")) as server:
    server.wait_ready()
    TritonClient(server.http).infer("digits", feeds)
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from trtforge.errors import ChildDiedError, InputError, UnavailableError
from trtforge.serving.triton.environment import TritonInstall
from trtforge.serving.triton.log import crashed_by_chance, failed_models, failure_in, is_stuck, ports_are_taken
from trtforge.textfile import kind_of

LOOPBACK = "127.0.0.1"
# Seconds between two looks at a server that starts.
_POLL_S = 0.05
# Seconds that Triton itself waits for requests in flight, and that it gets to end altogether: it looks at its models
# once a second while they unload.
_EXIT_TIMEOUT_S = 5
_STOP_TIMEOUT_S = 20
# Free ports are looked for and given back before the server takes them, and another program may be faster.
_ATTEMPTS = 5
_SHARED_MEMORY = Path("/dev/shm")
_LAUNCH = Path(__file__).with_name("launch.py")


class TritonServer:
    """A server process; use it as a context manager.

    It starts at once. It ends with this process, whatever ends that.

    Args:
        install: the server to run.
        repository: the model repository. Its configurations are taken as they are written.
        log: takes what the server and its models print; replaced.
        host: the address to listen on.
        http_port: None takes a free one, as for the others.
        grpc_port: see `http_port`.
        metrics_port: see `http_port`.
        cpus: cores that the server and its models may use; None leaves all.
        cache_bytes: size of the local response cache; 0 means none.
        arguments: further options of `tritonserver`.

    Attributes:
        log: the file.

    Raises:
        InputError: no such repository, a port in use, or a core that is not there.
        UnavailableError: the server cannot be started, or has no response cache.
    """

    def __init__(
        self,
        install: TritonInstall,
        repository: Path,
        *,
        log: Path,
        host: str = LOOPBACK,
        http_port: int | None = None,
        grpc_port: int | None = None,
        metrics_port: int | None = None,
        cpus: Sequence[int] | None = None,
        cache_bytes: int = 0,
        arguments: Sequence[str] = (),
    ) -> None:
        self.log = log
        self._host = host
        self._given_ports = (http_port, grpc_port, metrics_port)
        self._cpus = None if cpus is None else _check_cpus(cpus)
        if kind_of(repository, "model repository") != "folder":
            raise InputError(f"{repository} is no model repository", "there is no such folder", "give its folder")
        if cache_bytes and "local" not in install.cache_names():
            raise UnavailableError(
                "this Triton server has no local response cache", f"not in {install.caches}", "leave the cache out"
            )
        self._memory_prefix = f"trtforge_{uuid.uuid4().hex}_"
        self._command = [
            str(install.binary),
            f"--model-repository={repository.absolute()}",
            f"--backend-directory={install.backends}",
            "--disable-auto-complete-config",
            f"--exit-timeout-secs={_EXIT_TIMEOUT_S}",
            f"--backend-config=python,shm-region-prefix-name={self._memory_prefix}",
            *([f"--cache-directory={install.caches}"] if install.caches is not None else []),
            *([f"--cache-config=local,size={cache_bytes}"] if cache_bytes else []),
            *arguments,
        ]
        self._environment = {**os.environ, **install.environment()}
        self._attempts = 0
        self._is_stopped = False
        self._start()

    @property
    def http(self) -> str:
        """Address of the HTTP service, e.g. `127.0.0.1:8000`; it may change until the server is ready."""
        return f"{self._reachable_host}:{self._ports[0]}"

    @property
    def grpc(self) -> str:
        """Address of the gRPC service."""
        return f"{self._reachable_host}:{self._ports[1]}"

    @property
    def metrics(self) -> str:
        """URL of the Prometheus metrics."""
        return f"http://{self._reachable_host}:{self._ports[2]}/metrics"

    @property
    def pid(self) -> int:
        """The process id, of a process that may have ended."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Wait until every model is loaded.

        Raises:
            UnavailableError: a model failed to load, or the server ended; carries its own words.
            ChildDiedError: it was not ready in time.
        """
        deadline = time.monotonic() + timeout_s
        while not self._is_ready():
            if not self.is_alive():
                self._restart_or_raise()
            elif is_stuck(self._log_text()):
                self._kill()
                self._restart_or_raise()
            elif time.monotonic() > deadline:
                self.stop()
                why = self.failure() or "its models take longer to load"
                what = f"the Triton server was not ready within {timeout_s:g} s"
                raise ChildDiedError(what, why, "give it more time, or look into its log")
            time.sleep(_POLL_S)

    def failure(self) -> str | None:
        """What the log says went wrong, in the server's own words; None where it says nothing."""
        return failure_in(self._log_text())

    def ending(self) -> str | None:
        """How the process ended; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        return f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"it exited with {code}"

    def failed_models(self) -> dict[str, str]:
        """Why models failed to load, by name, in the server's own words."""
        return failed_models(self._log_text())

    def stop(self) -> None:
        """End the server and its models' processes; harmless when repeated."""
        self._is_stopped = True
        if self.is_alive():
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_TIMEOUT_S)
        self._kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _reachable_host(self) -> str:
        return LOOPBACK if self._host == "0.0.0.0" else self._host

    def _start(self) -> None:
        self._attempts += 1
        self._ports = _choose_ports(self._host, self._given_ports)
        options = [f"--{service}-address={self._host}" for service in ("http", "grpc", "metrics")]
        options += [
            f"--{service}-port={port}" for service, port in zip(("http", "grpc", "metrics"), self._ports, strict=True)
        ]
        lifeline, self._lifeline = os.pipe()
        config = {
            "command": [*self._command, *options],
            "cpus": self._cpus,
            "lifeline": lifeline,
            "parent": os.getpid(),
        }
        try:
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_LAUNCH), json.dumps(config)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                    pass_fds=[lifeline],
                    process_group=0,
                )
        except OSError as err:
            os.close(self._lifeline)
            place = f": {err.filename}" if err.filename else ""
            raise UnavailableError("the Triton server cannot be started", f"{err.strerror}{place}") from err
        finally:
            os.close(lifeline)

    def _kill(self) -> None:
        """End what is left of the server's processes, and wait for the server; harmless when repeated."""
        if self._lifeline < 0:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._lifeline)
        self._lifeline = -1
        # A process of the Python backend that was killed leaves the memory that it shared with the server.
        for region in _SHARED_MEMORY.glob(f"{self._memory_prefix}*"):
            region.unlink(missing_ok=True)

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection(self._reachable_host, self._ports[0], timeout=5)
        try:
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status == http.client.OK and self.is_alive()
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _restart_or_raise(self) -> None:
        """Start again where another program took a port that was free before, or the server crashed by chance.

        Else say why it ended.
        """
        text = self._log_text()
        self._kill()
        if self._is_stopped:
            raise ChildDiedError("the Triton server was stopped", "trtforge ended it", "start it again")
        is_worth_it = crashed_by_chance(text) or (ports_are_taken(text) and None in self._given_ports)
        if is_worth_it and self._attempts < _ATTEMPTS:
            self._start()
            return
        why = failure_in(text) or self.ending() or ""
        fix = "mend that and start it again; the server's log has more"
        raise UnavailableError("the Triton server did not start", why, fix)

    def _log_text(self) -> str:
        with contextlib.suppress(OSError):
            return self.log.read_text(encoding="utf-8", errors="replace")
        return ""


def _check_cpus(cpus: Sequence[int]) -> list[int]:
    allowed = sorted(os.sched_getaffinity(0))
    if not cpus or not set(cpus) <= set(allowed):
        raise InputError(
            f"the server cannot be pinned to cores {list(cpus)}",
            f"the cores of this process are {', '.join(map(str, allowed))}",
            f"name some of them, e.g. {allowed[0]}",
        )
    return sorted(set(cpus))


def _choose_ports(host: str, given: Sequence[int | None]) -> tuple[int, ...]:
    """Ports for HTTP, gRPC and metrics: those given, which must be free, and free ones for the others.

    Raises:
        InputError: one is in use or given twice, or the host is not this machine's.
    """
    named = [port for port in given if port is not None]
    if len(set(named)) < len(named):
        raise InputError(f"the ports {named} are not all different", "each service needs its own", "give others")
    with contextlib.ExitStack() as stack:
        ports = []
        for port in given:
            probe = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            # As Triton does: a port whose connections are still winding down is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port or 0))
            except OSError as err:
                raise InputError(
                    f"the server cannot listen on {host}:{port or 0}",
                    err.strerror or str(err),
                    "give another port or address, or stop what uses it",
                ) from err
            ports.append(probe.getsockname()[1])
    return tuple(ports)
