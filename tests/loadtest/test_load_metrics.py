"""What the server says of itself: its statistics of models, and its Prometheus metrics."""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from trtforge.loadtest import metrics
from trtforge.loadtest.metrics import MetricsWatch, Reading, read_metrics, timeline, tokens_between
from trtforge.loadtest.statistics import work_between

# As Triton 2.51 prints them; the GPU's as in its documentation, and the tokens as the text front counts them.
_PAGE = """# HELP nv_inference_request_success Number of successful inference requests, all batch sizes
# TYPE nv_inference_request_success counter
nv_inference_request_success{model="minilm",version="1"} %(requests)d
nv_inference_request_success{model="minilm_b8",version="1"} %(requests)d
nv_inference_request_success{model="other",version="1"} 1%(requests)d
# TYPE nv_inference_request_failure counter
nv_inference_request_failure{model="minilm",reason="OTHER",version="1"} 1
nv_inference_request_failure{model="minilm",reason="REJECTED",version="1"} 2
# TYPE nv_inference_count counter
nv_inference_count{model="minilm",version="1"} %(inferences)d
# TYPE nv_inference_exec_count counter
nv_inference_exec_count{model="minilm",version="1"} %(executions)d
# TYPE nv_inference_queue_duration_us counter
nv_inference_queue_duration_us{model="minilm",version="1"} %(queue_us)d
# TYPE nv_inference_compute_infer_duration_us counter
nv_inference_compute_infer_duration_us{model="minilm",version="1"} 0
# TYPE nv_inference_pending_request_count gauge
nv_inference_pending_request_count{model="minilm",version="1"} 5
# TYPE nv_gpu_utilization gauge
nv_gpu_utilization{gpu_uuid="GPU-1"} 0.5
# TYPE nv_gpu_memory_used_bytes gauge
nv_gpu_memory_used_bytes{gpu_uuid="GPU-1"} 1000
nv_gpu_memory_used_bytes{gpu_uuid="GPU-0"} 2000
# TYPE nv_cpu_utilization gauge
nv_cpu_utilization NaN
# TYPE trtforge_text_tokens_total counter
trtforge_text_tokens_total{bucket="8",kind="real",model="minilm"} %(real)d
trtforge_text_tokens_total{bucket="16",kind="real",model="minilm"} 1
trtforge_text_tokens_total{bucket="8",kind="padding",model="minilm"} %(padding)d
"""
_ZERO = {"requests": 0, "inferences": 0, "executions": 0, "queue_us": 0, "real": 0, "padding": 0}


class Page(http.server.ThreadingHTTPServer):
    """Serves one text."""

    text = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/metrics"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Page)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.server.text.encode())

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def page() -> Iterator[Page]:
    with Page(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def readings(page: Page, *figures: dict[str, int]) -> list[Reading]:
    taken = []
    for one in figures:
        page.text = _PAGE % {**_ZERO, **one}
        taken.append(read_metrics(page.url, ("minilm", "minilm_b8")))
    return taken


def test_counters_become_a_timeline_of_the_models_that_take_part(page: Page) -> None:
    taken = readings(page, {}, {"requests": 10, "inferences": 30, "executions": 5, "queue_us": 40_000})
    (second,) = timeline(taken, taken[0].moment - 1)
    assert second.second == 1
    # Front and bucket model both count a request.
    assert second.requests == 20
    assert second.failures == 0
    assert second.mean_batch == 6
    assert second.queue_ms == 2
    assert second.compute_ms == 0
    assert second.pending == 5
    assert second.cpu is None
    assert list(second.gpus) == ["GPU-0", "GPU-1"]
    assert second.gpus["GPU-1"].utilization == 0.5
    assert (second.gpus["GPU-0"].memory_bytes, second.gpus["GPU-0"].utilization) == (2000, None)


def test_second_without_requests_has_no_means(page: Page) -> None:
    (second,) = timeline(readings(page, {}, {}), 0.0)
    assert (second.requests, second.mean_batch, second.queue_ms) == (0, None, None)


def test_tokens_are_those_between_the_readings(page: Page) -> None:
    taken = readings(page, {"real": 100, "padding": 50}, {"real": 150, "padding": 70}, {"real": 175, "padding": 75})
    tokens = tokens_between(taken)
    assert tokens is not None
    assert (tokens.real, tokens.padded) == (75, 100)
    assert tokens.padding_share == 0.25
    assert tokens_between(taken[:1]) is None


def test_counter_of_a_server_that_began_again_is_no_negative_work(page: Page) -> None:
    (second,) = timeline(readings(page, {"requests": 10}, {"requests": 3}), 0.0)
    assert second.requests == 0


def test_watch_gives_the_readings_around_a_span(page: Page) -> None:
    page.text = _PAGE % _ZERO
    begin = time.monotonic()
    with MetricsWatch(page.url, ("minilm",)) as watch:
        found = watch.between(begin, begin + 1.2, wait_s=30)
        assert watch.problem == ""
        assert watch.gpus() == ("GPU-0", "GPU-1")
    assert len(found) >= 2
    assert found[-1].moment >= begin + 1.2 > found[-2].moment


def test_page_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stop = threading.Event()
        thread = threading.Thread(target=_drip, args=(listener, stop))
        thread.start()
        try:
            with pytest.raises(TimeoutError, match=r"the page took longer than 0\.5 s"):
                read_metrics(f"http://127.0.0.1:{listener.getsockname()[1]}/metrics", ())
        finally:
            stop.set()
            thread.join()


def _drip(listener: socket.socket, stop: threading.Event) -> None:
    """Answers one request with a letter now and then."""
    connection, _ = listener.accept()
    with connection, contextlib.suppress(OSError):
        connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
        while not stop.wait(0.1):
            connection.sendall(b"a")


def test_watch_says_why_there_are_no_metrics(page: Page) -> None:
    page.text = "no metrics {"
    with MetricsWatch(page.url, ()) as watch:
        assert watch.between(0, 0, wait_s=0) == []
        deadline = time.monotonic() + 30
        while not watch.problem and time.monotonic() < deadline:
            time.sleep(0.02)
    assert watch.problem.startswith(f"{page.url} cannot be read: ")
    assert "give --metrics URL" in MetricsWatch(None, ()).problem


def _statistics(requests: int, batches: dict[int, int], queue_ns: int) -> dict[str, object]:
    count = {"count": requests, "ns": queue_ns}
    return {
        "inference_count": sum(size * number for size, number in batches.items()),
        "execution_count": sum(batches.values()),
        "inference_stats": {"queue": count, "success": count, "fail": {"count": 1, "ns": 5}},
        "batch_stats": [{"batch_size": size, "compute_infer": {"count": n, "ns": 9}} for size, n in batches.items()],
    }


def test_statistics_are_the_work_between_two_readings() -> None:
    before = {"m": _statistics(10, {1: 10}, 1_000_000), "idle": _statistics(3, {1: 3}, 0)}
    after = {"m": _statistics(40, {1: 20, 4: 5}, 61_000_000), "idle": _statistics(3, {1: 3}, 0)}
    (work,) = work_between(before, after)
    assert work.name == "m"
    assert (work.inferences, work.executions, work.failures) == (30, 15, 0)
    assert work.batch_sizes == {"1": 10, "4": 5}
    assert work.queue_ms == 2
    assert work.compute_ms is None


def test_model_under_test_is_listed_even_where_it_did_nothing() -> None:
    same = {"m": _statistics(3, {1: 3}, 0)}
    (work,) = work_between(same, same)
    assert (work.executions, work.queue_ms) == (0, None)
    assert work_between({}, same) == ()
