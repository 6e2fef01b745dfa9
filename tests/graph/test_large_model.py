"""A model whose weights lie in a file is never held whole: what a cast adds is its own half of the size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from trtforge.graph.storage import release_pages

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Casts a model in its process, and says by how many of its bytes the peak rose above that of a tiny one. VmHWM starts
# anew with a program; ru_maxrss would count the one that started it.
SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {benchmarks!r})
from large_model import cast_model, make_model
folder = Path({folder!r})
peaks = []
for name, layers, rows in (("tiny", 2, 8), ("large", 8, 2048)):
    num_bytes = make_model(folder / f"{{name}}.onnx", layers, rows, 4096)
    cast_model(folder / f"{{name}}.onnx", folder / f"{{name}}_fp16.onnx")
    status = Path("/proc/self/status").read_text()
    peaks.append(1024 * int(status.partition("VmHWM:")[2].split()[0]))
print((peaks[1] - peaks[0]) / num_bytes)
"""


def test_casting_holds_less_than_the_model(tmp_path: Path) -> None:
    script = SCRIPT.format(benchmarks=str(BENCHMARKS), folder=str(tmp_path))
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    # The fp16 weights are half of the size; the mapped fp32 ones would add the whole.
    assert 0.4 < float(run.stdout) < 0.9


def test_released_pages_keep_their_values(tmp_path: Path) -> None:
    values = np.arange(4096, dtype=np.float32)
    (tmp_path / "w.bin").write_bytes(values.tobytes())
    mapped = np.asarray(np.memmap(tmp_path / "w.bin", np.float32, "r"))
    assert mapped.sum() == values.sum()
    release_pages(mapped[1:])
    np.testing.assert_array_equal(mapped, values)


def test_arrays_in_memory_are_left_alone() -> None:
    values = np.arange(10)
    release_pages(values)
    np.testing.assert_array_equal(values, np.arange(10))
