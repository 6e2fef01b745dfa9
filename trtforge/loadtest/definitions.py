"""What the figures of a load test mean: fixed, printed with them and kept in `run.json`."""

from __future__ import annotations

DEFINITIONS: dict[str, str] = {
    "latency": (
        "from sending a request to having its full answer; in an open loop from the moment at which the schedule meant "
        "to send it, so that a server that stalls is charged for every request that had to wait (no coordinated "
        "omission)"
    ),
    "service time": "from actually sending a request to having its full answer",
    "time to first answer": "from sending a request to its first streamed answer",
    "time between answers": "between two streamed answers of one request",
    "throughput": "right answers that arrived during the measurement, per second; wrong and failed ones do not count",
    "measurement": (
        "requests that were to be sent after the warm-up and before the end; their answers are waited for until the "
        "timeout"
    ),
    "not sent": (
        "open loop: the schedule meant to send the request within the measurement, but at its end all connections were "
        "still busy, or the client was too slow"
    ),
    "service-level share": (
        "share of all requests, failed and unsent ones included, that were answered right within the limit"
    ),
    "percentile": "of right answers; marked where fewer than ten values lie above it",
}
