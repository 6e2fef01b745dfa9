"""Load tests of a real Triton server."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from command_checks import Watch
from gevent import monkey
from served import address_of, serve
from support import save_onnx

from trtforge.errors import InputError
from trtforge.load_testing import LoadTest, run_load_test
from trtforge.loadtest.arrivals import poisson_arrivals
from trtforge.loadtest.results import Load, Measurement, load_run
from trtforge.loadtest.session import LoadSession
from trtforge.loadtest.traffic import Traffic
from trtforge.progress import Event
from trtforge.serving.triton.environment import TritonInstall
from trtforge.serving.triton.server import TritonServer

LENGTHS = [{"min": 4, "max": 8, "weight": 3}, {"min": 9, "max": 16}]
CLOSED, OPEN = Load(kind="closed", start=4, end=4), Load(kind="open", start=40, end=40)


@pytest.fixture(scope="module")
def server(triton_install: TritonInstall, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with serve(triton_install, tmp_path_factory.mktemp("served")) as running:
        yield running


def traffic_of(model: str, **values: Any) -> Traffic:
    lengths = [] if model in ("stream", "words") else LENGTHS
    short = {"duration_s": 1, "warmup_s": 0.3, "distinct": 16}
    return Traffic.model_validate({"model": model, "lengths": lengths, **short, **values})


def measure(
    server: TritonServer, traffic: Traffic, load: Load, protocol: str = "http", folder: Path = Path(), **options: Any
) -> Measurement:
    with LoadSession(address_of(server, protocol), traffic, folder, **options) as session:
        result = session.run_step(load)
    assert result.failure is None
    assert result.measurement is not None
    return result.measurement


@pytest.fixture
def doubling(tmp_path: Path) -> Path:
    """x -> 2 x, as the served model has it."""
    return save_onnx(
        tmp_path / "double.onnx",
        "double (float[batch, n] x) => (float[batch, n] y) { y = Mul(x, two) }",
        two=np.array(2, np.float32),
    )


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_closed_loop_counts_right_answers_in_client_and_server(
    server: TritonServer, doubling: Path, protocol: str
) -> None:
    traffic = traffic_of("double", batch={1: 1, 4: 1}, expect={"model": "double.onnx"})
    one = measure(server, traffic, CLOSED, protocol, doubling.parent, objectives=["p99=60s", "p50=1us"])
    assert one.ok == one.requests > 0
    assert one.errors == ()
    assert one.latency.count == one.service.count == one.ok
    assert one.latency.hdr == one.service.hdr
    assert {(cell.bucket, cell.batch) for cell in one.cells} == {("4-8", 1), ("4-8", 4), ("9-16", 1), ("9-16", 4)}
    assert sum(cell.requests for cell in one.cells) == one.requests
    assert [level.is_met for level in one.service_levels] == [True, False]
    assert [level.share for level in one.service_levels] == [1.0, 0.0]
    assert one.samples_per_s > one.throughput > 0
    assert sum(second.sent for second in one.timeline) == sum(second.ok for second in one.timeline) >= one.ok
    assert all(0 <= second.in_flight <= 4 for second in one.timeline)
    (work,) = one.server.models
    # The server is asked a moment after each end of the measurement.
    assert work.inferences > 0
    assert sum(int(size) * count for size, count in work.batch_sizes.items()) == work.inferences
    assert work.compute_ms is not None
    assert work.failures == 0
    assert one.server.missing == ""
    assert sum(second.requests for second in one.server.seconds) > 0
    assert one.server.seconds[-1].cpu is not None
    assert one.client.cpu > 0
    assert not monkey.is_module_patched("socket")  # Locust's changes stay in its process


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_wrong_answers_are_errors_and_no_throughput(server: TritonServer, doubling: Path, protocol: str) -> None:
    traffic = traffic_of("faulty", expect={"model": "double.onnx"})
    one = measure(server, traffic, CLOSED, protocol, doubling.parent)
    (error,) = one.errors
    assert error.kind == "wrong answer"
    assert "relative error of 0.5" in error.example
    assert error.count == one.requests - one.ok
    # Every fourth request of the server is wrong; at the ends of the measurement a few more or fewer.
    assert abs(error.count - one.requests / 4) <= 5
    assert one.latency.count == one.ok
    assert one.throughput * one.duration_s <= one.ok + 4


def test_every_arrival_of_an_open_loop_counts(server: TritonServer) -> None:
    traffic = traffic_of("double", seed=5)
    one = measure(server, traffic, OPEN)
    meant = [moment for moment in poisson_arrivals(40, 40, 0.3, 1, 5) if moment >= 0]
    assert one.requests == len(meant)
    assert one.ok + sum(error.count for error in one.errors) == one.requests


def test_arrivals_that_the_client_is_too_slow_for_count(server: TritonServer) -> None:
    rate = 20_000
    one = measure(server, traffic_of("double", warmup_s=0, seed=5), Load(kind="open", start=rate, end=rate))
    assert one.requests == len(list(poisson_arrivals(rate, rate, 0, 1, 5)))
    assert one.ok + sum(error.count for error in one.errors) == one.requests
    assert "the client was too slow to send it" in {error.text for error in one.errors}
    assert one.client.is_saturated


def test_model_that_fails_now_and_then_is_measured(server: TritonServer) -> None:
    one = measure(server, traffic_of("flaky"), CLOSED)
    assert {error.kind for error in one.errors} == {"server"}
    # One in three; at the ends of the measurement a few more or fewer.
    assert abs(one.ok - 2 * one.requests / 3) <= 5


def test_open_loop_charges_waiting_to_the_server(server: TritonServer) -> None:
    traffic = traffic_of("slow", max_in_flight=2, warmup_s=0)
    one = measure(server, traffic, OPEN)
    # One request at a time, a tenth of a second each: most of the 40 a second wait on connections.
    assert one.latency.mean_ms is not None and one.service.mean_ms is not None
    assert one.latency.mean_ms > 1.2 * one.service.mean_ms
    unsent = sum(error.count for error in one.errors if error.kind == "not sent")
    assert unsent > one.requests / 3
    assert one.ok + unsent == one.requests
    assert one.throughput <= 11


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_timeouts_are_told_apart(server: TritonServer, protocol: str) -> None:
    one = measure(server, traffic_of("slow", timeout_s=0.05), Load(kind="closed", start=1, end=1), protocol)
    assert one.ok == 0
    assert one.throughput == 0
    assert {error.kind for error in one.errors} == {"timeout"}
    assert one.latency.percentiles_ms == {}


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_refusals_of_the_server_are_told_apart(server: TritonServer, protocol: str) -> None:
    one = measure(server, traffic_of("crowded"), Load(kind="closed", start=6, end=6), protocol)
    assert one.ok > 0
    (error,) = one.errors
    assert error.kind == "server"
    assert "Exceeds maximum queue size" in error.text
    assert error.count == one.requests - one.ok


def test_streams_have_a_first_answer_and_time_between(server: TritonServer) -> None:
    traffic = traffic_of("stream", inputs={"count": {"min": 3, "max": 3}})
    one = measure(server, traffic, Load(kind="closed", start=1, end=1), "grpc")
    assert one.first is not None and one.between is not None
    assert one.first.count == one.ok > 0
    assert one.between.count == 2 * one.ok
    # Three answers, each after a hundredth of a second of sleep.
    assert one.between.mean_ms is not None and one.between.mean_ms > 5
    assert one.first.mean_ms is not None and one.latency.mean_ms is not None
    assert one.first.mean_ms < one.latency.mean_ms


def test_texts_of_a_file_are_sent_by_length(server: TritonServer, tmp_path: Path) -> None:
    lines = ["one", "one two three", "a b c d e f"]
    (tmp_path / "texts.txt").write_text("\n".join(lines))
    np.savez(tmp_path / "counts.npz", words=np.array([[1], [3], [6]], np.int32))
    traffic = traffic_of(
        "words",
        inputs={"text": {"file": "texts.txt"}},
        lengths=[{"min": 1, "max": 3}, {"min": 4, "max": 8}],
        expect={"file": "counts.npz"},
        batch=2,
    )
    one = measure(server, traffic, CLOSED, folder=tmp_path)
    assert one.ok == one.requests > 0
    assert [cell.bucket for cell in one.cells] == ["1-3", "4-8"]
    assert all(cell.requests for cell in one.cells)


def test_samples_and_their_answers(server: TritonServer, tmp_path: Path) -> None:
    x = np.arange(20, dtype=np.float32).reshape(5, 4)
    np.savez(tmp_path / "short.npz", x=x)
    np.savez(tmp_path / "long.npz", x=np.tile(x, 3))
    np.savez(tmp_path / "right.npz", y=2 * x)
    np.savez(tmp_path / "wrong.npz", y=np.tile(x, 3))
    samples = [{"file": "short.npz", "expect": "right.npz"}, {"file": "long.npz", "expect": "wrong.npz"}]
    one = measure(server, traffic_of("double", samples=samples, lengths=[], batch=3), CLOSED, folder=tmp_path)
    short, long = one.cells
    assert (short.bucket, long.bucket) == ("short", "long")
    assert short.ok == short.requests > 0
    assert long.ok == 0 < long.requests


def test_ramp_of_users_grows_in_the_measurement(server: TritonServer) -> None:
    traffic = traffic_of("slow", duration_s=3)
    one = measure(server, traffic, Load(kind="closed", start=1, end=4))
    in_flight = {second.second: second.in_flight for second in one.timeline}
    assert in_flight[-1] <= 1
    assert in_flight[2] > 1


def test_server_that_dies_ends_the_run_and_keeps_what_was_measured(
    triton_install: TritonInstall, tmp_path: Path
) -> None:
    (tmp_path / "traffic.yaml").write_text(
        "model: double\nlengths: [{min: 4, max: 8}]\nload: {users: [2, 3]}\nduration_s: 60\nwarmup_s: 0.2\n"
    )
    with serve(triton_install, tmp_path / "served", "double") as dying:
        address = dying.http

        def kill(event: Event) -> None:
            if "measurement, " in event.detail and ", 0 of 0" not in event.detail and dying.is_alive():
                os.kill(dying.pid, signal.SIGKILL)

        test = LoadTest(url=address, traffic=tmp_path / "traffic.yaml", output=tmp_path / "out")
        result = run_load_test(test, kill)
    assert result.run.failure is not None
    assert "2 users, batch 1" in result.run.failure
    assert result.problems[0] == result.run.failure
    (step,) = result.run.steps
    (one,) = step.measurements
    assert 0 < one.ok < one.requests
    assert one.duration_s < 60
    assert one.errors[0].kind == "unreachable"
    assert load_run(tmp_path / "out") == result.run


def test_client_that_dies_keeps_what_was_measured(server: TritonServer, tmp_path: Path) -> None:
    (tmp_path / "traffic.yaml").write_text(
        "model: double\nlengths: [{min: 4, max: 8}]\nload: {users: [2, 3]}\nduration_s: 1\nwarmup_s: 0\n"
    )
    before = set(psutil.Process().children())

    def kill(event: Event) -> None:
        if event.detail.startswith("3 users"):
            for child in set(psutil.Process().children()) - before:
                child.kill()

    result = run_load_test(LoadTest(url=server.http, traffic=tmp_path / "traffic.yaml"), kill)
    assert result.run.failure is not None
    assert result.run.failure.startswith("the client died in '3 users, batch 1'")
    assert [step.key for step in result.run.steps] == ["2 users, batch 1"]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_proxy_for_the_web_is_not_asked(server: TritonServer, monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "grpc_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    one = measure(server, traffic_of("double"), CLOSED, protocol)
    assert one.ok == one.requests > 0
    assert one.server.missing == ""


def test_grpc_port_spoken_to_in_http_is_named(server: TritonServer, watch: Watch) -> None:
    (watch.folder / "traffic.yaml").write_text("model: double\nlengths: [{min: 4, max: 8}]\n")
    err = watch.refusal(["loadtest", server.grpc, "--traffic", "traffic.yaml"])
    assert "the address is that of its http port" in err


def test_folder_that_was_taken_meanwhile_loses_no_result(server: TritonServer, tmp_path: Path) -> None:
    (tmp_path / "traffic.yaml").write_text("model: double\nlengths: [{min: 4, max: 8}]\nduration_s: 1\nwarmup_s: 0\n")
    folder = tmp_path / "out"

    def take(_: Event) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "mine.txt").write_text("mine")

    result = run_load_test(LoadTest(url=server.http, traffic=tmp_path / "traffic.yaml", output=folder), take)
    assert result.run.steps[0].measurements[0].ok > 0
    assert result.problems == (f"{folder} is not the folder of a run, so it is not touched: it holds mine.txt",)
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]


def test_command_writes_a_run_and_compares_it(server: TritonServer, watch: Watch) -> None:
    (watch.folder / "traffic.yaml").write_text("model: double\nlengths: [{min: 4, max: 8}]\nwarmup_s: 0.2\n")
    command = ["loadtest", server.http, "--traffic", "traffic.yaml", "--duration", "1", "--metrics", server.metrics]
    code, out, err = watch.run([*command, "--concurrency", "1,2", "--slo", "p99=5s", "-o", "first"])
    assert code == 0, err
    assert "1 user, batch 1" in out
    assert "no coordinated omission" in out
    run = load_run(watch.folder / "first")
    assert [step.key for step in run.steps] == ["1 user, batch 1", "2 users, batch 1"]
    assert run.model.config is not None and run.model.config["max_batch_size"] == 8
    assert (watch.folder / "first" / "report.html").read_text().startswith("<!doctype html>")
    again = [*command, "--concurrency", "2", "--baseline", "first", "-o", "second", "--json"]
    code, out, err = watch.run(again)
    document = json.loads(out)
    assert document["passed"] is (code == 0), err
    assert [step["load"]["start"] for step in document["steps"]] == [2.0]
    assert {change["step"] for change in document["comparison"]["changes"]} == {"2 users, batch 1"}


def test_command_fails_where_answers_are_wrong(server: TritonServer, watch: Watch, doubling: Path) -> None:
    (watch.folder / "traffic.yaml").write_text(
        f"model: faulty\nlengths: [{{min: 4, max: 8}}]\nwarmup_s: 0.2\nexpect: {{model: {doubling}}}\n"
    )
    code, out, err = watch.run(["loadtest", server.http, "--traffic", "traffic.yaml", "--duration", "1"])
    assert code == 1
    assert "wrong answers" in err
    assert "wrong answer: output y has a relative error" in out


def test_command_prints_a_few_of_many_kinds_of_errors(server: TritonServer, watch: Watch) -> None:
    (watch.folder / "traffic.yaml").write_text("model: flaky\nlengths: [{min: 4, max: 8}]\nwarmup_s: 0\n")
    code, out, err = watch.run(["loadtest", server.http, "--traffic", "traffic.yaml", "--duration", "1"])
    assert code == 0, err
    assert out.count(" x server: ") == 5
    assert "more kinds of errors" in out


REFUSED = {
    "model: nothing": "it has: crowded, double, faulty, flaky, picky, slow, stream, words",
    "model: double": "add `lengths` to it",
    "model: double\nbatch: 9\nlengths: [{min: 4, max: 8}]": "its max_batch_size is 8",
    "model: double\ninputs: {z: {min: 1}}": "it takes x FP32 [-1]",
    "model: double\noutputs: [z]": "it gives y",
    "model: double\nversion: '7'\nlengths: [{min: 4, max: 8}]": "loaded: 1",
    "model: double\ninputs: {x: {shape: [2, 2]}}": "shape [2, 2] of input 'x' does not fit",
    "model: double\ninputs: {x: {file: traffic.yaml}}": "which is no text",
    "model: stream": "HTTP does not carry",
    "model: double\nsamples: [{file: short.npz}]": "short.npz of the traffic file cannot be read",
    "model: double\nexpect: {model: lost.onnx}": "lost.onnx of the traffic file cannot be read",
}


@pytest.mark.parametrize("text", REFUSED)
def test_traffic_that_does_not_fit_is_refused(server: TritonServer, watch: Watch, text: str) -> None:
    (watch.folder / "traffic.yaml").write_text(text)
    err = watch.refusal(["loadtest", server.http, "--traffic", "traffic.yaml", "-o", "out"])
    assert REFUSED[text] in err


def test_every_batch_size_is_tried_before_the_first_measurement(server: TritonServer, tmp_path: Path) -> None:
    (tmp_path / "traffic.yaml").write_text(
        "model: picky\nlengths: [{min: 4, max: 4}]\nbatch: [1, 4]\nduration_s: 1\nwarmup_s: 0\n"
    )
    stages = []
    with pytest.raises(InputError, match="the server refuses requests of length 4, batch 4") as caught:
        run_load_test(
            LoadTest(url=server.http, traffic=tmp_path / "traffic.yaml"), lambda event: stages.append(event.stage)
        )
    assert "too many elements" in caught.value.why
    assert set(stages) == {"requests"}


def test_request_that_the_server_refuses_ends_the_test_before_it_begins(server: TritonServer, watch: Watch) -> None:
    # The batch axis is the model's own, and a request of two counts has a shape that it does not take.
    (watch.folder / "traffic.yaml").write_text(
        "model: stream\ninputs: {count: {shape: [1], min: -1000000, max: -1000000}}\n"
    )
    err = watch.refusal(["loadtest", f"grpc://{server.grpc}", "--traffic", "traffic.yaml"])
    assert "the stream ended without an answer" in err
