"""The kernel library behind its C interface: a block on arrays of cupy, torch, pycuda or, on the emulator, numpy.

Arrays are taken by their `__cuda_array_interface__` (numpy's by `__array_interface__`): nothing is copied, and none of
those packages is imported.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtforge.benchmark.block_params import (
    ACTIVATIONS,
    ORDERS,
    TYPES,
    BlockLinear,
    BlockNorm,
    BlockParams,
    DeviceTraits,
)
from trtforge.benchmark.case import BlockCase
from trtforge.benchmark.operands import EPSILON, ROLES, softmax_scale
from trtforge.errors import InputError, UnavailableError

STRATEGIES = {"auto": 0, "launches": 1, "persistent": 2}  # BlockStrategy
_REBUILD = "build it again from the sources of this trtforge: `trtforge plugin build --kernels`"


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceSize:
    """What launchers choose tiles and strategies by."""

    compute_capability: int
    num_multiprocessors: int


class BlockKernels:
    """A loaded library.

    Args:
        library: `libtrtforge_kernels.so`, or the emulator's build of the same sources.
        device: that the arrays are on.

    Raises:
        InputError: it cannot be loaded, or has another layout of parameters.
    """

    def __init__(self, library: Path, device: DeviceSize) -> None:
        self.device = device
        try:
            self._library = ctypes.CDLL(str(library))
            num_bytes = self._declare("block_params_bytes", ctypes.c_size_t)()
            self._workspace_bytes = self._declare("block_workspace_bytes", ctypes.c_size_t, ctypes.POINTER(BlockParams))
            self._launch = self._declare("launch_block", ctypes.c_int, ctypes.POINTER(BlockParams), ctypes.c_void_p)
            self._status_text = self._declare("block_status_text", ctypes.c_char_p, ctypes.c_int)
        except (OSError, AttributeError) as err:
            raise InputError(f"{library} cannot be used as a kernel library", str(err), _REBUILD) from err
        if num_bytes != ctypes.sizeof(BlockParams):
            why = f"its BlockParams has {num_bytes} bytes, that of this trtforge {ctypes.sizeof(BlockParams)}"
            raise InputError(f"{library} was built from other sources", why, _REBUILD)

    def bind(
        self,
        case: BlockCase,
        arrays: Mapping[str, Any],
        y: Any,
        input_scales: Mapping[str, float] | None = None,
        strategy: str = "auto",
    ) -> BlockParams:
        """The parameters of a block, without a workspace. They do not keep the arrays alive.

        Args:
            case: sizes and choices.
            arrays: operands by the names of `trtforge::AttentionFFN_*`; contiguous, of T's size, 16-byte aligned.
            y: the output [B, S, H].
            input_scales: of each product's input, by role; for int8 blocks.
            strategy: "auto", "launches" or "persistent".

        Raises:
            InputError: an array is missing, not contiguous, or of another size than the case has.
        """
        params = BlockParams()
        params.x = _address(arrays, "x", case.batch * case.sequence * case.width, 2)
        params.y = _address({"y": y}, "y", case.batch * case.sequence * case.width, 2)
        dims = case.bias_dims
        params.attention_bias = _address(arrays, "attention_bias", dims[0] * dims[1] * dims[2] * dims[3], 2)
        params.attention_bias_dims[:] = dims
        if case.mask == "lengths":
            params.lengths = _address(arrays, "lengths", case.batch, 4)
        for role in ROLES:
            setattr(params, role, _linear(case, role, arrays, (input_scales or {}).get(role, 0.0)))
        for norm in ("1", "2"):
            vectors = (_address(arrays, f"ln{norm}_{part}", case.width, 2) for part in ("gamma", "beta"))
            setattr(params, f"norm{norm}", BlockNorm(*vectors))
        params.batch, params.sequence, params.width = case.batch, case.sequence, case.width
        params.inner_width, params.num_heads = case.inner_width, case.num_heads
        params.softmax_scale, params.epsilon = softmax_scale(case), EPSILON
        params.activation, params.order = ACTIVATIONS[case.activation], ORDERS[case.order]
        params.type = TYPES[case.element_type]
        params.is_causal, params.is_int8 = case.mask == "causal", case.dtype == "int8"
        params.strategy = STRATEGIES[strategy]
        params.device = DeviceTraits(self.device.compute_capability, self.device.num_multiprocessors)
        return params

    def workspace_bytes(self, params: BlockParams) -> int:
        """Bytes of device memory that `launch` needs beside the arrays; 0 for sizes that it refuses."""
        return int(self._workspace_bytes(ctypes.byref(params)))

    def give_workspace(self, params: BlockParams, workspace: Any) -> None:
        """Set the workspace: an array of bytes, as many as `workspace_bytes` says or more."""
        interface = _interface(workspace, "workspace")
        params.workspace = interface["data"][0]
        params.workspace_bytes = _count(interface) * int(interface["typestr"][2:])

    def launch(self, params: BlockParams, stream: int = 0) -> None:
        """Launch the block on a stream (a cudaStream_t as int) and return without waiting.

        Raises:
            UnavailableError: the kernels refuse it; why says the reason.
        """
        status = self._launch(ctypes.byref(params), ctypes.c_void_p(stream))
        if status != 0:
            text = self._status_text(status).decode()
            raise UnavailableError(
                f"the block was not launched (status {status})", text, "choose other sizes or another strategy"
            )

    def _declare(self, name: str, result: Any, *arguments: Any) -> Any:
        function = getattr(self._library, f"trtforge_{name}")
        function.restype, function.argtypes = result, list(arguments)
        return function


def _linear(case: BlockCase, role: str, arrays: Mapping[str, Any], input_scale: float) -> BlockLinear:
    depth, columns = {
        "qkv": (case.width, 3 * case.width),
        "out": (case.width, case.width),
        "up": (case.width, case.inner_width),
        "down": (case.inner_width, case.width),
    }[role]
    is_int8 = case.dtype == "int8"
    weight = _address(arrays, f"w_{role}", depth * columns, 1 if is_int8 else 2)
    scales = _address(arrays, f"w_{role}_scale", columns, 4) if is_int8 else None
    return BlockLinear(weight, _address(arrays, f"b_{role}", columns, 2), scales, input_scale)


def _address(arrays: Mapping[str, Any], name: str, size: int, element_bytes: int) -> int:
    if name not in arrays:
        raise InputError(f"the block has no {name}", f"it was given {', '.join(sorted(arrays))}", f"give {name} too")
    interface = _interface(arrays[name], name)
    num_elements, num_bytes = _count(interface), int(interface["typestr"][2:])
    if (num_elements, num_bytes) != (size, element_bytes):
        raise InputError(
            f"{name} has {num_elements} elements of {num_bytes} bytes",
            f"a block of these sizes takes {size} of {element_bytes}",
            "check its shape and type (bf16 of a library without it: its bits as int16)",
        )
    return int(interface["data"][0])


def _interface(array: Any, name: str) -> dict[str, Any]:
    for attribute in ("__cuda_array_interface__", "__array_interface__"):
        interface: dict[str, Any] | None = getattr(array, attribute, None)
        if interface is not None:
            if not _is_contiguous(interface):
                raise InputError(f"{name} is not contiguous", "the kernels read rows one after the other", "copy it")
            return interface
    why = f"a {type(array).__name__} has neither __cuda_array_interface__ nor __array_interface__"
    raise InputError(f"{name} is no array", why, "give an array of cupy, torch, pycuda or numpy")


def _count(interface: Mapping[str, Any]) -> int:
    count = 1
    for dim in interface["shape"]:
        count *= dim
    return count


def _is_contiguous(interface: Mapping[str, Any]) -> bool:
    """True of rows in C order; an interface without strides says so itself."""
    strides = interface.get("strides")
    if strides is None:
        return True
    expected = int(interface["typestr"][2:])
    for dim, stride in reversed(list(zip(interface["shape"], strides, strict=True))):
        if dim != 1 and stride != expected:
            return False
        expected *= dim
    return True
