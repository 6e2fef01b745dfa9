"""Cases of the GEMM kernels: their operands, and the runner that puts them through the launchers on the emulator.

The runner (tests/csrc/gemm/runner.cpp) reads a line per case and a raw file per operand, and writes raw results.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from case_count import count_cases
from emulation_build import TYPES, sanitizer_environment
from numpy.typing import NDArray

Array = NDArray[np.generic]
Operands = dict[str, Array]

ACTIVATIONS = ("none", "gelu", "gelu_tanh", "relu", "silu")
TILES = ("auto", "small", "medium", "large")
INT8_ROW_BYTES = 16  # rows of int8 matrices start at multiples of this


@dataclass(frozen=True)
class Case:
    """One launch. C is [m, n], or y for the row kernels; k is the depth of a product."""

    op: str
    m: int
    n: int
    k: int = 8
    type: str = "half"
    activation: str = "none"
    tile: str = "auto"
    bias: bool = True
    residual: bool = False
    lengths: tuple[int, ...] | None = None
    seed: int = 0
    settings: dict[str, object] = field(default_factory=dict)  # further keys of the runner

    @property
    def sequence_length(self) -> int:
        return self.m // len(self.lengths) if self.lengths else self.m

    def line(self, case_id: str) -> str:
        known = {
            "id": case_id,
            "op": self.op,
            "type": self.type,
            "m": self.m,
            "n": self.n,
            "k": self.k,
            "s": self.sequence_length,
            "activation": ACTIVATIONS.index(self.activation),
            "tile": TILES.index(self.tile),
            "seed": self.seed,
        }
        return " ".join(f"{key}={value}" for key, value in {**known, **self.settings}.items())

    def valid_rows(self) -> NDArray[np.bool_]:
        """[m]: False at padding."""
        if self.lengths is None:
            return np.ones(self.m, bool)
        positions = np.arange(self.sequence_length)
        return (positions[None, :] < np.asarray(self.lengths)[:, None]).reshape(-1)


@dataclass(frozen=True)
class Result:
    status: int
    text: str
    outputs: Operands


def int8_row_bytes(num_cols: int) -> int:
    return -(-num_cols // INT8_ROW_BYTES) * INT8_ROW_BYTES


def padded_int8(matrix: Array, padding: int) -> Array:
    """Rows at multiples of 16 bytes, with `padding` between."""
    padded = np.full((matrix.shape[0], int8_row_bytes(matrix.shape[1])), padding, np.int8)
    padded[:, : matrix.shape[1]] = matrix
    return padded


def make_operands(case: Case) -> Operands:
    """Random operands, the same for the same case. Products have about unit size, whatever K is."""
    random = np.random.default_rng([case.m, case.n, case.k])
    dtype = TYPES[case.type]

    def normal(*shape: int) -> Array:
        return random.normal(size=shape).astype(dtype)

    operands: Operands = {}
    if case.op == "gemm":
        operands["a"] = normal(case.m, case.k)
        operands["b"] = (random.normal(size=(case.k, case.n)) / np.sqrt(case.k)).astype(dtype)
    elif case.op == "gemm_s8":
        # 77: which no result may show.
        operands["a"] = padded_int8(random.integers(-128, 128, size=(case.m, case.k)).astype(np.int8), 77)
        operands["b"] = random.integers(-128, 128, size=(case.k, case.n)).astype(np.int8)
        # 74: the standard deviation of a uniform int8.
        operands["b_scales"] = (random.uniform(0.5, 2, size=case.n) / 74 / np.sqrt(case.k)).astype(np.float32)
    else:
        operands["x"] = normal(case.m, case.n)
        if case.op == "layernorm":
            operands["gamma"] = normal(case.n)
            operands |= {"beta": normal(case.n)} if case.bias else {}
    if case.op in ("gemm", "gemm_s8"):
        operands |= {"bias": normal(case.n)} if case.bias else {}
        operands |= {"residual": normal(case.m, case.n)} if case.residual else {}
    if case.lengths is not None:
        operands["lengths"] = np.asarray(case.lengths, np.int32)
    return operands


def output_dtypes(case: Case) -> dict[str, tuple[np.dtype[np.generic], tuple[int, int]]]:
    """Files that the runner writes for a case: name -> element type and shape as they lie in memory."""
    whole = (TYPES[case.type], (case.m, case.n))
    quantized = (np.dtype(np.int8), (case.m, int8_row_bytes(case.n)))
    if case.op == "gemm":
        return {"c": whole}
    if case.op == "gemm_s8":
        return {"c": quantized if "c_scale" in case.settings else whole}
    outputs = {
        "layernorm": {"y": whole, "y_int8": quantized},
        "quantize": {"y_int8": quantized},
        "phases": {"y": whole},
    }
    return outputs.get(case.op, {})


def read_outputs(folder: Path, case_id: str, case: Case) -> Operands:
    outputs: Operands = {}
    for name, (dtype, shape) in output_dtypes(case).items():
        array = np.fromfile(folder / f"{case_id}.{name}", dtype).reshape(shape)
        outputs[name] = array[:, : case.n] if name in ("c", "y_int8") else array
    return outputs


def write_operands(folder: Path, case_id: str, operands: Operands) -> None:
    """The operands as the runner reads them: an int8 B is given to the kernel as [N, K]."""
    files = dict(operands)
    if "b" in operands and operands["b"].dtype == np.int8:
        files["b_transposed"] = padded_int8(operands["b"].T, 0)
    for name, array in files.items():
        (folder / f"{case_id}.{name}").write_bytes(np.ascontiguousarray(array).tobytes())


def run_program(program: Path, folder: Path, lines: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the runner over lines whose operands are in `folder`."""
    return subprocess.run(
        [str(program), str(folder)],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=sanitizer_environment(),
    )


def run_cases(program: Path, folder: Path, cases: list[tuple[Case, Operands]]) -> list[Result]:
    """Run all cases in one process; a sanitizer's or the emulator's complaint fails the test with its text."""
    lines = []
    for number, (case, operands) in enumerate(cases):
        write_operands(folder, str(number), operands)
        lines.append(case.line(str(number)))
    finished = run_program(program, folder, lines)
    count_cases(len(cases))
    assert finished.returncode == 0, finished.stderr[:4000]
    results = []
    for (number, (case, _)), line in zip(enumerate(cases), finished.stdout.splitlines(), strict=True):
        case_id, status, text = line.split(" ", 2)
        assert case_id == str(number)
        outputs = read_outputs(folder, case_id, case) if status == "0" else {}
        results.append(Result(int(status), text, outputs))
    return results
