"""The emulator's kernel library, compiled once; tests that need it are skipped without g++ and CUDA's headers."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtforge.benchmark.compilers import build_for_host
from trtforge.errors import UnavailableError
from trtforge.staging import locked

BUILD = Path(__file__).resolve().parents[2] / "build" / "test-bench"


@pytest.fixture(scope="session")
def emulated() -> Path:
    """Of tests that run at once, one compiles and the others wait."""
    BUILD.mkdir(parents=True, exist_ok=True)
    try:
        with locked(BUILD):
            return build_for_host(BUILD)
    except UnavailableError as err:
        pytest.skip(f"{err.what}: {err.fix}")
