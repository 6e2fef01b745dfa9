from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from command_checks import Watch
from support import save_onnx

from trtforge.errors import UnavailableError
from trtforge.serving.triton.environment import TritonInstall, find_triton
from trtforge.tensor import TensorSpec


@pytest.fixture
def mlp(tmp_path: Path) -> Path:
    """x [batch, 4] -> MatMul 4x8 -> Relu -> MatMul 8x3 -> scores [batch, 3]; node and tensor names are fixed."""
    random = np.random.default_rng(7)
    return save_onnx(
        tmp_path / "mlp.onnx",
        """mlp (float[batch, 4] x) => (float[batch, 3] scores) {
            [up] hidden = MatMul(x, w1)
            [act] active = Relu(hidden)
            [down] scores = MatMul(active, w2)
        }""",
        w1=random.normal(size=(4, 8)).astype(np.float32),
        w2=random.normal(size=(8, 3)).astype(np.float32),
    )


@pytest.fixture
def x_spec() -> tuple[TensorSpec, ...]:
    """The input of `mlp`."""
    return (TensorSpec("x", "float32", ("batch", 4)),)


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Watch:
    """A working directory and a temporary folder, both empty."""
    folder, temporary = tmp_path / "here", tmp_path / "tmp"
    folder.mkdir()
    temporary.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return Watch(folder, temporary, capsys)


@pytest.fixture(scope="session")
def triton_install() -> TritonInstall:
    """The real Triton server that `make test` installs; TRTFORGE_TRITON names another place."""
    named = os.environ.get("TRTFORGE_TRITON")
    try:
        return find_triton([Path(named) if named else Path(sys.prefix) / "triton"])
    except UnavailableError as err:
        pytest.fail(f"{err}\nor set TRTFORGE_TRITON; here: trtforge triton install --dir {Path(sys.prefix) / 'triton'}")
