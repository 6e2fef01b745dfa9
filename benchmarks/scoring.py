"""How a quantized file is scored: its outputs against the fp32 file's on the same data, both in ONNX Runtime.

Graph optimisation is off, so that Q/DQ is computed as written: with it on, INT8 kernels on CPUs without VNNI drift.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]
Metric = Callable[[Arrays, Arrays, Arrays], dict[str, float]]

SCORING_BATCH = 8


def run_model(path: Path, data: Arrays) -> dict[str, np.ndarray]:
    """Return all outputs over all samples, by name; arrays that are no input (labels) are not fed."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    inputs = {entry.name: data[entry.name] for entry in session.get_inputs()}
    names = [output.name for output in session.get_outputs()]
    count = len(next(iter(inputs.values())))
    parts = [
        session.run(names, {name: array[start : start + SCORING_BATCH] for name, array in inputs.items()})
        for start in range(0, count, SCORING_BATCH)
    ]
    return {name: np.concatenate([part[i] for part in parts]) for i, name in enumerate(names)}


def mean_cosine(actual: np.ndarray, expected: np.ndarray, mask: np.ndarray | None) -> float:
    """Return the mean over samples of the cosine between two outputs `[N, ...]`, each sample flattened.

    Args:
        actual: of the quantized model.
        expected: of the fp32 model.
        mask: `[N, S]`, 0 where a position of outputs shaped `[N, S, ...]` is padding; or None.
    """
    pairs = [array.astype(np.float64) for array in (actual, expected)]
    if mask is not None and actual.ndim >= 3 and actual.shape[:2] == mask.shape:
        pairs = [array * mask.reshape(*mask.shape, *[1] * (array.ndim - 2)) for array in pairs]
    left, right = (array.reshape(len(array), -1) for array in pairs)
    norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    return float(((left * right).sum(axis=1) / np.maximum(norms, np.finfo(np.float64).tiny)).mean())


def score_model(path: Path, reference: Arrays, data: Arrays, metric: Metric) -> dict[str, float]:
    """Return the cosine of the first output and the model's own metrics."""
    outputs = run_model(path, data)
    first = next(iter(reference))
    cosine = mean_cosine(outputs[first], reference[first], data.get("attention_mask"))
    return {"cosine": cosine, **metric(outputs, reference, data)}
