"""Bring a graph into the one form that the other stages work on.

    names unique -> local functions inlined, opset raised, types inferred (one call of the child process)
    -> GroupNormalization repaired -> until nothing changes: Constant nodes to initializers, constants folded,
       Identity removed, dead nodes removed, types inferred again

Inputs and outputs keep names, order and types; inputs that nothing reads stay. Weights never leave this process. The
number of live QuantizeLinear and DequantizeLinear nodes is the same before and after; the result of a second run is the
result of the first.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import onnx
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.importers.onnx_importer import get_onnx_tensor_dtype, get_onnx_tensor_shape
from onnx_graphsurgeon.logger import G_LOGGER

from trtforge.errors import InputError, InternalError
from trtforge.graph.cleanup import move_constants, remove_identities
from trtforge.graph.edit import all_nodes, remove_dead_nodes, sort_nodes
from trtforge.graph.fold import fold_constants
from trtforge.graph.groupnorm import widen_group_norms
from trtforge.graph.load import graph_from_model
from trtforge.graph.names import make_names_unique
from trtforge.graph.native import OnnxNative, PreparedModel, open_native
from trtforge.graph.protos import all_bodies
from trtforge.graph.save import IR_VERSION, skeleton_from_graph

# The opset that all stages are written for: `Attention` needs it in ONNX Runtime.
TARGET_OPSET = 23
# The lowest one they accept where the converter gives up: fp16 scales of Q/DQ.
LOWEST_OPSET = 19
# GroupNormalization's scale and bias become per channel.
_GROUP_NORM_OPSET = 21
_MAX_ROUNDS = 16
_QDQ_OPS = ("QuantizeLinear", "DequantizeLinear")

_Port = tuple[str, Any, Any]
"""Name, type and shape of an input or output."""


@dataclasses.dataclass(frozen=True, slots=True)
class NormaliseReport:
    """What normalising changed.

    Attributes:
        source_opset, opset: before and after.
        num_inlined: local functions inlined.
        num_constants: Constant nodes that became initializers.
        num_folded: nodes that became constants.
        num_identities: Identity nodes removed.
        num_dead: nodes removed that no output needed.
        num_renamed: nodes and tensors that got a new name.
        num_qdq: live QuantizeLinear and DequantizeLinear nodes.
        notes: sentences on what was not done, and why.
    """

    source_opset: int
    opset: int
    num_inlined: int
    num_constants: int
    num_folded: int
    num_identities: int
    num_dead: int
    num_renamed: int
    num_qdq: int
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Simplified:
    """Counts of the clean-up passes, as in `NormaliseReport`."""

    num_constants: int
    num_folded: int
    num_identities: int
    num_dead: int
    num_qdq: int
    skipped: tuple[str, ...]


def normalise(
    graph: gs.Graph, opset: int = TARGET_OPSET, native: OnnxNative | None = None
) -> tuple[gs.Graph, NormaliseReport]:
    """A normalised graph.

    Args:
        graph: from `load_model`; it is used up (its nodes and tensors are renamed and its weights shared).
        opset: the opset to raise the graph to; a higher one is kept.
        native: a child process to share with other passes; by default one is started and ended here.

    Raises:
        InputError: an opset that onnx does not know, functions that cannot be inlined, or an opset below 19 that cannot
            be raised.
        ChildDiedError: the child process that runs onnx's C++ crashed.
        InternalError: the number of Q/DQ nodes changed.
    """
    _check_opset(graph.opset)
    source_opset = graph.opset
    inputs, outputs = ([(t.name, t.dtype, t.shape) for t in tensors] for tensors in (graph.inputs, graph.outputs))
    num_renamed = make_names_unique(graph)
    num_constants = move_constants(graph)
    with open_native(native) as child:
        skeleton = skeleton_from_graph(graph)
        prepared = child.prepare(skeleton.model, opset)
        _check_preparation(prepared, source_opset, opset)
        result = graph_from_model(prepared.model, weights=skeleton.weights)
        num_renamed += make_names_unique(result)
        if source_opset < _GROUP_NORM_OPSET <= result.opset:
            widen_group_norms(result)
        sort_nodes(result)
        counts = _simplify(result, child)
    result.ir_version = IR_VERSION
    _restore_ports(result, inputs, outputs)
    notes = [f"opset {result.opset} kept: {prepared.conversion_error}"] if prepared.conversion_error else []
    notes += [f"types not inferred: {prepared.inference_error}"] if prepared.inference_error else []
    notes += [f"{name!r} not folded: its result would be too large" for name in counts.skipped]
    return result, NormaliseReport(
        source_opset=source_opset,
        opset=result.opset,
        num_inlined=prepared.num_inlined,
        num_constants=num_constants + counts.num_constants,
        num_folded=counts.num_folded,
        num_identities=counts.num_identities,
        num_dead=counts.num_dead,
        num_renamed=num_renamed,
        num_qdq=counts.num_qdq,
        notes=tuple(notes),
    )


def _check_opset(opset: int) -> None:
    newest = onnx.defs.onnx_opset_version()
    if opset > newest:
        raise InputError(
            f"the model uses opset {opset}",
            f"the installed onnx package ({onnx.__version__}) knows opsets up to {newest}",
            "update onnx, or export the model with a lower opset",
        )


def _check_preparation(prepared: PreparedModel, source_opset: int, opset: int) -> None:
    """Refuse an opset that could not be raised far enough, and a conversion that lost Q/DQ."""
    nodes = [node for body in all_bodies(prepared.model) for node in body.node]
    if prepared.conversion_error and source_opset < LOWEST_OPSET:
        named = sorted({node.op_type for node in nodes if node.op_type in prepared.conversion_error})
        raise InputError(
            f"the model's opset {source_opset} cannot be raised to {opset}"
            + (f": {', '.join(named)} cannot be converted" if named else ""),
            prepared.conversion_error[:500],
            f"export the model with opset {LOWEST_OPSET} or newer",
        )
    _check_qdq("opset conversion", prepared.num_qdq, sum(node.op_type in _QDQ_OPS for node in nodes))


def _check_qdq(step: str, before: int, after: int) -> None:
    if before != after:
        raise InternalError(
            f"{step} changed the number of QuantizeLinear and DequantizeLinear nodes from {before} to {after}",
            "quantization must survive every pass unchanged",
            "report the model",
        )


def _count_qdq(graph: gs.Graph) -> int:
    return sum(node.op in _QDQ_OPS for node in all_nodes(graph))


def _restore_ports(graph: gs.Graph, inputs: list[_Port], outputs: list[_Port]) -> None:
    """Give inputs and outputs back what the source states; what it leaves open is taken from inference."""
    for kind, ports, tensors in (("input", inputs, graph.inputs), ("output", outputs, graph.outputs)):
        if [port[0] for port in ports] != [tensor.name for tensor in tensors]:
            raise InternalError(
                f"normalising changed the model's {kind}s",
                f"from {[port[0] for port in ports]} to {[tensor.name for tensor in tensors]}",
                "report the model",
            )
        for (_, dtype, shape), tensor in zip(ports, tensors, strict=True):
            if isinstance(tensor, gs.Variable):
                tensor.dtype = tensor.dtype if dtype is None else dtype
                tensor.shape = tensor.shape if shape is None else shape


def _simplify(graph: gs.Graph, native: OnnxNative) -> _Simplified:
    """Run the clean-up passes until none changes anything."""
    num_dead = remove_dead_nodes(graph)
    num_qdq = _count_qdq(graph)
    num_constants = num_folded = num_identities = 0
    skipped: tuple[str, ...] = ()
    for _ in range(_MAX_ROUNDS):
        moved = move_constants(graph)
        folded = fold_constants(graph)
        identities = remove_identities(graph)
        dead = remove_dead_nodes(graph)
        num_constants, num_folded = num_constants + moved, num_folded + folded.num_folded
        num_identities, num_dead = num_identities + identities, num_dead + dead
        skipped = folded.skipped
        if not (moved or folded.num_folded or identities or dead):
            break
        _write_types(graph, native.infer(skeleton_from_graph(graph).model))
    _check_qdq("normalising", num_qdq, _count_qdq(graph))
    return _Simplified(num_constants, num_folded, num_identities, num_dead, num_qdq, skipped)


def _write_types(graph: gs.Graph, model: onnx.ModelProto) -> None:
    """Set every inner tensor's type to what inference found, which may be nothing; names are unique."""
    with G_LOGGER.suppress(G_LOGGER.CRITICAL):
        types = {
            info.name: (get_onnx_tensor_dtype(info), get_onnx_tensor_shape(info))
            for body in all_bodies(model)
            for info in [*body.value_info, *(body.output if isinstance(body, onnx.GraphProto) else [])]
            if info.type.HasField("tensor_type")
        }
    ports = {id(tensor) for tensor in [*graph.inputs, *graph.outputs]}
    for node in all_nodes(graph):
        for tensor in node.outputs:
            if isinstance(tensor, gs.Variable) and tensor.name and id(tensor) not in ports:
                tensor.dtype, tensor.shape = types.get(tensor.name, (None, None))
