"""A model in Triton's Python backend that runs an ONNX graph with ONNX Runtime on the CPU.

Graphs with Q/DQ run with graph optimisation off, so that they are computed as written, as trtforge measured them: on
CPUs without VNNI the fused INT8 kernels drift from the arithmetic that the graph states. The parameter `threads` of
`config.pbtxt` bounds the threads of one instance; without it an instance takes the cores that it may run on.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from answering import Answering, Feeds, read_facts

# Released wheels of ONNX Runtime report usage to their maker.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
import onnxruntime

# TensorProto.BFLOAT16.
_ONNX_BFLOAT16 = 16


class TritonPythonModel:
    """What the server calls."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the graph."""
        folder, facts = read_facts(args)
        parameters = json.loads(args["model_config"]).get("parameters", {})
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = int(
            parameters.get("threads", {}).get("string_value") or len(os.sched_getaffinity(0))
        )
        if facts["as_written"]:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._has_bfloat16 = any(port["dtype"] == "bfloat16" for port in facts["inputs"] + facts["outputs"])
        path = str(folder / facts["file"])
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._answering = Answering(facts, self._run)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One response per request."""
        responses: list[Any] = self._answering.answer(requests)
        return responses

    def _run(self, feeds: Feeds, names: Sequence[str]) -> dict[str, np.ndarray]:
        if self._has_bfloat16:
            return self._run_with_bfloat16(feeds, names)
        return dict(zip(names, self._session.run(list(names), feeds), strict=True))

    def _run_with_bfloat16(self, feeds: Feeds, names: Sequence[str]) -> dict[str, np.ndarray]:
        """ONNX Runtime takes and gives bfloat16 as its own values only, whose bytes are read here."""
        import ml_dtypes

        values = {name: _value_from_array(array) for name, array in feeds.items()}
        arrays = {}
        for name, value in zip(names, self._session.run_with_ort_values(list(names), values), strict=True):
            if value.data_type() == "tensor(bfloat16)":
                content = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
                arrays[name] = np.frombuffer(content, ml_dtypes.bfloat16).reshape(value.shape())
            else:
                arrays[name] = value.numpy()
        return arrays


def _value_from_array(array: np.ndarray) -> Any:
    if array.dtype.name != "bfloat16":
        return onnxruntime.OrtValue.ortvalue_from_numpy(array)
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), _ONNX_BFLOAT16)
