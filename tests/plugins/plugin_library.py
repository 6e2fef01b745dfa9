"""A plugin library for tests: built once for one architecture, and again only when its inputs change."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest

from trtforge.errors import InputError, UnavailableError
from trtforge.plugins.compile import BuiltLibrary, LibraryRequest, build_library
from trtforge.plugins.toolkit import Headers, find_build_tools, find_headers, find_toolkit
from trtforge.staging import locked

BUILD = Path(__file__).resolve().parents[2] / "build" / "test-plugin"
ARCHITECTURES = (86,)


def require_compilers() -> None:
    """Skip the test where nvcc, CMake or a C++ compiler is missing."""
    try:
        find_toolkit()
        find_build_tools()
    except UnavailableError as err:
        pytest.skip(f"{err.what}: {err.fix}")


def require_headers() -> Headers:
    """TensorRT's headers, from the variables that `trtforge plugin build` reads; skip the test without them."""
    include, root = os.environ.get("TRTFORGE_TENSORRT_INCLUDE_DIR"), os.environ.get("TensorRT_ROOT")  # noqa: SIM112
    try:
        return find_headers(Path(include) if include else None, Path(root) if root else None)
    except (InputError, UnavailableError) as err:
        pytest.skip(f"{err.what}: set TRTFORGE_TENSORRT_INCLUDE_DIR or TensorRT_ROOT")


def build_for_tests(headers: Headers | None) -> BuiltLibrary:
    """The plugin, or without headers the kernels alone; a warning of a compiler is an error.

    Of tests that run at once, one builds and the others wait.
    """
    require_compilers()
    turn = BUILD.with_name(f"{BUILD.name}-turn")  # build_library itself locks the folder that it writes to
    turn.mkdir(parents=True, exist_ok=True)
    strict = {"CXXFLAGS": "-Werror", "CUDAFLAGS": "-Werror=all-warnings -Xcompiler=-Werror"}  # read by CMake
    with locked(turn), mock.patch.dict(os.environ, strict):
        return build_library(
            LibraryRequest(
                BUILD,
                ARCHITECTURES,
                kernels_only=headers is None,
                tensorrt_include=headers.include_dir if headers else None,
                jobs=2,
            )
        )
