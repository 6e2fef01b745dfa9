"""Write a deployment's folder: it appears at once and whole, and a folder with other files in it is never touched."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Literal

import yaml

from trtforge.errors import InputError
from trtforge.serving.deploy import compose as machine
from trtforge.serving.deploy.dashboard import DASHBOARD_NAME, DASHBOARD_TAG, dashboard
from trtforge.serving.deploy.image import REQUIREMENTS_NAME, dockerfile, needs_build
from trtforge.serving.deploy.kubernetes import WRITER_NAME, YamlFile, fill_commands, kubectl, kubernetes_files
from trtforge.serving.deploy.plan import models_bytes
from trtforge.serving.deploy.spec import DeploymentSpec
from trtforge.staging import locked, open_staging, put_in_place

Form = Literal["kubernetes", "compose"]
COMPOSE_NAME = "compose.yaml"
DOCKERFILE_NAME = "Dockerfile"
# The first line of every file that can hold a comment; a folder is replaced only where its files have it.
_MARK = "# Written by `trtforge package`."
# Of one file; a larger one in the folder is another's, and is not read.
_LARGEST_BYTES = 16 * 2**20
_NO_FOLDING = 10**6


@dataclasses.dataclass(frozen=True, slots=True)
class WrittenDeployment:
    """What was written.

    Attributes:
        folder: where.
        files: names of its files.
        changed: False where the same files were there already.
        commands: what to run next.
    """

    folder: Path
    files: tuple[str, ...]
    changed: bool
    commands: tuple[str, ...]


def write_deployment(
    spec: DeploymentSpec, repository: Path, folder: Path, form: Form, force: bool = False
) -> WrittenDeployment:
    """Write the files of a deployment into a folder of their own.

    Args:
        spec: the deployment.
        repository: the Triton repository that it serves.
        folder: made where it is missing.
        form: for a cluster, or for one machine.
        force: replace a deployment that was written before.

    Raises:
        InputError: the folder holds another deployment and `force` is not given, or other files, or is inside the
            repository.
        UnavailableError: the place cannot be written.
    """
    folder = folder.absolute()
    if folder.resolve().is_relative_to(repository.resolve()):
        raise InputError(
            f"{folder} is inside the repository {repository}",
            "Triton takes every folder there for a model",
            "choose a folder beside it",
        )
    texts = deployment_files(spec, repository, folder, form)
    commands = _commands(spec, repository, folder, form)
    with open_staging(folder) as staging:
        for name, text in texts.items():
            (staging.directory / name).write_text(text, encoding="utf-8")
        with locked(folder.parent):
            found = check_folder(folder)
            if found and found != texts and not force:
                raise InputError(
                    f"{folder} holds another deployment",
                    "it is not replaced unasked",
                    "give --force, or another folder",
                )
            if found != texts:
                put_in_place(staging)
    return WrittenDeployment(folder, tuple(texts), changed=found != texts, commands=commands)


def check_folder(folder: Path) -> dict[str, str]:
    """The text of each file of a deployment that was written before; nothing where there is none.

    Raises:
        InputError: the folder holds other files, which are never touched, or is none.
    """
    if not folder.exists() and not folder.is_symlink():
        return {}
    if folder.is_symlink() or not folder.is_dir():
        raise InputError(f"{folder} cannot be written", "it is no folder", "choose another folder")
    texts = {path.name: _read_own(path) for path in sorted(folder.iterdir())}
    foreign = [name for name, text in texts.items() if text is None]
    if foreign:
        raise InputError(
            f"{folder} holds files that trtforge did not write",
            f"found {', '.join(foreign[:4])}",
            "choose a folder of its own, and keep changes in a kustomize overlay or a compose override beside it",
        )
    return {name: text for name, text in texts.items() if text is not None}


def deployment_files(spec: DeploymentSpec, repository: Path, folder: Path, form: Form) -> dict[str, str]:
    """The text of each file by name; `folder` is where they will be."""
    if form == "kubernetes":
        files = kubernetes_files(spec, models_bytes(repository, spec.models))
    else:
        files = {
            COMPOSE_NAME: YamlFile(machine.compose(spec, repository, folder), _COMPOSE_COMMENT),
            machine.PROMETHEUS_NAME: YamlFile(machine.prometheus_config(spec), ("What Prometheus scrapes.",)),
            machine.DATASOURCE_NAME: YamlFile(machine.grafana_datasource(), ("Where Grafana finds Prometheus.",)),
            machine.PROVIDER_NAME: YamlFile(machine.grafana_provider(), ("Where Grafana finds the dashboard.",)),
        }
    texts = {name: yaml_text(file) for name, file in files.items()}
    texts[DASHBOARD_NAME] = json.dumps(dashboard(spec), indent=1) + "\n"
    if needs_build(spec):
        texts[DOCKERFILE_NAME] = f"{_MARK}\n{dockerfile(spec)}"
        if spec.requirements:
            texts[REQUIREMENTS_NAME] = "\n".join((_MARK, *spec.requirements)) + "\n"
    return texts


def yaml_text(file: YamlFile) -> str:
    """A YAML file's text: the comment, then the content in the order in which it was made."""
    # Through JSON, no two places share a value, which YAML would write as an anchor and an alias.
    content = json.loads(json.dumps(file.content))
    body = yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=_NO_FOLDING, allow_unicode=True)
    return "".join(f"{line}\n" for line in (_MARK, *(f"# {line}" for line in file.comment))) + body


class _Dumper(yaml.SafeDumper):
    """Writes a text of several lines as such."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def _read_own(path: Path) -> str | None:
    """The text of a file that trtforge wrote; None of any other."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > _LARGEST_BYTES:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    is_own = text.startswith(_MARK) or (path.name == DASHBOARD_NAME and f'"{DASHBOARD_TAG}"' in text)
    return text if is_own else None


def _commands(spec: DeploymentSpec, repository: Path, folder: Path, form: Form) -> tuple[str, ...]:
    """What the user runs next."""
    place, models = shlex.quote(str(folder)), shlex.quote(str(repository))
    if form == "compose":
        return (f"docker compose --file {shlex.quote(str(folder / COMPOSE_NAME))} up --detach --wait --build",)
    commands = []
    if needs_build(spec):
        contexts = f"--build-context models={models} " if spec.models_in_image else ""
        commands.append(f"docker build {contexts}--tag {spec.image} {place}")
        if "/" in spec.image:
            commands.append(f"docker push {spec.image}")
    commands.append(f"{kubectl(spec)} apply --kustomize {place}")
    if not spec.models_in_image:
        commands += fill_commands(spec, models, shlex.quote(str(folder / WRITER_NAME)))
    return tuple(commands)


_COMPOSE_COMMENT = (
    "docker compose up --detach --wait",
    "docker compose --profile monitoring up --detach   also starts Prometheus, and Grafana on http://127.0.0.1:3000",
    "Ports are published on 127.0.0.1 alone: put a proxy with TLS in front of them for other machines.",
)
