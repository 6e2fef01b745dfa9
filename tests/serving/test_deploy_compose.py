from __future__ import annotations

import importlib.metadata
import json
from importlib import resources
from pathlib import Path
from typing import Any

import compose_spec
import pytest
from deploy_cases import CPU, ENGINE, TEXT, deploy, load, make_repository

from trtforge.serving.deploy import DeploymentOptions, plan_deployment, write_deployment
from trtforge.serving.deploy.queries import TOKENS
from trtforge.serving.deploy.server import EXIT_TIMEOUT_S

CASES = {"cpu": CPU, "engine": ENGINE, "text": TEXT}


def services_of(folder: Path) -> dict[str, Any]:
    services = load(folder, "compose.yaml")["services"]
    assert isinstance(services, dict)
    return services


@pytest.mark.parametrize("in_image", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_file_holds_to_the_compose_specification(tmp_path: Path, case: str, in_image: bool) -> None:
    folder = deploy(tmp_path, CASES[case], "compose", models_in_image=in_image)
    parsed = compose_spec.PyCompose.from_yaml((folder / "compose.yaml").read_text())
    assert sorted(parsed.service_names()) == ["grafana", "prometheus", "triton"]


def test_specification_refuses_what_is_misspelt(tmp_path: Path) -> None:
    text = (deploy(tmp_path, CPU, "compose") / "compose.yaml").read_text()
    with pytest.raises(Exception, match="read_onli"):
        compose_spec.PyCompose.from_yaml(text.replace("read_only: true", "read_onli: true", 1))


@pytest.mark.parametrize("service", ["triton", "prometheus", "grafana"])
def test_service_is_locked_down(tmp_path: Path, service: str) -> None:
    facts = services_of(deploy(tmp_path, ENGINE, "compose"))[service]
    assert facts["read_only"] is True
    assert facts["cap_drop"] == ["ALL"]
    assert facts["security_opt"] == ["no-new-privileges:true"]
    assert all(port["host_ip"] == "127.0.0.1" for port in facts.get("ports", []))
    assert all(mount["read_only"] for mount in facts["volumes"] if mount["type"] == "bind")
    assert not {"privileged", "cap_add", "network_mode", "pid", "ipc"} & set(facts)


def test_server_is_not_root_and_has_bounds(tmp_path: Path) -> None:
    triton = services_of(deploy(tmp_path, CPU, "compose", memory="6Gi"))["triton"]
    assert triton["user"] == "1000:1000"
    assert (triton["mem_limit"], triton["shm_size"]) == (6 * 2**30, 2**30)
    assert len({port["target"] for port in triton["ports"]}) == 3
    assert int(triton["stop_grace_period"].removesuffix("s")) > EXIT_TIMEOUT_S


def test_monitoring_starts_only_when_it_is_asked_for(tmp_path: Path) -> None:
    folder = deploy(tmp_path, CPU, "compose")
    services = services_of(folder)
    assert "profiles" not in services["triton"]
    assert services["prometheus"]["profiles"] == services["grafana"]["profiles"] == ["monitoring"]
    assert "ports" not in services["prometheus"]
    (scrape,) = load(folder, "prometheus.yaml")["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": ["triton:8002"]}]
    mounted = [m["source"] for s in services.values() for m in s["volumes"] if m["source"].startswith("./")]
    assert len(mounted) == 4 and all((folder / name).is_file() for name in mounted)
    (provider,) = load(folder, "grafana-provider.yaml")["providers"]
    targets = [mount["target"] for mount in services["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/triton.json" in targets


def test_models_are_found_from_the_folder_of_the_file(tmp_path: Path) -> None:
    folder = deploy(tmp_path, TEXT, "compose")
    mounts = services_of(folder)["triton"]["volumes"]
    assert [mount["target"] for mount in mounts] == ["/models/MiniLM", "/models/MiniLM_b32", "/models/MiniLM_b128"]
    for mount in mounts:
        assert not Path(mount["source"]).is_absolute()
        assert (folder / mount["source"] / "config.pbtxt").is_file()
        assert mount["bind"] == {"create_host_path": False}


def test_dollar_in_a_path_is_no_variable(tmp_path: Path) -> None:
    repository = make_repository(tmp_path / "of $USER", CPU)
    spec = plan_deployment(repository, DeploymentOptions())
    folder = write_deployment(spec, repository, tmp_path / "compose", "compose").folder
    (mount,) = services_of(folder)["triton"]["volumes"]
    assert mount["source"] == "../of $$USER/digits"


def test_gpus_are_reserved_for_engines_only(tmp_path: Path) -> None:
    engine = services_of(deploy(tmp_path / "1", ENGINE, "compose"))["triton"]
    assert engine["deploy"]["resources"]["reservations"]["devices"] == [
        {"driver": "nvidia", "count": 2, "capabilities": ["gpu"]}
    ]
    assert "deploy" not in services_of(deploy(tmp_path / "2", CPU, "compose"))["triton"]


def test_image_adds_exact_versions_and_runs_as_another_user(tmp_path: Path) -> None:
    folder = deploy(tmp_path, TEXT | ENGINE, "compose", gpu="sm_86")
    runtime = importlib.metadata.version("onnxruntime")
    lines = (folder / "requirements.txt").read_text().splitlines()[1:]
    assert all("==" in line for line in lines)
    assert f"onnxruntime=={runtime}" in lines and "tensorrt-rtx-cu13==1.7.1.116" in lines
    dockerfile = [line for line in (folder / "Dockerfile").read_text().splitlines() if line and line[0] != "#"]
    assert dockerfile[0] == "FROM nvcr.io/nvidia/tritonserver:26.10-py3"
    assert dockerfile[-1] == "USER 1000:1000"


def test_dashboard_shows_gpus_where_there_are_some(tmp_path: Path) -> None:
    titles = []
    for number, models in enumerate((CPU, ENGINE)):
        text = (deploy(tmp_path / str(number), models, "compose") / "grafana-dashboard.json").read_text()
        panels = json.loads(text)["panels"]
        titles.append({panel["title"] for panel in panels})
        boxes = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
        assert len(set(boxes)) == len(boxes) and len({panel["id"] for panel in panels}) == len(panels)
    assert titles[1] - titles[0] == {"GPU use", "GPU memory", "GPU power"}
    assert {"Throughput", "Errors", "Batch size", "Latency percentiles", "Where the time goes"} <= titles[0]


def test_dashboards_of_two_deployments_have_two_ids(tmp_path: Path) -> None:
    """Grafana keeps one dashboard for each id, which may have 40 characters."""
    folders = [deploy(tmp_path / number, CPU, "compose", name="d" * 46 + number) for number in ("1", "2")]
    first, second = (json.loads((folder / "grafana-dashboard.json").read_text())["uid"] for folder in folders)
    assert first != second and len(first) == len(second) == 40


def test_dashboard_of_a_text_model_shows_its_padding(tmp_path: Path) -> None:
    text = (deploy(tmp_path, TEXT, "compose") / "grafana-dashboard.json").read_text()
    queries = [target["expr"] for panel in json.loads(text)["panels"] for target in panel["targets"]]
    assert any(TOKENS in query for query in queries)
    # The name, and the labels, that the model reports them under.
    model = resources.files("trtforge.serving").joinpath("python_models/text_model.py").read_text()
    assert f'name="{TOKENS}"' in model and '"bucket"' in model and '"padding"' in model
