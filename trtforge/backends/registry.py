"""The engine builders, in the order in which `auto` tries them; a backend's module is imported when it is tried."""

from __future__ import annotations

import importlib

from trtforge.backends.base import Backend
from trtforge.errors import InputError
from trtforge.target import BackendName

# name -> module that holds BACKEND. TensorRT comes first: where it can be used, there is a GPU to measure kernels on.
_BACKENDS = {
    BackendName.TENSORRT: "trtforge.backends.tensorrt",
    BackendName.TENSORRT_RTX: "trtforge.backends.tensorrt_rtx",
}
BACKEND_OPTIONS = ("auto", *(str(name) for name in BackendName))


def all_backends() -> list[Backend]:
    """Every backend, usable here or not."""
    return [_import(name) for name in _BACKENDS]


def select_backend(name: str = "auto") -> Backend:
    """The backend for `--backend`; `auto` is the first that can be used here.

    Args:
        name: "auto", "tensorrt" or "tensorrt-rtx".

    Raises:
        InputError: unknown name.
        UnavailableError: it cannot be used here; `auto` says why for the last of them, which needs no GPU.
    """
    if name not in BACKEND_OPTIONS:
        raise InputError(
            f"--backend {name!r} is unknown",
            f"it takes {', '.join(BACKEND_OPTIONS)}",
            "leave it out to let trtforge choose",
        )
    for tried in _BACKENDS if name == "auto" else [BackendName(name)]:
        backend = _import(tried)
        error = backend.unavailable()
        if error is None:
            return backend
    assert error is not None
    raise error


def _import(name: BackendName) -> Backend:
    backend: Backend = importlib.import_module(_BACKENDS[name]).BACKEND
    return backend
