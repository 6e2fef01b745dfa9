"""ONNX Runtime on the graph that a model was packaged from, and how near to it an answer has to be."""

from __future__ import annotations

import math
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from trtforge.errors import TrtForgeError
from trtforge.manifest import MODEL_NAME, load_manifest
from trtforge.reference import ReferenceModel
from trtforge.serving.batching import FLOAT32_TOLERANCE, LOW_TOLERANCE, relative_error
from trtforge.serving.model_file import ModelFile
from trtforge.serving.repository import PackagedModel
from trtforge.serving.request_values import numpy_type
from trtforge.spec import precision_from_name

Arrays = dict[str, np.ndarray]
# |answer - reference| / |reference| of the same graph, in the same release of ONNX Runtime, on the same shapes: the
# order of its sums may depend on its threads, which moves fp32 by a few units in the last place, 2^-24 each, and in
# other graphs a few of the values by a step of their type.
_SAME_FLOAT32, _SAME_LOW = 1e-5, 1e-2


class Reference:
    """ONNX Runtime on a model's graph; use it as a context manager.

    Args:
        model: the content of its `model.json`.
        entry: the model.
        folder: of its version.
        artifact: it was packaged from; a model that runs on ONNX Runtime brings its own graph.

    Attributes:
        alone: the largest error of a right answer to a request that comes alone.
        joined: the same beside others.
        note: why nothing is compared; empty where it is.
    """

    def __init__(self, model: ModelFile, entry: PackagedModel, folder: Path, artifact: Path | None) -> None:
        is_exact = entry.precision == "fp32" and not model.as_written
        self.joined = FLOAT32_TOLERANCE if is_exact else LOW_TOLERANCE
        self.alone = _SAME_FLOAT32 if is_exact else _SAME_LOW
        self.note = ""
        self._types: dict[str, str] = {}
        path = folder / model.file
        if model.kind != "onnxruntime":
            # Two vectors of one length with cosine c lie sqrt(2 (1 - c)) apart.
            self.alone = self.joined = math.sqrt(2 * (1 - precision_from_name(entry.precision).default_budget))
            path = (artifact or folder) / MODEL_NAME
            if artifact is not None:
                ports = load_manifest(artifact).io
                self._types = {port.name: port.source_dtype for port in ports if port.source_dtype is not None}
        self._path, self._as_written = path, model.as_written
        self._model: ReferenceModel | None = None

    def __enter__(self) -> Self:
        if self._path.is_file():
            self._model = ReferenceModel(self._path, as_written=self._as_written)
        else:
            self.note = "answers were not compared: the graph is not in the repository"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._model is not None:
            self._model.close()

    def run(self, feeds: Arrays) -> Arrays | None:
        """Outputs by name; None where they cannot be known."""
        if self._model is None:
            return None
        typed = {
            name: array.astype(numpy_type(self._types.get(name, array.dtype.name))) for name, array in feeds.items()
        }
        try:
            return self._model.run(typed)
        except TrtForgeError as err:
            self.note = f"answers were not compared: {err.what}: {err.why}"
            return None


def worst_error(expected: Arrays | None, answer: Arrays) -> float | None:
    """The worst output's error; infinite where a shape differs, None where nothing is known."""
    if expected is None:
        return None
    errors = [
        relative_error(expected[name], array) if expected[name].shape == array.shape else math.inf
        for name, array in answer.items()
    ]
    return max(errors, default=0.0)
