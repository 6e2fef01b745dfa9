"""Bring a graph into the one form that the other stages work on.

    names unique -> scales of Resize made float32
    -> local functions inlined, opset raised, types inferred (one call of the child process)
    -> GroupNormalization repaired -> until nothing changes: the passes of simplify.py, types inferred again

Inputs and outputs keep names, order and types; inputs that nothing reads stay. Weights never leave this process. The
number of live QuantizeLinear and DequantizeLinear nodes is the same before and after; the result of a second run is the
result of the first.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import onnx
import onnx_graphsurgeon as gs

from trtforge.errors import InputError, InternalError
from trtforge.graph.collection import without_collection
from trtforge.graph.edit import is_onnx_op, sort_nodes
from trtforge.graph.intake import Operators, describe_rewrites
from trtforge.graph.load import graph_from_model
from trtforge.graph.messages import IR_VERSION
from trtforge.graph.names import make_names_unique
from trtforge.graph.native import OnnxNative, PreparedModel, open_native
from trtforge.graph.opset import LOWEST_OPSET, default_opset
from trtforge.graph.passes.cleanup import move_constants
from trtforge.graph.passes.groupnorm import widen_group_norms
from trtforge.graph.passes.resize import mend_resize_scales
from trtforge.graph.protos import all_bodies
from trtforge.graph.save import skeleton_from_graph
from trtforge.graph.simplify import QDQ_OPS, Simplified, check_qdq, simplify

# The opset that all stages are written for: `Attention` needs it in ONNX Runtime.
TARGET_OPSET = 23
# GroupNormalization's scale and bias become per channel.
_GROUP_NORM_OPSET = 21

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
        num_casts, num_transposes: Casts and Transposes removed, merged or moved.
        num_batch_norms: BatchNormalizations folded into weights.
        num_control_flow: Ifs, Loops and sequences replaced by what they come to.
        num_operators: nodes that TensorRT does not take and that were rewritten.
        num_dead: nodes removed that no output needed.
        num_renamed: nodes and tensors that got a new name.
        num_qdq: live QuantizeLinear and DequantizeLinear nodes.
        notes: sentences on what changed more than spelling, and on what was not done, and why.
    """

    source_opset: int
    opset: int
    num_inlined: int
    num_constants: int
    num_folded: int
    num_identities: int
    num_casts: int
    num_transposes: int
    num_batch_norms: int
    num_control_flow: int
    num_operators: int
    num_dead: int
    num_renamed: int
    num_qdq: int
    notes: tuple[str, ...]


@without_collection()
def normalise(
    graph: gs.Graph, opset: int = TARGET_OPSET, native: OnnxNative | None = None, operators: Operators = "exact"
) -> tuple[gs.Graph, NormaliseReport]:
    """A normalised graph.

    Args:
        graph: from `load_model`; it is used up (its nodes and tensors are renamed and its weights shared).
        opset: the opset to raise the graph to; a higher one is kept.
        native: a child process to share with other passes; by default one is started and ended here.
        operators: what becomes of operators that TensorRT does not take (`intake.Operators`).

    Raises:
        InputError: an opset that onnx does not know, functions that cannot be inlined, or an opset below 19 that cannot
            be raised.
        ChildDiedError: the child process that runs onnx's C++ crashed.
        InternalError: the number of Q/DQ nodes changed.
    """
    _check_opset(graph.opset)
    source_opset = graph.opset
    inputs, outputs = ([(t.name, t.dtype, t.shape) for t in tensors] for tensors in (graph.inputs, graph.outputs))
    doubted = _forget_sizes_read(graph)
    num_renamed = make_names_unique(graph)
    num_constants = move_constants(graph)
    mended = mend_resize_scales(graph)
    with open_native(native) as child:
        skeleton = skeleton_from_graph(graph)
        prepared = child.prepare(skeleton.model, opset)
        _check_preparation(prepared, source_opset, opset)
        result = graph_from_model(prepared.model, weights=skeleton.weights)
        num_renamed += make_names_unique(result)
        if source_opset < _GROUP_NORM_OPSET <= result.opset:
            widen_group_norms(result)
        sort_nodes(result)
        done = simplify(result, child, operators=operators)
    result.ir_version = IR_VERSION
    _restore_ports(result, inputs, outputs, doubted)
    failed = prepared.conversion_error
    notes = [f"opset {result.opset} instead of {opset}: {failed}"] if failed else []
    notes += [f"types not inferred: {prepared.inference_error}"] if prepared.inference_error else []
    return result, NormaliseReport(
        source_opset=source_opset,
        opset=result.opset,
        num_inlined=prepared.num_inlined,
        num_constants=num_constants + done.counts["constants"],
        num_folded=done.counts["folded"],
        num_identities=done.counts["identities"],
        num_casts=done.counts["casts"],
        num_transposes=done.counts["transposes"],
        num_batch_norms=done.counts["batch_norms"],
        num_control_flow=sum(done.counts[name] for name in ("conditionals", "loops", "sequences")),
        num_operators=done.counts["operators"],
        num_dead=done.counts["dead"],
        num_renamed=num_renamed,
        num_qdq=done.num_qdq,
        notes=(*notes, *mended, *simplification_notes(done)),
    )


