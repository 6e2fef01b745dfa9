"""What scales the servers: a PodMonitor that feeds Prometheus, adapter rules that make two metrics, an autoscaler.

The metrics carry the deployment's name, because rules of several deployments end up in one adapter.
"""

from __future__ import annotations

from typing import Any

from trtforge.serving.deploy.queries import QUEUE_TIME, SUCCESS, mean_ms, model_matcher, offered_requests
from trtforge.serving.deploy.server import METRICS_PATH, labels, metadata
from trtforge.serving.deploy.spec import DeploymentSpec

_SCRAPE_S = 15
# Four scrapes: one that is lost leaves a rate.
_WINDOW = "1m"


def requests_metric(spec: DeploymentSpec) -> str:
    """Name of the metric of requests per second in the custom metrics API."""
    return f"{spec.name.replace('-', '_')}_requests_per_second"


def queue_metric(spec: DeploymentSpec) -> str:
    """Name of the metric of the mean time in queues, in milliseconds."""
    return f"{spec.name.replace('-', '_')}_queue_ms"


def pod_monitor(spec: DeploymentSpec) -> dict[str, Any]:
    """For the Prometheus operator: scrape each server's metrics port."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": metadata(spec),
        "spec": {
            "selector": {"matchLabels": labels(spec)},
            "podMetricsEndpoints": [
                {"port": "metrics", "path": METRICS_PATH, "interval": f"{_SCRAPE_S}s", "scrapeTimeout": "10s"}
            ],
        },
    }


def adapter_values(spec: DeploymentSpec) -> dict[str, Any]:
    """Values of the prometheus-adapter chart: the rules that turn Triton's counters into the two metrics."""
    here = "<<.LabelMatchers>>"
    entries = f"{here},{model_matcher(spec.entries)}"
    by = "<<.GroupBy>>"
    return {
        "rules": {
            "custom": [
                _rule(spec, SUCCESS, requests_metric(spec), offered_requests(entries, _WINDOW, by)),
                _rule(spec, QUEUE_TIME, queue_metric(spec), mean_ms(QUEUE_TIME, here, entries, _WINDOW, by)),
            ]
        }
    }


def _rule(spec: DeploymentSpec, series: str, name: str, query: str) -> dict[str, Any]:
    return {
        "seriesQuery": f'{series}{{namespace!="",pod=~"{spec.name}-.*"}}',
        "resources": {"overrides": {"namespace": {"resource": "namespace"}, "pod": {"resource": "pod"}}},
        "name": {"matches": f"^{series}$", "as": name},
        "metricsQuery": query,
    }


def autoscaler(spec: DeploymentSpec) -> dict[str, Any]:
    """The HorizontalPodAutoscaler: as many servers as the busier of the two metrics asks for."""
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": metadata(spec),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": spec.name},
            "minReplicas": spec.scaling.min_replicas,
            "maxReplicas": spec.scaling.max_replicas,
            "metrics": [
                _pods_metric(requests_metric(spec), spec.scaling.requests_per_second),
                _pods_metric(queue_metric(spec), spec.scaling.queue_ms),
            ],
            "behavior": {
                "scaleUp": {
                    "stabilizationWindowSeconds": 0,
                    "policies": [{"type": "Percent", "value": 100, "periodSeconds": 60}],
                },
                # Loading an engine takes a minute, so a server is not given up for a short lull.
                "scaleDown": {
                    "stabilizationWindowSeconds": 300,
                    "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}],
                },
            },
        },
    }


def _pods_metric(name: str, average: int) -> dict[str, Any]:
    target = {"type": "AverageValue", "averageValue": str(average)}
    return {"type": "Pods", "pods": {"metric": {"name": name}, "target": target}}
