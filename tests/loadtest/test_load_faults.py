"""Load tests that cannot begin, or that are interrupted."""

from __future__ import annotations

import http.server
import importlib.util
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_checks import Watch
from run_cases import make_run
from served import serve

from trtforge.errors import InputError
from trtforge.loadtest.results import load_run
from trtforge.serving.triton.environment import TritonInstall

TRAFFIC = "model: double\nlengths: [{min: 4, max: 8}]\n"


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_unreachable_server_is_refused(watch: Watch, closed_port: int, protocol: str) -> None:
    (watch.folder / "traffic.yaml").write_text(TRAFFIC)
    url = f"{protocol}://127.0.0.1:{closed_port}"
    err = watch.refusal(["loadtest", url, "--traffic", "traffic.yaml", "-o", "out"])
    assert f"127.0.0.1:{closed_port} did not answer" in err


class _Api(http.server.BaseHTTPRequestHandler):
    """Answers everything with the same JSON value."""

    value = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.value)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.mark.parametrize("value", ["[]", "{}", '{"name": "double", "inputs": [{}]}'])
def test_server_of_something_else_is_named(watch: Watch, value: str) -> None:
    (watch.folder / "traffic.yaml").write_text(TRAFFIC)
    handler = type("_Handler", (_Api,), {"value": value.encode()})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as api:
        thread = threading.Thread(target=api.serve_forever)
        thread.start()
        try:
            err = watch.refusal(["loadtest", f"127.0.0.1:{api.server_port}", "--traffic", "traffic.yaml"])
        finally:
            api.shutdown()
            thread.join()
    assert "does not speak KServe v2" in err


def test_more_connections_than_the_system_allows_are_refused(triton_install: TritonInstall, tmp_path: Path) -> None:
    (tmp_path / "traffic.yaml").write_text(TRAFFIC)
    with serve(triton_install, tmp_path, "double") as server:
        code = "import sys; from trtforge.cli.app import main; main()"
        command = [sys.executable, "-c", code, "loadtest", server.http, "--traffic", "traffic.yaml"]
        limited = ["sh", "-c", 'ulimit -n 256 && exec "$@"', "sh", *command, "--concurrency", "400"]
        done = subprocess.run(limited, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "400 connections at a time cannot be opened" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--protocol", "tcp"], "known: http, grpc"),
        (["--concurrency", "1,x"], "--concurrency '1,x' cannot be used"),
        (["--concurrency", "1.5"], "whole numbers above 0"),
        (["--rate", "0"], "numbers above 0"),
        (["--duration", "0"], "greater than or equal to 1"),
        (["--slo", "p98=1ms"], "'p98' is not known"),
        (["--baseline", "nowhere.json"], "run nowhere.json does not exist"),
        (["-o", "full"], "it holds mine.txt"),
        (["-o", "traffic.yaml"], "it is not a folder"),
    ],
)
def test_options_that_cannot_be_used_are_refused(watch: Watch, arguments: list[str], words: str) -> None:
    (watch.folder / "traffic.yaml").write_text(TRAFFIC)
    (watch.folder / "full").mkdir()
    (watch.folder / "full" / "mine.txt").write_text("mine")
    err = watch.refusal(["loadtest", "127.0.0.1:1", "--traffic", "traffic.yaml", *arguments])
    assert words in err


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("failure", "the server was gone", "baseline old.json ended early"),
        ("schema_version", 2, "it has schema version 2"),
        ("steps", [{}], "missing key 'steps.0.load'"),
    ],
)
def test_baseline_that_cannot_be_used_is_refused(watch: Watch, field: str, value: object, words: str) -> None:
    (watch.folder / "traffic.yaml").write_text(TRAFFIC)
    old = {**make_run().model_dump(mode="json"), field: value}
    (watch.folder / "old.json").write_text(json.dumps(old))
    err = watch.refusal(["loadtest", "127.0.0.1:1", "--traffic", "traffic.yaml", "--baseline", "old.json"])
    assert words in err


def test_more_right_answers_than_requests_are_no_run(tmp_path: Path) -> None:
    document = make_run().model_dump(mode="json")
    one = document["steps"][0]["measurements"][0]
    one["ok"] = one["requests"] + 1
    (tmp_path / "run.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match="requests have a right answer"):
        load_run(tmp_path)


def test_full_disk_is_found_before_the_test(watch: Watch) -> None:
    (watch.folder / "traffic.yaml").write_text(TRAFFIC)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    try:
        err = watch.refusal(["loadtest", "127.0.0.1:1", "--traffic", "traffic.yaml", "-o", "out"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "out cannot be written" in err
    assert "free some space" in err


def test_missing_extra_names_its_install_line(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without_locust(name: str, package: str | None = None) -> Any:
        return None if name == "locust" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_locust)
    (watch.folder / "traffic.yaml").write_text(TRAFFIC)
    err = watch.refusal(["loadtest", "127.0.0.1:1", "--traffic", "traffic.yaml"])
    assert "'locust' is not installed" in err
    assert "pip install 'trtforge[serving]'" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_test_leaves_no_file_and_no_process(
    triton_install: TritonInstall, tmp_path: Path, number: signal.Signals
) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "traffic.yaml").write_text(TRAFFIC + "duration_s: 600\n")
    with serve(triton_install, tmp_path, "double") as server:
        code = "import sys; from trtforge.cli.app import main; main()"
        arguments = ["loadtest", server.http, "--traffic", "traffic.yaml", "-o", "out"]
        command = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        children = _wait_for_load(command.pid, int(server.http.rpartition(":")[2]))
        os.kill(command.pid, number)
        _, err = command.communicate(timeout=60)
    gone, alive = psutil.wait_procs(children, timeout=30)
    assert gone and not alive
    assert sorted(path.name for path in folder.iterdir()) == ["traffic.yaml"]
    if number is signal.SIGINT:
        assert command.returncode == 130
        assert b"nothing was left behind" in err


def _wait_for_load(pid: int, port: int) -> list[psutil.Process]:
    """The children of a command, once one of them is connected to the server."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        children = psutil.Process(pid).children(recursive=True)
        for child in children:
            if any(one.raddr and one.raddr.port == port for one in child.net_connections("inet")):
                return children
        time.sleep(0.05)
    pytest.fail("the load test did not begin")