def simplification_notes(done: Simplified) -> list[str]:
    """What the passes did that a user should know, and what they left."""
    notes = [*describe_rewrites(done.operators), *done.notes]
    if done.counts["batch_norms"]:
        notes.append(f"{done.counts['batch_norms']} BatchNormalization nodes were folded into the weights before them")
    return notes + [f"{name!r} not folded: its result would be too large" for name in done.skipped]


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
    if prepared.conversion_error and default_opset(prepared.model) < min(opset, LOWEST_OPSET):
        named = sorted({node.op_type for node in nodes if node.op_type in prepared.conversion_error})
        raise InputError(
            f"the model's opset {source_opset} cannot be raised to {opset}"
            + (f": {', '.join(named)} cannot be converted" if named else ""),
            prepared.conversion_error[:500],
            f"export the model with opset {LOWEST_OPSET} or newer",
        )
    check_qdq("opset conversion", prepared.num_qdq, sum(node.op_type in QDQ_OPS for node in nodes))


def _forget_sizes_read(graph: gs.Graph) -> set[str]:
    """Take the stated sizes off the outputs that nodes read too, in place: inference tells them. Gives their names.

    A file whose inputs were opened by hand often still states a batch of 1 for its outputs. ONNX Runtime only warns of
    that; here it would be folded into the shapes that follow. What operators give that onnx does not know is believed.
    """
    doubted = set()
    for tensor in graph.outputs:
        is_read = isinstance(tensor, gs.Variable) and tensor.outputs and all(is_onnx_op(node) for node in tensor.inputs)
        if is_read and tensor.shape is not None:
            tensor.shape = [dim if isinstance(dim, str) else None for dim in tensor.shape]
            doubted.add(tensor.name)
    return doubted


def _merge_shapes(stated: Any, inferred: Any) -> Any:
    """What a file states of an output, with the sizes that inference knows better."""
    if stated is None or inferred is None or len(stated) != len(inferred):
        return inferred if stated is None else stated
    return [
        found if isinstance(size, int) and isinstance(found, int | str) else size
        for size, found in zip(stated, inferred, strict=True)
    ]


def _restore_ports(graph: gs.Graph, inputs: list[_Port], outputs: list[_Port], doubted: set[str]) -> None:
    """Give inputs and outputs back what the source states; what it leaves open is taken from inference, and so are the
    sizes of the outputs in `doubted`.
    """
    for kind, ports, tensors in (("input", inputs, graph.inputs), ("output", outputs, graph.outputs)):
        if [port[0] for port in ports] != [tensor.name for tensor in tensors]:
            raise InternalError(
                f"normalising changed the model's {kind}s",
                f"from {[port[0] for port in ports]} to {[tensor.name for tensor in tensors]}",
                "report the model",
            )
        for (name, dtype, shape), tensor in zip(ports, tensors, strict=True):
            if isinstance(tensor, gs.Variable):
                tensor.dtype = tensor.dtype if dtype is None else dtype
                if name in doubted:
                    tensor.shape = _merge_shapes(shape, tensor.shape)
                else:
                    tensor.shape = tensor.shape if shape is None else shape
