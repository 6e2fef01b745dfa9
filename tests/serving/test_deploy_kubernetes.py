from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from deploy_cases import CPU, ENGINE, PER_GPU, TEXT, deploy, load, make_repository, pod_problems

from trtforge.hashing import sha256_of_file
from trtforge.serving.deploy import DeploymentOptions, ResponseCache, Scaling, plan_deployment
from trtforge.serving.deploy.models import volume_claim
from trtforge.serving.deploy.server import DRAIN_S, EXIT_TIMEOUT_S
from trtforge.serving.repository import load_repository

# The oldest release that NVIDIA's GPU operator and Kubernetes themselves still looked after, and the newest there is.
VERSIONS = ("1.33", "1.37")
CASES = {"cpu": CPU, "engine": ENGINE, "text": TEXT}
# Not Kubernetes' own kinds: kustomize's and the Prometheus operator's, and values of a chart.
OTHERS = ("kustomization.yaml", "pod-monitor.yaml", "prometheus-adapter-values.yaml")


def pod_of(folder: Path) -> dict[str, Any]:
    pod = load(folder, "deployment.yaml")["spec"]["template"]["spec"]
    assert isinstance(pod, dict)
    return pod


def server_of(folder: Path) -> dict[str, Any]:
    (container,) = pod_of(folder)["containers"]
    assert isinstance(container, dict)
    return container


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", CASES)
def test_every_object_holds_to_the_schema(tmp_path: Path, case: str, version: str) -> None:
    folder = deploy(tmp_path, CASES[case], namespace="inference", cache=ResponseCache(host="redis.cache.svc"))
    kinds = set()
    for path in folder.glob("*.yaml"):
        if path.name not in OTHERS:
            value = load(folder, path.name)
            kubernetes_validate.validate(value, version, strict=True)
            assert value["metadata"]["namespace"] == "inference"
            kinds.add(value["kind"])
    assert kinds == {
        "ConfigMap", "Deployment", "HorizontalPodAutoscaler", "NetworkPolicy", "PersistentVolumeClaim", "Pod",
        "PodDisruptionBudget", "Service", "ServiceAccount",
    }  # fmt: skip


