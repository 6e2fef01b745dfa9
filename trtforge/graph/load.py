"""Read an ONNX model that nobody vouches for.

Order matters: size, then parsing, then every rule of validate.py and storage.py over the whole model, and only then is
any weight touched. Afterwards the protobuf is dropped, so that the model's bytes are held once: inline weights as
read-only arrays, external ones as maps of their files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from google.protobuf.message import DecodeError
from onnx_graphsurgeon.ir.tensor import LazyValues
from onnx_graphsurgeon.logger import G_LOGGER

from trtforge.errors import InputError
from trtforge.graph.collection import without_collection
from trtforge.graph.edit import all_graphs
from trtforge.graph.protos import Body, all_bodies, all_tensors, child_graphs, find_damaged_text
from trtforge.graph.sparse import densify
from trtforge.graph.storage import array_from_bytes, array_from_tensor, check_tensor, external_range
from trtforge.graph.validate import DEFAULT_DOMAINS, check_model
from trtforge.graph.wire import WEIGHT_BYTES, Span, is_cut_off, split_model
from trtforge.limits import DEFAULT_LIMITS, Limits
from trtforge.textfile import kind_of

# Protobuf cannot parse a message of 2 GiB or more.
_PROTOBUF_BYTES = 2**31 - 1

_KNOWN_FORMATS = (
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"PK\x03\x04", "a zip archive (PyTorch .pt and .pt2, numpy .npz)"),
    (b"\x80", "a Python pickle"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x93NUMPY", "a numpy array"),
    (b"ftrt", "a TensorRT engine"),
    (b"version https://git-lfs", "a Git LFS pointer: the model itself was not downloaded"),
)
"""First bytes of what is most often given in place of an ONNX model."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model as it was read.

    Attributes:
        graph: the graph; its constants are read-only arrays.
        name: the file's stem.
        sha256: over the ONNX file, then each external data file with its location, in order of location.
        opset: version of the default domain.
        ir_version: of the file; 0 where it states none.
        metadata: keys and values of the file's `metadata_props`, in order.
    """

    graph: gs.Graph
    name: str
    sha256: str
    opset: int
    ir_version: int
    metadata: tuple[tuple[str, str], ...] = ()


@without_collection()
def load_model(path: Path, limits: Limits = DEFAULT_LIMITS) -> LoadedModel:
    """Read an ONNX file with its external data.

    Args:
        path: the `.onnx` file; external data is read from its folder only.
        limits: bounds on size, nodes and dims.

    Raises:
        InputError: anything that the file breaks; see validate.py and storage.py for the rules.
    """
    data = _read_file(path, limits)
    digest = hashlib.sha256(data)
    model, inline = _parse(data, path)
    damaged = find_damaged_text(model)
    if damaged:
        raise InputError(
            f"{path} holds text that is not UTF-8", damaged, "the file is damaged: export or download it again"
        )
    opset = check_model(model, str(path), limits)
    files = _check_tensors(model, inline, path, limits)
    densify(model, limits)
    weights = _inline_weights(model, inline, data)
    _check_shadowed(model, path.parent, weights)
    graph = graph_from_model(model, path.parent, weights)
    for location in sorted(files):
        digest.update(f"\0{location}\0".encode())
        with files[location].open("rb") as file:
            while chunk := file.read(2**20):
                digest.update(chunk)
    metadata = tuple((entry.key, entry.value) for entry in model.metadata_props)
    return LoadedModel(graph, path.stem, digest.hexdigest(), opset, model.ir_version, metadata)


def graph_from_model(
    model: onnx.ModelProto, folder: Path = Path(), weights: Mapping[str, np.ndarray[Any, Any]] = MappingProxyType({})
) -> gs.Graph:
    """A graph whose constants are arrays and which keeps no reference to the model.

    Args:
        model: one that passed the checks; its memory is free once the caller drops it.
        folder: where its external data is.
        weights: values of initializers that have no data in the model, by name.

    Raises:
        InputError: onnx-graphsurgeon cannot represent it.
    """
    # Held, because the constants are told by the identity of their protobuf: an attribute may have a weight's name.
    stubs = {id(tensor): tensor for tensor in _initializers(model) if tensor.name in weights and not _has_data(tensor)}
    try:
        with G_LOGGER.suppress(G_LOGGER.CRITICAL + 1):
            graph = gs.import_onnx(model)
    except Exception as err:
        # onnx-graphsurgeon raises KeyError, TypeError, its own and others on a damaged model.
        raise InputError(
            "the model cannot be read as a graph", f"{type(err).__name__}: {err}", "export the model again"
        ) from err
    imports = [
        onnx.helper.make_opsetid("" if entry.domain in DEFAULT_DOMAINS else entry.domain, entry.version)
        for entry in model.opset_import
    ]
    for holder in [*all_graphs(graph), *graph.functions]:
        holder.import_domains = [onnx.helper.make_opsetid(entry.domain, entry.version) for entry in imports]
    for function, source in zip(graph.functions, model.functions, strict=True):
        if source.opset_import:
            function.import_domains = [onnx.helper.make_opsetid(e.domain, e.version) for e in source.opset_import]
    for constant in _stored_constants(graph):
        tensor = constant._values.tensor
        constant.data_location = None
        if id(tensor) in stubs:
            constant.values = weights[constant.name]
        elif tensor.data_type == onnx.TensorProto.STRING:
            constant.values = LazyValues(onnx.TensorProto.FromString(tensor.SerializeToString()))
        else:
            constant.values = _values_of(tensor, folder)
    return graph


def _values_of(tensor: onnx.TensorProto, folder: Path) -> np.ndarray[Any, Any]:
    """The values that a checked tensor has in the model or beside it."""
    is_external = tensor.data_location == onnx.TensorProto.EXTERNAL
    return array_from_tensor(tensor, external_range(tensor, f"tensor {tensor.name!r}", folder) if is_external else None)


def _initializers(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    for body in all_bodies(model):
        yield from body.initializer if isinstance(body, onnx.GraphProto) else ()


def _has_data(tensor: onnx.TensorProto) -> bool:
    """Whether a tensor has values in the model or beside it."""
    if tensor.HasField("raw_data") or tensor.data_location == onnx.TensorProto.EXTERNAL:
        return True
    return len(getattr(tensor, onnx.helper.tensor_dtype_to_field(tensor.data_type))) > 0


def _check_shadowed(model: onnx.ModelProto, folder: Path, weights: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Refuse an initializer of a subgraph that hides another tensor of its name: ONNX forbids it, and onnx-graphsurgeon
    reads the outer one. A copy of the outer one, which onnx-graphsurgeon writes, is harmless.
    """

    def check(body: Body, scopes: tuple[dict[str, onnx.TensorProto | None], ...]) -> None:
        initializers = list(body.initializer) if isinstance(body, onnx.GraphProto) else []
        for tensor in initializers:
            scope = next((scope for scope in reversed(scopes) if tensor.name in scope), {tensor.name: tensor})
            hidden = scope[tensor.name]
            if hidden is None or (hidden is not tensor and not is_same(hidden, tensor)):
                raise InputError(
                    f"initializer {tensor.name!r} of subgraph {body.name!r} has the name of another tensor around it",
                    "they have different values, and ONNX wants one name for one tensor",
                    "rename one of them, or export the model again",
                )
        ports = body.input if isinstance(body, onnx.FunctionProto) else [port.name for port in body.input]
        names = [*ports, *(name for node in body.node for name in node.output)]
        known = {**dict.fromkeys(names), **{tensor.name: tensor for tensor in initializers}}
        for node in body.node:
            for graph in child_graphs(node):
                check(graph, (*scopes, known))

    def is_same(outer: onnx.TensorProto, inner: onnx.TensorProto) -> bool:
        if (outer.data_type, list(outer.dims)) != (inner.data_type, list(inner.dims)):
            return False
        if outer.data_type == onnx.TensorProto.STRING:
            return list(outer.string_data) == list(inner.string_data)
        is_cut = outer.name in weights and not _has_data(outer)
        values = weights[outer.name] if is_cut else _values_of(outer, folder)
        return values.tobytes() == _values_of(inner, folder).tobytes()

    for body in (model.graph, *model.functions):
        check(body, ())


