"""What TensorRT says of an engine that it built, in the build process: it loads the engine on the GPU to ask."""

from __future__ import annotations

from typing import Any

from trtforge.backends.build_log import BuildLog, write_log
from trtforge.backends.library import trt


def inspect_engine(engine: Any, log: BuildLog, has_host_code: bool) -> str:
    """The engine inspector's JSON; empty where the engine cannot be loaded, which the log says.

    Args:
        engine: the serialised engine, just built here.
        log: takes what the runtime says.
        has_host_code: a version-compatible engine, which brings a runtime of its own.
    """
    runtime = trt.Runtime(log)
    runtime.engine_host_code_allowed = has_host_code
    loaded = runtime.deserialize_cuda_engine(engine)
    if loaded is None:
        write_log("W", "the engine cannot be loaded here, so its plan is taken from this log")
        return ""
    return str(loaded.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON))
