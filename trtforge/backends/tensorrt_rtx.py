"""TensorRT-RTX: builds portable engines ahead of time, on a machine with or without a GPU.

This module talks to the child process; worker.py is what runs there. The child gets `POLYGRAPHY_USE_TENSORRT_RTX`,
this process never does, so that its own Polygraphy is not changed.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtforge.backends.base import BuildRequest, BuildResult
from trtforge.errors import ChildDiedError
from trtforge.isolation import Child
from trtforge.target import BackendName

if TYPE_CHECKING:
    from trtforge.profile import Profile

_SERVICE = "trtforge.backends.worker:SERVICE"
_MODULE = "tensorrt_rtx"
_PACKAGE = "tensorrt-rtx-cu13"


@dataclasses.dataclass(frozen=True, slots=True)
class TensorRtRtxBackend:
    """See `trtforge.backends.base.Backend`."""

    name: BackendName = BackendName.TENSORRT_RTX

    def availability(self) -> str | None:
        """Why this backend cannot be used here; None when it can. Imports nothing."""
        return None if importlib.util.find_spec(_MODULE) else f"the Python package '{_PACKAGE}' is not installed"

    def version(self) -> str:
        """Version of the installed package, "unknown" where it was installed without metadata."""
        try:
            return importlib.metadata.version(_PACKAGE)
        except importlib.metadata.PackageNotFoundError:
            return "unknown"

    def start_worker(self, log: Path | None) -> Child:
        """Start the process that will build; everything that the builder says is appended to `log`."""
        return Child(_SERVICE, purpose="engine build", log=log, env={"POLYGRAPHY_USE_TENSORRT_RTX": "1"})

    def build(
        self,
        request: BuildRequest,
        worker: Child,
        on_progress: Callable[[dict[str, Any]], None] | None = None,
    ) -> BuildResult:
        """Build one engine; see `Backend.build`."""
        target = request.target
        meta = {
            "model": str(request.model.absolute()),
            "engine": str(request.engine.absolute()),
            "profiles": [_shapes_of_profile(profile) for profile in request.profiles.profiles],
            "compute_capabilities": list(target.compute_capabilities) if target.explicit else None,
            "tf32": request.tf32,
        }
        reply, _ = worker.call("build", meta, on_progress=on_progress)
        # Imported here, so that the worker starts before this process loads pydantic.
        from trtforge.backends.answer import read_answer
        from trtforge.backends.plan import parse_plan

        try:
            answer = read_answer(reply)
        except ChildDiedError:
            worker.close()
            raise
        plan = parse_plan(answer.layers, answer.ports, answer.nodes, answer.tensors)
        return BuildResult(request.engine, answer.engine_sha256, plan, answer.build_s, answer.version)


def _shapes_of_profile(profile: Profile) -> dict[str, dict[str, list[list[int]]]]:
    """A profile as JSON: `{"inputs": {name: [min, opt, max]}, "values": {name: [min, opt, max]}}`."""
    return {
        kind: {name: [list(entry.min), list(entry.opt), list(entry.max)] for name, entry in entries.items()}
        for kind, entries in (("inputs", profile.inputs), ("values", profile.values))
    }


BACKEND = TensorRtRtxBackend()
