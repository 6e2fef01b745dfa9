from __future__ import annotations

from pathlib import Path

import pytest
from native_stubs import run_python, stub_driver

FIND = """
from trtforge.errors import UnavailableError
from trtforge.gpu import find_gpus
try:
    print(find_gpus())
except UnavailableError as error:
    print(error)
"""


def test_the_driver_names_gpus_and_their_compute_capability(tmp_path: Path) -> None:
    found = run_python(FIND, libraries=stub_driver(tmp_path, 103, count=2))
    assert found.count("Gpu(name='NVIDIA Stub', compute_capability=103)") == 2


@pytest.mark.parametrize(
    ("driver", "why"),
    [
        ({"count": 0}, "the NVIDIA driver finds no GPU (see nvidia-smi"),
        ({"status": 100}, "the NVIDIA driver finds no GPU (no CUDA-capable device is detected (CUDA error 100))"),
    ],
)
def test_a_driver_without_a_gpu_says_so(tmp_path: Path, driver: dict[str, int], why: str) -> None:
    found = run_python(FIND, libraries=stub_driver(tmp_path, **driver))
    assert "this machine has no GPU to use" in found
    assert why in found


@pytest.mark.parametrize("content", [b"no library", b""])
def test_a_missing_or_broken_driver_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "libcuda.so.1").write_bytes(content)
    found = run_python(FIND, libraries=tmp_path)
    assert "why: no NVIDIA driver is installed (" in found
    assert "libcuda.so.1" in found
