"""What a model that takes tensors does inside and outside of its profiles, and with many requests at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trtforge.serving.check.load import Content, check_load
from trtforge.serving.check.points import ProbePoint, probe_points
from trtforge.serving.check.reference import Arrays, Reference, worst_error
from trtforge.serving.check.results import LoadCheck, ModelCheck, RequestCheck
from trtforge.serving.model_file import MODEL_FILE_NAME, ModelFile, load_model_file
from trtforge.serving.repository import PackagedModel
from trtforge.serving.request_values import request_values
from trtforge.serving.triton.client import RequestError, TritonClient

# Different contents among the requests that are sent at once, at least.
_NUM_CONTENTS = 16
# Bytes of the inputs of all requests that are sent at once: above it, fewer are sent.
_MAX_BYTES = 2**30


def check_tensors(
    client: TritonClient, repository: Path, entry: PackagedModel, artifact: Path | None, num_requests: int
) -> ModelCheck:
    """Send requests to a model.

    Args:
        client: over gRPC, of a server that has the model loaded.
        repository: its folder.
        entry: the model.
        artifact: it was packaged from, for the graph; a model that runs on ONNX Runtime brings its own.
        num_requests: sent at once.

    Raises:
        InputError: `model.json` or the artifact cannot be read, or ONNX Runtime cannot load the graph.
        ChildDiedError: ONNX Runtime died on the graph.
    """
    folder = repository / entry.name / str(entry.version)
    model = load_model_file(folder / MODEL_FILE_NAME)
    with Reference(model, entry, folder, artifact) as reference:
        probe = _Probe(client, entry.name, model, reference)
        try:
            requests = tuple(probe.check_point(point) for point in probe_points(model))
            load = probe.check_load(num_requests)
        except RequestError as err:
            return ModelCheck(entry.name, entry.kind, failure=str(err), note=reference.note)
    return ModelCheck(entry.name, entry.kind, requests, load, note=reference.note)


class _Probe:
    """Requests to one model."""

    def __init__(self, client: TritonClient, name: str, model: ModelFile, reference: Reference) -> None:
        self._client = client
        self._name = name
        self._model = model
        self._reference = reference

    def check_point(self, point: ProbePoint) -> RequestCheck:
        """One request; inside it has to be answered right, outside to be refused."""
        feeds = request_values(self._model, point.shapes, point.values)
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in point.shapes.items())
        if point.values:
            shapes += ", values " + ", ".join(f"{name} {list(values)}" for name, values in point.values.items())
        try:
            answer = self._infer(feeds)
        except RequestError as err:
            if err.kind != "refused":
                raise
            detail = f"refused: {err.why}"
            return RequestCheck(point.profile, point.place, shapes, not point.is_inside, detail)
        if not point.is_inside:
            detail = "answered, though it lies outside of every profile"
            return RequestCheck(point.profile, point.place, shapes, False, detail)
        error = worst_error(self._reference.run(feeds), answer)
        passed = error is None or error <= self._reference.alone
        detail = "answered" if error is None else f"differs from ONNX Runtime by {error:.2g}"
        return RequestCheck(point.profile, point.place, shapes, passed, detail, error)

    def check_load(self, num_requests: int) -> LoadCheck:
        """Many requests at once, each with a batch of 1 where the server batches."""
        contents = [Content(feeds, self._reference.run(feeds)) for feeds in self._feeds()]
        size = max(sum(array.nbytes for array in content.feeds.values()) for content in contents)
        count = max(2, min(num_requests, _MAX_BYTES // max(1, size)))
        return check_load(self._client, [self._name], self._infer, contents, count, self._reference.joined)

    def _feeds(self) -> list[Arrays]:
        """Different requests of the shapes at the profiles' min and opt, those of one shape together."""
        inside = [point for point in probe_points(self._model) if point.is_inside]
        points = [point for point in inside if point.place != "max"] or inside
        each = -(-_NUM_CONTENTS // len(points))
        feeds = []
        for point in points:
            shapes = point.shapes
            if self._model.max_batch_size:
                shapes = {name: (1, *shape[1:]) for name, shape in shapes.items()}
            feeds += [request_values(self._model, shapes, point.values, seed) for seed in range(1, each + 1)]
        return feeds

    def _infer(self, feeds: Arrays) -> Arrays:
        """Outputs as the model has them; on the wire a scalar is [1], and a sample of a batch has an axis at least."""
        least = 2 if self._model.max_batch_size else 1
        wire = {name: array.reshape(*array.shape, *[1] * (least - array.ndim)) for name, array in feeds.items()}
        answer = self._client.infer(self._name, wire)
        return {port.name: _with_rank(answer[port.name], len(port.shape)) for port in self._model.outputs}


def _with_rank(array: np.ndarray, rank: int) -> np.ndarray:
    """The array without the axes of size 1 at its end that only the wire needs."""
    is_longer = array.ndim > rank and all(size == 1 for size in array.shape[rank:])
    return array.reshape(array.shape[:rank]) if is_longer else array
