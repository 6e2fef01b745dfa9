"""The ONNX Runtime executor: runs a model on the CPU in a child process, with any of its tensors as extra outputs.

Graphs with Q/DQ run with graph optimisation off, so that they are computed as written: on CPUs without VNNI the fused
INT8 kernels drift from the arithmetic that the graph states.
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


class ReferenceModel:
    """A model loaded in ONNX Runtime; use it as a context manager.

    Args:
        path: the ONNX file; its external data is read from beside it.
        taps: names of inner tensors to return as well.
        as_written: switch graph optimisation off.

    Raises:
        InputError: ONNX Runtime cannot load the model.
        ChildDiedError: it crashed on it, with and without optimisation.
    """

    def __init__(self, path: Path, *, taps: Sequence[str] = (), as_written: bool = False) -> None:
        self._child, self.outputs = _load(None, path, list(taps), as_written)

    def load(self, path: Path, *, as_written: bool = False) -> None:
        """Put another model in the place of this one, in the same process while that lives; raises as above."""
        self._child, self.outputs = _load(self._child, path, [], as_written)

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs and taps by name.

        Raises:
            InputError: ONNX Runtime refuses these inputs; names the node that it blames.
            ChildDiedError: it crashed or ran out of memory.
        """
        _, arrays = self._child.call("run", {}, feeds)
        return arrays

    def close(self) -> None:
        """End the child process."""
        self._child.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _load(child: Child | None, path: Path, taps: list[str], as_written: bool) -> tuple[Child, list[str]]:
    """A child with the model loaded; optimisation is given up where ONNX Runtime cannot load the model with it."""
    child = child or Child(_SERVICE, purpose="ONNX Runtime", env=_ENV)
    try:
        meta, _ = child.call("load", {"path": str(path.absolute()), "taps": taps, "as_written": as_written})
    except (ChildDiedError, InputError):
        child.close()
        if not as_written:
            return _load(None, path, taps, as_written=True)
        raise
    except BaseException:
        child.close()
        raise
    return child, list(meta["outputs"])


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
    source: str | bytes = path.name
    if meta["taps"]:
        source = _tapped_model(path, meta["taps"])
    elif any("\ud800" <= char <= "\udfff" for char in path.name):
        source = path.read_bytes()
    try:
        _session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as err:
        raise InputError(
            f"ONNX Runtime cannot load {path.name}", _one_line(err), "check the model with the tool that made it"
        ) from None
    return {"outputs": [output.name for output in _session.get_outputs()]}, {}


def _tapped_model(path: Path, taps: Sequence[str]) -> bytes:
    """The model with the taps as further graph outputs; its external data stays where it is."""
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    present = {output.name for output in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in dict.fromkeys(taps) if name not in present)
    data: bytes = model.SerializeToString()
    return data


def _handle_run(_: Meta, arrays: Arrays, __: Callable[[Meta], None]) -> tuple[Meta, Arrays]:
    names = [output.name for output in _session.get_outputs()]
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
