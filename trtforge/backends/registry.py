"""The engine builders, in the order in which `auto` tries them; a backend's module is imported when it is chosen."""

from __future__ import annotations

import importlib

from trtforge.backends.base import Backend
from trtforge.errors import InputError, UnavailableError, missing_extra
from trtforge.target import BackendName

# name -> module that holds BACKEND, package to install, extra that brings it.
_BACKENDS = {
    BackendName.TENSORRT_RTX: ("trtforge.backends.tensorrt_rtx", "tensorrt-rtx-cu13", "rtx"),
}
BACKEND_OPTIONS = ("auto", *(str(name) for name in BackendName))


def select_backend(name: str = "auto") -> Backend:
    """The backend for `--backend`; `auto` is the first of the registry.

    Args:
        name: "auto", "tensorrt-rtx" or "tensorrt".

    Raises:
        InputError: unknown name.
        UnavailableError: its package is not installed, or this version of trtforge has no such backend.
    """
    if name not in BACKEND_OPTIONS:
        raise InputError(
            f"--backend {name!r} is unknown",
            f"it takes {', '.join(BACKEND_OPTIONS)}",
            "leave it out to let trtforge choose",
        )
    if name == BackendName.TENSORRT:
        raise UnavailableError(
            "--backend tensorrt is not available",
            "this version of trtforge builds with tensorrt-rtx only",
            "use --backend tensorrt-rtx, which needs no GPU and builds for sm_75, 80, 86, 89, 120 and 121",
        )
    key = next(iter(_BACKENDS)) if name == "auto" else BackendName(name)
    module, package, extra = _BACKENDS[key]
    backend: Backend = importlib.import_module(module).BACKEND
    if backend.availability() is not None:
        raise missing_extra(package, extra)
    return backend
