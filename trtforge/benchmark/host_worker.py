"""The child process in which emulated kernels run: the emulator ends its process when a kernel does something wrong."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from trtforge.benchmark.arrays import HostArrays
from trtforge.benchmark.case import BlockCase
from trtforge.benchmark.implementations import bits_dtype, kernel_arrays
from trtforge.benchmark.kernels import BlockKernels, DeviceSize
from trtforge.benchmark.operands import make_operands
from trtforge.benchmark.reference import Reference, calibrated
from trtforge.isolation import Arrays, Handler, Meta, Progress

# What the emulator is like.
EMULATED = DeviceSize(86, 4)
_ALIGNMENT = 256  # bytes, as of cudaMalloc


def _check(meta: Meta, arrays: Arrays, progress: Progress) -> tuple[Meta, Arrays]:  # noqa: ARG001
    """Handler: one case on the library in `meta`."""
    case = BlockCase(**meta["case"])
    kernels = BlockKernels(Path(meta["library"]), EMULATED)
    operands = calibrated(case, make_operands(case), HostArrays())
    given = {name: _aligned(array) for name, array in kernel_arrays(case, operands).items()}
    y = _aligned(np.full((case.batch, case.sequence, case.width), -1, np.int16).view(bits_dtype(case)))
    params = kernels.bind(case, given, y, operands.input_scales, meta["strategy"])
    workspace = _aligned(np.full(kernels.workspace_bytes(params), 0xFF, np.uint8))
    kernels.give_workspace(params, workspace)
    kernels.launch(params)
    verdict = Reference(case, operands, HostArrays()).judge(y)
    return {"rms_ratio": verdict.rms_ratio, "max_ratio": verdict.max_ratio, "is_right": verdict.is_right}, {}


def _aligned(array: np.typing.NDArray[np.generic]) -> np.typing.NDArray[np.generic]:
    """A copy that starts where device memory would."""
    memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


HANDLERS: Mapping[str, Handler] = {"check": _check}
