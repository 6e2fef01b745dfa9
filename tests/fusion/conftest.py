from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_graphsurgeon as gs
import pytest
from region_reference import Prepare

from trtforge.graph.load import load_model
from trtforge.graph.native import OnnxNative
from trtforge.graph.normalise import normalise
from trtforge.limits import DEFAULT_LIMITS


@pytest.fixture(scope="module")
def prepare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prepare]:
    """Normalise a model as a build does; one child process for all tests."""
    folder = tmp_path_factory.mktemp("fusion")
    with OnnxNative() as native:

        def prepare_model(model: Path | onnx.ModelProto) -> gs.Graph:
            path = model if isinstance(model, Path) else folder / "model.onnx"
            if not isinstance(model, Path):
                onnx.save(model, path)
            return normalise(load_model(path, DEFAULT_LIMITS).graph, native=native, operators="float")[0]

        yield prepare_model
