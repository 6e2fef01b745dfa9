"""TensorRT-RTX: builds portable engines ahead of time, on a machine with or without a GPU."""

from __future__ import annotations

import dataclasses

from trtforge.backends.builder import NativeBuilder
from trtforge.engine_options import EngineOptions
from trtforge.errors import InputError, UnavailableError, missing_extra
from trtforge.target import BackendName, Target, rtx_target_from_option

_PACKAGE, _EXTRA = "tensorrt-rtx-cu13", "rtx"
_USE_TENSORRT = "leave the option out, or build with --backend tensorrt on a machine with TensorRT and a GPU"
# Options that TensorRT-RTX 1.7.1 refuses, ignores, or fails with on a machine without a GPU: field -> why.
_REFUSED = {
    "plugins": "it has no custom plugins: a model that holds one ends its build process",
    "refit": "a refittable engine needs a GPU while it is built, and this backend builds without one",
    "strip_weights": "stripping weights needs a GPU while the engine is built, and this backend builds without one",
    "version_compatible": "its engines load in the release that built them only; its packages lack the lean runtime",
    "hardware_compatible": "it ignores the option: its engines serve several GPUs already, which --gpu chooses",
    "timing_cache": "it measures no kernels while it builds, so a timing cache has no effect",
}


@dataclasses.dataclass(frozen=True, slots=True)
class TensorRtRtxBackend(NativeBuilder):
    """See `trtforge.backends.base.Backend`."""

    name: BackendName = BackendName.TENSORRT_RTX
    module: str = "tensorrt_rtx"
    distributions: tuple[str, ...] = (_PACKAGE,)

    def unavailable(self) -> UnavailableError | None:
        """The error where its package is missing; a GPU is not needed."""
        return None if self.is_installed else missing_extra(_PACKAGE, _EXTRA)

    def target(self, gpu: str | None) -> Target:
        """See `rtx_target_from_option`."""
        return rtx_target_from_option(gpu)

    def check(self, options: EngineOptions, target: Target) -> None:  # noqa: ARG002
        """Refuse what only TensorRT can do."""
        for field, flag in options.given().items():
            if field in _REFUSED:
                raise InputError(f"{flag} cannot be used with tensorrt-rtx", _REFUSED[field], _USE_TENSORRT)


BACKEND = TensorRtRtxBackend()
