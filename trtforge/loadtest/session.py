"""One model of one server under load: ask what the model takes, make the requests, and run step after step.

    with LoadSession(address, traffic, folder) as session:
        step = session.run_step(Load(kind="closed", start=4, end=4), batch=1)

Locust runs in a child process. This one asks the server for its own view meanwhile.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from trtforge.errors import InputError, UnavailableError, missing_extra
from trtforge.frames import Arrays, Meta
from trtforge.isolation import Child
from trtforge.limits import DEFAULT_LIMITS, Limits
from trtforge.loadtest.address import Address
from trtforge.loadtest.answers import open_answers
from trtforge.loadtest.metrics import MetricsWatch, Reading, timeline, tokens_between
from trtforge.loadtest.payloads import RequestMaker
from trtforge.loadtest.request import RequestCell, pack_cells
from trtforge.loadtest.results import Load, Measurement
from trtforge.loadtest.server_side import ServerSide
from trtforge.loadtest.signature import read_signature
from trtforge.loadtest.statistics import Counters, models_behind, read_statistics, work_between
from trtforge.loadtest.traffic import DEFAULT_TOLERANCE, ThinkTime, Traffic
from trtforge.serving.triton.client import RequestError, TritonClient

_PACKAGES = ("hdrh", "locust", "prometheus_client", "tritonclient")
# Where a user has told Locust not to replace the standard library, users would block one another.
_ENV = {"LOCUST_SKIP_MONKEY_PATCH": ""}
_SERVICE = "trtforge.loadtest.worker:SERVICE"
# Seconds for an answer about the model.
_ASK_S = 10.0
# Seconds after a measurement in which the last reading of the metrics may come.
_LAST_READING_S = 2.5
Tell = Callable[[Meta], None]


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """A step, run once.

    Attributes:
        measurement: None where the server was gone before it began.
        failure: why it ended early; None where it did not.
    """

    measurement: Measurement | None
    failure: str | None


class LoadSession:
    """See the module; use it as a context manager.

    Args:
        address: of the server.
        traffic: what to send; its loads and its duration are for the caller.
        folder: where the traffic's paths start.
        objectives: whose service levels are counted, as `objective.Objective` prints them.
        cpus: cores that the client may use; None leaves all.
        limits: bounds on the traffic's files.

    Attributes:
        signature: of the model.
        server: name, version and extensions.
        unranged: integer inputs whose values are 0 and 1 for want of a range.

    Raises:
        InputError: the traffic does not fit the model.
        UnavailableError: no server there, or the extra `serving` is missing.
    """

    def __init__(
        self,
        address: Address,
        traffic: Traffic,
        folder: Path,
        *,
        objectives: Sequence[str] = (),
        cpus: Sequence[int] | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        check_extra()
        self._traffic = traffic
        self._folder = folder
        self._objectives = list(objectives)
        self._limits = limits
        self._packed: dict[int | None, tuple[Meta, Arrays]] = {}
        self._loaded: tuple[int | None] | None = None
        with ExitStack() as stack:
            self._client = stack.enter_context(TritonClient(address.url, address.protocol, _ASK_S))
            self.server = _server_facts(self._client)
            self.signature = read_signature(self._client, traffic.model, traffic.version)
            if self.signature.is_decoupled and address.protocol == "http":
                why = "it may stream several answers to a request, which HTTP does not carry"
                fix = "give its gRPC port, with --protocol grpc"
                raise InputError(f"model {traffic.model!r} cannot be tested over HTTP", why, fix)
            self._maker = RequestMaker(traffic, self.signature, folder, limits)
            self.unranged = self._maker.unranged_inputs()
            self._models = models_behind(self._client, self.signature)
            self._metrics = stack.enter_context(MetricsWatch(address.metrics, self._models))
            self._child = stack.enter_context(Child(_SERVICE, purpose="load test", env=_ENV))
            if cpus is not None:
                os.sched_setaffinity(self._child.pid, cpus)
            self._open(address)
            self._stack = stack.pop_all()

    def prepare(self, batch: int | None) -> None:
        """Make the requests of a batch size, None for the traffic's mix, and send one of each kind.

        Raises:
            InputError: they cannot be made, the model of the answers does not take them, or the server refuses them;
                carries its words.
            UnavailableError: the server cannot be reached.
        """
        if self._loaded == (batch,):
            return
        meta, arrays = self._pack(batch)
        answer, _ = self._child.call("load", {**meta, "seed": self._traffic.seed}, arrays)
        for refusal in answer["refusals"]:
            if refusal["kind"] == "unreachable":
                why = str(refusal["text"])
                raise UnavailableError(f"{self._client.url} did not answer", why, "check that the server still runs")
            if refusal["kind"] == "server":
                what = f"the server refuses requests of {refusal['cell']}"
                raise InputError(what, str(refusal["text"]), "correct the traffic file, or see the server's log")
        self._loaded = (batch,)

    def run_step(
        self,
        load: Load,
        batch: int | None = None,
        *,
        repeat: int = 1,
        duration_s: float | None = None,
        warmup_s: float | None = None,
        tell: Tell | None = None,
    ) -> StepResult:
        """Run one step.

        Args:
            load: how requests arrive.
            batch: samples in each request; None for the traffic's mix, or its one batch size.
            repeat: its number; another one gives other arrivals.
            duration_s: by default the traffic's, as the warm-up.
            warmup_s: see `duration_s`.
            tell: called about once a second with {phase, left_s, requests, ok}.

        Raises:
            InputError: the server refuses what the traffic sends; carries its words.
            UnavailableError: the server cannot be reached at the beginning.
        """
        traffic = self._traffic
        batch = traffic.batch_steps[0] if batch is None else batch
        self.prepare(batch)
        request = {
            "load": load.model_dump(mode="json"),
            "duration_s": traffic.duration_s if duration_s is None else duration_s,
            "warmup_s": traffic.warmup_s if warmup_s is None else warmup_s,
            "max_in_flight": traffic.max_in_flight,
            "think": _range(traffic.think_s),
            "seed": traffic.seed + repeat - 1,
            "repeat": repeat,
            "objectives": self._objectives,
        }
        counters: dict[str, tuple[Counters, str]] = {}

        def on_progress(meta: Meta) -> None:
            if meta["phase"] in ("begin", "end"):
                counters[meta["phase"]] = read_statistics(self._client, self._models)
            elif tell is not None:
                tell(meta)

        started = time.monotonic()
        answer, _ = self._child.call("run", request, on_progress=on_progress)
        if answer["measurement"] is None:
            return StepResult(None, answer["failure"])
        measurement = Measurement.model_validate(answer["measurement"])
        begin = float(answer["begin"])
        end = begin + measurement.duration_s
        readings = self._metrics.between(started, end, 0.0 if answer["failure"] else _LAST_READING_S)
        side = self._server_side(counters, readings, begin)
        return StepResult(measurement.model_copy(update={"server": side}), answer["failure"])

    def is_server_alive(self) -> bool:
        """Whether the server still answers."""
        try:
            self._client.server()
        except RequestError:
            return False
        return True

    def gpus(self) -> tuple[str, ...]:
        """Ids of the GPUs in the server's metrics."""
        return self._metrics.gpus()

    def close(self) -> None:
        """End the child and the connections."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, address: Address) -> None:
        """Tell the child where requests go."""
        endpoint = {
            "url": address.url,
            "model": self.signature.name,
            "version": self._traffic.version,
            "outputs": list(self._traffic.outputs or self.signature.outputs),
            "timeout_s": self._traffic.timeout_s,
            "is_streamed": self.signature.is_decoupled,
        }
        expect = self._traffic.expect
        self._child.call(
            "open",
            {
                "protocol": address.protocol,
                "endpoint": endpoint,
                "is_batched": self.signature.has_batch_axis,
                "tolerance": DEFAULT_TOLERANCE if expect is None else expect.tolerance,
            },
        )

    def _server_side(
        self, counters: Mapping[str, tuple[Counters, str]], readings: list[Reading], begin: float
    ) -> ServerSide:
        """What the server says of a measurement.

        Args:
            counters: its statistics and what they lack, at the "begin" and the "end".
            readings: of its metrics, in the warm-up too.
            begin: of the measurement, seconds of time.monotonic().
        """
        before, after = counters.get("begin", ({}, "")), counters.get("end", ({}, ""))
        return ServerSide(
            models=work_between(before[0], after[0]),
            seconds=timeline(readings, begin),
            tokens=tokens_between([one for one in readings if one.moment >= begin]),
            missing="; ".join(text for text in dict.fromkeys((before[1], after[1], self._metrics.problem)) if text),
        )

    def _pack(self, batch: int | None) -> tuple[Meta, Arrays]:
        """The requests of a batch size with their right answers, as they go to the child."""
        if batch not in self._packed:
            with open_answers(self._traffic, self.signature, self._folder, self._limits) as book:
                drafts = list(self._maker.cells(batch))
                cells: list[RequestCell] = [self._maker.pack(cell, list(book.answers(cell))) for cell in drafts]
            self._packed[batch] = pack_cells(cells)
        return self._packed[batch]


def check_extra() -> None:
    """Refuse to begin without the packages of the extra `serving`.

    Raises:
        UnavailableError: one is missing.
    """
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise missing_extra(package, "serving")


def _server_facts(client: TritonClient) -> dict[str, Any]:
    """Name, version and extensions of the server."""
    facts = client.server()
    if not isinstance(facts, dict):
        why = f"its words about itself are {facts!r:.40}"
        raise InputError(f"{client.url} does not speak KServe v2", why, "check that the address is that of a server")
    return facts


def _range(think_s: float | ThinkTime) -> list[float]:
    return [think_s.min, think_s.max] if isinstance(think_s, ThinkTime) else [think_s, think_s]
