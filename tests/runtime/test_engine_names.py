"""What can be known of the engine runner without a GPU: names, versions, and that it needs nothing of trtforge."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tensorrt_names import BINDINGS, RTX, look_up, names_in, stub_tensorrt

import trtforge.runtime
from trtforge.errors import UnavailableError
from trtforge.gpu import find_gpus
from trtforge.runtime import Engine, EngineError
from trtforge.runtime.engine import _on_host, load_tensorrt

FOLDER = Path(trtforge.runtime.__file__).parent
# Classes of the objects that engine.py calls by these names.
CLASSES = {"engine": "ICudaEngine", "context": "IExecutionContext", "runtime": "Runtime", "config": "IRuntimeConfig"}
# `use_graphs` is for TensorRT-RTX.
RTX_ONLY = {"CudaGraphStrategy", "CudaGraphStrategy.WHOLE_GRAPH_CAPTURE", "IRuntimeConfig.cuda_graph_strategy"}


def used_names() -> set[str]:
    """Names of TensorRT's module that engine.py uses."""
    return names_in((FOLDER / "engine.py").read_text(), CLASSES)


def test_the_walk_finds_the_calls() -> None:
    names = used_names()
    assert {"IExecutionContext.execute_async_v3", "ICudaEngine.get_tensor_profile_shape", "DataType.BF16"} <= names
    assert names >= RTX_ONLY


def test_every_name_exists_in_tensorrt_rtx() -> None:
    assert look_up(RTX, used_names())[1] == []
    assert look_up(RTX, {"Runtime.no_such_name"})[1] == ["Runtime.no_such_name"]


def test_every_name_exists_in_tensorrt(tmp_path: Path) -> None:
    assert look_up(BINDINGS, used_names() - RTX_ONLY, stub_tensorrt(tmp_path))[1] == []


def test_another_release_is_refused_with_the_one_to_install() -> None:
    with pytest.raises(EngineError) as caught:
        load_tensorrt("tensorrt-rtx", "1.0.0.1")
    assert "pip install tensorrt-rtx-cu13==1.0.0.1" in str(caught.value)
    here = load_tensorrt("tensorrt-rtx", None).__version__
    assert here in str(caught.value)
    assert load_tensorrt("tensorrt-rtx", here).__version__ == here


def test_arrays_in_the_host_are_whole_rows_and_scalars_stay_scalars() -> None:
    assert _on_host(np.float32(3)).shape == ()
    columns = np.arange(6).reshape(2, 3).T
    assert _on_host(columns).flags.c_contiguous
    assert np.array_equal(_on_host(columns), columns)


def test_graphs_are_for_tensorrt_rtx(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="only TensorRT-RTX captures"):
        Engine(tmp_path / "model.engine", "tensorrt", use_graphs=True)


def test_without_a_gpu_an_engine_is_refused_and_not_crashed_on(tmp_path: Path) -> None:
    try:
        find_gpus()
    except UnavailableError:
        pass
    else:
        pytest.skip("there is a GPU here")
    with pytest.raises(EngineError, match=r"cupy|GPU 0"):
        Engine(tmp_path / "model.engine", "tensorrt-rtx")


def test_a_copy_runs_without_trtforge(tmp_path: Path) -> None:
    """As in a Triton repository, where it lies beside the model's code."""
    shutil.copytree(FOLDER, tmp_path / "runtime")
    code = "import sys; sys.path[:0] = [sys.argv[1]]; import runtime; print('trtforge' in sys.modules, runtime.Engine)"
    shown = subprocess.run([sys.executable, "-I", "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False <class 'runtime.engine.Engine'>"
