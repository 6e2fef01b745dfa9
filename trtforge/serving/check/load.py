"""Many requests at once: all have to be answered right, and joined where the server may join them.

Where a model's queue has limits, the requests that they turn away are what was asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trtforge.serving.check.reference import Arrays, worst_error
from trtforge.serving.check.results import LoadCheck
from trtforge.serving.triton.client import RequestError, TritonClient

# Requests that are under way at once.
_NUM_THREADS = 32
# What the server says of requests that the limits of a queue turn away.
_TURNED_AWAY = ("Exceeds maximum queue size", "Request timeout expired")
# A fast model may have answered before the next request comes.
_ROUNDS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Content:
    """One of the requests that are sent, several times.

    Attributes:
        feeds: its inputs.
        expected: the answer; None where it is not known.
    """

    feeds: Arrays
    expected: Arrays | None


def check_load(
    client: TritonClient,
    models: Sequence[str],
    ask: Callable[[Arrays], Arrays],
    contents: Sequence[Content],
    num_requests: int,
    tolerance: float,
) -> LoadCheck:
    """Send requests from many threads.

    Args:
        client: over gRPC, which threads may share.
        models: whose batches are counted.
        ask: sends one request and gives its answer.
        contents: of the requests, in their order, each several times: Triton joins requests of one shape that wait one
            behind the other, and a request of another shape between them ends the batch.
        num_requests: to send; as many again where the server joined none, up to three times.
        tolerance: the largest error of a right answer.
    """
    before = _batches(client, models)
    configs = [client.config(model) for model in models]
    expects = any(_may_join(config) for config in configs)
    has_limits = any(_queue_limits(config) for config in configs)
    result = LoadCheck(0, 0, 0, {}, expects)
    for _ in range(_ROUNDS):
        result = _send(ask, contents, num_requests, tolerance, has_limits, result)
        after = _batches(client, models)
        result = dataclasses.replace(
            result, batches={size: n - before.get(size, 0) for size, n in after.items() if n > before.get(size, 0)}
        )
        if result.largest_batch > 1 or not expects or result.lost:
            break
    return result


def _send(
    ask: Callable[[Arrays], Arrays],
    contents: Sequence[Content],
    count: int,
    tolerance: float,
    has_limits: bool,
    before: LoadCheck,
) -> LoadCheck:
    def send(index: int) -> tuple[float | None, str]:
        content = contents[index * len(contents) // count]
        try:
            return worst_error(content.expected, ask(content.feeds)), ""
        except RequestError as err:
            return None, err.why or err.what

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        outcomes = list(pool.map(send, range(count)))
    refusals = [words for _, words in outcomes if words]
    failures = [words for words in refusals if not (has_limits and any(limit in words for limit in _TURNED_AWAY))]
    return dataclasses.replace(
        before,
        sent=before.sent + count,
        answered=before.answered + count - len(refusals),
        turned_away=before.turned_away + len(refusals) - len(failures),
        wrong=before.wrong + sum(error is not None and not error <= tolerance for error, _ in outcomes),
        first_failure=before.first_failure or next(iter(failures), ""),
    )


def _queue_limits(config: Mapping[str, Any]) -> Mapping[str, Any]:
    limits: Mapping[str, Any] = config.get("dynamic_batching", {}).get("default_queue_policy", {})
    return limits


def _may_join(config: Mapping[str, Any]) -> bool:
    """Whether the server may join requests: of those of a queue for one, it sends each alone."""
    is_batched = int(config["max_batch_size"]) > 1 and "dynamic_batching" in config
    return is_batched and int(_queue_limits(config).get("max_queue_size", 0)) != 1


def _batches(client: TritonClient, models: Sequence[str]) -> dict[int, int]:
    """Executions by batch size so far."""
    counts: dict[int, int] = {}
    for model in models:
        for entry in client.statistics(model)["batch_stats"]:
            size = int(entry["batch_size"])
            counts[size] = counts.get(size, 0) + int(entry["compute_infer"]["count"])
    return counts
