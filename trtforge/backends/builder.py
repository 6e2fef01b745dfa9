"""What the two builders share on this side of the process border: TensorRT and TensorRT-RTX have one API.

worker.py is what runs in the child, for both: the environment variable `POLYGRAPHY_USE_TENSORRT_RTX` tells it, and
Polygraphy there, which Python module to use. It is set in the child only, so that Polygraphy in this process is not
changed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtforge.backends.base import BuildRequest, BuildResult
from trtforge.errors import ChildDiedError
from trtforge.isolation import Child
from trtforge.staging import replace_file
from trtforge.target import BackendName

if TYPE_CHECKING:
    from trtforge.profile import Profile

_SERVICE = "trtforge.backends.worker:SERVICE"


@dataclasses.dataclass(frozen=True, slots=True)
class NativeBuilder:
    """The parts of `trtforge.backends.base.Backend` that both builders have in common.

    Attributes:
        name: as in `--backend`.
        module: the builder's Python module.
        distributions: packages that bring it, the one to install first.
    """

    name: BackendName
    module: str
    distributions: tuple[str, ...]

    @property
    def is_installed(self) -> bool:
        """Whether the builder's module is there. Imports nothing; a mere folder of that name is none."""
        spec = importlib.util.find_spec(self.module)
        return spec is not None and spec.origin is not None

    def version(self) -> str:
        """Version of the installed package, "unknown" where it was installed without metadata."""
        for distribution in self.distributions:
            try:
                return importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
        return "unknown"

    def start_worker(self, log: Path | None) -> Child:
        """Start the process that will build; everything that the builder says is appended to `log`."""
        is_rtx = "1" if self.name is BackendName.TENSORRT_RTX else "0"
        return Child(_SERVICE, purpose="engine build", log=log, env={"POLYGRAPHY_USE_TENSORRT_RTX": is_rtx})

    def build(
        self,
        request: BuildRequest,
        worker: Child,
        on_progress: Callable[[dict[str, Any]], None] | None = None,
    ) -> BuildResult:
        """Build one engine; see `Backend.build`."""
        try:
            reply, arrays = worker.call("build", self._meta(request), on_progress=on_progress)
        except ChildDiedError as err:
            from trtforge.backends.crash import locate_death

            raise locate_death(err, worker.log) from err
        # Imported here, so that the worker starts before this process loads pydantic.
        from trtforge.backends.answer import read_answer, read_plan, read_timing_cache

        timing_cache = request.options.timing_cache
        try:
            answer = read_answer(reply)
            content = None if timing_cache is None else read_timing_cache(arrays)
        except ChildDiedError:
            worker.close()
            raise
        if timing_cache is not None and content is not None:
            replace_file(timing_cache.absolute(), content)
        return BuildResult(
            engine=request.engine,
            engine_sha256=answer.engine_sha256,
            plan=read_plan(answer),
            build_s=answer.build_s,
            backend_version=answer.version,
            plugin_layers=answer.plugin_layers,
            timing_cache_sha256=None if content is None else hashlib.sha256(content).hexdigest(),
        )

    def _meta(self, request: BuildRequest) -> dict[str, Any]:
        """The request as JSON: what worker.py reads."""
        target, options = request.target, request.options
        is_rtx = self.name is BackendName.TENSORRT_RTX
        return {
            "model": str(request.model.absolute()),
            "engine": str(request.engine.absolute()),
            "profiles": [_shapes_of_profile(profile) for profile in request.profiles.profiles],
            # TensorRT builds for the GPU that is there, RTX for those that it is told.
            "compute_capabilities": list(target.compute_capabilities) if target.explicit and is_rtx else None,
            "tf32": request.tf32,
            "whole_attention": list(request.whole_attention),
            "options": dataclasses.asdict(options)
            | {
                "plugins": [str(path.absolute()) for path in options.plugins],
                "timing_cache": None if options.timing_cache is None else str(options.timing_cache.absolute()),
                "own_timing_cache": request.own_timing_cache,
            },
        }


def _shapes_of_profile(profile: Profile) -> dict[str, dict[str, list[list[int]]]]:
    """A profile as JSON: `{"inputs": {name: [min, opt, max]}, "values": {name: [min, opt, max]}}`."""
    return {
        kind: {name: [list(entry.min), list(entry.opt), list(entry.max)] for name, entry in entries.items()}
        for kind, entries in (("inputs", profile.inputs), ("values", profile.values))
    }
