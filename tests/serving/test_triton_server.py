"""The real server as a child process: ports, failures in its own words, and an end that leaves nothing."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from command_checks import Watch
from packaging_cases import make_artifact

from trtforge.errors import ChildDiedError, InputError, UnavailableError
from trtforge.packaging import PackageSpec, package
from trtforge.serving.triton import server as server_module
from trtforge.serving.triton.client import TritonClient
from trtforge.serving.triton.environment import TRITON_VERSION, TritonInstall
from trtforge.serving.triton.log import failed_models, failure_in, is_stuck, ports_are_taken
from trtforge.serving.triton.server import LOOPBACK, TritonServer

# Seconds for what takes one or two where the machine does nothing else.
PATIENCE_S = 60.0
SHARED_MEMORY = Path("/dev/shm")
# Lines of a log, without what comes before the file's name.
FAILED = (
    r"""E1201 08:23:41.3 20046 model_lifecycle.cc:642] "failed to load 'bad' version 1: Internal: ValueError: """
    r"""no such file: \"x.onnx\"\n\nAt:\n  /models/bad/1/model.py(3): initialize\n" """.rstrip()
    + "\nerror: creating server: Internal - failed to load all models\n"
)
TAKEN = (
    'E1201 08:23:47.9 20241 main.cc:245] "failed to start GRPC service: '
    "Unavailable - Socket '127.0.0.1:18101' already in use \"\n"
)
NO_LIBRARY = (
    "/t/backends/python/triton_python_backend_stub: error while loading shared libraries: libpython3.12.so.1.0: "
    "cannot open shared object file: No such file or directory\n"
)
BROKEN_MODEL = """class TritonPythonModel:
    def initialize(self, args):
        raise ValueError("the weights are missing")
"""
CONFIG = 'name: "broken" backend: "python" input [{name: "x" data_type: TYPE_FP32 dims: [1]}] \
output [{name: "y" data_type: TYPE_FP32 dims: [1]}] instance_group [{kind: KIND_CPU}]'
CRASHES_ONCE = """#!/bin/sh
if mkdir {mark} 2>/dev/null; then
    echo "terminate called after throwing an instance of 'boost::interprocess::lock_exception'"
    echo "  what():  boost::interprocess::lock_exception"
    kill -ABRT $$
fi
exec {binary} "$@"
"""
START = """
import sys, time
from pathlib import Path
from trtforge.serving.triton.environment import find_triton
from trtforge.serving.triton.server import TritonServer
server = TritonServer(find_triton([Path(sys.argv[1])]), Path(sys.argv[2]), log=Path(sys.argv[3]))
server.wait_ready()
print(server.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("server")
    make_artifact(folder / "dynamic")
    package(PackageSpec(artifacts=(folder / "dynamic",), repository=folder / "models", cpu=True))
    return folder / "models"


@pytest.fixture
def in_use() -> Iterator[int]:
    """A port that this process listens on."""
    with socket.create_server((LOOPBACK, 0)) as taken:
        yield taken.getsockname()[1]


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_failures_are_read_from_the_log() -> None:
    assert failed_models(FAILED) == {
        "bad": 'Internal: ValueError: no such file: "x.onnx" At: /models/bad/1/model.py(3): initialize'
    }
    assert failure_in(FAILED) == f"model bad: {failed_models(FAILED)['bad']}"
    assert failure_in(TAKEN) == "failed to start GRPC service: Unavailable - Socket '127.0.0.1:18101' already in use"
    assert failure_in('I1201 08:23:41.0 1 server.cc:604] "all is well"\n') is None
    assert (failure_in(NO_LIBRARY) or "").startswith("error while loading shared libraries: libpython3.12")
    assert is_stuck(NO_LIBRARY)
    assert not is_stuck(FAILED)
    assert failure_in("/t/bin/tritonserver: unrecognized option '--no'\nUsage:\n") == "unrecognized option '--no'"
    assert failure_in("terminate called without an active exception\nSignal (6) received.\n") == (
        "terminate called without an active exception; Signal (6) received."
    )
    assert ports_are_taken(TAKEN)
    assert not ports_are_taken(FAILED)


def test_it_starts_on_free_ports_of_loopback_and_stops_with_its_models(
    triton_install: TritonInstall, repository: Path, tmp_path: Path
) -> None:
    core = min(os.sched_getaffinity(0))
    with TritonServer(triton_install, repository, log=tmp_path / "log", cpus=[core]) as server:
        server.wait_ready()
        with TritonClient(server.http) as client:
            assert client.server()["version"] == triton_install.version
        processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        assert len(processes) > 1
        assert [process.cpu_affinity() for process in processes] == [[core]] * len(processes)
        assert server.is_alive()
        hosts = {
            c.laddr.ip.removeprefix("::ffff:")
            for c in psutil.Process(server.pid).net_connections()
            if c.status == psutil.CONN_LISTEN
        }
        assert hosts == {LOOPBACK}
    assert not server.is_alive()
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)
    server.stop()


def test_the_version_of_the_wheel_is_what_the_server_says(triton_install: TritonInstall) -> None:
    if triton_install.python is None:
        pytest.skip("this server is NVIDIA's own, not the wheel's")
    assert triton_install.version == TRITON_VERSION


def test_a_model_that_fails_to_load_is_named_with_its_reason(triton_install: TritonInstall, tmp_path: Path) -> None:
    (tmp_path / "models/broken/1").mkdir(parents=True)
    (tmp_path / "models/broken/1/model.py").write_text(BROKEN_MODEL)
    (tmp_path / "models/broken/config.pbtxt").write_text(CONFIG)
    with TritonServer(triton_install, tmp_path / "models", log=tmp_path / "log") as server:
        with pytest.raises(UnavailableError) as caught:
            server.wait_ready()
        assert server.failed_models()["broken"].startswith("Internal: ValueError: the weights are missing")
    assert "model broken: Internal: ValueError: the weights are missing" in caught.value.why
    assert not server.is_alive()


def test_a_server_that_waits_for_a_process_that_is_gone_is_ended(triton_install: TritonInstall, tmp_path: Path) -> None:
    (tmp_path / "models/broken/1").mkdir(parents=True)
    (tmp_path / "models/broken/config.pbtxt").write_text(CONFIG)
    with (
        TritonServer(triton_install, tmp_path / "models", log=tmp_path / "log") as server,
        pytest.raises(UnavailableError) as caught,
    ):
        server.wait_ready()
    assert "Python model file not found" in caught.value.why


def test_a_port_in_use_is_refused(triton_install: TritonInstall, repository: Path, tmp_path: Path, in_use: int) -> None:
    with pytest.raises(InputError) as caught:
        TritonServer(triton_install, repository, log=tmp_path / "log", grpc_port=in_use)
    assert f"127.0.0.1:{in_use}" in caught.value.what
    assert "in use" in caught.value.why
    assert not (tmp_path / "log").exists()


def test_another_port_is_taken_where_a_free_one_is_lost_before_the_server_has_it(
    triton_install: TritonInstall, repository: Path, tmp_path: Path, in_use: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose, chosen = server_module._choose_ports, []

    def choose_taken_first(*arguments: object) -> tuple[int, ...]:
        ports = choose(*arguments)
        chosen.append(ports)
        return ports if len(chosen) > 1 else (ports[0], in_use, ports[2])

    monkeypatch.setattr(server_module, "_choose_ports", choose_taken_first)
    with TritonServer(triton_install, repository, log=tmp_path / "log") as server:
        server.wait_ready()
        assert server.grpc == f"127.0.0.1:{chosen[1][1]}"
    assert len(chosen) == 2


def test_a_server_that_crashed_by_chance_is_started_again(
    triton_install: TritonInstall, repository: Path, tmp_path: Path
) -> None:
    # A lock_exception comes about once in a hundred starts; here it comes the first time.
    program = tmp_path / "tritonserver"
    program.write_text(CRASHES_ONCE.format(mark=tmp_path / "mark", binary=triton_install.binary))
    program.chmod(0o755)
    crashing = dataclasses.replace(triton_install, binary=program)
    with TritonServer(crashing, repository, log=tmp_path / "log") as server:
        server.wait_ready()
        assert (tmp_path / "mark").is_dir()
        assert server.ending() is None
    assert server.ending() is not None


def test_a_killed_server_is_noticed_and_takes_its_models_with_it(
    triton_install: TritonInstall, repository: Path, tmp_path: Path
) -> None:
    with TritonServer(triton_install, repository, log=tmp_path / "log") as server:
        server.wait_ready()
        children = psutil.Process(server.pid).children(recursive=True)
        assert list(SHARED_MEMORY.glob(f"{server._memory_prefix}*"))
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: not server.is_alive())
        with pytest.raises(UnavailableError, match="did not start") as caught:
            server.wait_ready()
        assert "SIGKILL" in caught.value.why
        wait_until(lambda: not any(child.is_running() for child in children))
        assert not list(SHARED_MEMORY.glob(f"{server._memory_prefix}*"))


def test_a_server_that_is_not_ready_in_time_is_stopped(
    triton_install: TritonInstall, repository: Path, tmp_path: Path
) -> None:
    with TritonServer(triton_install, repository, log=tmp_path / "log") as server:
        with pytest.raises(ChildDiedError, match="not ready within 0 s"):
            server.wait_ready(timeout_s=0)
        assert not server.is_alive()


def test_it_ends_with_the_process_that_started_it(
    triton_install: TritonInstall, repository: Path, tmp_path: Path
) -> None:
    arguments = [sys.executable, "-c", START, triton_install.root, repository, tmp_path / "log"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        server = psutil.Process(int(parent.stdout.readline()))
        assert server.is_running()
        parent.kill()
    wait_until(lambda: not server.is_running())


def test_a_core_that_is_not_there_is_refused(triton_install: TritonInstall, repository: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cores"):
        TritonServer(triton_install, repository, log=tmp_path / "log", cpus=[100_000])


def test_serve_refuses_what_is_no_repository(triton_install: TritonInstall, watch: Watch) -> None:
    message = watch.refusal(["triton", "serve", "nothing", "--triton-env", str(triton_install.root)])
    assert "nothing is no model repository" in message


def test_serve_takes_numbers_of_cores(triton_install: TritonInstall, watch: Watch) -> None:
    (watch.folder / "models").mkdir()
    command = ["triton", "serve", "models", "--cpus", "all", "--triton-env", str(triton_install.root)]
    assert "--cpus 'all' cannot be used" in watch.refusal(command)


def test_serve_runs_until_it_is_interrupted(triton_install: TritonInstall, repository: Path, tmp_path: Path) -> None:
    ports = [str(port) for port in server_module._choose_ports(LOOPBACK, (None, None, None))]
    options = zip(("--http-port", "--grpc-port", "--metrics-port"), ports, strict=True)
    command = [sys.executable, "-m", "trtforge.cli.app", "triton", "serve", str(repository)]
    command += ["--triton-env", str(triton_install.root), *(part for option in options for part in option)]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as serve:
        assert serve.stdout is not None
        lines = []
        while "READY" not in "".join(lines[-1:]):
            lines.append(serve.stdout.readline())
            assert lines[-1], serve.communicate()[1]
        assert f"http://127.0.0.1:{ports[0]}\n" in "".join(lines)
        children = psutil.Process(serve.pid).children(recursive=True)
        serve.send_signal(signal.SIGINT)
        _, errors = serve.communicate(timeout=PATIENCE_S)
    assert serve.returncode == 130
    assert "interrupted" in errors
    assert not any(child.is_running() for child in children)
    assert list(tmp_path.iterdir()) == []
