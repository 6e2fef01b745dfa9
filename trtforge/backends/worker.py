"""The build itself, in a child process: ONNX file -> TensorRT-RTX network -> engine file, with the layer table.

The model is renamed before the parser sees it (graph/names.py), because the builder echoes names into its log and its
layer table. It is handed over as bytes without weights together with its path, so weights are read from where they are
and a model may have more than 2 GB. Polygraphy makes network, config and engine, under a logger of ours that is
installed before its first loader: its own drops the layer table. Everything is written to standard output, which is
the build log: one message per line, `[V] text`, further lines of a message indented, control characters escaped.
"""

from __future__ import annotations

import glob
import hashlib
import json
import mmap
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import onnx

from trtforge.backends.diagnose import Refusal, error_from_refusal, missing_range_error, missing_values_error
from trtforge.errors import UnavailableError
from trtforge.graph import native
from trtforge.graph.names import NameMap, drop_false_dim_names, shorten_names
from trtforge.graph.wire import WEIGHT_BYTES, split_model
from trtforge.isolation import Arrays, Handler, Meta, Progress

try:
    import polygraphy.backend.trt.util as polygraphy_trt
    import tensorrt_rtx as trt
    from polygraphy.backend.tensorrt_rtx import CreateConfigRTX
    from polygraphy.backend.trt import CreateNetwork, EngineBytesFromNetwork, Profile
    from polygraphy.exception import PolygraphyException
except (ImportError, OSError) as err:
    raise UnavailableError(
        "TensorRT-RTX is installed but cannot be loaded", str(err), "pip install --force-reinstall 'trtforge[rtx]'"
    ) from err

_LAYER_TABLE = "Layers:\n"
_LETTERS = {"VERBOSE": "V", "INFO": "I", "WARNING": "W", "ERROR": "E", "INTERNAL_ERROR": "E"}
# Everything that a terminal or a reader of lines acts on.
_CONTROL = {code: f"\\x{code:02x}" for code in [*range(32), *range(127, 160), 0x2028, 0x2029] if code != ord("\n")}
# Errors kept for the diagnosis; a broken model can log one per node.
_MAX_ERRORS = 100
# Seconds between two reports; the builder reports about a thousand steps a second.
_PROGRESS_INTERVAL_S = 0.1


class _Log(trt.ILogger):  # type: ignore[misc]
    """Writes every message to standard output and keeps the errors and the layer table."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.errors: list[str] = []
        self.layers = ""

    def log(self, severity: Any, message: str) -> None:
        if severity <= trt.ILogger.Severity.ERROR and len(self.errors) < _MAX_ERRORS:
            self.errors.append(message)
        if severity == trt.ILogger.Severity.VERBOSE and message.startswith(_LAYER_TABLE):
            self.layers = message
        write_log(_LETTERS[severity.name], message)


def write_log(letter: str, message: str) -> None:
    """Append one message to the build log; a full disk loses it rather than the build."""
    text = f"[{letter}] {message}".rstrip("\n").translate(_CONTROL).replace("\n", "\n    ")
    with suppress(OSError):
        os.write(1, f"{text}\n".encode("utf-8", "backslashreplace"))


class _Monitor(trt.IProgressMonitor):  # type: ignore[misc]
    """Passes the builder's phases on, a few times a second."""

    def __init__(self, report: Progress) -> None:
        trt.IProgressMonitor.__init__(self)
        self._report = report
        self._steps: dict[str, int] = {}
        self._last = 0.0

    def phase_start(self, name: str, parent: str | None, num_steps: int) -> None:  # noqa: ARG002
        self._steps[name] = num_steps
        self._pass_on(name, 0)

    def step_complete(self, name: str, step: int) -> bool:
        self._pass_on(name, step)
        return True

    def phase_finish(self, name: str) -> None:
        self._pass_on(name, self._steps.pop(name, 0))

    def _pass_on(self, name: str, step: int) -> None:
        now = time.monotonic()
        if now - self._last >= _PROGRESS_INTERVAL_S:
            self._last = now
            self._report({"phase": name, "step": step, "steps": self._steps.get(name, step)})


