"""Cast a float32 graph to float16 or bfloat16, with the unsafe parts left in float32.

Every float32 tensor may exist in two versions. A node asks for the version of its own precision; where the producer
gives the other one, a Cast is made once and shared, so that no two Casts undo each other:

    asked for low,  produced full:  t -> Cast -> t_float16      asked for full, produced low:  t -> Cast -> t_float32

The graph's inputs and outputs and the tensors that subgraphs read keep their name and type. int -> float32 Casts are
asked like constants: each version is cast straight from the integers. Constants are converted once per precision; the
scales of Q/DQ are values of the low type already (`qdq.insert_qdq`), so converting them changes no number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trtforge.graph.collection import without_collection
from trtforge.graph.edit import InputEdits, pinned_names, remove_nodes, replace_uses
from trtforge.graph.names import UniqueNames
from trtforge.graph.signature import is_float32
from trtforge.graph.storage import release_pages
from trtforge.quantization.cast_constants import convert_constant, is_bound
from trtforge.quantization.cast_plan import CastPlan, Precision, lowered_places, plan_cast
from trtforge.quantization.op_types import BFLOAT16, fill_element_types
from trtforge.quantization.placement import KeptFloat

LowPrecision = Literal["float16", "bfloat16"]


@dataclasses.dataclass(frozen=True, slots=True)
class CastReport:
    """What was cast.

    Attributes:
        dtype: the low precision.
        cast_nodes: nodes that now run in it.
        kept_float32: nodes with float32 tensors that stay float32, and why.
        clamped_constants: constants of which values beyond the range were replaced.
        num_casts: Cast nodes added.
    """

    dtype: str
    cast_nodes: tuple[str, ...]
    kept_float32: tuple[KeptFloat, ...]
    clamped_constants: tuple[str, ...]
    num_casts: int


@without_collection()
def cast_graph(
    graph: gs.Graph,
    dtype: LowPrecision,
    observed_amax: Mapping[str, float] | None = None,
    kept: Mapping[str, str] | None = None,
) -> CastReport:
    """Cast the graph in place; the types of its inputs and outputs stay.

    Args:
        graph: normalised, so topologically sorted with constants as initializers.
        dtype: the low precision.
        observed_amax: largest absolute values that calibration saw, by tensor name.
        kept: nodes that have to stay float32, by name, and why.
    """
    low = np.dtype(np.float16) if dtype == "float16" else BFLOAT16
    fill_element_types(graph)
    _remove_idle_casts(graph)
    plan = plan_cast(graph, low, observed_amax or {}, kept)
    caster = _Caster(graph, low, plan)
    caster.run()
    nodes = [node for node in graph.nodes if id(node) in plan.precisions]
    return CastReport(
        dtype,
        tuple(node.name for node in nodes if plan.precisions[id(node)] is Precision.LOW),
        tuple(KeptFloat(node.name, plan.reasons[id(node)]) for node in nodes if id(node) in plan.reasons),
        tuple(sorted(caster.clamped)),
        caster.num_casts,
    )


def _remove_idle_casts(graph: gs.Graph) -> None:
    """Remove float32 -> float32 Casts, which would end up as half of a pair."""
    pinned = pinned_names(graph)
    idle = {
        id(node)
        for node in graph.nodes
        if node.op == "Cast"
        and is_float32(node.inputs[0])
        and is_float32(node.outputs[0])
        and node.outputs[0].name not in pinned
    }
    for node in graph.nodes:
        if id(node) in idle:
            replace_uses(node.outputs[0], node.inputs[0])
    if idle:
        remove_nodes(graph, lambda node: id(node) in idle)


class _Caster:
    """Walks the nodes in order and builds the new node list; `_full` and `_low` hold each tensor's versions by name."""

    def __init__(self, graph: gs.Graph, low: np.dtype[np.generic], plan: CastPlan) -> None:
        self.graph = graph
        self.low = low
        self.plan = plan
        self.names = UniqueNames(graph)
        self.clamped: set[str] = set()
        self.num_casts = 0
        self._edits = InputEdits()
        self._nodes: list[gs.Node] = []
        self._full: dict[str, gs.Tensor] = {tensor.name: tensor for tensor in graph.inputs if is_float32(tensor)}
        self._low: dict[str, gs.Tensor] = {}
        self._lowered: list[gs.Variable] = []
        self._constants: dict[tuple[str, bool], tuple[gs.Constant, gs.Constant]] = {}
        self._sources: dict[str, gs.Tensor] = {}
        self._pinned = pinned_names(graph)

    def run(self) -> None:
        for node in self.graph.nodes:
            precision = self.plan.precisions[id(node)]
            if node.op == "Cast" and is_float32(node.outputs[0]) and not is_float32(node.inputs[0]):
                self._sources[node.outputs[0].name] = node.inputs[0]
                precision = Precision.FULL
            places = lowered_places(node, self.graph, self.low) if precision is Precision.LOW else (frozenset(),) * 2
            self._connect_inputs(node, precision, places[0])
            self._nodes.append(node)
            self._register_outputs(node, places[1])
        self._edits.apply()
        for tensor in self._lowered:
            tensor.dtype = self.low
        self.graph.nodes = self._nodes
        self._drop_unread_casts()
        self._rename_constants()

    def _connect_inputs(self, node: gs.Node, precision: Precision, lowered: frozenset[int]) -> None:
        for index, tensor in enumerate(node.inputs):
            if not is_float32(tensor):
                continue
            if index in lowered:
                wanted = self._low_version(tensor, node.op)
            elif precision is Precision.ANY and tensor.name in self._low and tensor.name not in self._full:
                wanted = self._low[tensor.name]
            else:
                wanted = self._full_version(tensor)
            if wanted is not tensor:
                self._edits.replace(node, index, wanted)

    def _register_outputs(self, node: gs.Node, lowered: frozenset[int]) -> None:
        for index, tensor in enumerate(list(node.outputs)):
            if index not in lowered:
                if is_float32(tensor):
                    self._full[tensor.name] = tensor
            elif tensor.name in self._pinned:
                low = self._variable(tensor, self.low)
                node.outputs[index] = low
                self._low[tensor.name] = low
                self._add_cast(low, tensor, np.dtype(np.float32))
                self._full[tensor.name] = tensor
            else:
                self._low[tensor.name] = tensor
                self._lowered.append(tensor)
        if lowered and node.op == "Cast":
            node.attrs["to"] = _onnx_type(self.low)
        elif lowered and node.op == "ConstantOfShape":
            value = node.attrs["value"].values if "value" in node.attrs else np.zeros(1, np.float32)
            node.attrs["value"] = gs.Constant("", convert_constant(value, node.op, self.low)[0])

    def _low_version(self, tensor: gs.Tensor, op: str) -> gs.Tensor:
        if isinstance(tensor, gs.Constant):
            return self._low_constant(tensor, op)
        if tensor.name not in self._low:
            source = self._sources.get(tensor.name, self._full[tensor.name])
            if source.dtype == self.low:
                self._low[tensor.name] = source
            else:
                self._low[tensor.name] = self._variable(tensor, self.low)
                self._add_cast(source, self._low[tensor.name], self.low)
        return self._low[tensor.name]

    def _full_version(self, tensor: gs.Tensor) -> gs.Tensor:
        if isinstance(tensor, gs.Constant):
            return tensor
        if tensor.name not in self._full:
            self._full[tensor.name] = self._variable(tensor, np.dtype(np.float32))
            self._add_cast(self._low[tensor.name], self._full[tensor.name], np.dtype(np.float32))
        return self._full[tensor.name]

    def _low_constant(self, constant: gs.Constant, op: str) -> gs.Constant:
        key = (constant.name, is_bound(op))
        if key not in self._constants:
            values, is_clamped = convert_constant(constant.values, op, self.low)
            release_pages(constant.values)
            if is_clamped:
                self.clamped.add(constant.name)
            low = gs.Constant(self.names.tensor(f"{constant.name}_{self.low.name}"), values)
            self._constants[key] = (constant, low)
        return self._constants[key][1]

    def _variable(self, tensor: gs.Variable, dtype: np.dtype[np.generic]) -> gs.Variable:
        return gs.Variable(self.names.tensor(f"{tensor.name}_{dtype.name}"), dtype, tensor.shape)

    def _add_cast(self, source: gs.Tensor, output: gs.Tensor, dtype: np.dtype[np.generic]) -> None:
        name = self.names.node(f"{output.name}_Cast")
        self._nodes.append(gs.Node("Cast", name, {"to": _onnx_type(dtype)}, [source], [output]))
        self.num_casts += 1

    def _drop_unread_casts(self) -> None:
        """Remove int -> float32 Casts of which only the low version is read."""
        remove_nodes(
            self.graph,
            lambda node: (
                node.op == "Cast"
                and node.outputs[0].name in self._sources
                and node.outputs[0].name not in self._pinned
                and not node.outputs[0].outputs
            ),
        )

    def _rename_constants(self) -> None:
        """Give a low constant the name of the float32 one where nothing reads that any more."""
        for constant, low in self._constants.values():
            if not constant.outputs and constant.name not in self._pinned:
                low.name = constant.name
                self._pinned.add(constant.name)


def _onnx_type(dtype: np.dtype[np.generic]) -> int:
    return int(onnx.helper.np_dtype_to_tensor_dtype(dtype))
