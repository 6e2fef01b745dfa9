"""The only place that calls onnx's C++ on a model: its inliner, version converter and shape inference.

They can crash on a damaged model, so the functions of `SERVICE` run in a child process; `OnnxNative` is the other end.
Models cross without their weights (save.py), as bytes. One child serves all calls of one pass; in a build that is the
builder's own process, which has loaded onnx anyway.
"""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import onnx
from onnx import inliner, shape_inference

from trtforge.errors import InputError
from trtforge.graph.arity import check_arity
from trtforge.graph.collection import without_collection
from trtforge.graph.dims.service import DIM_SERVICE, PointResult, result_from_meta
from trtforge.graph.opset import raise_opset
from trtforge.graph.protos import Body, all_bodies, all_nodes, child_graphs
from trtforge.graph.symbolic import resolve_shapes
from trtforge.graph.validate import DEFAULT_DOMAINS
from trtforge.isolation import Child
from trtforge.profile import DimReport

Meta = dict[str, Any]
Arrays = dict[str, np.ndarray[Any, Any]]

# The one domain whose local functions are kept: the plugin that replaces one needs its node.
PLUGIN_DOMAIN = "trtforge"
# Seconds; a 20,000-node model takes under 5.
_TIMEOUT_S = 600.0
# Bytes of address space; models come here without weights, and one of 20,000 nodes takes under 100 MB.
_GROWTH_BYTES = 2**30


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model after inlining and conversion.

    Attributes:
        model: with inferred types.
        num_inlined: local functions that were inlined.
        num_qdq: QuantizeLinear and DequantizeLinear nodes after inlining, before conversion.
        conversion_error: why the opset could not be changed; "" where it was, or needed not be.
        inference_error: why types could not be inferred; "" where they were.
    """

    model: onnx.ModelProto
    num_inlined: int
    num_qdq: int
    conversion_error: str
    inference_error: str


class OnnxNative:
    """onnx's C++ functions in a child process; a context manager.

    A crash or hang raises ChildDiedError with the name of the step.

    Args:
        child: one that was started earlier; by default it starts here.
    """

    def __init__(self, child: Child | None = None) -> None:
        self._child = child or Child("trtforge.graph.native:SERVICE", purpose="ONNX model reading")
        self._follows_values = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.close()

    def prepare(self, model: onnx.ModelProto, opset: int) -> PreparedModel:
        """Inline local functions (not those of trtforge's plugins), raise the opset, infer types."""
        meta, prepared = self._call("prepare", model, {"opset": opset})
        self._follows_values = meta["follows_values"]
        return PreparedModel(
            prepared, meta["num_inlined"], meta["num_qdq"], meta["conversion_error"], meta["inference_error"]
        )

    def infer(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """The model with inferred types; unchanged where inference fails."""
        return self._call("infer", model, {"follows_values": self._follows_values})[1]

    def resolve_shapes(
        self, model: onnx.ModelProto, input_shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, tuple[int, ...]]:
        """Concrete shapes of tensors of the top graph, for concrete input shapes."""
        shapes = {name: list(shape) for name, shape in input_shapes.items()}
        meta, _ = self._child.call(
            "resolve_shapes", {"shapes": shapes}, {"model": _array_from_model(model)}, timeout_s=_TIMEOUT_S
        )
        return {name: tuple(shape) for name, shape in meta["shapes"].items()}

    def analyse_dims(self, model: onnx.ModelProto, find_limits: bool) -> DimReport:
        """What a normalised model says of its inputs' open dimensions; see dims/find.py."""
        meta = {"find_limits": find_limits}
        arrays = {"model": _array_from_model(model)}
        return DimReport.from_json(self._child.call("analyse_dims", meta, arrays, timeout_s=_TIMEOUT_S)[0])

    def probe_shapes(self, model: onnx.ModelProto, points: Sequence[Meta]) -> list[PointResult]:
        """For each point {"shapes", "values"}, the first node that cannot take it; see dims/service.py."""
        arrays = {"model": _array_from_model(model)}
        meta, _ = self._child.call("probe_shapes", {"points": list(points)}, arrays, timeout_s=_TIMEOUT_S)
        return [result_from_meta(entry) for entry in meta["results"]]

    def _call(self, method: str, model: onnx.ModelProto, meta: Meta) -> tuple[Meta, onnx.ModelProto]:
        answer, arrays = self._child.call(method, meta, {"model": _array_from_model(model)}, timeout_s=_TIMEOUT_S)
        return answer, _model_from_array(arrays["model"])


@contextmanager
def open_native(given: OnnxNative | None = None) -> Iterator[OnnxNative]:
    """A child process for the time of a `with`: the given one, which stays open, or a new one."""
    if given is not None:
        yield given
        return
    with OnnxNative() as native:
        yield native


def _array_from_model(model: onnx.ModelProto) -> np.ndarray[Any, Any]:
    return np.frombuffer(model.SerializeToString(deterministic=True), np.uint8)


def _model_from_array(array: np.ndarray[Any, Any]) -> onnx.ModelProto:
    model = onnx.ModelProto()
    model.ParseFromString(array.tobytes())
    return model


def _count_qdq(nodes: Iterable[onnx.NodeProto]) -> int:
    return sum(node.op_type in ("QuantizeLinear", "DequantizeLinear") for node in nodes)


@without_collection()
def _prepare(meta: Meta, arrays: Arrays, report_progress: Callable[[Meta], None]) -> tuple[Meta, Arrays]:
    model = _model_from_array(arrays["model"])
    report_progress({"phase": "inlining local functions"})
    inlined = [(f.domain, f.name) for f in model.functions if f.domain != PLUGIN_DOMAIN]
    if inlined:
        try:
            # Only the one that inlines all can convert functions of another opset.
            if len(inlined) == len(model.functions):
                model = inliner.inline_local_functions(model, convert_version=True)
            else:
                model = inliner.inline_selected_functions(model, inlined)
        except Exception as err:
            raise InputError(
                "the model's local functions cannot be inlined", str(err), "export the model without local functions"
            ) from err
    num_qdq = _count_qdq(all_nodes(model))
    report_progress({"phase": "converting the opset"})
    # Before, because what raises the opset counts on it; after, because new forms need other things.
    check_arity(model)
    model, conversion_error = raise_opset(model, meta["opset"])
    check_arity(model)
    report_progress({"phase": "inferring shapes"})
    model, answer = _infer(model, follows_values=True)
    answer |= {"num_inlined": len(inlined), "num_qdq": num_qdq, "conversion_error": conversion_error}
    return answer, {"model": _array_from_model(model)}


def _infer(model: onnx.ModelProto, follows_values: bool) -> tuple[onnx.ModelProto, Meta]:
    """The model with inferred types.

    Types that the file declares are believed for inputs and outputs of graphs, nested ones included, and for results of
    ops that onnx does not know.

    Returns:
        The model, with "inference_error" and whether it could follow the values of shape tensors.
    """
    _forget_types(model.graph)
    declared = [
        [onnx.ValueInfoProto.FromString(port.SerializeToString()) for port in _ports(body)]
        for body in all_bodies(model)
    ]
    try:
        try:
            with _limited_memory():
                inferred = shape_inference.infer_shapes(model, data_prop=follows_values)
        except MemoryError:
            # onnx writes out the values of a constant of any size, e.g. ConstantOfShape of 10^12 elements.
            follows_values = False
            inferred = shape_inference.infer_shapes(model)
    except Exception as err:
        # InferenceError, RuntimeError and pybind's types: types are a help, not a condition.
        return model, {"inference_error": str(err) or type(err).__name__, "follows_values": follows_values}
    for number, (body, ports) in enumerate(zip(all_bodies(inferred), declared, strict=True)):
        for info in [*body.value_info, *_ports(body)]:
            for dim in info.type.tensor_type.shape.dim:
                # Inference's own names for sizes that it does not know.
                if dim.dim_param.startswith("unk__"):
                    dim.Clear()
        for port, stated in zip(_ports(body), ports, strict=True):
            if stated.type.HasField("tensor_type") and stated.type.tensor_type.HasField("shape"):
                if number == 0:
                    _fill_open_sizes(stated, port)
                port.CopyFrom(stated)
    return inferred, {"inference_error": "", "follows_values": follows_values}


def _fill_open_sizes(stated: onnx.ValueInfoProto, inferred: onnx.ValueInfoProto) -> None:
    """Give dims without a size or name what inference found; a loop's body may change it from trip to trip."""
    mine, found = stated.type.tensor_type.shape.dim, inferred.type.tensor_type.shape.dim
    if len(mine) == len(found):
        for dim, other in zip(mine, found, strict=True):
            if not dim.WhichOneof("value"):
                dim.CopyFrom(other)


def _ports(body: Body) -> list[onnx.ValueInfoProto]:
    return [*body.input, *body.output] if isinstance(body, onnx.GraphProto) else []


@contextmanager
def _limited_memory() -> Iterator[None]:
    """Let this process grow by no more than `_GROWTH_BYTES`, so that a hostile model ends it and nothing else."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    bound = pages * resource.getpagesize() + _GROWTH_BYTES
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [limit for limit in (bound, soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _forget_types(graph: onnx.GraphProto) -> None:
    opaque = {name for node in graph.node if node.domain not in DEFAULT_DOMAINS for name in node.output}
    kept = [onnx.ValueInfoProto.FromString(v.SerializeToString()) for v in graph.value_info if v.name in opaque]
    del graph.value_info[:]
    graph.value_info.extend(kept)
    for node in graph.node:
        for inner in child_graphs(node):
            _forget_types(inner)


@without_collection()
def _infer_types(meta: Meta, arrays: Arrays, _report_progress: Callable[[Meta], None]) -> tuple[Meta, Arrays]:
    model, answer = _infer(_model_from_array(arrays["model"]), meta["follows_values"])
    return answer, {"model": _array_from_model(model)}


@without_collection()
def _resolve_shapes(meta: Meta, arrays: Arrays, report_progress: Callable[[Meta], None]) -> tuple[Meta, Arrays]:
    report_progress({"phase": "resolving shapes"})
    model = _model_from_array(arrays["model"])
    shapes = resolve_shapes(model, {name: tuple(shape) for name, shape in meta["shapes"].items()})
    return {"shapes": {name: list(shape) for name, shape in shapes.items()}}, {}


SERVICE: Mapping[str, Callable[[Meta, Arrays, Callable[[Meta], None]], tuple[Meta, Arrays]]] = {
    "prepare": _prepare,
    "infer": _infer_types,
    "resolve_shapes": _resolve_shapes,
    **DIM_SERVICE,
}
"""What the child process answers."""
