"""Which models of a server work on a request, and what its statistics say of them (KServe's extension)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trtforge.loadtest.server_side import ModelWork
from trtforge.loadtest.signature import Signature
from trtforge.serving.triton.client import RequestError, TritonClient

Counters = dict[str, Mapping[str, Any]]


def models_behind(client: TritonClient, signature: Signature) -> tuple[str, ...]:
    """The model itself first, then those that it calls: an ensemble's steps, and the bucket models of a text front.

    Args:
        client: of the server.
        signature: of the model under test.
    """
    config = signature.config or {}
    steps = (config.get("ensemble_scheduling") or {}).get("step", [])
    called = [str(step["model_name"]) for step in steps]
    try:
        names = [state.name for state in client.models() if state.state == "READY"]
    except RequestError:
        names = []
    bucket = re.compile(re.escape(signature.name) + r"_b(\d+)")
    buckets = {name: int(match[1]) for name in names if (match := bucket.fullmatch(name))}
    return tuple(dict.fromkeys([signature.name, *called, *sorted(buckets, key=buckets.__getitem__)]))


def read_statistics(client: TritonClient, models: tuple[str, ...]) -> tuple[Counters, str]:
    """What the server counted so far, by model, and why something is missing.

    A server that is gone, or that does not have the extension, has nothing to say: no error.
    """
    counters: Counters = {}
    missing = ""
    for model in models:
        try:
            counters[model] = client.statistics(model)
        except RequestError as err:
            missing = f"no statistics of {model}: {err.why or err.what}"
    return counters, missing


def work_between(before: Counters, after: Counters) -> tuple[ModelWork, ...]:
    """What each model did between two readings; models that did nothing are left out, but for the first."""
    works = [_work(name, before[name], after[name]) for name in after if name in before]
    return tuple(work for place, work in enumerate(works) if place == 0 or work.executions or work.failures)


def _work(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> ModelWork:
    def count(key: str) -> int:
        return max(0, int(after.get(key, 0)) - int(before.get(key, 0)))

    def figure(part: str, key: str) -> int:
        values = (int(stats.get("inference_stats", {}).get(part, {}).get(key, 0)) for stats in (after, before))
        return max(0, next(values) - next(values))

    def mean_ms(part: str) -> float | None:
        number = figure(part, "count")
        return figure(part, "ns") / number / 1e6 if number else None

    sizes = {size: number - _batch_sizes(before).get(size, 0) for size, number in _batch_sizes(after).items()}
    return ModelWork(
        name=name,
        inferences=count("inference_count"),
        executions=count("execution_count"),
        failures=figure("fail", "count"),
        queue_ms=mean_ms("queue"),
        compute_input_ms=mean_ms("compute_input"),
        compute_ms=mean_ms("compute_infer"),
        compute_output_ms=mean_ms("compute_output"),
        request_ms=mean_ms("success"),
        batch_sizes={str(size): number for size, number in sorted(sizes.items()) if number > 0},
        cache_hits=figure("cache_hit", "count"),
    )


def _batch_sizes(statistics: Mapping[str, Any]) -> dict[int, int]:
    """Executions by batch size."""
    return {
        int(entry["batch_size"]): int(entry["compute_infer"]["count"]) for entry in statistics.get("batch_stats", [])
    }