def _stored_constants(graph: gs.Graph) -> Iterator[gs.Constant]:
    """Every constant that still refers to the protobuf."""
    for holder in [*all_graphs(graph), *graph.functions]:
        held = [value for node in holder.nodes for value in (*node.inputs, *node.attrs.values())]
        for value in [*held, *holder.outputs]:
            if isinstance(value, gs.Constant) and isinstance(value._values, LazyValues):
                yield value


def _read_file(path: Path, limits: Limits) -> bytes:
    kind = kind_of(path, "model")
    if kind == "folder":
        raise InputError(f"{path} is a directory", "an ONNX file was expected", "give the .onnx file in it")
    if kind is None:
        raise InputError(f"model {path} does not exist", "no such file", "check the path")
    try:
        size = path.stat().st_size
        bound = min(limits.model_bytes, _PROTOBUF_BYTES)
        if size > bound:
            raise InputError(
                f"{path} is too large",
                f"it has {size} bytes; the limit is {bound}",
                f"raise it with --limit model_bytes={size}"
                if size <= _PROTOBUF_BYTES
                else "save the model with external data: one ONNX file ends at 2 GiB",
            )
        if kind != "file":
            raise InputError(f"{path} is not a regular file", "an ONNX file was expected", "check the path")
        return path.read_bytes()
    except OSError as err:
        raise InputError(f"model {path} cannot be read", err.strerror or str(err), "check the file") from err


