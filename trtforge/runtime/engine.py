"""An engine on a GPU: its buffers, its stream and the profile of each run.

Inputs are arrays of numpy or of anything with `__cuda_array_interface__`. Outputs are cupy arrays; those whose values
are shapes, which TensorRT keeps in the host's memory, are numpy's. bfloat16, which neither has, is its 16 bits in
uint16. The file uses `trt` for TensorRT's module, and a test checks every name of it in both backends' bindings.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from .profiles import EngineError, EngineProfile, Span, choose_profile

Backend = Literal["tensorrt", "tensorrt-rtx"]
MODULES: dict[str, str] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}


@dataclasses.dataclass(frozen=True, slots=True)
class EnginePort:
    """An input or output of an engine.

    Attributes:
        dtype: as numpy keeps it.
        is_host: it lies in the host's memory.
        is_shape: of an input: its values become shapes.
    """

    name: str
    is_input: bool
    dtype: np.dtype[Any]
    is_host: bool
    is_shape: bool


class Engine:
    """A loaded engine. One thread may use it at a time.

    Args:
        path: the serialised engine.
        backend: what built it.
        device: number of the GPU.
        version: of the backend that built it; another one is refused before it can fail. None asks for none.
        use_graphs: let TensorRT-RTX capture a run as a CUDA graph and replay it for equal shapes.

    Attributes:
        ports: inputs and outputs in the engine's order.
        profiles: its optimisation profiles.

    Raises:
        EngineError: there is no TensorRT, cupy or GPU, the version is another, or the engine cannot be loaded.
    """

    def __init__(
        self,
        path: Path,
        backend: Backend = "tensorrt",
        device: int = 0,
        version: str | None = None,
        use_graphs: bool = False,
    ) -> None:
        if use_graphs and backend != "tensorrt-rtx":
            raise EngineError("only TensorRT-RTX captures CUDA graphs by itself: leave use_graphs out")
        self._trt = trt = load_tensorrt(backend, version)
        self._cupy = _import("cupy", "pip install cupy-cuda13x")
        try:
            self._device = self._cupy.cuda.Device(device)
            with self._device:
                self._stream = self._cupy.cuda.Stream(non_blocking=True)
        except Exception as err:
            raise EngineError(f"GPU {device} cannot be used: {err}") from err
        with self._device:
            self._logger = trt.Logger(trt.Logger.WARNING)
            self._runtime = runtime = trt.Runtime(self._logger)
            self._engine = engine = runtime.deserialize_cuda_engine(path.read_bytes())
            if engine is None:
                raise EngineError(f"{path} cannot be loaded by {backend} {trt.__version__} on this GPU; see its log")
            self._context = self._make_context(use_graphs)
        # With their allocators, whose address the context keeps.
        self._growing: dict[str, tuple[_Growing, Any]] = {}
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        self.ports = tuple(self._port(name) for name in names)
        self.profiles = tuple(self._profile(index) for index in range(engine.num_optimization_profiles))

    def run(self, feeds: Mapping[str, Any], outputs: Sequence[str] | None = None) -> dict[str, Any]:
        """Outputs by name, ready for any stream.

        Args:
            feeds: every input, in the engine's types; a copy is made of what is not in the GPU's memory. What is there
                has been written, or will be by work on cupy's current stream, which is waited for.
            outputs: names of those wanted; None means all.

        Raises:
            EngineError: an input is missing or of another type, no profile takes the shapes, or the run failed.
        """
        context = self._context
        with self._device:
            self._stream.wait_event(self._cupy.cuda.get_current_stream().record())
        with self._device, self._stream:
            inputs = {port.name: self._input(port, feeds) for port in self.ports if port.is_input}
            self._use_profile(inputs)
            for name, array in inputs.items():
                context.set_input_shape(name, tuple(array.shape))
                context.set_tensor_address(name, self._address(array))
            try:
                unknown = context.infer_shapes()
            except RuntimeError as err:
                raise EngineError(f"the shapes of the outputs cannot be inferred: {err}") from err
            if unknown:
                raise EngineError(f"the shapes of {', '.join(unknown)} are not known")
            results = {port.name: self._output(port) for port in self.ports if not port.is_input}
            if not context.execute_async_v3(self._stream.ptr):
                raise EngineError("the run failed; see TensorRT's log")
            self._stream.synchronize()
            arrays = {
                name: result.array() if isinstance(result, _Growing) else result for name, result in results.items()
            }
        return arrays if outputs is None else {name: arrays[name] for name in outputs}

    def _make_context(self, use_graphs: bool) -> Any:
        engine, trt = self._engine, self._trt
        if not use_graphs:
            return engine.create_execution_context()
        config = engine.create_runtime_config()
        config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        return engine.create_execution_context(config)

    def _port(self, name: str) -> EnginePort:
        engine, trt = self._engine, self._trt
        types = {
            trt.DataType.FLOAT: "float32",
            trt.DataType.HALF: "float16",
            trt.DataType.BF16: "uint16",
            trt.DataType.INT8: "int8",
            trt.DataType.UINT8: "uint8",
            trt.DataType.INT32: "int32",
            trt.DataType.INT64: "int64",
            trt.DataType.BOOL: "bool",
        }
        dtype = engine.get_tensor_dtype(name)
        if dtype not in types:
            raise EngineError(f"{name} has the type {dtype}, which is not known here")
        is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
        return EnginePort(
            name=name,
            is_input=is_input,
            dtype=np.dtype(types[dtype]),
            is_host=engine.get_tensor_location(name) == trt.TensorLocation.HOST,
            is_shape=is_input and engine.is_shape_inference_io(name),
        )

    def _profile(self, index: int) -> EngineProfile:
        engine = self._engine
        inputs = [port for port in self.ports if port.is_input]
        shapes = {port.name: _span(engine.get_tensor_profile_shape(port.name, index)) for port in inputs}
        values = {
            port.name: _span(engine.get_tensor_profile_values(index, port.name)) for port in inputs if port.is_shape
        }
        return EngineProfile(shapes, values)

    def _input(self, port: EnginePort, feeds: Mapping[str, Any]) -> Any:
        """An input where the engine reads it."""
        if port.name not in feeds:
            names = ", ".join(each.name for each in self.ports if each.is_input)
            raise EngineError(f"input {port.name} is missing; the inputs are {names}")
        feed = feeds[port.name]
        array = _on_host(feed) if port.is_host else self._cupy.asarray(feed, order="C")
        if array.dtype != port.dtype:
            raise EngineError(f"input {port.name} has the type {array.dtype}, the engine takes {port.dtype}")
        return array

    def _use_profile(self, inputs: Mapping[str, Any]) -> None:
        context = self._context
        shapes = {name: tuple(array.shape) for name, array in inputs.items()}
        values = {
            port.name: tuple(_on_host(inputs[port.name]).reshape(-1).tolist()) for port in self.ports if port.is_shape
        }
        index = choose_profile(self.profiles, shapes, values)
        if index != context.active_optimization_profile:
            if not context.set_optimization_profile_async(index, self._stream.ptr):
                raise EngineError(f"profile {index} cannot be used; see TensorRT's log")
            self._stream.synchronize()

    def _output(self, port: EnginePort) -> Any:
        """Where the engine writes an output: an array, or what grows to a size that only the run knows."""
        context = self._context
        shape = tuple(context.get_tensor_shape(port.name))
        if min(shape, default=0) < 0:
            return self._growing_output(port)
        array = (np if port.is_host else self._cupy).empty(shape, port.dtype)
        context.set_tensor_address(port.name, self._address(array))
        return array

    def _growing_output(self, port: EnginePort) -> _Growing:
        """What takes an output whose size only the run knows; the context calls it in every run."""
        context = self._context
        if port.name not in self._growing:
            growing = _Growing(port, self._cupy)
            allocator = _make_allocator(self._trt, growing)
            context.set_output_allocator(port.name, allocator)
            self._growing[port.name] = growing, allocator
        return self._growing[port.name][0]

    def _address(self, array: Any) -> int:
        """Of an array's memory; TensorRT wants one of an empty array as well."""
        if isinstance(array, np.ndarray):
            return int(array.ctypes.data)
        if array.nbytes == 0:
            self._nothing = self._cupy.empty(1, np.uint8)
            return int(self._nothing.data.ptr)
        return int(array.data.ptr)


