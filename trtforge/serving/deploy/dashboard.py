"""The Grafana dashboard: load, latency, where the time goes, batches, errors, and the machine.

It is written as JSON for import, for the sidecar of Grafana's chart, or for a provisioning folder.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from trtforge.hashing import fingerprint
from trtforge.serving.deploy import queries as q
from trtforge.serving.deploy.spec import DeploymentSpec

DASHBOARD_NAME = "grafana-dashboard.json"
# By which the file is known for trtforge's: JSON has no comments.
DASHBOARD_TAG = "trtforge"
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WINDOW = "$__rate_interval"
_MODELS = 'model=~"$model",instance=~"$instance"'
_SERVERS = 'instance=~"$instance"'
# Grafana's grid is 24 wide.
_WIDTH, _HEIGHT = 12, 8
_COLUMNS = 24 // _WIDTH
# Of the dashboard's format, as Grafana 11 and 12 read it.
_SCHEMA_VERSION = 39


@dataclasses.dataclass(frozen=True, slots=True)
class _Panel:
    """A time series chart.

    Attributes:
        queries: legend, which may name labels, and query of each line or group of lines.
        unit: Grafana's name of it.
        is_stacked: lines add up.
    """

    title: str
    description: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    is_stacked: bool = False


def dashboard(spec: DeploymentSpec) -> dict[str, Any]:
    """The dashboard's JSON model."""
    panels = [*_load_panels(), *_time_panels(), *_text_panels(spec), *_machine_panels(spec)]
    return {
        "title": f"Triton: {spec.name}",
        # Grafana takes 40 characters: two long names, cut to that, could be one.
        "uid": fingerprint(spec.name)[:40],
        "tags": ["triton", DASHBOARD_TAG],
        "schemaVersion": _SCHEMA_VERSION,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables(spec)},
        "panels": [_panel_json(index, panel) for index, panel in enumerate(panels)],
    }


def _load_panels() -> list[_Panel]:
    errors = q.rate(q.FAILURE, _MODELS, _WINDOW, "model, reason")
    return [
        _Panel(
            "Throughput",
            "Successful requests per second. A text model and the length buckets that it calls each count a request.",
            "reqps",
            (("{{model}}", q.rate(q.SUCCESS, _MODELS, _WINDOW, "model")),),
        ),
        _Panel("Errors", "Failed requests per second, by reason.", "reqps", (("{{model}} {{reason}}", errors),)),
        _Panel(
            "Batch size",
            "Inferences per execution: 1 means that the dynamic batcher joins nothing.",
            "short",
            (("{{model}}", q.mean_batch(_MODELS, _WINDOW, "model")),),
        ),
        _Panel(
            "Waiting requests",
            "Requests that are in a queue now.",
            "short",
            (("{{model}}", f"sum({q.PENDING}{{{_MODELS}}}) by (model)"),),
        ),
    ]


def _time_panels() -> list[_Panel]:
    quantiles = f'max({q.REQUEST_QUANTILES}{{{_MODELS},quantile=~"0.5|0.99|0.999"}}) by (model, quantile) / 1000'
    parts = (
        ("queue", q.QUEUE_TIME),
        ("compute: input", q.INPUT_TIME),
        ("compute: inference", q.INFER_TIME),
        ("compute: output", q.OUTPUT_TIME),
    )
    return [
        _Panel(
            "Latency percentiles",
            "Time in the server, of the slowest server: percentiles of several servers cannot be joined.",
            "ms",
            (("{{model}} p{{quantile}}", quantiles),),
        ),
        _Panel(
            "Mean latency",
            "Mean time of a successful request in the server.",
            "ms",
            (("{{model}}", q.mean_ms(q.REQUEST_TIME, _MODELS, _MODELS, _WINDOW, "model")),),
        ),
        _Panel(
            "Where the time goes",
            "Mean time per request of the chosen models; it stacks up to the mean latency.",
            "ms",
            tuple((legend, _share(metric)) for legend, metric in parts),
            is_stacked=True,
        ),
        _Panel(
            "Time in queues",
            "Mean time per request in the queue of each model.",
            "ms",
            (("{{model}}", q.mean_ms(q.QUEUE_TIME, _MODELS, _MODELS, _WINDOW, "model")),),
        ),
    ]


