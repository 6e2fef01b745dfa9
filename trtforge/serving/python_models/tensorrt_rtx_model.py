"""A model in Triton's Python backend that runs a TensorRT-RTX engine on the GPU of its instance.

An engine runs with the release of TensorRT-RTX that built it and no other, which `model.json` names and
`requirements.txt` installs. `runtime/` is a copy of trtforge's, which needs numpy, cupy and TensorRT-RTX.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from answering import Answering, Feeds, read_facts
from runtime import Engine, EngineError


class TritonPythonModel:
    """What the server calls."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the engine on the instance's GPU."""
        if args["model_instance_kind"] != "GPU":
            raise EngineError("TensorRT-RTX runs on a GPU: give the instance group kind KIND_GPU")
        folder, facts = read_facts(args)
        path = folder / facts["file"]
        if not path.is_file():
            raise EngineError(f"{path} is missing: build it on this machine with python3 {folder / 'build_engine.py'}")
        self._engine = Engine(path, "tensorrt-rtx", int(args["model_instance_device_id"]), facts["version"] or None)
        self._answering = Answering(facts, self._run)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One response per request."""
        responses: list[Any] = self._answering.answer(requests)
        return responses

    def _run(self, feeds: Feeds, names: Sequence[str]) -> dict[str, np.ndarray]:
        bits = {name: array.view(np.uint16) if _is_bfloat16(array) else array for name, array in feeds.items()}
        arrays = self._engine.run(bits, names)
        return {name: array.get() if hasattr(array, "get") else array for name, array in arrays.items()}


def _is_bfloat16(array: np.ndarray) -> bool:
    return bool(array.dtype.name == "bfloat16")
