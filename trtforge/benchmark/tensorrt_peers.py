"""The same block in TensorRT: built from standard operators, or with trtforge's plugin.

Engines are built in this process, from models that are made here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trtforge.benchmark.case import BlockCase
from trtforge.benchmark.device import Device
from trtforge.benchmark.implementations import Mode, bits_dtype, kernel_arrays
from trtforge.benchmark.operands import Operands
from trtforge.benchmark.reference import K_RMS, K_RMS_OF_PEERS
from trtforge.errors import BuildError, InputError, missing_extra

TENSORRT_PEERS = {
    "tensorrt": "TensorRT, the block in standard operators with Attention-23",
    "tensorrt+plugin": "TensorRT with trtforge's plugin as the whole block",
}
_loaded: set[Path] = set()


class TensorRtBlock:
    """An engine of one block.

    Raises:
        UnavailableError: TensorRT or onnx is not installed.
        InputError: the plugin's peer has no library, or it cannot be loaded.
        BuildError: TensorRT refused the block.
    """

    is_quantized = True

    def __init__(
        self, name: str, case: BlockCase, operands: Operands, device: Device, plugin_library: Path | None
    ) -> None:
        try:
            import onnx  # noqa: F401 - a machine that measures the kernels alone has neither
            import tensorrt as trt
        except ImportError as err:
            raise missing_extra("tensorrt", "tensorrt") from err
        from trtforge.benchmark.onnx_block import plugin_model, standard_model

        self.case = case
        self.device = device
        has_plugin = name == "tensorrt+plugin"
        self.rms_limit = K_RMS if has_plugin else K_RMS_OF_PEERS
        self.log: Any = trt.Logger(trt.Logger.ERROR)
        if has_plugin:
            _load_plugin(trt, plugin_library)
        model = plugin_model(case, operands) if has_plugin else standard_model(case, operands)
        plan = build_plan(trt, self.log, model.SerializeToString())
        self.runtime: Any = trt.Runtime(self.log)
        self.engine: Any = self.runtime.deserialize_cuda_engine(plan)
        self.context: Any = self.engine.create_execution_context()
        self.x = device.upload(kernel_arrays(case, operands)["x"])
        self.y = device.empty((case.batch, case.sequence, case.width), bits_dtype(case))
        self.context.set_tensor_address("x", self.x.data.ptr)
        self.context.set_tensor_address("y", self.y.data.ptr)

    def prepare(self, mode: Mode) -> Callable[[], None]:
        """A call that launches the engine on the device's stream."""

        def launch() -> None:
            if not self.context.execute_async_v3(self.device.stream.ptr):
                raise BuildError("TensorRT did not launch the engine", "it gives no reason here", "see its log")

        call = launch if mode == "call" else self.device.capture(launch)
        self.device.poison(self.y)
        return call

    def output(self) -> Any:
        """What the last call wrote; padding, which standard operators compute too, made zero."""
        for sample, length in enumerate(self.case.lengths):
            if length < self.case.sequence:
                rows = self.y[sample, length:]
                self.device.cupy.cuda.runtime.memset(rows.data.ptr, 0, rows.nbytes)
        return self.y


def build_plan(trt: Any, log: Any, model: bytes) -> Any:
    """The serialised engine of a model.

    Args:
        trt: the builder's module.
        log: its logger.
        model: ONNX.

    Raises:
        BuildError: the parser or the builder refused it.
    """
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse(model):
        reasons = "; ".join(parser.get_error(index).desc() for index in range(parser.num_errors))
        raise BuildError("TensorRT does not take the block", reasons, "leave this peer out")
    plan = builder.build_serialized_network(network, builder.create_builder_config())
    if plan is None:
        raise BuildError("TensorRT did not build the block", "its log, on stderr, says why", "leave this peer out")
    return plan


def _load_plugin(trt: Any, library: Path | None) -> None:
    if library is None:
        raise InputError("no plugin library was given", "this peer is TensorRT with the plugin", "give --plugin LIB")
    if library in _loaded:
        return
    try:
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)  # the registry gives no reason when it fails; the loader does
    except OSError as err:
        raise InputError(f"--plugin {library} cannot be loaded", str(err), "build it for this machine") from err
    trt.init_libnvinfer_plugins(None, "")
    trt.get_plugin_registry().load_library(str(library))
    _loaded.add(library)
