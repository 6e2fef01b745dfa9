"""Write a graph as ONNX: equal graphs give equal bytes.

- The message is that of messages.py, serialised deterministically.
- Weights are embedded below 1.9 GB (protobuf ends at 2 GiB); above, they go to `<name>.data` beside the model, each
  at a multiple of 4,096 bytes so that it can be mapped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import TensorProto

from trtforge.errors import UnavailableError
from trtforge.graph.collection import without_collection
from trtforge.graph.edit import all_graphs, is_array
from trtforge.graph.messages import model_from_graph
from trtforge.graph.protos import all_bodies
from trtforge.graph.storage import PACKED_BITS, release_pages, tensor_from_array
from trtforge.graph.wire import WEIGHT_BYTES, write_model

# Bytes; leaves 100 MB below protobuf's 2 GiB for the graph itself.
EMBED_BYTES = 1_900_000_000
# Page size: what ONNX's external data specification recommends for mapping.
_ALIGNMENT = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class Skeleton:
    """A model without its weights.

    Attributes:
        model: weights of `WEIGHT_BYTES` and more have type and dims but no data.
        weights: their values, by tensor name.
    """

    model: onnx.ModelProto
    weights: dict[str, np.ndarray[Any, Any]]


@without_collection()
def skeleton_from_graph(graph: gs.Graph) -> Skeleton:
    """The model of a graph without its weights; of two weights with one name, the second keeps its data."""
    weights: dict[str, np.ndarray[Any, Any]] = {}
    stubs: set[int] = set()
    for constant in _constants(graph):
        is_weight = is_array(constant) and constant.values.nbytes >= WEIGHT_BYTES
        if is_weight and constant.name not in weights:
            weights[constant.name] = constant.values
            stubs.add(id(constant))
    return Skeleton(model_from_graph(graph, stubs), weights)


def _stubs(skeleton: Skeleton) -> Iterator[TensorProto]:
    """The initializers of a skeleton that have no data."""
    for body in all_bodies(skeleton.model):
        for tensor in body.initializer if isinstance(body, onnx.GraphProto) else ():
            if tensor.name in skeleton.weights and not tensor.HasField("raw_data"):
                yield tensor


@without_collection()
def save_model(graph: gs.Graph, path: Path, metadata: Iterable[tuple[str, str]] = ()) -> tuple[Path, ...]:
    """Write a graph, replacing what was there only once the new file is complete.

    Args:
        path: the ONNX file; its external data, if needed, is `<path>.data`.
        metadata: keys and values that the file says of itself.

    Returns:
        The files written, the ONNX file first.

    Raises:
        InputError: the graph cannot be written as ONNX.
        UnavailableError: the disk is full or the folder cannot be written.
    """
    data_path = path.with_name(f"{path.name}.data")
    staged = path.with_name(f".{path.name}.partial")
    staged_data = path.with_name(f".{path.name}.data.partial")
    total = sum(c.values.nbytes for c in _constants(graph) if is_array(c))
    try:
        skeleton = skeleton_from_graph(graph)
        skeleton.model.metadata_props.extend(_entries(metadata))
        if total < EMBED_BYTES:
            with staged.open("wb") as file:
                write_model(skeleton.model, _raw_weights(skeleton), file)
            staged.replace(path)
            return (path,)
        with staged_data.open("wb") as file:
            for tensor in _stubs(skeleton):
                _write_external(tensor, skeleton.weights[tensor.name], file, data_path.name)
                release_pages(skeleton.weights[tensor.name])
        staged.write_bytes(skeleton.model.SerializeToString(deterministic=True))
        staged_data.replace(data_path)
        staged.replace(path)
        return (path, data_path)
    except OSError as err:
        raise UnavailableError(
            f"{path} cannot be written", err.strerror or str(err), "free space, or choose another folder"
        ) from err
    finally:
        staged.unlink(missing_ok=True)
        staged_data.unlink(missing_ok=True)


def _raw_weights(skeleton: Skeleton) -> dict[str, np.ndarray[Any, Any]]:
    """The weights of the top graph in ONNX's raw layout; those of subgraphs are put into the model."""
    raw = {}
    for tensor in skeleton.model.graph.initializer:
        if tensor.name in skeleton.weights and not tensor.HasField("raw_data"):
            raw[tensor.name] = _raw_array(tensor, skeleton.weights[tensor.name])
    for tensor in _stubs(skeleton):
        if tensor.name not in raw:
            tensor.CopyFrom(tensor_from_array(tensor.name, skeleton.weights[tensor.name]))
    return raw


def _raw_array(tensor: TensorProto, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A weight's bytes in ONNX's raw layout; copied only where elements share a byte."""
    if tensor.data_type in PACKED_BITS:
        return np.frombuffer(tensor_from_array("", array).raw_data, np.uint8)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _write_external(tensor: TensorProto, array: np.ndarray[Any, Any], file: Any, location: str) -> None:
    file.write(b"\0" * (-file.tell() % _ALIGNMENT))
    offset = file.tell()
    file.write(_raw_array(tensor, array))
    tensor.data_location = TensorProto.EXTERNAL
    place = {"location": location, "offset": str(offset), "length": str(file.tell() - offset)}
    tensor.external_data.extend(_entries(place.items()))


def _entries(pairs: Iterable[tuple[str, str]]) -> list[onnx.StringStringEntryProto]:
    return [onnx.StringStringEntryProto(key=key, value=value) for key, value in pairs]


def _constants(graph: gs.Graph) -> Iterator[gs.Constant]:
    """Every constant that nodes or graph outputs refer to, each once."""
    seen: set[int] = set()
    for holder in all_graphs(graph):
        for tensor in [*(t for node in holder.nodes for t in node.inputs), *holder.outputs]:
            if isinstance(tensor, gs.Constant) and id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor
