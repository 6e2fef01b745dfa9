"""What is refused, and what the folder of a deployment looks like while and after it is written."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deploy_cases import CPU, ENGINE, PER_GPU, TEXT, deploy, load, make_repository

from trtforge.errors import InputError
from trtforge.packaging import PackageSpec, package
from trtforge.serving.deploy import (
    DeploymentOptions,
    Ports,
    ResponseCache,
    Scaling,
    check_folder,
    plan_deployment,
    write_deployment,
)
from trtforge.serving.deploy.names import deployment_name
from trtforge.serving.repository import load_repository

GOOD_IMAGE = "registry.local:5000/team/digits_x:1.0@sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "Digits"}, "the deployment's name 'Digits' cannot be used"),
        ({"name": "2digits"}, "the deployment's name '2digits' cannot be used"),
        ({"name": "d" * 60}, "is too long"),
        ({"name": "digits\n"}, "cannot be used"),
        ({"namespace": "a_b"}, "the namespace 'a_b' cannot be used"),
        ({"claim": "-x"}, "the volume claim '-x' cannot be used"),
        ({"claim": "models", "models_in_image": True}, "the volume claim 'models' would be unused"),
        ({"image": "digits:1 --privileged"}, "the image 'digits:1 --privileged' cannot be used"),
        ({"base_image": "a\nRUN id"}, r"the base image 'a\nRUN id' cannot be used"),
        ({"cpu": "two"}, "'two' is no number of cores"),
        ({"cpu": "0"}, "'0' is no number of cores"),
        ({"cpu": "0.0"}, "'0.0' is no number of cores"),
        ({"memory": "9" * 30 + "Ti"}, "is no amount of memory"),
        ({"memory": "8GB"}, "'8GB' is no amount of memory"),
        ({"shared_memory": "1.5Gi"}, "'1.5Gi' is no amount of memory"),
        ({"monitoring_namespace": ""}, "the namespace of Prometheus '' cannot be used"),
    ],
)
def test_option_that_a_cluster_would_refuse_is_refused(options: dict[str, Any], message: str) -> None:
    """Before there is a repository, so that a command that is refused has written nothing."""
    with pytest.raises(InputError, match=re.escape(message)):
        DeploymentOptions(**options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ResponseCache(host="redis:6379"), "the Redis host 'redis:6379' cannot be used"),
        (lambda: Scaling(3, 2), "3 to 2 replicas make no range"),
        (lambda: Scaling(1, 2**31), "1 to 2147483648 replicas make no range"),
        (lambda: Scaling(queue_ms=0), "a target of the autoscaler is below 1"),
        (lambda: Scaling(requests_per_second=2**31), "a target of the autoscaler is too large"),
        (lambda: Ports(metrics=8000), "the ports 8000, 8001, 8000 cannot be used"),
        (lambda: Ports(http=80), "the ports 80, 8001, 8002 cannot be used"),
    ],
)
def test_value_that_cannot_be_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "1Gi", "shared_memory": "1024Mi"}, "1024Mi of shared memory do not fit into 1Gi"),
        ({"gpus": 1}, "a server with 1 GPUs does not fit the models"),
        ({"gpu": "sm_86"}, "no engine of the repository runs on 'sm_86'"),
    ],
)
def test_options_that_do_not_fit_the_repository_are_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    repository = make_repository(tmp_path, CPU)
    with pytest.raises(InputError, match=re.escape(message)):
        plan_deployment(repository, DeploymentOptions(**options))


def test_model_with_a_name_that_trtforge_does_not_give_is_refused(tmp_path: Path) -> None:
    """It would become part of paths, commands and queries."""
    manifest = make_repository(tmp_path, CPU) / "trtforge.json"
    manifest.write_text(manifest.read_text().replace('"name": "digits"', '"name": "a b"'))
    with pytest.raises(InputError, match=r"models\.0\.name"):
        plan_deployment(tmp_path, DeploymentOptions(name="digits"))


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"backend_version": "1.7 --index-url http://x\ny"}, "the model 'digits' has the backend version"),
        ({"targets": ("sm_90a",)}, "the model 'digits' has the target 'sm_90a'"),
    ],
)
def test_manifest_that_was_edited_by_hand_is_refused(tmp_path: Path, facts: dict[str, Any], message: str) -> None:
    repository = make_repository(tmp_path, {"digits": ENGINE["digits"] | facts})
    with pytest.raises(InputError, match=re.escape(message)):
        plan_deployment(repository, DeploymentOptions())


def test_model_that_is_listed_twice_is_refused(tmp_path: Path) -> None:
    manifest = load_repository(make_repository(tmp_path, CPU))
    (tmp_path / "trtforge.json").write_text(manifest.model_copy(update={"models": manifest.models * 2}).to_json())
    with pytest.raises(InputError, match="two models of the repository have one name"):
        plan_deployment(tmp_path, DeploymentOptions())


def test_engine_that_is_built_where_it_is_served_comes_first(tmp_path: Path) -> None:
    repository = make_repository(tmp_path, {"digits": {**ENGINE["digits"], "local_files": ("1/model.engine",)}})
    with pytest.raises(InputError, match=r"model\.engine is not there yet") as caught:
        plan_deployment(repository, DeploymentOptions())
    assert f"python3 {repository}/digits/1/build_engine.py" in caught.value.fix
    (repository / "digits/1/model.engine").write_text("built here")
    spec = plan_deployment(repository, DeploymentOptions())
    assert spec.files["digits/1/model.engine"] == hashlib.sha256(b"built here").hexdigest()
    # It is for the GPU of the machine that built it, and nobody knows which.
    assert spec.targets == ()


@pytest.mark.parametrize(
    ("base", "image"),
    [
        ("nvcr.io/nvidia/tritonserver:25.08-py3", "digits-triton:25.08-py3"),
        ("registry.local:5000/tritonserver", "digits-triton:latest"),
        ("tritonserver", "digits-triton:latest"),
        ("tritonserver@sha256:" + "b" * 64, "digits-triton:" + "b" * 64),
    ],
)
def test_image_is_tagged_like_the_one_it_is_built_from(tmp_path: Path, base: str, image: str) -> None:
    spec = plan_deployment(make_repository(tmp_path, CPU), DeploymentOptions(base_image=base))
    assert spec.image == image


def test_good_values_pass(tmp_path: Path) -> None:
    repository = make_repository(tmp_path, ENGINE)
    options = DeploymentOptions(name="d" * 47, image=GOOD_IMAGE, cpu="500m", memory="4096Mi", gpu="sm_86", gpus=4)
    spec = plan_deployment(repository, options)
    assert (spec.image, spec.resources.gpus) == (GOOD_IMAGE, 4)


def test_engines_that_no_gpu_shares_need_a_choice(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no GPU runs every engine") as caught:
        plan_deployment(make_repository(tmp_path, PER_GPU), DeploymentOptions())
    assert caught.value.why == "digits_sm86: sm_86; digits_sm89: sm_89"


def test_engines_of_two_releases_are_refused(tmp_path: Path) -> None:
    models = {"a": {**PER_GPU["digits_sm86"]}, "b": {**PER_GPU["digits_sm86"], "triton": "25.02"}}
    with pytest.raises(InputError, match="no Triton release runs every engine"):
        plan_deployment(make_repository(tmp_path, models), DeploymentOptions())


def test_engines_of_two_rtx_versions_are_refused(tmp_path: Path) -> None:
    models = {"a": ENGINE["digits"], "b": {**ENGINE["digits"], "backend_version": "1.6.0.1"}}
    with pytest.raises(InputError, match="no image runs every engine") as caught:
        plan_deployment(make_repository(tmp_path, models), DeploymentOptions())
    assert "tensorrt-rtx-cu13==1.6.0.1 and tensorrt-rtx-cu13==1.7.1.116" in caught.value.why


def test_changed_repository_is_refused(tmp_path: Path) -> None:
    repository = make_repository(tmp_path, CPU)
    (repository / "digits/1/model file.bin").unlink()
    with pytest.raises(InputError, match="does not hold what was packaged"):
        plan_deployment(repository, DeploymentOptions())


def test_folder_that_is_no_repository_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no repository of trtforge"):
        plan_deployment(tmp_path, DeploymentOptions())


@pytest.mark.parametrize(
    ("model", "name"),
    [("MiniLM_L6", "minilm-l6"), ("7b", "triton-7b"), ("__", "triton"), ("x" * 80, "x" * 47)],
)
def test_name_of_a_deployment_comes_from_the_model(model: str, name: str) -> None:
    assert deployment_name(model) == name


def test_equal_deployment_is_left_and_another_needs_force(tmp_path: Path) -> None:
    repository = make_repository(tmp_path / "repository", CPU)
    folder = tmp_path / "k8s"
    spec = plan_deployment(repository, DeploymentOptions())
    assert write_deployment(spec, repository, folder, "kubernetes").changed
    before = folder.stat().st_ino
    assert not write_deployment(spec, repository, folder, "kubernetes").changed
    other = plan_deployment(repository, DeploymentOptions(namespace="inference", models_in_image=True))
    with pytest.raises(InputError, match="holds another deployment"):
        write_deployment(other, repository, folder, "kubernetes")
    assert folder.stat().st_ino == before
    result = write_deployment(other, repository, folder, "kubernetes", force=True)
    # A file of the deployment before is gone with it.
    assert {path.name for path in folder.iterdir()} == set(result.files)
    assert "model-volume.yaml" not in result.files


@pytest.mark.parametrize("name", ["overlay.yaml", "grafana-dashboard.json", "data.bin"])
def test_folder_with_other_files_is_never_touched(tmp_path: Path, name: str) -> None:
    folder = deploy(tmp_path, CPU)
    (folder / name).write_bytes(b'{"title": "mine \xff"}')
    before = {path: path.read_bytes() for path in folder.iterdir()}
    repository = tmp_path / "repository"
    spec = plan_deployment(repository, DeploymentOptions(namespace="inference"))
    with pytest.raises(InputError, match="holds files that trtforge did not write") as caught:
        write_deployment(spec, repository, folder, "kubernetes", force=True)
    assert name in caught.value.why
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_large_file_of_another_is_not_read(tmp_path: Path) -> None:
    """It is sparse, and would not fit into memory."""
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(2**36)
    with pytest.raises(InputError, match="holds files that trtforge did not write"):
        check_folder(tmp_path)


def test_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kubernetes").write_text("mine")
    with pytest.raises(InputError, match="it is no folder"):
        deploy(tmp_path, CPU)
    assert (tmp_path / "kubernetes").read_text() == "mine"


def test_folder_inside_the_repository_is_refused(tmp_path: Path) -> None:
    repository = make_repository(tmp_path, CPU)
    spec = plan_deployment(repository, DeploymentOptions())
    with pytest.raises(InputError, match="is inside the repository"):
        write_deployment(spec, repository, repository / "k8s", "kubernetes")
    assert not (repository / "k8s").exists()


def test_folder_with_other_files_stops_a_package_before_it_begins(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    spec = PackageSpec((tmp_path / "no-artifact",), tmp_path / "repository", deployments=(("kubernetes", tmp_path),))
    with pytest.raises(InputError, match="holds files that trtforge did not write"):
        package(spec)


def test_same_repository_makes_the_same_files(tmp_path: Path) -> None:
    first, second = (deploy(tmp_path / number, ENGINE) for number in "12")
    assert {p.name: p.read_bytes() for p in first.iterdir()} == {p.name: p.read_bytes() for p in second.iterdir()}


def test_files_are_written_for_people(tmp_path: Path) -> None:
    folder = deploy(tmp_path, TEXT)
    assert "SHA256SUMS: |" in (folder / "model-checksums.yaml").read_text()
    # A value that two places share is written twice, and not as an anchor and an alias.
    assert not any(re.search(r"[&*]id\d", path.read_text()) for path in folder.glob("*.yaml"))


def test_next_commands_name_what_was_written(tmp_path: Path) -> None:
    repository, folder = make_repository(tmp_path / "my repository", CPU), tmp_path / "k8s"
    spec = plan_deployment(repository, DeploymentOptions(namespace="inference", image="registry.local/digits:1"))
    assert write_deployment(spec, repository, folder, "kubernetes").commands == (
        f"docker build --tag registry.local/digits:1 {folder}",
        "docker push registry.local/digits:1",
        f"kubectl --namespace inference apply --kustomize {folder}",
        f"kubectl --namespace inference apply --filename {folder}/model-writer.yaml",
        "kubectl --namespace inference wait --for condition=Ready pod/digits-writer --timeout 15m",
        "kubectl --namespace inference exec digits-writer -- rm -rf /models/digits",
        f"kubectl --namespace inference cp '{repository}'/digits digits-writer:/models/",
        f"kubectl --namespace inference delete --filename {folder}/model-writer.yaml",
    )
    assert write_deployment(spec, repository, tmp_path / "compose", "compose").commands == (
        f"docker compose --file {tmp_path / 'compose/compose.yaml'} up --detach --wait --build",
    )


def test_image_without_a_registry_is_not_pushed(tmp_path: Path) -> None:
    repository, folder = make_repository(tmp_path / "repository", CPU), tmp_path / "k8s"
    spec = plan_deployment(repository, DeploymentOptions(models_in_image=True))
    assert write_deployment(spec, repository, folder, "kubernetes").commands == (
        f"docker build --build-context models={repository} --tag {spec.image} {folder}",
        f"kubectl apply --kustomize {folder}",
    )


def test_image_with_a_digest_is_not_built_again(tmp_path: Path) -> None:
    """A digest names an image that exists; `docker build --tag` refuses it."""
    repository, folder = make_repository(tmp_path / "repository", CPU), tmp_path / "k8s"
    spec = plan_deployment(repository, DeploymentOptions(image=GOOD_IMAGE))
    written = write_deployment(spec, repository, folder, "kubernetes")
    assert written.commands[0] == f"kubectl apply --kustomize {folder}"
    assert not {"Dockerfile", "requirements.txt"} & set(written.files)
    compose = write_deployment(spec, repository, tmp_path / "compose", "compose").folder
    assert "build" not in load(compose, "compose.yaml")["services"]["triton"]
