from __future__ import annotations

import onnx
import pytest
from backend_cases import profile_set

from trtforge.backends.base import BuildRequest
from trtforge.backends.tensorrt_rtx import BACKEND
from trtforge.target import rtx_target_from_option


@pytest.fixture(scope="session")
def worker(tmp_path_factory):
    with BACKEND.start_worker(tmp_path_factory.mktemp("worker") / "build.log") as child:
        yield child


@pytest.fixture
def build(tmp_path, worker):
    """Build a model and return its BuildResult."""

    def run(model, *profiles, gpu="sm_86", on_progress=None, child=worker, **options):
        path = tmp_path / "model.onnx"
        onnx.save(model, path)
        target = rtx_target_from_option(gpu)
        request = BuildRequest(path, tmp_path / "model.engine", profile_set(*profiles), target, **options)
        return BACKEND.build(request, child, on_progress)

    return run
