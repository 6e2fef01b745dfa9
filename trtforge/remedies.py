"""What is tried when the builder refuses a node: each remedy once per node, in the order of `REMEDIES`.

A remedy changes the prepared graph (in a form that computes the same) or what the lowering does with one node. The
caller then lowers, verifies and builds again, and says what was done. The list is short on purpose: what is known
before a build is a pass or a lint rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.backends.plan import EnginePlan
from trtforge.errors import BuildError, Diagnosis
from trtforge.graph.edit import remove_dead_nodes
from trtforge.graph.lint.params import ZERO_CHANNEL_SCALE, constant_input, read_params
from trtforge.graph.names import UniqueNames
from trtforge.graph.passes.dilation import fill_kernel, spell_out_pool
from trtforge.manifest import RemedyEntry
from trtforge.spec import Precision
from trtforge.stages import Lowered

# Builds that a job tries after the first: a model that needs more is not worth the time, and says so.
MAX_REMEDIES = 32
# Failures that may be those of a type, so that a wider one may help.
_CAUSES_OF_TYPE = frozenset(
    ("no-kernel", "mixed-types", "operator-type", "unsupported-use", "internal-error", "unknown")
)
_QDQ = ("QuantizeLinear", "DequantizeLinear")
# Nodes between a Q/DQ node and the node that it serves.
_MAX_STEPS = 16


@dataclasses.dataclass(slots=True)
class Remedies:
    """The remedies of one build, and what they decided.

    Attributes:
        graph: the prepared graph, which remedies may rewrite.
        precision: of the build.
        kept: nodes that stay unquantized, and why.
        wide: nodes that stay float32 in an fp16 or bf16 graph, and why.
        applied: what was done, in order.
        ruled_out: nodes that a remedy does not fit, and why.
    """

    graph: gs.Graph
    precision: Precision
    kept: dict[str, str] = dataclasses.field(default_factory=dict)
    wide: dict[str, str] = dataclasses.field(default_factory=dict)
    applied: list[RemedyEntry] = dataclasses.field(default_factory=list)
    ruled_out: dict[str, str] = dataclasses.field(default_factory=dict)
    _tried: set[tuple[str, str]] = dataclasses.field(default_factory=set)

    def take(self, error: BuildError, lowered: Lowered) -> RemedyEntry | None:
        """Apply the next remedy to the node that the builder refused.

        Args:
            error: the refusal.
            lowered: the graph that was refused.

        Returns:
            What was done; None where no remedy is left.
        """
        diagnosis = error.diagnosis
        node = None if diagnosis is None else self._node_behind(diagnosis, lowered.graph)
        if diagnosis is None or node is None or len(self.applied) >= MAX_REMEDIES:
            return None
        for name, remedy in REMEDIES.items():
            if (name, node.name) in self._tried:
                continue
            self._tried.add((name, node.name))
            done = remedy(self, node, diagnosis, lowered)
            if done is not None:
                entry = RemedyEntry(node=node.name, op=node.op, reason=diagnosis.reason, remedy=done)
                self.applied.append(entry)
                return entry
        return None

    def _node_behind(self, diagnosis: Diagnosis, built: gs.Graph) -> gs.Node | None:
        """The node of the prepared graph to blame: the refused one, or the one that its Q/DQ or added Cast serves."""
        own = {node.name: node for node in self.graph.nodes}
        node = next((node for node in built.nodes if node.name == diagnosis.node), None)
        for _ in range(_MAX_STEPS):
            if node is None or (node.name in own and node.op not in _QDQ):
                break
            readers = [reader for tensor in node.outputs for reader in tensor.outputs]
            node = readers[0] if readers else None
        return None if node is None else own.get(node.name)


Remedy = Callable[[Remedies, gs.Node, Diagnosis, Lowered], str | None]


def split_attribute(remedies: Remedies, node: gs.Node, diagnosis: Diagnosis, lowered: Lowered) -> str | None:
    """Spell an attribute that the builder does not have out in other operators."""
    if diagnosis.cause == "deconv-dilation" and not remedies.precision.is_weight_only:
        reason, done = fill_kernel(node, remedies.graph), "its dilation was written into its kernel, as zeros"
    elif diagnosis.cause == "pool-dilation":
        reason, done = spell_out_pool(node, remedies.graph), "it was written out as one Slice per element of its window"
    else:
        return None
    if reason is not None:
        remedies.ruled_out[node.name] = f"its dilation cannot be written out: {reason}"
        return None
    if node.op == "ConvTranspose" and lowered.qdq is not None and node.name in lowered.qdq.nodes:
        remedies.kept[node.name] = "its kernel was written out after its weight had been quantized"
    return done


def scale_per_tensor(remedies: Remedies, node: gs.Node, diagnosis: Diagnosis, _: Lowered) -> str | None:
    """Give a ConvTranspose that came quantized per channel one scale for its weight."""
    dequantize = _producer(node, 1)
    if node.op != "ConvTranspose" or diagnosis.cause not in _CAUSES_OF_TYPE or dequantize is None:
        return None
    weight = _dequantized(dequantize)
    if weight is None or np.asarray(dequantize.inputs[1].values).size == 1:
        return None
    smallest = ZERO_CHANNEL_SCALE if weight.dtype == np.float16 else float(np.finfo(np.float32).smallest_normal)
    values = weight.astype(np.float32)
    scale = np.asarray(max(float(np.abs(values).max(initial=0.0)) / 127, smallest), weight.dtype)
    codes = np.clip(np.rint(values / scale.astype(np.float32)), -127, 127).astype(np.int8)
    names = UniqueNames(remedies.graph)
    constants = {"weight": codes, "scale": scale, "zero_point": np.int8(0)}
    inputs = [gs.Constant(names.tensor(f"{node.name}_{key}"), np.asarray(value)) for key, value in constants.items()]
    output = gs.Variable(names.tensor(f"{node.name}_weight_float"), weight.dtype, weight.shape)
    _insert_before(
        remedies.graph,
        node,
        gs.Node("DequantizeLinear", names.node(f"{node.name}_DequantizeLinear"), {}, inputs, [output]),
    )
    node.inputs[1] = output
    remove_dead_nodes(remedies.graph)
    return "its weight was quantized again with one scale for all channels"


def widen(remedies: Remedies, node: gs.Node, diagnosis: Diagnosis, lowered: Lowered) -> str | None:
    """Leave a quantized node in the float type."""
    if diagnosis.cause not in _CAUSES_OF_TYPE:
        return None
    base = remedies.precision.base
    if lowered.qdq is not None and node.name in lowered.qdq.nodes and not remedies.precision.is_weight_only:
        remedies.kept[node.name] = f"the builder refused it in {remedies.precision.quantization}: {diagnosis.reason}"
        return f"it stays in {base}"
    if _bypass_pairs(node, remedies.graph):
        return f"the Q/DQ that it came with was taken off, and it runs in {base}"
    return None


def widen_to_float32(remedies: Remedies, node: gs.Node, diagnosis: Diagnosis, lowered: Lowered) -> str | None:
    """Leave a node of an fp16 or bf16 graph in float32."""
    if diagnosis.cause not in _CAUSES_OF_TYPE or lowered.cast is None or node.name not in lowered.cast.cast_nodes:
        return None
    if lowered.qdq is not None and node.name in lowered.qdq.nodes:
        return None
    remedies.wide[node.name] = f"the builder refused it in {remedies.precision.base}: {diagnosis.reason}"
    return "it stays in fp32"


REMEDIES: Mapping[str, Remedy] = {
    "split-attribute": split_attribute,
    "per-tensor-weight": scale_per_tensor,
    "wider-type": widen,
    "float32": widen_to_float32,
}
"""Every remedy by its name, gentlest first."""


def decomposed_attention(graph: gs.Graph, plan: EnginePlan) -> tuple[RemedyEntry, ...]:
    """The Attention nodes that the builder had no fused kernel for and took apart, read from its plan."""
    if plan.unreadable is not None:
        return ()
    fused = {node for layer in plan.layers if layer.is_attention for node in layer.onnx_nodes + layer.main_nodes}
    return tuple(
        RemedyEntry(
            node=node.name,
            op=node.op,
            reason="there is no fused kernel for its type and head size",
            remedy="it was taken apart into products and Softmax",
        )
        for node in graph.nodes
        if node.op == "Attention" and node.name not in fused
    )


def with_history(error: BuildError, remedies: Remedies) -> BuildError:
    """The last refusal, with why no remedy fits its node, and what was tried before it."""
    notes = [remedies.ruled_out[error.node]] if error.node in remedies.ruled_out else []
    if remedies.applied:
        tried = "; ".join(f"node {entry.node!r}: {entry.remedy}" for entry in remedies.applied)
        notes.append(f"tried before: {tried}")
    why = "".join([error.why, *(f" ({note})" for note in notes)])
    return BuildError(error.what, why, error.fix, error.node, error.diagnosis)


def _producer(node: gs.Node, index: int) -> gs.Node | None:
    """The DequantizeLinear right in front of an input."""
    if index >= len(node.inputs) or not node.inputs[index].inputs:
        return None
    producer: gs.Node = node.inputs[index].inputs[0]
    return producer if producer.op == "DequantizeLinear" else None


def _dequantized(node: gs.Node) -> np.ndarray[Any, Any] | None:
    """The values of a constant behind a DequantizeLinear without blocks; None for anything else."""
    codes, params = constant_input(node, 0), read_params(node)
    if codes is None or params is None or params.block_size or not params.fits(codes.shape):
        return None
    # In float32, which holds the codes of float8 as well.
    zero, scale = (params.spread(part, codes.shape).astype(np.float32) for part in (params.zero_point, params.scale))
    return ((codes.astype(np.float32) - zero) * scale).astype(params.scale.dtype)


def _bypass_pairs(node: gs.Node, graph: gs.Graph) -> bool:
    """Let a node that came quantized read what its Q/DQ pairs read; False where it has none."""
    changed = False
    for index in range(min(2, len(node.inputs))):
        dequantize = _producer(node, index)
        if dequantize is None:
            continue
        source = dequantize.inputs[0].inputs[0] if dequantize.inputs[0].inputs else None
        if source is not None and source.op == "QuantizeLinear":
            node.inputs[index] = source.inputs[0]
        elif (values := _dequantized(dequantize)) is not None:
            node.inputs[index] = gs.Constant(UniqueNames(graph).tensor(f"{node.name}_weight"), values)
        else:
            continue
        changed = True
    if changed:
        remove_dead_nodes(graph)
    return changed


def _insert_before(graph: gs.Graph, node: gs.Node, added: gs.Node) -> None:
    index = next(index for index, other in enumerate(graph.nodes) if other is node)
    graph.nodes.insert(index, added)
