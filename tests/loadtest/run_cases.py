"""Runs as a load test writes them, with latencies drawn from a distribution instead of a server."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trtforge.loadtest.distribution import PERCENTILES
from trtforge.loadtest.objective import parse_objectives
from trtforge.loadtest.results import (
    Cell,
    ClientSide,
    Environment,
    ErrorCount,
    Latency,
    Load,
    Measurement,
    ModelUnderTest,
    Run,
    Second,
    ServerInfo,
    ServiceLevel,
    Step,
)
from trtforge.loadtest.server_side import GpuUse, ModelWork, ServerSecond, ServerSide, Tokens
from trtforge.loadtest.traffic import LengthBucket, Traffic

SERVICE_MS = 8.0  # median of an answer with one user
BUCKETS = {"8-32": 1.0, "33-128": 1.8, "129-256": 3.4}  # latency against that of the shortest
ENVIRONMENT = Environment(
    trtforge="0.6.0",
    python="3.11.2",
    locust="2.47.0",
    tritonclient="2.73.0",
    client_cpu="Xeon",
    client_cores=2,
    started_at="2026-12-01T08:00:00+00:00",
)
SERVER = ServerInfo(url="http://127.0.0.1:8000", name="triton", version="2.51.0", is_local=True, gpus=())
MODEL = ModelUnderTest(
    name="minilm",
    version="1",
    platform="python",
    is_decoupled=False,
    config={"name": "minilm", "max_batch_size": 32, "dynamic_batching": {"max_queue_delay_microseconds": 500}},
    config_sha256="c" * 64,
    artifact_sha256="a" * 64,
)


def make_run(
    users: Sequence[int] = (1, 4, 16),
    *,
    rates: Sequence[float] = (),
    repeats: int = 1,
    slowdown: float = 1.0,
    spread: float = 0.02,
    error_share: float = 0.0,
    objectives: Sequence[str] = (),
    seconds: int = 20,
    seed: int = 0,
    **changes: object,
) -> Run:
    """A run in three length buckets.

    Args:
        users, rates: its steps.
        repeats: of each.
        slowdown: factor on every latency.
        spread: standard deviation of the logarithm of a repeat's own factor.
        error_share: of the requests that time out.
        objectives: as typed.
        seconds: of a measurement.
        seed: decides the figures.
        changes: fields of `Run` to replace.
    """
    random = np.random.default_rng(seed)
    loads = [Load(kind="closed", start=n, end=n) for n in users] + [Load(kind="open", start=r, end=r) for r in rates]
    steps = []
    for load in loads:
        factors = slowdown * np.exp(random.normal(0, spread, repeats))
        measured = [
            _measurement(n + 1, load, factor, error_share, objectives, seconds, random)
            for n, factor in enumerate(factors)
        ]
        steps.append(Step(load=load, batch=1, measurements=tuple(measured)))
    run = Run(
        environment=ENVIRONMENT,
        server=SERVER,
        model=MODEL,
        protocol="http",
        traffic=Traffic(
            model="minilm", lengths=tuple(_bucket(name) for name in BUCKETS), duration_s=seconds, repeats=repeats
        ),
        traffic_sha256="7" * 64,
        files={},
        objectives=tuple(str(objective) for objective in parse_objectives(objectives)),
        repeats=repeats,
        failure=None,
        steps=tuple(steps),
    )
    return run.model_copy(update=changes)


def latency_of(milliseconds: np.ndarray) -> Latency:
    """A distribution of these times; its histogram is left out."""
    count = len(milliseconds)
    values = np.percentile(milliseconds, PERCENTILES) if count else ()
    percentiles = {f"p{at:g}": float(value) for at, value in zip(PERCENTILES, values, strict=False)}
    return Latency(
        count=count,
        mean_ms=float(milliseconds.mean()) if count else None,
        min_ms=float(milliseconds.min()) if count else None,
        max_ms=float(milliseconds.max()) if count else None,
        percentiles_ms=percentiles,
        too_few=tuple(f"p{at:g}" for at in PERCENTILES if count * (100 - at) / 100 < 10),
        hdr="",
    )


def _bucket(name: str) -> LengthBucket:
    low, high = name.split("-")
    return LengthBucket(min=int(low), max=int(high))


def _measurement(
    repeat: int,
    load: Load,
    factor: float,
    error_share: float,
    objectives: Sequence[str],
    seconds: int,
    random: np.random.Generator,
) -> Measurement:
    in_flight = load.end if load.kind == "closed" else max(1.0, load.end * SERVICE_MS / 1e3)
    middle = SERVICE_MS * factor * (1 + (in_flight - 1) / 2.5)
    rate = in_flight / middle * 1e3 * 0.8 if load.kind == "closed" else load.end
    count = int(rate * seconds)
    by_bucket = {name: middle * ratio * np.exp(random.normal(0, 0.25, count // 3)) for name, ratio in BUCKETS.items()}
    cells, right = [], []
    for name, values in by_bucket.items():
        kept = values[int(error_share * len(values)) :]
        right.append(kept)
        cells.append(
            Cell(
                bucket=name,
                batch=1,
                requests=len(values),
                ok=len(kept),
                latency=latency_of(kept),
                service_levels=_levels(objectives, kept, len(values)),
            )
        )
    everything = np.concatenate(right)
    requests = sum(cell.requests for cell in cells)
    failed = requests - len(everything)
    errors = (ErrorCount(kind="timeout", text="no answer in time", count=failed, example="no answer within 10 s"),)
    return Measurement(
        repeat=repeat,
        duration_s=float(seconds),
        requests=requests,
        ok=len(everything),
        throughput=len(everything) / seconds,
        samples_per_s=len(everything) / seconds,
        latency=latency_of(everything),
        service=latency_of(everything),
        first=None,
        between=None,
        errors=errors if failed else (),
        service_levels=_levels(objectives, everything, requests),
        cells=tuple(cells),
        timeline=tuple(_second(at, rate, everything, random) for at in range(-2, seconds)),
        server=_server(in_flight, everything, seconds, random),
        client=ClientSide(cpu=0.4, is_saturated=False, lag_ms=1.0),
    )


def _levels(objectives: Sequence[str], kept: np.ndarray, requests: int) -> tuple[ServiceLevel, ...]:
    return tuple(
        ServiceLevel(
            objective=str(objective),
            limit_ms=objective.limit_ms,
            share=float((kept <= objective.limit_ms).sum() / requests),
            is_met=objective.is_met(latency_of(kept).statistics_ms) and len(kept) == requests,
        )
        for objective in parse_objectives(objectives)
    )


def _second(at: int, rate: float, values: np.ndarray, random: np.random.Generator) -> Second:
    count = int(random.poisson(rate))
    if not len(values):
        return Second(second=at, sent=count, ok=0, errors=count, in_flight=2, p50_ms=None, p99_ms=None)
    p50, p99 = np.percentile(random.choice(values, max(1, int(rate))), [50, 99])
    return Second(second=at, sent=count, ok=count, errors=0, in_flight=2, p50_ms=float(p50), p99_ms=float(p99))


def _server(in_flight: float, values: np.ndarray, seconds: int, random: np.random.Generator) -> ServerSide:
    mean = float(values.mean()) if len(values) else SERVICE_MS
    size = max(1, round(in_flight / 2))
    batches = {str(size): len(values) // size, "1": 10} if size > 1 else {"1": len(values)}
    work = ModelWork(
        name="minilm",
        inferences=sum(int(key) * number for key, number in batches.items()),
        executions=sum(batches.values()),
        failures=0,
        queue_ms=0.35 * mean,
        compute_input_ms=0.02 * mean,
        compute_ms=0.5 * mean,
        compute_output_ms=0.01 * mean,
        request_ms=0.9 * mean,
        batch_sizes=batches,
        cache_hits=0,
    )
    timeline = tuple(
        ServerSecond(
            second=at,
            requests=100,
            failures=0,
            mean_batch=float(size * np.exp(random.normal(0, 0.1))),
            queue_ms=1.0,
            compute_ms=2.0,
            pending=1.0,
            cpu=0.9,
            gpus={"GPU-0": GpuUse(utilization=0.6, memory_bytes=2.5e9, power_w=None)},
        )
        for at in range(seconds)
    )
    return ServerSide(models=(work,), seconds=timeline, tokens=Tokens(real=9_000, padded=11_500), missing="")
