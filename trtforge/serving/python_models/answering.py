"""Answer the requests that Triton's Python backend hands over: read, check, join, run and split them.

    requests -> arrays by input -> those of one shape joined along axis 0 -> run -> split -> responses

The server hands over requests whose sizes sum to `max_batch_size` at most. A request whose shapes lie in no
optimisation profile is refused with a message, and so is each that the model itself cannot run: its neighbours are
answered. The file runs inside the server and needs numpy, and ml_dtypes where there is bfloat16; `model.json` beside it
describes the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

Feeds = dict[str, np.ndarray]
# (feeds, names of outputs) -> outputs by name.
Run = Callable[[Feeds, Sequence[str]], Mapping[str, np.ndarray]]


class RefusalError(Exception):
    """A request that is not run; its text is what the client reads."""


class Answering:
    """The requests of one model.

    Args:
        facts: the content of `model.json`.
        run: runs the model once.
    """

    def __init__(self, facts: Mapping[str, Any], run: Run) -> None:
        self._run = run
        self._inputs = facts["inputs"]
        self._outputs = {port["name"]: port for port in facts["outputs"]}
        self._profiles = facts["profiles"]
        self._is_batched = facts["max_batch_size"] > 0

    def answer(self, requests: Sequence[Any]) -> list[Any]:
        """One response per request, in their order."""
        responses: list[Any] = [None] * len(requests)
        groups: dict[object, list[tuple[int, Feeds, list[str]]]] = {}
        for index, request in enumerate(requests):
            names = [name for name in self._outputs if name in request.requested_output_names()]
            try:
                feeds = {port["name"]: _array_from_request(request, port) for port in self._inputs}
                check_ranges(feeds, self._profiles)
            except RefusalError as err:
                responses[index] = _error_response(err)
            else:
                groups.setdefault(self._key(index, feeds), []).append((index, feeds, names))
        for group in groups.values():
            for index, response in self._answer_group(group):
                responses[index] = response
        return responses

    def _key(self, index: int, feeds: Feeds) -> object:
        """Equal for requests that can be joined."""
        return tuple(array.shape[1:] for array in feeds.values()) if self._is_batched else index

    def _answer_group(self, group: Sequence[tuple[int, Feeds, list[str]]]) -> list[tuple[int, Any]]:
        """The responses of requests that are joined; where that fails, each is run alone."""
        wanted = [name for name in self._outputs if any(name in names for _, _, names in group)]
        try:
            outputs = self._run(_join([feeds for _, feeds, _ in group]), wanted)
            parts = _split(outputs, [feeds for _, feeds, _ in group])
            return [
                (index, self._response(values, names)) for (index, _, names), values in zip(group, parts, strict=True)
            ]
        except Exception as err:
            if len(group) == 1:
                return [(group[0][0], _error_response(err))]
        return [answer for entry in group for answer in self._answer_group([entry])]

    def _response(self, values: Mapping[str, np.ndarray], names: Sequence[str]) -> Any:
        return pb_utils.InferenceResponse([_tensor_from_array(self._outputs[name], values[name]) for name in names])


def read_facts(args: Mapping[str, str]) -> tuple[Path, dict[str, Any]]:
    """The folder of a model's version, and the content of its `model.json`."""
    folder = Path(args["model_repository"]) / args["model_version"]
    facts: dict[str, Any] = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    return folder, facts


def check_ranges(feeds: Mapping[str, np.ndarray], profiles: Sequence[Mapping[str, Any]]) -> None:
    """Refuse what no optimisation profile holds.

    Args:
        feeds: inputs by name, batch included.
        profiles: as `model.json` has them: of each input min, opt and max of the shape, and of the values of those
            whose values become shapes.

    Raises:
        RefusalError: names the input, its shape and what each profile takes.
    """
    reasons = [_reason_against(feeds, profile) for profile in profiles]
    if all(reasons):
        raise RefusalError("; ".join(reasons))


def _reason_against(feeds: Mapping[str, np.ndarray], profile: Mapping[str, Any]) -> str:
    """Why a profile does not hold some inputs; empty where it does."""
    for name, span in profile["inputs"].items():
        if not _is_inside(feeds[name].shape, span):
            return f"input '{name}' has shape {list(feeds[name].shape)}, {_range_text(profile, span)}"
    for name, span in profile["values"].items():
        values = feeds[name].reshape(-1).tolist()
        if not _is_inside(values, span):
            return f"input '{name}' has the values {values}, {_range_text(profile, span)}"
    return ""


def _is_inside(sizes: Sequence[int], span: Mapping[str, Sequence[int]]) -> bool:
    return len(sizes) == len(span["min"]) and all(
        low <= size <= high for low, size, high in zip(span["min"], sizes, span["max"], strict=True)
    )


def _range_text(profile: Mapping[str, Any], span: Mapping[str, Sequence[int]]) -> str:
    return f"and profile '{profile['name']}' takes {list(span['min'])} to {list(span['max'])}"


def _array_from_request(request: Any, port: Mapping[str, Any]) -> np.ndarray:
    """An input as the model has it: a scalar comes as [1], because Triton has none."""
    tensor = pb_utils.get_input_tensor_by_name(request, port["name"])
    array: np.ndarray
    if port["dtype"] == "bfloat16":
        import bfloat16

        array = bfloat16.array_from_tensor(tensor)
    else:
        array = tensor.as_numpy()
    return array.reshape(()) if not port["shape"] and array.size == 1 else array


def _tensor_from_array(port: Mapping[str, Any], array: np.ndarray) -> Any:
    array = np.ascontiguousarray(array if array.shape else array.reshape(1))
    if port["dtype"] == "bfloat16":
        import bfloat16

        return bfloat16.tensor_from_array(port["name"], array)
    return pb_utils.Tensor(port["name"], array)


def _join(parts: Sequence[Feeds]) -> Feeds:
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([feeds[name] for feeds in parts]) for name in parts[0]}


def _split(outputs: Mapping[str, np.ndarray], parts: Sequence[Feeds]) -> list[dict[str, np.ndarray]]:
    """The outputs of each of the requests that were joined."""
    if len(parts) == 1:
        return [dict(outputs)]
    sizes = [len(next(iter(feeds.values()))) for feeds in parts]
    ends = np.cumsum(sizes)
    for name, array in outputs.items():
        if len(array) != ends[-1]:
            raise ValueError(f"output '{name}' has {len(array)} rows for {ends[-1]} samples")
    return [
        {name: array[end - size : end] for name, array in outputs.items()}
        for size, end in zip(sizes, ends.tolist(), strict=True)
    ]


def _error_response(error: Exception) -> Any:
    text = " ".join(str(error).split())[:1000] or type(error).__name__
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(text))
