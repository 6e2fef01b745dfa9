"""The ONNX Runtime executor: runs a model in a child process, with any of its tensors as extra outputs.

Graphs with Q/DQ run with graph optimisation off, so that they are computed as written: on CPUs without VNNI the fused
INT8 kernels drift from the arithmetic that the graph states. Everything runs on the CPU, except what asks for a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from trtforge.errors import ChildDiedError, InputError, TrtForgeError
from trtforge.frames import Arrays, Meta
from trtforge.isolation import Child, Handler

_SERVICE = "trtforge.reference:SERVICE"
# Released wheels of ONNX Runtime report usage to their maker, with files in ~/.cache and the temporary folder.
_ENV = {"ORT_DISABLE_TELEMETRY": "1"}
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


class ReferenceModel:
    """A model loaded in ONNX Runtime; use it as a context manager.

    Args:
        path: the ONNX file; its external data is read from beside it.
        taps: names of inner tensors to return as well.
        as_written: switch graph optimisation off.
        exact_integers: run dynamically quantized products without the saturation of some CPUs (unsigned_weights.py);
            not with taps.
        use_gpu: run on the GPU where ONNX Runtime has its CUDA provider and can start it; never `as_written`.
        service: what the child serves; `SERVICE` and whatever the caller adds to it.

    Attributes:
        outputs: names of the outputs, taps included.
        provider: ONNX Runtime's execution provider that runs the model.
        version: ONNX Runtime's.
        gpu_failure: why the GPU that was asked for, and that ONNX Runtime is made for, is not used; else empty.

    Raises:
        InputError: ONNX Runtime cannot load the model.
        ChildDiedError: it crashed on it, with and without optimisation.
    """

    def __init__(
        self,
        path: Path,
        *,
        taps: Sequence[str] = (),
        as_written: bool = False,
        exact_integers: bool = False,
        use_gpu: bool = False,
        service: str = _SERVICE,
    ) -> None:
        request = {"path": str(path.absolute()), "taps": list(taps), "as_written": as_written}
        request["use_gpu"] = use_gpu and not as_written
        request["exact_integers"] = exact_integers
        self._service = service
        self._take(*_load(None, service, request))

    def load(self, path: Path, *, as_written: bool = False) -> None:
        """Put another model in the place of this one, in the same process while that lives; raises as above."""
        request = {"path": str(path.absolute()), "taps": [], "as_written": as_written, "use_gpu": False}
        request["exact_integers"] = False
        self._take(*_load(self._child, self._service, request))

    def _take(self, child: Child, loaded: Meta) -> None:
        self._child = child
        self.outputs = [str(name) for name in loaded["outputs"]]
        self.provider, self.version = str(loaded["provider"]), str(loaded["version"])
        self.gpu_failure = str(loaded["gpu_failure"])

    def run(self, feeds: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """Outputs and taps by name; all of them, or only those asked for.

        Raises:
            InputError: ONNX Runtime refuses these inputs; names the node that it blames.
            ChildDiedError: it crashed or ran out of memory.
        """
        _, arrays = self.call("run", {"outputs": outputs if outputs is None else list(outputs)}, feeds)
        return arrays

    def call(self, method: str, meta: Meta, arrays: Mapping[str, np.ndarray]) -> tuple[Meta, Arrays]:
        """Call any method of the child's service; raises as `run`."""
        return self._child.call(method, meta, arrays)

    def close(self) -> None:
        """End the child process."""
        self._child.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _load(child: Child | None, service: str, request: Meta) -> tuple[Child, Meta]:
    """A child with the model loaded, and its answer; GPU and optimisation are given up where it fails with them."""
    child = child or Child(service, purpose="ONNX Runtime", env=_ENV)
    try:
        answer, _ = child.call("load", request)
    except (ChildDiedError, InputError):
        child.close()
        if not request["as_written"]:
            return _load(None, service, request | {"as_written": True, "use_gpu": False})
        if request["exact_integers"]:
            return _load(None, service, request | {"exact_integers": False})
        raise
    except BaseException:
        child.close()
        raise
    return child, answer


_session: Any = None


def _handle_load(meta: Meta, _: Arrays, __: Callable[[Meta], None]) -> tuple[Meta, Arrays]:
    global _session  # noqa: PLW0603 - the child's one session lives from call to call
    import onnxruntime

    _session = None  # its memory is free before the next model takes some
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    if meta["as_written"]:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    path = Path(meta["path"])
    # ONNX Runtime takes paths as UTF-8 text only, and of a model that is given as bytes it knows no folder.
    os.chdir(path.parent)
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", ".")
    has_bytes = any("\ud800" <= char <= "\udfff" for char in path.name)
    source: str | bytes = path.read_bytes() if has_bytes else path.name
    if meta["taps"]:
        source = _tapped_model(path, meta["taps"])
    elif meta["exact_integers"]:
        from trtforge.graph.unsigned_weights import with_unsigned_weights

        source = with_unsigned_weights(path) or source
    try:
        _session, gpu_failure = _open_session(source, options, meta["use_gpu"])
    except Exception as err:
        raise InputError(
            f"ONNX Runtime cannot load {path.name}", _one_line(err), "check the model with the tool that made it"
        ) from None
    outputs = [output.name for output in _session.get_outputs()]
    provider = _session.get_providers()[0]
    answer = {"outputs": outputs, "provider": provider, "version": onnxruntime.__version__, "gpu_failure": gpu_failure}
    return answer, {}


def _open_session(source: str | bytes, options: Any, use_gpu: bool) -> tuple[Any, str]:
    """A session, and why a GPU that should run it does not."""
    import onnxruntime

    failure = ""
    providers = choose_providers(onnxruntime.get_available_providers(), use_gpu)
    if providers != [CPU]:
        try:
            session = onnxruntime.InferenceSession(source, options, providers=providers)
            # Where a provider cannot start, ONNX Runtime says so in its log and goes on with the next.
            is_on_gpu = CUDA in session.get_providers()
            return session, "" if is_on_gpu else "no driver, or libraries of CUDA or cuDNN are missing"
        except Exception as err:
            failure = _one_line(err)
    return onnxruntime.InferenceSession(source, options, providers=[CPU]), failure


def choose_providers(available: Sequence[str], use_gpu: bool) -> list[str | tuple[str, dict[str, str]]]:
    """Execution providers to ask for, first choice first, with their options.

    Args:
        available: what this build of ONNX Runtime has.
        use_gpu: CUDA is welcome.
    """
    if use_gpu and CUDA in available:
        # TF32 would round the operands of an fp32 product to 10 bits.
        return [(CUDA, {"use_tf32": "0"}), CPU]
    return [CPU]


def _tapped_model(path: Path, taps: Sequence[str]) -> bytes:
    """The model with the taps as further graph outputs; its external data stays where it is."""
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    present = {output.name for output in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in dict.fromkeys(taps) if name not in present)
    data: bytes = model.SerializeToString()
    return data


def _handle_run(meta: Meta, arrays: Arrays, _: Callable[[Meta], None]) -> tuple[Meta, Arrays]:
    names = meta["outputs"] or [output.name for output in _session.get_outputs()]
    try:
        values = _session.run(names, dict(arrays))
    except TrtForgeError:
        raise
    except Exception as err:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
        raise InputError(
            f"ONNX Runtime cannot run the model on {shapes}", _one_line(err), "give shapes that the model accepts"
        ) from None
    return {}, dict(zip(names, values, strict=True))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:400]


SERVICE: dict[str, Handler] = {"load": _handle_load, "run": _handle_run}
