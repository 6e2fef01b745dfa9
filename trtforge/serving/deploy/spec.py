"""What is deployed: the models of a repository, the image that runs them, and how much of a machine they get.

Each value checks itself, so that the files hold nothing that a cluster would refuse.
"""

from __future__ import annotations

import dataclasses

from trtforge.errors import InputError
from trtforge.hashing import fingerprint
from trtforge.serving.deploy.names import (
    bytes_of_quantity,
    check_cpu,
    check_deployment_name,
    check_image,
    check_subdomain,
    check_target,
)
from trtforge.serving.repository import PackagedModel

# Kubernetes counts in 32 bits.
_LARGEST = 2**31 - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Resources:
    """What one server gets.

    Attributes:
        cpu: cores that are requested, e.g. "2" or "500m"; more are used where they are free.
        memory: requested and the limit, e.g. "8Gi"; `shared_memory` counts towards it.
        shared_memory: size of /dev/shm, in which the Python backend passes tensors.
        gpus: of a server; 0 without an engine.
    """

    cpu: str
    memory: str
    shared_memory: str
    gpus: int

    def __post_init__(self) -> None:
        check_cpu(self.cpu)
        if bytes_of_quantity(self.shared_memory) >= bytes_of_quantity(self.memory):
            raise InputError(
                f"{self.shared_memory} of shared memory do not fit into {self.memory}",
                "shared memory counts towards the server's memory",
                "ask for more memory, or less shared memory",
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Scaling:
    """Bounds and targets of the autoscaler, each per server.

    Attributes:
        requests_per_second: what one server answers within the objective; `trtforge loadtest` measures it.
        queue_ms: mean time in queues that is too long; keep it above the queue delay of the dynamic batcher.
    """

    min_replicas: int = 1
    max_replicas: int = 4
    requests_per_second: int = 100
    queue_ms: int = 20

    def __post_init__(self) -> None:
        low, high = self.min_replicas, self.max_replicas
        if not 1 <= low <= high <= _LARGEST:
            why = f"it takes 1 <= min <= max <= {_LARGEST}"
            raise InputError(f"{low} to {high} replicas make no range", why, "mend the bounds")
        if min(self.requests_per_second, self.queue_ms) < 1:
            raise InputError("a target of the autoscaler is below 1", "it divides the measured value", "raise it")
        if max(self.requests_per_second, self.queue_ms) > _LARGEST:
            raise InputError("a target of the autoscaler is too large", f"it may be {_LARGEST}", "lower it")


@dataclasses.dataclass(frozen=True, slots=True)
class Ports:
    """Where the server listens; metrics have a port of their own."""

    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002

    def __post_init__(self) -> None:
        ports = dataclasses.astuple(self)
        if len(set(ports)) < len(ports) or not all(1024 <= port <= 65535 for port in ports):
            raise InputError(
                f"the ports {', '.join(map(str, ports))} cannot be used",
                "HTTP, gRPC and metrics each need their own, from 1024 to 65535, because the server is not root",
                "choose other ports",
            )


@dataclasses.dataclass(frozen=True, slots=True)
class ResponseCache:
    """Triton's response cache: in the server's memory (`bytes`), or in Redis (`host`, `port`); neither is none."""

    bytes: int = 0
    host: str = ""
    port: int = 6379

    def __post_init__(self) -> None:
        if self.host:
            check_subdomain(self.host, "the Redis host", "redis.cache.svc")

    @property
    def option(self) -> list[str]:
        """Options of tritonserver."""
        if self.host:
            return [f"--cache-config=redis,host={self.host}", f"--cache-config=redis,port={self.port}"]
        return [f"--cache-config=local,size={self.bytes}"] if self.bytes else []


@dataclasses.dataclass(frozen=True, slots=True)
class DeploymentSpec:
    """A deployment.

    Attributes:
        name: of every object; an RFC 1035 label.
        models: those that are served; others of the repository are not mounted.
        image: what the cluster or the machine runs; the Dockerfile builds it.
        base_image: NVIDIA's image that it is built from.
        requirements: Python packages of the Python backend, with their exact versions.
        namespace: of the objects; None leaves it to `kubectl`.
        claim: an existing PersistentVolumeClaim that holds the repository; None writes one.
        models_in_image: copy the models into the image, instead of mounting a volume.
        monitoring_namespace: where Prometheus runs; no other namespace reaches the metrics.
    """

    name: str
    models: tuple[PackagedModel, ...]
    image: str
    base_image: str
    requirements: tuple[str, ...]
    namespace: str | None
    claim: str | None
    models_in_image: bool
    resources: Resources
    scaling: Scaling
    ports: Ports
    cache: ResponseCache
    monitoring_namespace: str

    def __post_init__(self) -> None:
        check_deployment_name(self.name)
        check_image(self.image, "the image")
        names = [model.name for model in self.models]
        if len(set(names)) < len(names):
            raise InputError("two models of the repository have one name", ", ".join(names), "package them again")
        for model in self.models:
            for target in model.targets:
                check_target(target, model.name)
        if (self.resources.gpus < 1) == self.needs_gpu:
            raise InputError(
                f"a server with {self.resources.gpus} GPUs does not fit the models",
                "an engine needs a GPU, and other models use none",
                "give another number of GPUs, or package with --cpu",
            )
        if self._built_engines and not self.targets:
            each = "; ".join(f"{model.name}: {', '.join(model.targets)}" for model in self._built_engines)
            raise InputError(
                "no GPU runs every engine of the repository", each, "name the GPU to deploy for: --gpu sm_86"
            )

    @property
    def needs_gpu(self) -> bool:
        """Whether a model runs an engine."""
        return any(model.needs_gpu for model in self.models)

    @property
    def targets(self) -> tuple[str, ...]:
        """Compute capabilities that every engine runs on, in order, e.g. ("sm_86", "sm_89").

        Empty without an engine; one that was built where it is served is for the GPU of that machine.
        """
        engines = [set(model.targets) for model in self._built_engines]
        return tuple(sorted(set.intersection(*engines), key=lambda name: int(name[3:]))) if engines else ()

    @property
    def _built_engines(self) -> tuple[PackagedModel, ...]:
        """Models whose engine was packaged, and not built where it is served."""
        return tuple(model for model in self.models if model.needs_gpu and not model.local_files)

    @property
    def entries(self) -> tuple[str, ...]:
        """Names of the models that clients call; a length bucket is called by its text model."""
        return tuple(model.name for model in self.models if model.bucket is None)

    @property
    def claim_name(self) -> str:
        """The PersistentVolumeClaim that holds the repository."""
        return self.claim or f"{self.name}-models"

    @property
    def files(self) -> dict[str, str]:
        """SHA-256 of each file that is served, by its path in the repository."""
        found = {f"{model.name}/{path}": digest for model in self.models for path, digest in model.files.items()}
        return dict(sorted(found.items()))

    @property
    def digest(self) -> str:
        """SHA-256 over the files that are served."""
        return fingerprint(self.files)
