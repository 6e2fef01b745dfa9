"""What every engine builder offers: say whether it can be used here, and turn an ONNX file into an engine.

A backend is never given a precision (it is in the graph), and it builds in a child process that the caller starts
early, so that the builder's imports overlap with the caller's own work:

    backend = select_backend("auto")
    target = backend.target("sm_86,sm_89")
    backend.check(options, target)
    with backend.start_worker(log) as worker:
        ...                                     # calibrate, insert Q/DQ, save the model
        result = backend.build(request, worker, on_progress)

Nothing in this process imports the builder's package.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trtforge.engine_options import DEFAULT_OPTIONS, EngineOptions
from trtforge.errors import UnavailableError
from trtforge.isolation import Child
from trtforge.target import BackendName, Target

if TYPE_CHECKING:
    from trtforge.backends.plan import EnginePlan
    from trtforge.profile import ProfileSet


@dataclasses.dataclass(frozen=True, slots=True)
class BuildRequest:
    """One engine to build.

    Attributes:
        model: the ONNX file; its external data lies beside it.
        engine: file to write.
        profiles: optimisation profiles, every input of the model in each.
        target: what the engine has to run on.
        tf32: whether fp32 GEMMs may round their operands to TF32.
        options: how the builder makes the engine; the backend has checked them.
        own_timing_cache: the user did not name the timing cache, so one that does not fit is started anew.
        whole_attention: names of the `Attention` nodes that must become one kernel each: the build fails otherwise. All
            others are taken apart where there is no kernel for them.
    """

    model: Path
    engine: Path
    profiles: ProfileSet
    target: Target
    tf32: bool = True
    options: EngineOptions = DEFAULT_OPTIONS
    own_timing_cache: bool = False
    whole_attention: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class BuildResult:
    """An engine that was built.

    Attributes:
        engine: the file.
        engine_sha256: of its bytes, taken while it was written.
        plan: its kernels, with the model's own names.
        build_s: seconds in the builder, parsing included.
        backend_version: version of the builder.
        plugin_layers: layers of the network that a plugin computes.
        timing_cache_sha256: of the timing cache as this build left it; None without one.
    """

    engine: Path
    engine_sha256: str
    plan: EnginePlan
    build_s: float
    backend_version: str
    plugin_layers: int = 0
    timing_cache_sha256: str | None = None


class Backend(Protocol):
    """An engine builder."""

    @property
    def name(self) -> BackendName:
        """As in `--backend` and in the manifest."""

    def unavailable(self) -> UnavailableError | None:
        """The error that says why this backend cannot be used here, and what to do; None when it can."""

    def version(self) -> str:
        """Version of the installed builder package."""

    def target(self, gpu: str | None) -> Target:
        """What to build for.

        Args:
            gpu: compute capabilities as in `--gpu`, e.g. "sm_86,sm_89"; None is the backend's default.

        Raises:
            InputError: no compute capabilities, or some that cannot share an engine.
            UnavailableError: the backend cannot build for them here.
        """

    def check(self, options: EngineOptions, target: Target) -> None:
        """Refuse options that this backend cannot do, before anything is built.

        Raises:
            InputError: some of them.
        """

    def start_worker(self, log: Path | None) -> Child:
        """Start the process that will build, and that answers `graph.native.OnnxNative` until then.

        Args:
            log: everything that the builder says is appended to it.
        """

    def build(
        self,
        request: BuildRequest,
        worker: Child,
        on_progress: Callable[[dict[str, Any]], None] | None = None,
    ) -> BuildResult:
        """Build one engine.

        Args:
            request: what to build.
            worker: from `start_worker`.
            on_progress: called with `{"phase": str}`, with "step" and "steps" where known, up to ten times a second.

        Raises:
            BuildError: the builder refused the graph.
            InputError: it cannot use a plugin library or the timing cache.
            ChildDiedError: the worker ended without an answer.
            UnavailableError: the engine cannot be written.
        """
