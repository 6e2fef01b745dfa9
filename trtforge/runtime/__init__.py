"""Run an engine on a GPU with numpy, cupy and the TensorRT module alone.

A Triton repository carries a copy of this package beside its models, so it imports nothing of trtforge, and its own
files by relative names. What it raises is an `EngineError`.

engine = Engine(Path("model.engine"), "tensorrt-rtx")
outputs = engine.run({"ids": ids, "mask": mask})      # cupy arrays
"""

from .engine import Engine
from .profiles import EngineError

__all__ = ["Engine", "EngineError"]