def _text_panels(spec: DeploymentSpec) -> list[_Panel]:
    """Of the text models: how well the length buckets fit."""
    if all(model.kind != "text" for model in spec.models):
        return []
    tokens = q.rate(q.TOKENS, _MODELS, _WINDOW, "bucket")
    padding = q.rate(q.TOKENS, f'{_MODELS},kind="padding"', _WINDOW, "bucket")
    return [
        _Panel(
            "Padding",
            "Share of the tokens of each length bucket that only pad texts.",
            "percentunit",
            (("{{bucket}}", f"{padding} / {tokens}"),),
        ),
        _Panel("Tokens", "Tokens per second by length bucket, with padding.", "short", (("{{bucket}}", tokens),)),
    ]


def _share(metric: str) -> str:
    """Milliseconds per request over the chosen models together."""
    time = f"sum(rate({metric}{{{_MODELS}}}[{_WINDOW}]))"
    return f"{time} / sum(rate({q.SUCCESS}{{{_MODELS}}}[{_WINDOW}])) / 1000"


def _machine_panels(spec: DeploymentSpec) -> list[_Panel]:
    panels = []
    if spec.needs_gpu:
        panels += [
            _Panel("GPU use", "", "percentunit", (("{{gpu_uuid}}", f"{q.GPU_USE}{{{_SERVERS}}}"),)),
            _Panel(
                "GPU memory",
                "",
                "bytes",
                (
                    ("{{gpu_uuid}} used", f"{q.GPU_MEMORY}{{{_SERVERS}}}"),
                    ("{{gpu_uuid}} total", f"{q.GPU_MEMORY_TOTAL}{{{_SERVERS}}}"),
                ),
            ),
            _Panel("GPU power", "", "watt", (("{{gpu_uuid}}", f"{q.GPU_POWER}{{{_SERVERS}}}"),)),
        ]
    if spec.cache.option:
        hits, misses = (q.rate(metric, _MODELS, _WINDOW, "model") for metric in (q.CACHE_HITS, q.CACHE_MISSES))
        panels.append(
            _Panel(
                "Response cache hits",
                "Share of requests that the response cache answers.",
                "percentunit",
                (("{{model}}", f"{hits} / ({hits} + {misses})"),),
            )
        )
    return [
        *panels,
        _Panel("CPU use", "Of the whole machine.", "percentunit", (("{{instance}}", f"{q.CPU_USE}{{{_SERVERS}}}"),)),
        _Panel("Memory", "Of the whole machine.", "bytes", (("{{instance}}", f"{q.CPU_MEMORY}{{{_SERVERS}}}"),)),
    ]


def _variables(spec: DeploymentSpec) -> list[dict[str, Any]]:
    """What the dashboard can be narrowed to; the models are this deployment's."""
    series = f"{q.SUCCESS}{{{q.model_matcher([model.name for model in spec.models])}}}"
    choices = [("model", f"label_values({series}, model)"), ("instance", f"label_values({series}, instance)")]
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        *(
            {
                "name": name,
                "label": name.capitalize(),
                "type": "query",
                "datasource": _SOURCE,
                "query": {"query": query, "refId": name},
                "definition": query,
                "refresh": 2,
                "sort": 1,
                "multi": True,
                "includeAll": True,
                "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
            }
            for name, query in choices
        ),
    ]


def _panel_json(index: int, panel: _Panel) -> dict[str, Any]:
    row, column = divmod(index, _COLUMNS)
    stacking = {"mode": "normal" if panel.is_stacked else "none"}
    custom = {"drawStyle": "line", "fillOpacity": 30 if panel.is_stacked else 5, "stacking": stacking}
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {
            "legend": {"showLegend": True, "displayMode": "table", "placement": "bottom", "calcs": ["mean", "max"]},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": _SOURCE, "expr": expr, "legendFormat": legend}
            for number, (legend, expr) in enumerate(panel.queries)
        ],
    }
