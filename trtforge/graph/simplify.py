"""Run the clean-up passes over a graph until none of them changes anything.

Each pass works in place, keeps inputs, outputs and Q/DQ, and says how much it changed. After a round that changed
something, types are inferred again, because one pass's result is what the next one needs: a folded condition takes an
If away, and behind it a rank becomes known that another condition compares.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

import onnx
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.importers.onnx_importer import get_onnx_tensor_dtype, get_onnx_tensor_shape
from onnx_graphsurgeon.logger import G_LOGGER

from trtforge.errors import InternalError
from trtforge.graph.bounds import NOTHING_KNOWN, KnownSizes
from trtforge.graph.control_flow.conditionals import resolve_conditionals
from trtforge.graph.control_flow.loops import resolve_loops
from trtforge.graph.control_flow.sequences import resolve_sequences
from trtforge.graph.edit import all_nodes, remove_dead_nodes
from trtforge.graph.fold import fold_constants
from trtforge.graph.intake import Operators, Rewrite, narrow_types, rewrite_operators
from trtforge.graph.native import OnnxNative
from trtforge.graph.passes.batchnorm import fold_batch_norms
from trtforge.graph.passes.casts import remove_casts
from trtforge.graph.passes.cleanup import move_constants, remove_identities
from trtforge.graph.passes.squeeze import state_squeezed_axes
from trtforge.graph.passes.transposes import remove_transposes
from trtforge.graph.protos import all_bodies
from trtforge.graph.save import skeleton_from_graph

_MAX_ROUNDS = 48
QDQ_OPS = ("QuantizeLinear", "DequantizeLinear")


@dataclasses.dataclass(slots=True)
class Simplified:
    """What the passes changed.

    Attributes:
        counts: by pass: "constants", "folded", "operators", "types", "squeezes", "conditionals", "loops", "invariants"
            (loops that read a value from outside which they carried), "sequences", "casts", "transposes", "identities",
            "batch_norms", "dead".
        notes: sentences on what changed more than spelling, in order.
        skipped: nodes that were not folded because the result would be too large.
        num_qdq: live QuantizeLinear and DequantizeLinear nodes.
        operators: nodes that TensorRT does not take and that were rewritten.
    """

    counts: Counter[str]
    notes: list[str]
    skipped: tuple[str, ...] = ()
    num_qdq: int = 0
    operators: list[Rewrite] = dataclasses.field(default_factory=list)


def simplify(
    graph: gs.Graph, native: OnnxNative, sizes: KnownSizes | None = None, operators: Operators = "exact"
) -> Simplified:
    """Run every pass until none changes anything, in place.

    Args:
        graph: sorted, with inferred types and unique names.
        native: infers types.
        sizes: what is known of the inputs beyond their declared shapes; conditions that it decides are folded.
        operators: what becomes of operators that TensorRT does not take.

    Raises:
        InternalError: the number of Q/DQ nodes changed.
    """
    done = Simplified(Counter(dead=remove_dead_nodes(graph)), [])
    done.num_qdq = _count_qdq(graph)
    for _ in range(_MAX_ROUNDS):
        before = done.counts.total()
        _run_passes(graph, sizes, done, operators)
        if done.counts.total() == before:
            break
        write_types(graph, native.infer(skeleton_from_graph(graph).model))
    check_qdq("simplifying", done.num_qdq, _count_qdq(graph))
    return done


def _run_passes(graph: gs.Graph, sizes: KnownSizes | None, done: Simplified, operators: Operators) -> None:
    """One round; what only shapes or only values decide comes first, so that a round sees what it made known."""

    def note(name: str, change: Callable[[gs.Graph], list[str]]) -> None:
        notes = change(graph)
        done.counts[name] += len(notes)
        done.notes += notes

    done.counts["constants"] += move_constants(graph)
    folded = fold_constants(graph, NOTHING_KNOWN if sizes is None else sizes)
    done.counts["folded"] += folded.num_folded
    done.skipped = folded.skipped
    if operators != "keep":
        rewrites = rewrite_operators(graph, exact_products=operators == "exact")
        done.counts["operators"] += len(rewrites)
        done.operators += rewrites
        note("types", narrow_types)
    num_squeezes, notes = state_squeezed_axes(graph, None if sizes is None else sizes.dims)
    done.counts["squeezes"] += num_squeezes
    done.notes += notes
    note("conditionals", resolve_conditionals)
    notes, num_invariant = resolve_loops(graph)
    done.counts["loops"] += len(notes)
    done.counts["invariants"] += num_invariant
    done.notes += notes
    done.counts["sequences"] += resolve_sequences(graph)
    done.counts["casts"] += remove_casts(graph)
    done.counts["transposes"] += remove_transposes(graph)
    # Behind the passes that leave identities.
    done.counts["identities"] += remove_identities(graph)
    done.counts["batch_norms"] += fold_batch_norms(graph)
    done.counts["dead"] += remove_dead_nodes(graph)


def check_qdq(step: str, before: int, after: int) -> None:
    """Refuse a step that lost or made QuantizeLinear or DequantizeLinear nodes.

    Raises:
        InternalError: it did.
    """
    if before != after:
        raise InternalError(
            f"{step} changed the number of QuantizeLinear and DequantizeLinear nodes from {before} to {after}",
            "quantization must survive every pass unchanged",
            "report the model",
        )


def _count_qdq(graph: gs.Graph) -> int:
    return sum(node.op in QDQ_OPS for node in all_nodes(graph))


def write_types(graph: gs.Graph, model: onnx.ModelProto) -> None:
    """Set types to what inference found: of every inner tensor, which may be nothing, and what outputs leave open.

    Names are unique.
    """
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
    for tensor in graph.outputs:
        if isinstance(tensor, gs.Variable) and tensor.name in types:
            dtype, shape = types[tensor.name]
            tensor.dtype = dtype if tensor.dtype is None else tensor.dtype
            if tensor.shape is None:
                tensor.shape = shape
            elif shape is not None and len(shape) == len(tensor.shape):
                tensor.shape = [
                    found if stated is None else stated for stated, found in zip(tensor.shape, shape, strict=True)
                ]
