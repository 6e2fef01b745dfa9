"""`run.json` of a load test (schema version 1): what was asked, where it ran, and what was measured.

A run is a list of steps, one for each load and batch size; a step has one measurement for each repeat. Repeat 2 of
every step follows repeat 1 of all steps, so that the spread of the repeats holds what drifts with time.

All times are in milliseconds unless their name says seconds. All latencies are of successful answers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic

from trtforge.errors import InputError
from trtforge.loadtest.definitions import DEFINITIONS
from trtforge.loadtest.server_side import Count, ServerSide
from trtforge.loadtest.traffic import Traffic
from trtforge.textfile import FileModel, parse_json, read_text, validate

SCHEMA_VERSION: Literal[1] = 1
RUN_NAME = "run.json"
ErrorKind = Literal["timeout", "unreachable", "wrong answer", "not sent", "server"]

NotNegative = Annotated[float, pydantic.Field(ge=0)]
Share = Annotated[float, pydantic.Field(ge=0, le=1)]


class Latency(FileModel):
    """A distribution of times.

    Attributes:
        count: of values.
        mean_ms, min_ms, max_ms: None without values.
        percentiles_ms: "p50", "p75", "p90", "p95", "p99" and "p99.9"; empty without values.
        too_few: the percentiles with less than ten values above them, which chance decides.
        hdr: the HDR histogram in microseconds, compressed and in base64 (HdrHistogram's own encoding, three digits).
    """

    count: Count
    mean_ms: float | None
    min_ms: float | None
    max_ms: float | None
    percentiles_ms: dict[str, float]
    too_few: tuple[str, ...]
    hdr: str

    @property
    def statistics_ms(self) -> dict[str, float | None]:
        """Percentiles and the mean by the names that objectives use."""
        return {**self.percentiles_ms, "mean": self.mean_ms}


class ErrorCount(FileModel):
    """Requests without a right answer, by kind.

    Attributes:
        kind: "timeout", "unreachable", "wrong answer", "not sent" or "server".
        text: for "server" its own words, numbers replaced by "#"; else what the kind means here.
        count: of requests.
        example: of one of them, in full.
    """

    kind: ErrorKind
    text: str
    count: Count
    example: str


class ServiceLevel(FileModel):
    """An objective, and how far it is met.

    Attributes:
        objective: as `objective.Objective` prints it, e.g. "p99=50ms".
        limit_ms: its limit.
        share: of all requests, right within the limit; failed and unsent requests are not. None without requests.
        is_met: whether the statistic of the latencies is within the limit and no more requests than it allows are
            outside: 1 % for p99; for the mean none may fail.
    """

    objective: str
    limit_ms: float
    share: Share | None
    is_met: bool


class Cell(FileModel):
    """The requests of one length bucket and one batch size, within one measurement.

    Attributes:
        bucket: name of the length bucket of the traffic file, e.g. "8-32"; None where the traffic has no lengths.
        batch: samples in a request.
        requests: that should have been sent within the measurement.
        ok: with a right answer.
        latency: as in `Measurement`.
    """

    bucket: str | None
    batch: int
    requests: Count
    ok: Count
    latency: Latency
    service_levels: tuple[ServiceLevel, ...]


class Second(FileModel):
    """One second of the timeline; the warm-up has negative seconds.

    Attributes:
        second: since the measurement began; it covers [second, second + 1).
        sent: requests sent in it.
        ok: right answers that arrived in it.
        errors: requests that failed in it.
        in_flight: requests on their way at its end.
        p50_ms, p99_ms: latency of the answers that arrived in it; None without answers.
    """

    second: int
    sent: Count
    ok: Count
    errors: Count
    in_flight: Count
    p50_ms: float | None
    p99_ms: float | None


class ClientSide(FileModel):
    """How hard the client worked: a client at its limit measures itself.

    Attributes:
        cpu: cores that the process used, e.g. 0.7; Locust runs on one core.
        lag_ms: how late the client's own event loop was, 99th percentile of a probe 50 times a second.
        is_saturated: more than 0.9 of a core was used, or the lag is above a quarter of the p99 latency: the latencies
            then hold the client's own delay.
    """

    cpu: float
    lag_ms: float
    is_saturated: bool


class Measurement(FileModel):
    """One step, once.

    Attributes:
        repeat: 1, 2, ...
        duration_s: of the measurement, without warm-up and without waiting for the last answers.
        requests: that should have been sent in it, unsent ones included.
        ok: those of them with a right answer.
        throughput: right answers that arrived in it, per second.
        samples_per_s: the same in samples: a request of batch 4 counts 4.
        latency: from send to full answer; in an open loop from the arrival that the schedule intended.
        service: from the actual send to the full answer; equal to latency in a closed loop.
        first: from send to the first streamed answer; None for models that answer once.
        between: between streamed answers of one request; None for models that answer once.
        errors: most frequent first.
        service_levels: over all cells.
        cells: by bucket, in the order of the traffic file, then batch.
        timeline: per second.
    """

    repeat: int
    duration_s: NotNegative
    requests: Count
    ok: Count
    throughput: NotNegative
    samples_per_s: NotNegative
    latency: Latency
    service: Latency
    first: Latency | None
    between: Latency | None
    errors: tuple[ErrorCount, ...]
    service_levels: tuple[ServiceLevel, ...]
    cells: tuple[Cell, ...]
    timeline: tuple[Second, ...]
    server: ServerSide
    client: ClientSide

    @pydantic.model_validator(mode="after")
    def _check_count(self) -> Self:
        if self.ok > self.requests:
            raise ValueError(f"{self.ok} of {self.requests} requests have a right answer")
        return self

    @property
    def error_rate(self) -> float:
        """Share of the requests without a right answer."""
        return 1 - self.ok / self.requests if self.requests else 0.0


class Load(FileModel):
    """How requests arrive in a step.

    Attributes:
        kind: "closed": so many users, each sends its next request after the answer to the last one and its think time;
            "open": requests arrive by a Poisson process with so many per second, whatever the server does.
        start, end: users or requests per second when the measurement begins and ends; they differ in a ramp.
    """

    kind: Literal["closed", "open"]
    start: float
    end: float

    def describe(self) -> str:
        """`4 users`, `50 requests/s`, `10 to 200 requests/s`."""
        unit = "requests/s" if self.kind == "open" else "user" if self.start == self.end == 1 else "users"
        return f"{self.start:g} {unit}" if self.start == self.end else f"{self.start:g} to {self.end:g} {unit}"


class Step(FileModel):
    """One load and batch size.

    Attributes:
        load: see `Load`.
        batch: samples in every request; None where the traffic mixes batch sizes.
        measurements: one per repeat; fewer where the run ended early.
    """

    load: Load
    batch: int | None
    measurements: tuple[Measurement, ...]

    @property
    def key(self) -> str:
        """Names the step within a run and in a comparison: `4 users, batch 8`."""
        return self.load.describe() + ("" if self.batch is None else f", batch {self.batch}")


class Environment(FileModel):
    """Where the client ran, and with what.

    Attributes:
        trtforge, python, locust, tritonclient: versions.
        client_cpu: its model name.
        client_cores: that the client may use.
        started_at: UTC, ISO 8601.
    """

    trtforge: str
    python: str
    locust: str
    tritonclient: str
    client_cpu: str
    client_cores: int
    started_at: str


class ServerInfo(FileModel):
    """The server under test, as it describes itself.

    Attributes:
        url: as given.
        name, version: e.g. "triton", "2.51.0".
        is_local: it answers on a loopback address, so client and server share the machine.
        gpus: names or ids of the GPUs in its metrics; empty on a CPU.
    """

    url: str
    name: str
    version: str
    is_local: bool
    gpus: tuple[str, ...]


class ModelUnderTest(FileModel):
    """The model under test.

    Attributes:
        name, version: as the server has them; version "" means the server's choice.
        platform: its backend.
        is_decoupled: it may stream several answers to a request.
        config: its configuration as the server gives it; None where it gives none.
        config_sha256: fingerprint of `config`; None likewise.
        artifact_sha256: of the artifact that it was packaged from; None where the configuration does not carry it.
    """

    name: str
    version: str
    platform: str
    is_decoupled: bool
    config: dict[str, Any] | None
    config_sha256: str | None
    artifact_sha256: str | None


class Run(FileModel):
    """A load test.

    Attributes:
        protocol: of the requests; decoupled models are streamed over gRPC.
        traffic: as the file has it, with the options of the command applied and all defaults filled in.
        files: SHA-256 of the files that the traffic names, by their path in it.
        traffic_sha256: fingerprint of the requests, whatever their load: see `Traffic.request_fingerprint`. Runs whose
            fingerprints differ sent other requests and cannot be compared.
        definitions: what the figures mean.
        repeats: asked for.
        failure: why the run ended early: the server died, say; None where it is complete.
        steps: in the order in which they ran.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    kind: Literal["loadtest"] = "loadtest"
    environment: Environment
    server: ServerInfo
    model: ModelUnderTest
    protocol: Literal["http", "grpc"]
    traffic: Traffic
    files: dict[str, str]
    traffic_sha256: str
    definitions: dict[str, str] = DEFINITIONS
    objectives: tuple[str, ...] = ()
    repeats: int
    failure: str | None
    steps: tuple[Step, ...]

    @property
    def num_failed(self) -> int:
        """Requests without a right answer, over all measurements."""
        return sum(one.requests - one.ok for step in self.steps for one in step.measurements)

    def to_json(self) -> str:
        """The text of `run.json`."""
        return json.dumps(self.model_dump(mode="json"), indent=1, allow_nan=False) + "\n"


def load_run(path: Path) -> Run:
    """Read a `run.json`, or the one in a folder that `loadtest -o` wrote.

    Raises:
        InputError: missing, not a run, or of a newer schema.
    """
    file = path / RUN_NAME if path.is_dir() else path
    value = parse_json(read_text(file, "run"), f"run {file}")
    version = value.get("schema_version") if isinstance(value, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        why = f"it has schema version {version}; this trtforge reads {SCHEMA_VERSION}"
        raise InputError(f"run {file} cannot be read", why, "use the trtforge that wrote it, or a newer one")
    return validate(Run, value, f"run {file}")