def _parse(data: bytes, path: Path) -> tuple[onnx.ModelProto, dict[str, Span]]:
    """The model without its large weights, and where in the file those are."""
    if not data:
        raise InputError(f"{path} is empty", "it has 0 bytes", "export or download it again")
    model = onnx.ModelProto()
    reason = ""
    try:
        split = split_model(data, WEIGHT_BYTES)
        model.ParseFromString(split.skeleton)
        if model.HasField("graph") or model.opset_import:
            return model, split.weights
    except (DecodeError, RuntimeError, ValueError) as err:
        reason = str(err)
    if is_cut_off(data):
        raise InputError(
            f"{path} is a truncated ONNX file",
            f"it ends inside a field at byte {len(data)}",
            "export or download it again",
        )
    known = next((name for magic, name in _KNOWN_FORMATS if data.startswith(magic)), "")
    raise InputError(
        f"{path} is not an ONNX file",
        f"it looks like {known}" if known else f"its content is no ONNX model{f' ({reason})' if reason else ''}",
        "give an .onnx file",
    )


def _inline_weights(model: onnx.ModelProto, inline: Mapping[str, Span], data: bytes) -> dict[str, np.ndarray[Any, Any]]:
    """The large weights as arrays over the file's bytes, which are not copied."""
    weights = {}
    for tensor in model.graph.initializer:
        # Text, and what is stored beside the file, has no raw data to ONNX.
        if tensor.name in inline and not _has_data(tensor) and tensor.data_type != onnx.TensorProto.STRING:
            span = inline[tensor.name]
            weights[tensor.name] = array_from_bytes(
                tensor, memoryview(data)[span.offset : span.offset + span.num_bytes]
            )
    return weights


def _check_tensors(model: onnx.ModelProto, inline: Mapping[str, Span], path: Path, limits: Limits) -> dict[str, Path]:
    """Check every stored tensor; gives the external files by location."""
    files: dict[str, Path] = {}
    cut = {id(tensor): tensor for tensor in model.graph.initializer if tensor.name in inline}
    for place, tensor in all_tensors(model):
        span = inline[tensor.name] if id(tensor) in cut else None
        check_tensor(tensor, place, limits, None if span is None else span.num_bytes)
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
            files[location] = external_range(tensor, place, path.parent).file
    num_bytes = math.fsum([path.stat().st_size, *(file.stat().st_size for file in set(files.values()))])
    if num_bytes > limits.model_bytes:
        raise InputError(
            f"{path} is too large together with its external data",
            f"they have {num_bytes:.0f} bytes; the limit is {limits.model_bytes}",
            f"raise it with --limit model_bytes={num_bytes:.0f}",
        )
    return files
