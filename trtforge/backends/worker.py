"""The build itself, in a child process: ONNX file -> network of TensorRT or TensorRT-RTX -> engine file, with its plan.

The model is renamed before the parser sees it (graph/names.py), because the builder echoes names into its log and its
layer table, unless its weights are to be replaced later. It is handed over as bytes without weights together with its
path, so weights are read from where they are and a model may have more than 2 GB. Polygraphy makes network, config and
engine, under a logger of ours that is installed before its first loader: its own drops the layer table.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import polygraphy.backend.trt.util as polygraphy_trt
from polygraphy.backend.trt import CreateNetwork, EngineBytesFromNetwork
from polygraphy.exception import PolygraphyException

from trtforge.backends.build_log import BuildLog, write_log
from trtforge.backends.builder_config import count_plugin_layers, load_plugins, make_config, read_timing_cache
from trtforge.backends.diagnose import Refusal, error_from_refusal, missing_range_error, missing_values_error
from trtforge.backends.engine_inspector import inspect_engine
from trtforge.backends.library import IS_RTX, trt
from trtforge.errors import UnavailableError
from trtforge.graph import native
from trtforge.graph.names import NameMap, drop_false_dim_names, shorten_names
from trtforge.graph.wire import WEIGHT_BYTES, split_model
from trtforge.isolation import Arrays, Handler, Meta, Progress

_BUILDER = "TensorRT-RTX" if IS_RTX else "TensorRT"


def _build(meta: Meta, arrays: Arrays, progress: Progress) -> tuple[Meta, Arrays]:  # noqa: ARG001
    """Handler: see `builder.NativeBuilder` for meta and answer."""
    log, options = BuildLog(), meta["options"]
    polygraphy_trt.TRT_LOGGER = log
    progress({"phase": "reading the model"})
    model = _read_model(Path(meta["model"]))
    names = _keep_names(model) if options["refit"] or options["strip_weights"] else shorten_names(model)
    drop_false_dim_names(model, [profile["inputs"] for profile in meta["profiles"]])
    ports = [port.name for port in [*model.graph.input, *model.graph.output]]
    _log_names(names)
    nodes = [(node.name, _full_name(node)) for node in model.graph.node]

    start = time.monotonic()
    progress({"phase": "parsing"})
    if not IS_RTX:
        load_plugins(options["plugins"], log)
    builder, network = CreateNetwork(strongly_typed=True)()
    parser = trt.OnnxParser(network, log)
    content = model.SerializeToString()
    del model
    path = Path(meta["model"])
    # The parser reads the weights from beside this path, which it takes as UTF-8 text only.
    os.chdir(path.parent)
    if not parser.parse(content, path=path.name):
        raise error_from_refusal(_refusal_from_parser(parser, log, nodes), names, log.trace, _BUILDER)
    del content
    _check_profiles(network, meta["profiles"])
    _let_attention_decompose(network, names, frozenset(meta["whole_attention"]))
    progress({"phase": "building"})
    try:
        config = make_config(builder, network, meta, log, progress)
        engine = EngineBytesFromNetwork((builder, network, parser), config=config)()
    except PolygraphyException as err:
        raise error_from_refusal(Refusal(log.errors or [str(err)]), names, log.trace, _BUILDER) from err
    build_s = time.monotonic() - start
    engine_sha256 = _write_engine(Path(meta["engine"]), memoryview(engine))
    answer = {
        "inspection": "" if IS_RTX else inspect_engine(engine, log, options["version_compatible"]),
        "layers": log.layers,
        "ports": ports,
        "nodes": names.nodes,
        "tensors": names.tensors,
        "engine_sha256": engine_sha256,
        "build_s": build_s,
        "version": trt.__version__,
        "plugin_layers": count_plugin_layers(network),
    }
    made: Arrays = {}
    if options["timing_cache"] is not None:
        made["timing_cache"] = np.frombuffer(read_timing_cache(config, Path(options["timing_cache"])), np.uint8)
    return answer, made


def _read_model(path: Path) -> onnx.ModelProto:
    """The model with its weights declared as external data that lies inside the very file, so that they are never
    copied here: the parser reads them from their offsets.
    """
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        memoryview(data) as view,
    ):
        split = split_model(view, WEIGHT_BYTES)
    model = onnx.ModelProto()
    model.ParseFromString(split.skeleton)
    for tensor in model.graph.initializer:
        span = split.weights.get(tensor.name)
        if span is not None:
            tensor.data_location = onnx.TensorProto.EXTERNAL
            entries = {"location": path.name, "offset": str(span.offset), "length": str(span.num_bytes)}
            tensor.external_data.extend(
                onnx.StringStringEntryProto(key=key, value=value) for key, value in entries.items()
            )
    return model


def _keep_names(model: onnx.ModelProto) -> NameMap:
    """The model's own names, which an engine needs whose weights are replaced later: they are found by their names in
    model.onnx.
    """
    tensors = [*(weight.name for weight in model.graph.initializer), *(n for op in model.graph.node for n in op.output)]
    return NameMap({node.name: node.name for node in model.graph.node}, {name: name for name in tensors})


def _log_names(names: NameMap) -> None:
    """Put the way back from short names into the log, so that it can be read with the model at hand."""
    for kind, entries in (("node", names.nodes), ("tensor", names.tensors)):
        lines = "".join(f"{short} = {json.dumps(original)}\n" for short, original in entries.items())
        write_log("N", f"{kind} names in this log:\n{lines}")


def _full_name(node: onnx.NodeProto) -> str:
    """The operator, with its domain where that is not ONNX's."""
    return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"