class _Growing:
    """An output whose size only the run knows."""

    def __init__(self, port: EnginePort, cupy: Any) -> None:
        self._port = port
        self._cupy = cupy
        self._memory: Any = None
        self._shape: tuple[int, ...] = ()

    def allocate(self, size: int) -> int:
        """Memory of a size; its address."""
        self._memory = self._cupy.cuda.alloc(max(size, 1))
        return int(self._memory.ptr)

    def set_shape(self, shape: Sequence[int]) -> None:
        """The shape that came out."""
        self._shape = tuple(shape)

    def array(self) -> Any:
        """The output, whose memory is its own from here on."""
        memory, self._memory = self._memory, None
        return self._cupy.ndarray(self._shape, self._port.dtype, memory)


def _make_allocator(trt: Any, output: _Growing) -> Any:
    """TensorRT's interface to an output that grows; its class is known once TensorRT is loaded."""

    class Allocator(trt.IOutputAllocator):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)

        def reallocate_output_async(self, _name: str, _memory: int, size: int, _alignment: int, _stream: int) -> int:
            return output.allocate(size)

        def notify_shape(self, _name: str, shape: Sequence[int]) -> None:
            output.set_shape(shape)

    return Allocator()


def load_tensorrt(backend: Backend, version: str | None) -> Any:
    """The module of a backend.

    Raises:
        EngineError: it is not installed, or its version is not the one that built the engine.
    """
    package = f"{backend}-cu13" if version is None else f"{backend}-cu13=={version}"
    trt = _import(MODULES[backend], f"pip install {package}")
    if version is not None and trt.__version__ != version:
        raise EngineError(
            f"the engine was built by {backend} {version} and runs with that release only; here is {trt.__version__}: "
            f"pip install {package}, or build the engine again"
        )
    return trt


def _import(module: str, fix: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as err:
        raise EngineError(f"the Python package {module} cannot be loaded ({err}): {fix}") from err


def _on_host(feed: Any) -> np.ndarray:
    """An array in the host's memory, row by row; a scalar keeps its rank of 0."""
    return np.asarray(feed.get() if hasattr(feed, "get") else feed, order="C")


def _span(corners: Sequence[Sequence[int]]) -> Span:
    low, opt, high = (tuple(int(size) for size in corner) for corner in corners)
    return Span(low, opt, high)
