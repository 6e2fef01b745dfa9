from __future__ import annotations

from collections.abc import Iterator

import pytest
from lint_build import RtxBuild, build

from trtforge.backends.tensorrt_rtx import BACKEND


@pytest.fixture(scope="session")
def rtx_build(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RtxBuild]:
    """Build a graph with TensorRT-RTX; one worker for all tests."""
    folder = tmp_path_factory.mktemp("rtx")
    with BACKEND.start_worker(folder / "build.log") as worker:
        yield lambda graph: build(graph, folder, worker)
