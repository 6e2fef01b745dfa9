"""The Kubernetes folder: one file per object, a kustomization, and what is applied by other means."""

from __future__ import annotations

import dataclasses
from typing import Any

from trtforge.serving.deploy import autoscaling, models, workload
from trtforge.serving.deploy.dashboard import DASHBOARD_NAME
from trtforge.serving.deploy.image import needs_build
from trtforge.serving.deploy.server import MODELS_PATH, metadata
from trtforge.serving.deploy.spec import DeploymentSpec

KUSTOMIZATION_NAME = "kustomization.yaml"
WRITER_NAME = "model-writer.yaml"
ADAPTER_NAME = "prometheus-adapter-values.yaml"


@dataclasses.dataclass(frozen=True, slots=True)
class YamlFile:
    """A YAML file: its content, and lines of comment above it."""

    content: dict[str, Any]
    comment: tuple[str, ...]


def kubernetes_files(spec: DeploymentSpec, size_bytes: int) -> dict[str, YamlFile]:
    """Every YAML file of the folder by name.

    Args:
        spec: the deployment.
        size_bytes: of the models, for the volume claim.
    """
    objects = {
        "service-account.yaml": YamlFile(workload.service_account(spec), ("An account with no rights and no token.",)),
        "model-checksums.yaml": YamlFile(models.checksums(spec), ("What a server checks its models against.",)),
        **_volume(spec, size_bytes),
        "deployment.yaml": YamlFile(workload.deployment(spec), _deployment_comment(spec)),
        "service.yaml": YamlFile(workload.service(spec), _SERVICE_COMMENT),
        "network-policy.yaml": YamlFile(workload.network_policy(spec), _network_comment(spec)),
        "pod-disruption-budget.yaml": YamlFile(
            workload.disruption_budget(spec), ("Draining nodes takes one server at a time.",)
        ),
        "pod-monitor.yaml": YamlFile(autoscaling.pod_monitor(spec), _MONITOR_COMMENT),
        "horizontal-pod-autoscaler.yaml": YamlFile(autoscaling.autoscaler(spec), _AUTOSCALER_COMMENT),
    }
    files = {
        **objects,
        KUSTOMIZATION_NAME: YamlFile(_kustomization(spec, list(objects)), _apply_comment(spec)),
        ADAPTER_NAME: YamlFile(autoscaling.adapter_values(spec), _ADAPTER_COMMENT),
    }
    if not spec.models_in_image:
        files[WRITER_NAME] = YamlFile(models.writer_pod(spec), _writer_comment(spec))
    return files


def _volume(spec: DeploymentSpec, size_bytes: int) -> dict[str, YamlFile]:
    """The claim for the models, unless there is one."""
    if spec.models_in_image or spec.claim is not None:
        return {}
    comment = (
        "Servers on several nodes read it, so its storage class has to offer ReadWriteMany; for one node,",
        "ReadWriteOnce will do.",
    )
    return {"model-volume.yaml": YamlFile(models.volume_claim(spec, size_bytes), comment)}


def _kustomization(spec: DeploymentSpec, resources: list[str]) -> dict[str, Any]:
    name = spec.name + "-dashboard"
    place = {} if spec.namespace is None else {"namespace": spec.namespace}
    options = {"disableNameSuffixHash": True, "labels": {**metadata(spec)["labels"], "grafana_dashboard": "1"}}
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        **place,
        "resources": resources,
        # Grafana's chart loads ConfigMaps with this label.
        "configMapGenerator": [{"name": name, "files": [DASHBOARD_NAME], "options": options}],
    }


def kubectl(spec: DeploymentSpec) -> str:
    """The command, with its namespace."""
    return "kubectl" if spec.namespace is None else f"kubectl --namespace {spec.namespace}"


def _apply_comment(spec: DeploymentSpec) -> tuple[str, ...]:
    build = ("Build the image first, see Dockerfile, and push it to the registry that --image named.",)
    fill = (f"Then fill the volume once: see {WRITER_NAME}.",)
    return (
        *(build if needs_build(spec) else ()),
        f"{kubectl(spec)} apply --kustomize .",
        *(() if spec.models_in_image else fill),
        "Without the Prometheus operator, remove pod-monitor.yaml from the list.",
    )


def _deployment_comment(spec: DeploymentSpec) -> tuple[str, ...]:
    lines = ["Servers start once the checksums of their models hold."]
    if spec.targets:
        lines += [
            f"The engines run on {', '.join(spec.targets)}. The labels are those of NVIDIA's GPU feature discovery;",
            "without it, remove `affinity` and choose the nodes otherwise.",
        ]
    return tuple(lines)


def _network_comment(spec: DeploymentSpec) -> tuple[str, ...]:
    return (
        "Requests come from this namespace; add a `from` for an ingress controller in another.",
        f"Metrics go to the namespace {spec.monitoring_namespace} alone. A server calls "
        + (f"port {spec.cache.port}, of its Redis cache, and DNS." if spec.cache.host else "nobody."),
    )


def fill_commands(spec: DeploymentSpec, repository: str, writer: str) -> tuple[str, ...]:
    """What copies the repository into the volume.

    Args:
        spec: the deployment.
        repository: its path, quoted for a shell.
        writer: the path of `WRITER_NAME`, quoted for a shell.
    """
    command, pod = kubectl(spec), f"{spec.name}-writer"
    folders = " ".join(f"{MODELS_PATH}/{model.name}" for model in spec.models)
    return (
        f"{command} apply --filename {writer}",
        f"{command} wait --for condition=Ready pod/{pod} --timeout 15m",
        f"{command} exec {pod} -- rm -rf {folders}",
        *(f"{command} cp {repository}/{model.name} {pod}:{MODELS_PATH}/" for model in spec.models),
        f"{command} delete --filename {writer}",
    )


def _writer_comment(spec: DeploymentSpec) -> tuple[str, ...]:
    return ("Copies the repository into the volume:", *fill_commands(spec, "REPO", WRITER_NAME))


_SERVICE_COMMENT = (
    "What clients call: HTTP and gRPC, not the metrics.",
    "A gRPC client keeps one connection, and so one server: open several, or put a service mesh in between.",
)
_MONITOR_COMMENT = (
    "For the Prometheus operator. A Prometheus that selects monitors by label needs that label here, for example",
    "`release: prometheus`.",
)
_AUTOSCALER_COMMENT = (
    f"Both metrics come from the rules in {ADAPTER_NAME}; without them, the autoscaler changes nothing.",
    "Set the targets from `trtforge loadtest`: the requests per second that one server answers within the objective.",
)
_ADAPTER_COMMENT = (
    "Values of the prometheus-adapter chart. Its list `rules.custom` is replaced, not joined, by a later file.",
    "helm upgrade --install prometheus-adapter prometheus-community/prometheus-adapter --namespace monitoring \\",
    f"  --reuse-values --values {ADAPTER_NAME}",
)