def test_schema_refuses_what_is_misspelt(tmp_path: Path) -> None:
    value = load(deploy(tmp_path, CPU), "deployment.yaml")
    value["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(value, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("case", CASES)
def test_pods_hold_to_the_restricted_standard(tmp_path: Path, case: str) -> None:
    folder = deploy(tmp_path, CASES[case])
    assert pod_problems(pod_of(folder)) == []
    assert pod_problems(load(folder, "model-writer.yaml")["spec"]) == []
    assert load(folder, "service-account.yaml")["automountServiceAccountToken"] is False


def test_server_writes_to_memory_and_a_temporary_volume_only(tmp_path: Path) -> None:
    folder = deploy(tmp_path, ENGINE)
    writable = {mount["mountPath"] for mount in server_of(folder)["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/tmp", "/dev/shm"}
    folders = {entry["name"]: entry["value"] for entry in server_of(folder)["env"] if "value" in entry}
    assert set(folders) == {"HOME", "CUPY_CACHE_DIR"}
    assert all(Path(value).is_relative_to("/tmp") for value in folders.values())
    volumes = {volume["name"]: volume for volume in pod_of(folder)["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}
    assert volumes["models"]["persistentVolumeClaim"] == {"claimName": "digits-models", "readOnly": True}


def test_metrics_have_their_own_port_which_no_service_and_one_namespace_reach(tmp_path: Path) -> None:
    folder = deploy(tmp_path, CPU, monitoring_namespace="observability")
    ports = {port["name"]: port["containerPort"] for port in server_of(folder)["ports"]}
    assert len(set(ports.values())) == 3
    assert {port["targetPort"] for port in load(folder, "service.yaml")["spec"]["ports"]} == {"http", "grpc"}
    policy = load(folder, "network-policy.yaml")["spec"]
    reached_by = {port["port"]: rule["from"] for rule in policy["ingress"] for port in rule["ports"]}
    assert reached_by["http"] == reached_by["grpc"] == [{"podSelector": {}}]
    assert reached_by["metrics"] == [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "observability"}}}
    ]
    assert policy["egress"] == [] and "Egress" in policy["policyTypes"]


def test_ports_of_the_redis_cache_and_dns_are_the_only_way_out(tmp_path: Path) -> None:
    folder = deploy(tmp_path, CPU, cache=ResponseCache(host="redis.cache.svc", port=6380))
    assert "--cache-config=redis,host=redis.cache.svc" in server_of(folder)["args"]
    assert "--cache-config=redis,port=6380" in server_of(folder)["args"]
    ports = [port["port"] for rule in load(folder, "network-policy.yaml")["spec"]["egress"] for port in rule["ports"]]
    assert ports == [53, 53, 6380]
    comment = (folder / "network-policy.yaml").read_text().partition("apiVersion")[0]
    assert "A server calls port 6380, of its Redis cache, and DNS." in comment


def test_gpu_is_requested_for_engines_only(tmp_path: Path) -> None:
    engine, cpu = deploy(tmp_path / "1", ENGINE), deploy(tmp_path / "2", CPU)
    # The model's instance groups name GPU 1.
    assert server_of(engine)["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert "nvidia.com/gpu" not in json.dumps(load(cpu, "deployment.yaml"))
    terms = pod_of(engine)["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    chosen = [[rule["values"] for rule in term["matchExpressions"]] for term in terms["nodeSelectorTerms"]]
    assert chosen == [[["8"], ["6"]], [["12"], ["0"]]]


def test_server_has_time_to_finish_its_requests(tmp_path: Path) -> None:
    folder = deploy(tmp_path, CPU)
    assert server_of(folder)["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", str(DRAIN_S)]
    assert f"--exit-timeout-secs={EXIT_TIMEOUT_S}" in server_of(folder)["args"]
    assert pod_of(folder)["terminationGracePeriodSeconds"] > DRAIN_S + EXIT_TIMEOUT_S
    # And it is stopped only once another is ready.
    strategy = load(folder, "deployment.yaml")["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_autoscaler_reads_the_metrics_that_the_rules_make(tmp_path: Path) -> None:
    folder = deploy(tmp_path, TEXT, scaling=Scaling(2, 6, requests_per_second=70, queue_ms=15))
    spec = load(folder, "horizontal-pod-autoscaler.yaml")["spec"]
    wanted = {m["pods"]["metric"]["name"]: m["pods"]["target"]["averageValue"] for m in spec["metrics"]}
    rules = load(folder, "prometheus-adapter-values.yaml")["rules"]["custom"]
    assert wanted == {"minilm_requests_per_second": "70", "minilm_queue_ms": "15"}
    assert [rule["name"]["as"] for rule in rules] == list(wanted)
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 6)
    assert spec["scaleTargetRef"]["name"] == load(folder, "deployment.yaml")["metadata"]["name"]
    # The autoscaler alone says how many servers there are.
    assert "replicas" not in load(folder, "deployment.yaml")["spec"]


def test_requests_are_counted_once_and_queues_everywhere(tmp_path: Path) -> None:
    """The buckets of a text model answer the same requests again, and make them wait again."""
    requests, queue = load(deploy(tmp_path, TEXT), "prometheus-adapter-values.yaml")["rules"]["custom"]
    assert requests["metricsQuery"] == (
        'sum(rate(nv_inference_request_success{<<.LabelMatchers>>,model=~"MiniLM"}[1m])) by (<<.GroupBy>>)'
        ' + sum(rate(nv_inference_request_failure{<<.LabelMatchers>>,model=~"MiniLM"}[1m])) by (<<.GroupBy>>)'
    )
    assert queue["metricsQuery"] == (
        "sum(rate(nv_inference_queue_duration_us{<<.LabelMatchers>>}[1m])) by (<<.GroupBy>>) / clamp_min("
        'sum(rate(nv_inference_request_success{<<.LabelMatchers>>,model=~"MiniLM"}[1m])) by (<<.GroupBy>>), 0.001)'
        " / 1000"
    )


def test_selectors_find_the_pods(tmp_path: Path) -> None:
    folder = deploy(tmp_path, CPU)
    labels = load(folder, "deployment.yaml")["spec"]["template"]["metadata"]["labels"]
    assert load(folder, "deployment.yaml")["spec"]["selector"]["matchLabels"] == labels
    assert load(folder, "service.yaml")["spec"]["selector"] == labels
    assert load(folder, "network-policy.yaml")["spec"]["podSelector"]["matchLabels"] == labels
    for name in ("pod-disruption-budget.yaml", "pod-monitor.yaml"):
        assert load(folder, name)["spec"]["selector"]["matchLabels"] == labels
    writer = load(folder, "model-writer.yaml")["metadata"]["labels"]
    assert not labels.items() <= writer.items()


def test_pod_monitor_is_what_the_operator_documents(tmp_path: Path) -> None:
    """Fields of monitoring.coreos.com/v1 PodMonitor: prometheus-operator, Documentation/api-reference."""
    folder = deploy(tmp_path, CPU)
    monitor = load(folder, "pod-monitor.yaml")
    assert (monitor["apiVersion"], monitor["kind"]) == ("monitoring.coreos.com/v1", "PodMonitor")
    assert set(monitor["spec"]) == {"selector", "podMetricsEndpoints"}
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert set(endpoint) <= {"port", "path", "interval", "scrapeTimeout", "scheme", "params", "honorLabels"}
    assert endpoint["port"] in {port["name"] for port in server_of(folder)["ports"]}
    assert int(endpoint["scrapeTimeout"].removesuffix("s")) < int(endpoint["interval"].removesuffix("s"))


def test_kustomization_lists_what_is_applied(tmp_path: Path) -> None:
    folder = deploy(tmp_path, CPU)
    kustomization = load(folder, "kustomization.yaml")
    apart = {"kustomization.yaml", "model-writer.yaml", "prometheus-adapter-values.yaml"}
    assert set(kustomization["resources"]) == {path.name for path in folder.glob("*.yaml")} - apart
    (generator,) = kustomization["configMapGenerator"]
    assert all((folder / name).is_file() for name in generator["files"])
    assert generator["options"]["labels"]["grafana_dashboard"] == "1"


def run_check(folder: Path, models: Path, checksums: Path) -> int:
    """Run the init container's command on the models here."""
    (check,) = pod_of(folder)["initContainers"]
    checksums.write_text(load(folder, "model-checksums.yaml")["data"]["SHA256SUMS"])
    command = [str(checksums) if word.endswith("SHA256SUMS") else word for word in check["command"]]
    return subprocess.run(command, cwd=models, capture_output=True, check=False).returncode


def test_server_refuses_models_that_are_missing_or_changed(tmp_path: Path) -> None:
    folder = deploy(tmp_path, TEXT)
    models, checksums = tmp_path / "repository", tmp_path / "SHA256SUMS"
    assert run_check(folder, models, checksums) == 0
    file = models / "MiniLM_b32/1/model file.bin"
    content = file.read_text()
    file.write_text("other")
    assert run_check(folder, models, checksums) != 0
    file.unlink()
    assert run_check(folder, models, checksums) != 0
    file.write_text(content)
    assert run_check(folder, models, checksums) == 0


def test_other_models_make_other_pods(tmp_path: Path) -> None:
    digests = set()
    for number, models in enumerate((CPU, CPU, TEXT)):
        template = load(deploy(tmp_path / str(number), models), "deployment.yaml")["spec"]["template"]
        digests.add(template["metadata"]["annotations"]["trtforge/models-sha256"])
    assert len(digests) == 2


def test_one_gpus_engines_are_served_from_a_repository_for_several(tmp_path: Path) -> None:
    folder = deploy(tmp_path, PER_GPU, gpu="sm_89")
    for container in (*pod_of(folder)["initContainers"], *pod_of(folder)["containers"]):
        mounts = [mount["subPath"] for mount in container["volumeMounts"] if mount["name"] == "models"]
        assert mounts == ["digits_sm89"]
    assert "sm86" not in load(folder, "model-checksums.yaml")["data"]["SHA256SUMS"]
    # TensorRT's own backend needs no package: NVIDIA's image is run as it is.
    assert server_of(folder)["image"] == "nvcr.io/nvidia/tritonserver:24.12-py3"
    assert not (folder / "Dockerfile").exists()


def test_volume_has_room_for_the_models_twice(tmp_path: Path) -> None:
    spec = plan_deployment(make_repository(tmp_path, CPU), DeploymentOptions())
    sizes = [volume_claim(spec, size)["spec"]["resources"]["requests"]["storage"] for size in (0, 1, 3 * 2**30)]
    assert sizes == ["1Gi", "1Gi", "6Gi"]


def test_existing_claim_is_used_and_none_is_written(tmp_path: Path) -> None:
    folder = deploy(tmp_path, CPU, claim="shared-models")
    assert not (folder / "model-volume.yaml").exists()
    assert pod_of(folder)["volumes"][0]["persistentVolumeClaim"]["claimName"] == "shared-models"


def test_models_in_the_image_need_no_volume(tmp_path: Path) -> None:
    folder = deploy(tmp_path, TEXT, models_in_image=True)
    assert not (folder / "model-volume.yaml").exists() and not (folder / "model-writer.yaml").exists()
    assert "persistentVolumeClaim" not in json.dumps(pod_of(folder))
    dockerfile = (folder / "Dockerfile").read_text()
    assert "COPY --from=models MiniLM_b32 /models/MiniLM_b32\n" in dockerfile
    # The same tag never names other models.
    other = deploy(tmp_path / "2", {"MiniLM": {"kind": "onnxruntime"}}, models_in_image=True)
    assert server_of(folder)["image"] != server_of(other)["image"]


def test_memory_grows_with_the_models(tmp_path: Path) -> None:
    repository = make_repository(tmp_path, CPU)
    assert plan_deployment(repository, DeploymentOptions()).resources.memory == "5Gi"
    file = repository / "digits/1/model file.bin"
    with file.open("wb") as stream:
        stream.truncate(400 * 2**20)
    manifest = load_repository(repository)
    (model,) = manifest.models
    model = model.model_copy(update={"files": model.files | {"1/model file.bin": sha256_of_file(file)}})
    (repository / "trtforge.json").write_text(manifest.model_copy(update={"models": (model,)}).to_json())
    # 4 GiB, and 3 bytes for each of the 400 MiB, in whole GiB.
    assert plan_deployment(repository, DeploymentOptions()).resources.memory == "6Gi"