def _build(meta: Meta, arrays: Arrays, progress: Progress) -> tuple[Meta, Arrays]:  # noqa: ARG001
    """Handler: see `tensorrt_rtx.TensorRtRtxBackend.build` for meta and answer."""
    log = _Log()
    polygraphy_trt.TRT_LOGGER = log
    progress({"phase": "reading the model"})
    model = _read_model(Path(meta["model"]))
    names = shorten_names(model)
    drop_false_dim_names(model, [profile["inputs"] for profile in meta["profiles"]])
    ports = [port.name for port in [*model.graph.input, *model.graph.output]]
    _log_names(names)
    nodes = [(node.name, node.op_type) for node in model.graph.node]

    start = time.monotonic()
    progress({"phase": "parsing"})
    builder, network = CreateNetwork(strongly_typed=True)()
    parser = trt.OnnxParser(network, log)
    content = model.SerializeToString()
    del model
    path = Path(meta["model"])
    # The parser reads the weights from beside this path, which it takes as UTF-8 text only.
    os.chdir(path.parent)
    if not parser.parse(content, path=path.name):
        raise error_from_refusal(_refusal_from_parser(parser, log, nodes), names)
    del content
    _check_profiles(network, meta["profiles"])
    _let_attention_decompose(network)
    progress({"phase": "building"})
    try:
        config = _make_config(builder, network, meta, progress)
        engine = EngineBytesFromNetwork((builder, network, parser), config=config)()
    except PolygraphyException as err:
        raise error_from_refusal(Refusal(log.errors or [str(err)]), names) from err
    build_s = time.monotonic() - start
    engine_sha256 = _write_engine(Path(meta["engine"]), memoryview(engine))
    answer = {"layers": log.layers, "ports": ports, "nodes": names.nodes, "tensors": names.tensors}
    answer |= {"engine_sha256": engine_sha256}
    return answer | {"build_s": build_s, "version": trt.__version__}, {}


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


def _log_names(names: NameMap) -> None:
    """Put the way back from short names into the log, so that it can be read with the model at hand."""
    for kind, entries in (("node", names.nodes), ("tensor", names.tensors)):
        lines = "".join(f"{short} = {json.dumps(original)}\n" for short, original in entries.items())
        write_log("N", f"{kind} names in this log:\n{lines}")


def _refusal_from_parser(parser: Any, log: _Log, nodes: list[tuple[str, str]]) -> Refusal:
    """The parser's first error. In a subgraph it knows the operator and the outer node's index only; some of its checks
    know nothing but their own name, `In function importScatterElements`, which the log has.
    """
    if not parser.num_errors:
        return Refusal(log.errors)
    error = parser.get_error(0)
    name, op, index = error.node_name(), error.node_operator(), error.node()
    if 0 <= index < len(nodes):
        return Refusal([error.desc()], name or nodes[index][0], op or nodes[index][1])
    importer = re.search(r"In function import(\w+):", "\n".join(log.errors))
    suspects = [node for node in nodes if importer and node[1] == importer[1]]
    return Refusal([error.desc()], *suspects[0]) if len(suspects) == 1 else Refusal([error.desc()])


def _check_profiles(network: Any, profiles: list[dict[str, Any]]) -> None:
    """Refuse missing ranges: Polygraphy would fill in ones, and take a shape's range for a shape tensor's values."""
    for index in range(network.num_inputs):
        port = network.get_input(index)
        for number, profile in enumerate(profiles):
            if port.is_shape_tensor and port.name not in profile["values"]:
                raise missing_values_error(port.name, port.shape[0] if len(port.shape) else 1)
            if not port.is_shape_tensor and -1 in port.shape and port.name not in profile["inputs"]:
                raise missing_range_error(port.name, number, port.shape)


def _let_attention_decompose(network: Any) -> None:
    """Without this an Attention that has no fused kernel (fp32, head size 512) fails the build; one that has is fused
    all the same, and the plan tells which.
    """
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = True


def _make_config(builder: Any, network: Any, meta: Meta, progress: Progress) -> Any:
    """Builder configuration; profiles are added in order."""
    targets = meta["compute_capabilities"]
    profiles = []
    for entries in meta["profiles"]:
        profile = Profile()
        for name, (low, opt, high) in (entries["inputs"] | entries["values"]).items():
            # Polygraphy takes names for patterns: an input called "x[0]" would not be found.
            profile.add(glob.escape(name), min=low, opt=opt, max=high)
        profiles.append(profile)
    config = CreateConfigRTX(
        compute_capabilities=None if targets is None else [divmod(target, 10) for target in targets],
        profiles=profiles,
        profiling_verbosity=trt.ProfilingVerbosity.DETAILED,
        progress_monitor=_Monitor(progress),
    )(builder, network)
    # Set either way: Polygraphy's two config loaders differ in what they leave on.
    change_flag: Callable[[Any], None] = config.set_flag if meta["tf32"] else config.clear_flag
    change_flag(trt.BuilderFlag.TF32)
    return config


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