def _refusal_from_parser(parser: Any, log: BuildLog, nodes: list[tuple[str, str]]) -> Refusal:
    """The parser's first error. In a subgraph it knows the operator and the outer node's index only; some of its checks
    know no node at all, which the trace of the log then has.
    """
    if not parser.num_errors:
        return Refusal(log.errors)
    error = parser.get_error(0)
    name, op, index = error.node_name(), error.node_operator(), error.node()
    if 0 <= index < len(nodes):
        outer_name, outer_op = nodes[index]
        op = outer_op if not op or outer_op.endswith(f".{op}") else op
        return Refusal([error.desc()], name or outer_name, op, log.errors)
    return Refusal([error.desc()], context=log.errors)


def _check_profiles(network: Any, profiles: list[dict[str, Any]]) -> None:
    """Refuse missing ranges: Polygraphy would fill in ones, and take a shape's range for a shape tensor's values."""
    for index in range(network.num_inputs):
        port = network.get_input(index)
        for number, profile in enumerate(profiles):
            if port.is_shape_tensor and port.name not in profile["values"]:
                raise missing_values_error(port.name, port.shape[0] if len(port.shape) else 1)
            if not port.is_shape_tensor and -1 in port.shape and port.name not in profile["inputs"]:
                raise missing_range_error(port.name, number, port.shape)


def _let_attention_decompose(network: Any, names: NameMap, whole: frozenset[str]) -> None:
    """Without this an Attention that has no fused kernel (fp32, head size 512) fails the build; one that has is fused
    all the same, and the plan tells which. Nodes named in `whole` are left to fail.
    """
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer
            attention = layer.attention
            attention.decomposable = names.nodes.get(attention.name, attention.name) not in whole


def _write_engine(path: Path, engine: memoryview) -> str:
    """Write the engine, and hash it on another core meanwhile."""
    try:
        with ThreadPoolExecutor(1) as pool, path.open("wb") as file:
            digest = pool.submit(hashlib.sha256, engine)
            file.write(engine)
            return digest.result().hexdigest()
    except OSError as err:
        raise UnavailableError(
            f"the engine cannot be written to {path}",
            f"{err.strerror}; it needs {len(engine)} bytes",
            "free disk space or choose another folder with -o",
        ) from err


# Before it builds, the process also serves the graph passes: a second one would load numpy and onnx once more.
SERVICE: dict[str, Handler] = {"build": _build, **native.SERVICE}
