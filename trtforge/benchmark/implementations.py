"""What is measured: the plugin, and what every other implementation has in common with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import numpy as np

from trtforge.benchmark.arrays import Host, bits_from_values
from trtforge.benchmark.block_params import BlockParams
from trtforge.benchmark.case import BlockCase
from trtforge.benchmark.device import Device
from trtforge.benchmark.kernels import BlockKernels
from trtforge.benchmark.operands import Operands
from trtforge.benchmark.reference import K_RMS

# "call": as a program makes it, launches included. "graph": the same work as one CUDA graph, device time alone.
Mode = Literal["call", "graph"]
MODES: tuple[Mode, ...] = ("call", "graph")


class Implementation(Protocol):
    """One way to compute a block.

    Attributes:
        is_quantized: it computes an int8 block in int8; others take the same weights in T.
        rms_limit: of its error, see reference.py.
    """

    is_quantized: bool
    rms_limit: float

    def prepare(self, mode: Mode) -> Callable[[], None]:
        """A call that launches the block on the device's stream; raises where that is not possible."""

    def output(self) -> Any:
        """What the last call wrote, [B, S, H] in T's bits; rows of padding are zero."""


class PluginBlock:
    """The plugin's kernels, launched through their C interface.

    Args:
        strategy: see `kernels.STRATEGIES`.
    """

    is_quantized = True
    rms_limit = K_RMS

    def __init__(
        self, kernels: BlockKernels, device: Device, case: BlockCase, operands: Operands, strategy: str = "auto"
    ) -> None:
        self.kernels = kernels
        self.device = device
        self.arrays = {name: device.upload(array) for name, array in kernel_arrays(case, operands).items()}
        self.y = device.empty((case.batch, case.sequence, case.width), bits_dtype(case))
        self.params: BlockParams = kernels.bind(case, self.arrays, self.y, operands.input_scales, strategy)
        self.workspace = device.empty((max(1, kernels.workspace_bytes(self.params)),), "uint8")
        kernels.give_workspace(self.params, self.workspace)

    def prepare(self, mode: Mode) -> Callable[[], None]:
        """A call that launches the block on the device's stream."""

        def launch() -> None:
            self.kernels.launch(self.params, self.device.stream.ptr)

        call = launch if mode == "call" else self.device.capture(launch)
        self.device.poison(self.y)
        return call

    def output(self) -> Any:
        """What the last call wrote."""
        return self.y


def bits_dtype(case: BlockCase) -> str:
    """How T is kept: numpy and cupy have no bf16."""
    return "int16" if case.element_type == "bf16" else "float16"


def kernel_arrays(case: BlockCase, operands: Operands) -> dict[str, Host]:
    """Operands as the kernels read them: values in T's bits, codes, scales and lengths as they are."""
    return {
        name: bits_from_values(values, case.element_type)
        if values.dtype == np.float32 and not name.endswith("_scale")
        else np.ascontiguousarray(values)
        for name, values in operands.values.items()
    }
