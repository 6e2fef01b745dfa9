"""From a packaged repository to a deployment: which models, which image, how much memory, how many GPUs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from trtforge.errors import InputError
from trtforge.hashing import sha256_of_file
from trtforge.serving.deploy.image import base_image, requirements
from trtforge.serving.deploy.names import (
    bytes_of_quantity,
    check_cpu,
    check_deployment_name,
    check_image,
    check_namespace,
    check_subdomain,
    deployment_name,
)
from trtforge.serving.deploy.spec import DeploymentSpec, Ports, Resources, ResponseCache, Scaling
from trtforge.serving.model_folder import BUILD_SCRIPT
from trtforge.serving.repository import CONFIG_NAME, PackagedModel, damaged_models, load_repository

_GIB = 2**30
# A server without models, and what the models' files become in memory: the file, the weights, what they compute.
_SERVER_GIB = 4
_MEMORY_PER_BYTE = 3
# Of a repository whose models ask for a response cache.
_CACHE_BYTES = 256 * 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class DeploymentOptions:
    """What a user may decide; None is derived from the repository.

    Attributes:
        name: of the deployment; None is the first model's name.
        image: to run; None is one that the Dockerfile builds, or NVIDIA's where nothing has to be added.
        base_image: NVIDIA's image to build from; None is the release that the engines need.
        gpu: compute capability to deploy for, e.g. "sm_86": engines for others are left out.
        memory: None fits the models' files.
        gpus: None is as many as the models' instance groups name.
        cache: None is a local one where a model asks for it.
    """

    name: str | None = None
    image: str | None = None
    base_image: str | None = None
    namespace: str | None = None
    gpu: str | None = None
    claim: str | None = None
    models_in_image: bool = False
    cpu: str = "2"
    memory: str | None = None
    shared_memory: str = "1Gi"
    gpus: int | None = None
    scaling: Scaling = dataclasses.field(default_factory=Scaling)
    ports: Ports = dataclasses.field(default_factory=Ports)
    cache: ResponseCache | None = None
    monitoring_namespace: str = "monitoring"

    def __post_init__(self) -> None:
        if self.name is not None:
            check_deployment_name(self.name)
        if self.namespace is not None:
            check_namespace(self.namespace)
        check_namespace(self.monitoring_namespace, "the namespace of Prometheus")
        if self.claim is not None:
            check_subdomain(self.claim, "the volume claim", "models")
            if self.models_in_image:
                why = "the models are in the image"
                raise InputError(f"the volume claim {self.claim!r} would be unused", why, "give one of the two")
        for image, what in ((self.image, "the image"), (self.base_image, "the base image")):
            if image is not None:
                check_image(image, what)
        check_cpu(self.cpu)
        for amount in (self.shared_memory, self.memory):
            if amount is not None:
                bytes_of_quantity(amount)


def plan_deployment(repository: Path, options: DeploymentOptions) -> DeploymentSpec:
    """The deployment of a repository.

    Args:
        repository: that `trtforge package` wrote.
        options: what the user decided.

    Raises:
        InputError: no repository, names or values that a cluster would refuse, or engines that no one server runs.
    """
    manifest = load_repository(repository)
    models = _models_for(manifest.models, options.gpu)
    damaged = damaged_models(repository, manifest.model_copy(update={"models": models}))
    if damaged:
        raise InputError(
            f"{repository / damaged[0]} does not hold what was packaged",
            "its files do not match trtforge.json",
            "package the artifact again with --force",
        )
    if not models:
        raise InputError(f"{repository} has no model to deploy", "none was packaged", "package an artifact into it")
    models = tuple(_with_local_files(repository, model) for model in models)
    name = options.name or deployment_name(next((m.name for m in models if m.bucket is None), models[0].name))
    base = options.base_image or base_image(models)
    packages = requirements(models)
    image = base if not packages and not options.models_in_image else f"{name}-triton:{_tag(base)}"
    spec = DeploymentSpec(
        name=name,
        models=models,
        image=options.image or image,
        base_image=base,
        resources=_resources(repository, models, options),
        requirements=packages,
        namespace=options.namespace,
        claim=options.claim,
        models_in_image=options.models_in_image,
        scaling=options.scaling,
        ports=options.ports,
        cache=_cache(repository, models) if options.cache is None else options.cache,
        monitoring_namespace=options.monitoring_namespace,
    )
    if options.models_in_image and options.image is None:
        # Other models are another image.
        return dataclasses.replace(spec, image=f"{name}-triton:{spec.digest[:12]}")
    return spec


def _tag(image: str) -> str:
    """The tag of an image, or its digest; "latest" where it has neither, as everywhere."""
    tag = image.rpartition(":")[2]
    return "latest" if "/" in tag or ":" not in image else tag


def _with_local_files(repository: Path, model: PackagedModel) -> PackagedModel:
    """The model with the hashes of files that were made on this machine, such as an engine that was built here."""
    folder = repository / model.name
    missing = [path for path in model.local_files if not (folder / path).is_file()]
    if missing:
        raise InputError(
            f"{folder / missing[0]} is not there yet",
            "a server of a deployment cannot write it: its models are read-only",
            f"build it first, on a machine with the GPU: python3 {folder / str(model.version) / BUILD_SCRIPT}",
        )
    local = {path: sha256_of_file(folder / path) for path in model.local_files}
    return model.model_copy(update={"files": model.files | local})


def _models_for(models: tuple[PackagedModel, ...], gpu: str | None) -> tuple[PackagedModel, ...]:
    """The models that a GPU of this kind runs; all where none is named."""
    if gpu is None:
        return models
    found = tuple(model for model in models if not model.needs_gpu or gpu in model.targets)
    if not any(model.needs_gpu for model in found):
        known = sorted({target for model in models if model.needs_gpu for target in model.targets})
        raise InputError(
            f"no engine of the repository runs on {gpu!r}",
            f"there are engines for {', '.join(known) or 'no GPU'}",
            "name one of these, or package an artifact for this GPU",
        )
    return found


def models_bytes(repository: Path, models: tuple[PackagedModel, ...]) -> int:
    """Size of the models' files."""
    return sum((repository / model.name / path).stat().st_size for model in models for path in model.files)


def _resources(repository: Path, models: tuple[PackagedModel, ...], options: DeploymentOptions) -> Resources:
    gibibytes = _SERVER_GIB + -(-_MEMORY_PER_BYTE * models_bytes(repository, models) // _GIB)
    numbers = [number for model in models if model.needs_gpu for number in model.gpus]
    gpus = max(numbers, default=0) + 1 if any(model.needs_gpu for model in models) else 0
    return Resources(
        cpu=options.cpu,
        memory=options.memory or f"{gibibytes}Gi",
        shared_memory=options.shared_memory,
        gpus=gpus if options.gpus is None else options.gpus,
    )


def _cache(repository: Path, models: tuple[PackagedModel, ...]) -> ResponseCache:
    """A local cache where a configuration asks for one: without it, the server ignores the wish."""
    texts = ((repository / model.name / CONFIG_NAME).read_text() for model in models)
    return ResponseCache(bytes=_CACHE_BYTES if any("response_cache" in text for text in texts) else 0)
