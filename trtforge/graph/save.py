"""Write a graph as ONNX: equal graphs give equal bytes.

- Protobuf is serialised deterministically, opset imports are sorted, and the producer is trtforge.
- A constant that a subgraph reads from outside is stored once, in the outermost graph that knows it:
  onnx-graphsurgeon would write a copy into every subgraph.
- 4-bit and 8-bit float types are written by onnx itself: onnx-graphsurgeon gives some the wrong size or type.
- Weights are embedded below 1.9 GB (protobuf ends at 2 GiB); above, they go to `<name>.data` beside the model, each
  at a multiple of 4,096 bytes so that it can be mapped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import TensorProto
from onnx_graphsurgeon.ir.tensor import LazyValues
from onnx_graphsurgeon.logger import G_LOGGER

from trtforge.errors import InputError, UnavailableError
from trtforge.graph.collection import without_collection
from trtforge.graph.edit import all_graphs, is_array
from trtforge.graph.protos import all_bodies
from trtforge.graph.storage import PACKED_BITS, release_pages, tensor_from_array
from trtforge.graph.validate import DEFAULT_DOMAINS
from trtforge.graph.wire import WEIGHT_BYTES, write_model

# Bytes; leaves 100 MB below protobuf's 2 GiB for the graph itself.
EMBED_BYTES = 1_900_000_000
# Newest IR version that TensorRT-RTX 1.7's parser and ONNX Runtime 1.23 both read; opset 23 runs with it.
IR_VERSION = 10
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
    return Skeleton(_export(graph, stubs), weights)


def _stubs(skeleton: Skeleton) -> Iterator[TensorProto]:
    """The initializers of a skeleton that have no data."""
    for body in all_bodies(skeleton.model):
        for tensor in body.initializer if isinstance(body, onnx.GraphProto) else ():
            if tensor.name in skeleton.weights and not tensor.HasField("raw_data"):
                yield tensor


@without_collection()
def save_model(graph: gs.Graph, path: Path) -> tuple[Path, ...]:
    """Write a graph, replacing what was there only once the new file is complete.

    Args:
        path: the ONNX file; its external data, if needed, is `<path>.data`.

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
    entries = {"location": location, "offset": str(offset), "length": str(file.tell() - offset)}
    tensor.external_data.extend(onnx.StringStringEntryProto(key=key, value=value) for key, value in entries.items())


def _constants(graph: gs.Graph) -> Iterator[gs.Constant]:
    """Every constant that nodes or graph outputs refer to, each once."""
    seen: set[int] = set()
    for holder in all_graphs(graph):
        for tensor in [*(t for node in holder.nodes for t in node.inputs), *holder.outputs]:
            if isinstance(tensor, gs.Constant) and id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


@contextmanager
def _as_protos(graph: gs.Graph, stubs: set[int]) -> Iterator[None]:
    """For the time of an export, every constant holds the TensorProto that it is written as."""
    attributes = [
        value
        for holder in [*all_graphs(graph), *graph.functions]
        for node in holder.nodes
        for value in node.attrs.values()
        if isinstance(value, gs.Constant)
    ]
    kept = []
    try:
        for constant in [*_constants(graph), *attributes]:
            if is_array(constant):
                kept.append((constant, constant.values))
                constant.values = LazyValues(
                    tensor_from_array(constant.name, constant.values, id(constant) not in stubs)
                )
        yield
    finally:
        for constant, values in kept:
            constant.values = values


def _export(graph: gs.Graph, stubs: set[int]) -> onnx.ModelProto:
    try:
        with G_LOGGER.suppress(G_LOGGER.CRITICAL + 1), _as_protos(graph, stubs):
            model: onnx.ModelProto = gs.export_onnx(graph, do_type_check=False, opset_imports=_opset_imports(graph))
    except (TypeError, ValueError, KeyError, RuntimeError, AttributeError) as err:
        raise InputError(
            "the graph cannot be written as ONNX", str(err), "report the model: this may be a defect"
        ) from err
    model.ir_version = IR_VERSION
    model.producer_name = "trtforge"
    model.producer_version = ""
    for function in model.functions:
        imports = sorted(function.opset_import, key=lambda entry: entry.domain)
        copies = [onnx.helper.make_opsetid(entry.domain, entry.version) for entry in imports]
        del function.opset_import[:]
        function.opset_import.extend(copies)
    _store_once(model)
    return model


def _opset_imports(graph: gs.Graph) -> list[onnx.OperatorSetIdProto]:
    versions = {entry.domain: entry.version for entry in graph.import_domains or []}
    versions = {domain: version for domain, version in versions.items() if domain not in DEFAULT_DOMAINS}
    used = {node.domain for holder in all_graphs(graph) for node in holder.nodes if node.domain}
    for domain in used - set(DEFAULT_DOMAINS):
        versions.setdefault(domain, 1)
    versions[""] = graph.opset
    return [onnx.helper.make_opsetid(domain, versions[domain]) for domain in sorted(versions)]


def _store_once(model: onnx.ModelProto) -> None:
    """Move the initializers of subgraphs to the top graph, each once; a name that means several things stays."""
    graphs = [body for body in all_bodies(model) if isinstance(body, onnx.GraphProto)]
    if len(graphs) == 1:
        return
    defined = {name for body in graphs for node in body.node for name in node.output}
    defined.update(port.name for body in graphs for port in body.input)
    first: dict[str, TensorProto] = {}
    for body in graphs:
        for tensor in body.initializer:
            if first.setdefault(tensor.name, tensor) is not tensor and first[tensor.name] != tensor:
                # ONNX Runtime would read the outer one everywhere.
                defined.add(tensor.name)
    stored = {tensor.name for tensor in model.graph.initializer}
    for body in graphs[1:]:
        kept = []
        for tensor in body.initializer:
            if tensor.name in defined:
                kept.append(TensorProto.FromString(tensor.SerializeToString()))
            elif tensor.name not in stored:
                model.graph.initializer.append(tensor)
                stored.add(tensor.name)
        del body.initializer[:]
        body.initializer.extend(kept)
