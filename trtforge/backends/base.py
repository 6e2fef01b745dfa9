"""What every engine builder offers: say whether it can be used here, and turn an ONNX file into an engine.

A backend is never given a precision (it is in the graph), and it builds in a child process that the caller starts
early, so that the builder's imports overlap with the caller's own work:

    backend = select_backend("auto")
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
    """

    model: Path
    engine: Path
    profiles: ProfileSet
    target: Target
    tf32: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class BuildResult:
    """An engine that was built.

    Attributes:
        engine: the file.
        engine_sha256: of its bytes, taken while it was written.
        plan: its kernels, with the model's own names.
        build_s: seconds in the builder, parsing included.
        backend_version: version of the builder.
    """

    engine: Path
    engine_sha256: str
    plan: EnginePlan
    build_s: float
    backend_version: str


class Backend(Protocol):
    """An engine builder."""

    @property
    def name(self) -> BackendName:
        """As in `--backend` and in the manifest."""

    def availability(self) -> str | None:
        """Why this backend cannot be used here; None when it can."""

    def version(self) -> str:
        """Version of the installed builder package."""

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
            ChildDiedError: the worker ended without an answer.
            UnavailableError: the engine cannot be written.
        """
