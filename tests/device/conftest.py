"""Tests that need TensorRT and a GPU: `pytest tests/device` on such a machine; elsewhere they are skipped."""

from __future__ import annotations

import pytest

from trtforge.backends.tensorrt import BACKEND


@pytest.fixture(autouse=True)
def _on_a_gpu() -> None:
    reason = BACKEND.unavailable()
    if reason is not None:
        pytest.skip(reason.why)
