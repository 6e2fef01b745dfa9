"""Read a server's Prometheus metrics once a second, beside a load test, and make a timeline of them.

The names are Triton's. Counters are read as differences between two readings, gauges at the later one.
"""

from __future__ import annotations

import dataclasses
import http.client
import itertools
import math
import threading
import time
import urllib.request
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import Self

from trtforge.loadtest.server_side import GpuUse, ServerSecond, Tokens

_PERIOD_S = 1.0
_TIMEOUT_S = 2.0
# Bytes of a page; Triton's has about 3 kB a model.
_MAX_BYTES, _PART_BYTES = 16 * 2**20, 2**16
# The parser gives every counter the ending "_total", which Triton leaves out.
_REQUESTS, _FAILURES = "nv_inference_request_success_total", "nv_inference_request_failure_total"
_INFERENCES, _EXECUTIONS = "nv_inference_count_total", "nv_inference_exec_count_total"
_QUEUE, _COMPUTE = "nv_inference_queue_duration_us_total", "nv_inference_compute_infer_duration_us_total"
_PENDING, _CPU = "nv_inference_pending_request_count", "nv_cpu_utilization"
_OF_MODELS = (_REQUESTS, _FAILURES, _INFERENCES, _EXECUTIONS, _QUEUE, _COMPUTE, _PENDING)
_UTILIZATION, _MEMORY, _POWER = "nv_gpu_utilization", "nv_gpu_memory_used_bytes", "nv_gpu_power_usage"
# Of the text front (serving/python_models/text_model.py): tokens by kind, real or padding.
_TOKENS = "trtforge_text_tokens_total"
_REAL, _PADDING = "real", "padding"


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """One reading.

    Attributes:
        moment: seconds of time.monotonic().
        figures: by metric, summed over the models that take part; tokens by their kind.
        gpus: by the GPU's id.
    """

    moment: float
    figures: Mapping[str, float]
    gpus: Mapping[str, GpuUse]


class MetricsWatch:
    """Reads metrics in a thread until it is closed; use it as a context manager.

    Args:
        url: of the metrics; None reads nothing.
        models: whose figures count.

    Attributes:
        problem: why there are none; empty where there are.
    """

    def __init__(self, url: str | None, models: Collection[str]) -> None:
        self._url = url
        self._models = models
        self.problem = "" if url is not None else "no metrics port is known: give --metrics URL"
        self._readings: list[Reading] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def between(self, begin: float, end: float, wait_s: float) -> list[Reading]:
        """The readings of a span, with one before and one after it; those before are dropped.

        Args:
            begin, end: seconds of time.monotonic().
            wait_s: how long to wait for the one after.
        """
        deadline = time.monotonic() + (0.0 if self.problem else wait_s)
        while not any(one.moment >= end for one in self._readings) and time.monotonic() < deadline:
            time.sleep(_PERIOD_S / 20)
        before = sum(one.moment < begin for one in self._readings)
        del self._readings[: max(0, before - 1)]
        inside = sum(one.moment < end for one in self._readings)
        return self._readings[: inside + 1]

    def gpus(self) -> tuple[str, ...]:
        """Ids of the GPUs that the server has."""
        return tuple(self._readings[-1].gpus) if self._readings else ()

    def _watch(self) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            try:
                self._readings.append(read_metrics(self._url or "", self._models))
                self.problem = ""
            except (OSError, ValueError, http.client.HTTPException) as err:
                if not self._readings:
                    self.problem = f"{self._url} cannot be read: {getattr(err, 'reason', None) or err}"
            due = max(due + _PERIOD_S, time.monotonic())
            self._stop.wait(due - time.monotonic())

    def __enter__(self) -> Self:
        if self._url is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._url is not None:
            # A reading that hangs is left behind: the thread ends with the process.
            self._thread.join(2 * _TIMEOUT_S)


def read_metrics(url: str, models: Collection[str]) -> Reading:
    """The figures of a metrics page.

    Raises:
        OSError, HTTPException: it does not answer.
        ValueError: what it answers is no metrics page, or the URL is none.
    """
    from prometheus_client.parser import text_string_to_metric_families

    # A proxy for the web does not reach a server of the own network, nor this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=_TIMEOUT_S) as answer:
        text = _read_page(answer).decode("utf-8")
    moment = time.monotonic()
    figures: dict[str, float] = {}
    gpus: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            of_model = one.labels.get("model") in models
            if not math.isfinite(one.value):
                continue
            if one.name == _CPU or (one.name in _OF_MODELS and of_model):
                figures[one.name] = figures.get(one.name, 0.0) + one.value
            elif one.name == _TOKENS and of_model:
                kind = one.labels.get("kind", "")
                figures[kind] = figures.get(kind, 0.0) + one.value
            elif one.name in (_UTILIZATION, _MEMORY, _POWER):
                gpus.setdefault(one.labels.get("gpu_uuid", ""), {})[one.name] = one.value
    uses = {
        gpu: GpuUse(utilization=used.get(_UTILIZATION), memory_bytes=used.get(_MEMORY), power_w=used.get(_POWER))
        for gpu, used in sorted(gpus.items())
    }
    return Reading(moment, figures, uses)


def _read_page(answer: http.client.HTTPResponse) -> bytes:
    """The whole page; a server that sends it drop by drop would keep its reader for ever."""
    deadline = time.monotonic() + _TIMEOUT_S
    page = b""
    while part := answer.read1(_PART_BYTES):
        page += part
        if len(page) > _MAX_BYTES:
            raise ValueError(f"the page has more than {_MAX_BYTES} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError(f"the page took longer than {_TIMEOUT_S:g} s")
    return page


def timeline(readings: Sequence[Reading], begin: float) -> tuple[ServerSecond, ...]:
    """What happened between each two readings, by the second of the middle between them.

    Args:
        readings: in the order of time.
        begin: of the measurement, seconds of time.monotonic().
    """
    return tuple(
        _second(before, after, math.floor((before.moment + after.moment) / 2 - begin))
        for before, after in itertools.pairwise(readings)
    )


def tokens_between(readings: Sequence[Reading]) -> Tokens | None:
    """What a text front counted from the first reading to the last; None without one."""
    if len(readings) < 2 or _REAL not in readings[-1].figures:
        return None
    real, padding = (_growth(readings[0], readings[-1], kind) for kind in (_REAL, _PADDING))
    return Tokens(real=round(real), padded=round(real + padding))


def _growth(before: Reading, after: Reading, name: str) -> float:
    """Of a counter, which begins again at zero when its server starts again."""
    return max(0.0, after.figures.get(name, 0.0) - before.figures.get(name, 0.0))


def _second(before: Reading, after: Reading, second: int) -> ServerSecond:
    requests, executions = _growth(before, after, _REQUESTS), _growth(before, after, _EXECUTIONS)
    return ServerSecond(
        second=second,
        requests=round(requests),
        failures=round(_growth(before, after, _FAILURES)),
        mean_batch=_growth(before, after, _INFERENCES) / executions if executions else None,
        queue_ms=_growth(before, after, _QUEUE) / requests / 1000 if requests else None,
        compute_ms=_growth(before, after, _COMPUTE) / requests / 1000 if requests else None,
        pending=after.figures.get(_PENDING),
        cpu=after.figures.get(_CPU),
        gpus=dict(after.gpus),
    )
