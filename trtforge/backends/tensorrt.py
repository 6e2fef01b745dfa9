"""TensorRT: builds for the GPU of this machine, which it needs to measure kernels on."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from trtforge.backends.builder import NativeBuilder
from trtforge.engine_options import EngineOptions
from trtforge.errors import InputError, UnavailableError
from trtforge.gpu import find_gpus
from trtforge.target import BackendName, Target, tensorrt_target_from_option

_OLDEST = 11
_AMPERE = 80
_INSTEAD = "use --backend tensorrt-rtx, which needs no GPU"


@dataclasses.dataclass(frozen=True, slots=True)
class TensorRtBackend(NativeBuilder):
    """See `trtforge.backends.base.Backend`."""

    name: BackendName = BackendName.TENSORRT
    module: str = "tensorrt"
    # The wheel for CUDA 13, the one that leaves CUDA's version open, and that of the system's packages.
    distributions: tuple[str, ...] = ("tensorrt-cu13", "tensorrt")

    def unavailable(self) -> UnavailableError | None:
        """The error that names what is missing: the package, a release that is new enough, the GPU."""
        missing, fixes = [], []
        version = self.version()
        major = version.partition(".")[0]
        if not self.is_installed:
            missing.append(f"the Python package '{self.distributions[0]}' is not installed")
            fixes.append("pip install 'trtforge[tensorrt]'")
        elif major.isdecimal() and int(major) < _OLDEST:
            missing.append(f"TensorRT {version} is installed, but trtforge needs {_OLDEST} or newer")
            fixes.append("pip install --upgrade 'trtforge[tensorrt]'")
        try:
            find_gpus()
        except UnavailableError as err:
            missing.append(f"it builds on a GPU only, and {err.why}")
            fixes.append(err.fix)
        if not missing:
            return None
        return UnavailableError(
            "--backend tensorrt is not available here", "; ".join(missing), f"{' and '.join(fixes)}, or {_INSTEAD}"
        )

    def target(self, gpu: str | None) -> Target:
        """CUDA's default GPU, which `--gpu` may name but not change."""
        return tensorrt_target_from_option(gpu, find_gpus()[0].compute_capability)

    def check(self, options: EngineOptions, target: Target) -> None:
        """Refuse what this GPU cannot do, and a timing cache that could not be written in the end."""
        if options.timing_cache is not None:
            _check_timing_cache(options.timing_cache.absolute())
        if options.hardware_compatible == "ampere_plus" and target.compute_capabilities[0] < _AMPERE:
            raise InputError(
                f"--hardware-compatible ampere_plus cannot be built on {target.names[0]}",
                "it takes a GPU of the Ampere generation (sm_80) or newer",
                "give --hardware-compatible same_compute_capability",
            )


def _check_timing_cache(path: Path) -> None:
    from trtforge.textfile import kind_of  # loads pydantic, which is to come after the worker's start

    if kind_of(path, "timing cache") not in (None, "file"):
        why = "it is no regular file"
    elif kind_of(path.parent, "timing cache") != "folder":
        why = f"there is no folder {path.parent}"
    elif not os.access(path.parent, os.W_OK):
        why = f"the folder {path.parent} cannot be written"
    else:
        return
    raise InputError(f"--timing-cache {path} cannot be used", why, "give a file in a folder that can be written")


BACKEND = TensorRtBackend()
