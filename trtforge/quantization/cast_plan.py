"""Which nodes run in float16 or bfloat16, and why the others stay float32.

1.  An operator stays float32 where the ONNX schema does not allow the type, where no schema is known, where the builder
    has no kernel, and where a constant cannot be represented.
2.  Operators that add up many terms or raise to powers stay float32: a sum of squares leaves float16's range at
    sqrt(65504) = 256. LayerNormalization and RMSNormalization do not: TensorRT-RTX 1.7.1 computes their statistics in
    float32 whatever the type of their input. A Softmax it computes in that type, so Softmax stays float32 too, except
    inside attention: there it is part of the fused kernel, and casts around it cost two kernels per block of a ViT.
3.  A Mul that only feeds such a sum joins it (x * x), and so does a Div of two float32 values.
4.  The argument of Sin and Cos stays float32 back to where it starts: float16 knows integers, hence positions, exactly
    only up to 2048.
5.  An elementwise or layout node between float32 nodes stays float32, which saves a pair of casts. To a layout
    node the graph's inputs and outputs count as such nodes: what is only passed on is not rounded.
6.  A step function (a comparison, Floor, a Cast to integers) of values that nothing rounded stays float32 back to where
    they start: rounding moves a value over the step (2093.75 <= 2093.75 fails where one side becomes 2094).
7.  float16 only: a node that calibration saw reach `MAX_SAFE_FLOAT16` stays float32, and so does the node that made the
    value when only operators that pass it on stand between.

Nodes without a float32 tensor are not concerned. Nodes that only read one float32 tensor and give another type (Shape,
IsNaN, Cast to int64) take whichever precision there is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.graph.edit import pinned_names, subgraphs_of
from trtforge.graph.intake import needs_float32
from trtforge.graph.signature import is_float32, tensor_dtype
from trtforge.graph.storage import release_pages
from trtforge.quantization.cast_constants import refuse_constant
from trtforge.quantization.cast_ops import (
    FLOAT32_OPS,
    LAYOUT_OPS,
    MAX_SAFE_FLOAT16,
    NEUTRAL_OPS,
    PASSING_OPS,
    QDQ_OPS,
    RECURRENT_OPS,
    STEP_OPS,
    SUM_OPS,
    TYPED_OUTPUT_OPS,
    WITHOUT_BFLOAT16,
)
from trtforge.quantization.op_types import BFLOAT16, OpTypes, node_types


class Precision(Enum):
    """How a node meets the float32 tensors it touches."""

    NONE = "it touches none"
    LOW = "the low precision"
    FULL = "float32"
    ANY = "reads whichever there is"


@dataclasses.dataclass(frozen=True, slots=True)
class CastPlan:
    """A decision per node of the main graph.

    Attributes:
        precisions: by `id(node)`.
        reasons: why a node stays float32, by `id(node)`.
    """

    precisions: dict[int, Precision]
    reasons: dict[int, str]


def plan_cast(
    graph: gs.Graph,
    dtype: np.dtype[np.generic],
    observed_amax: Mapping[str, float],
    kept: Mapping[str, str] | None = None,
) -> CastPlan:
    """Decide each node's precision.

    Args:
        graph: topologically sorted, element types known.
        dtype: float16 or bfloat16.
        observed_amax: largest absolute values seen, by tensor name; tensors may be missing.
        kept: nodes that have to stay float32, by name, and why.
    """
    planner = _Planner(graph, dtype, observed_amax, kept or {})
    planner.seed()
    planner.keep_trigonometric_arguments()
    planner.keep_products_of_sums()
    planner.keep_quotients()
    planner.keep_steps()
    planner.keep_between()
    return CastPlan(planner.precisions, planner.reasons)


def lowered_places(
    node: gs.Node, graph: gs.Graph, dtype: np.dtype[np.generic]
) -> tuple[frozenset[int], frozenset[int]]:
    """The float32 inputs and outputs, by index, that are low when the node runs in low precision.

    Inputs of a type variable that does not allow the type (the scales of Resize) stay float32, and so do outputs whose
    variable no lowered input shares (the statistics of LayerNormalization).
    """
    types = node_types(node, graph)
    if types is None:
        return frozenset(), frozenset()
    inputs = [index for index, tensor in enumerate(node.inputs) if is_float32(tensor)]
    lowered = [index for index in inputs if _is_lowered(node, types, index, dtype)]
    variables = {types.input_variable(index) for index in lowered}
    outputs = [
        index
        for index, tensor in enumerate(node.outputs)
        if is_float32(tensor) and (node.op in TYPED_OUTPUT_OPS or types.output_variable(index) in variables)
    ]
    return frozenset(lowered), frozenset(outputs)


def _is_lowered(node: gs.Node, types: OpTypes, index: int, dtype: np.dtype[np.generic]) -> bool:
    variable = types.input_variable(index)
    return variable is not None and types.allows(variable, dtype.name) and (node.op, variable) != ("Resize", "T2")


class _Planner:
    def __init__(
        self,
        graph: gs.Graph,
        dtype: np.dtype[np.generic],
        observed_amax: Mapping[str, float],
        kept: Mapping[str, str],
    ) -> None:
        self.graph = graph
        self.dtype = dtype
        self.kept = kept
        self.observed_amax = _with_sources(graph, observed_amax) if dtype != BFLOAT16 else {}
        self.precisions: dict[int, Precision] = {}
        self.reasons: dict[int, str] = {}
        self._pinned = pinned_names(graph)

    def seed(self) -> None:
        """Decide what a node's own operator, constants and ranges decide."""
        for node in self.graph.nodes:
            reason = self.kept.get(node.name) or self._seed_reason(node)
            if not any(is_float32(tensor) for tensor in (*node.inputs, *node.outputs)):
                self.precisions[id(node)] = Precision.NONE
            elif reason is not None:
                self._keep(node, reason)
            elif _reads_one_float(node):
                self.precisions[id(node)] = Precision.ANY
            else:
                self.precisions[id(node)] = Precision.LOW

    def keep_trigonometric_arguments(self) -> None:
        """Rule 4: walk back from Sin and Cos through cheap operators."""
        passed = (NEUTRAL_OPS | {"CumSum", "Einsum", "MatMul", "Pow", "Range", "Reciprocal"}) - {"DequantizeLinear"}
        pending = [tensor for node in self.graph.nodes if node.op in ("Cos", "Sin") for tensor in node.inputs]
        seen: set[int] = set()
        while pending:
            for node in pending.pop().inputs:
                if id(node) in seen or node.op not in passed or not _is_low(self, node) or _has_weight_matrix(node):
                    continue
                seen.add(id(node))
                self._keep(node, "it computes the argument of Sin or Cos, where positions need float32")
                pending.extend(tensor for tensor in node.inputs if is_float32(tensor))

    def keep_products_of_sums(self) -> None:
        """Rule 3: a product that is only ever summed in float32."""
        for node in self.graph.nodes:
            if node.op == "Mul" and _is_low(self, node) and node.outputs[0].outputs:
                consumers = node.outputs[0].outputs
                if node.outputs[0].name not in self._pinned and all(reader.op in SUM_OPS for reader in consumers):
                    self._keep(node, f"its product feeds {consumers[0].op}, which sums in float32")

    def keep_quotients(self) -> None:
        """Rule 3: a quotient of two float32 values may be small where both overflow float16."""
        for node in self.graph.nodes:
            if node.op == "Div" and _is_low(self, node):
                sources = [producer for tensor in node.inputs for producer in tensor.inputs]
                if len(sources) == 2 and all(self.precisions[id(source)] is Precision.FULL for source in sources):
                    self._keep(node, "both its inputs are float32")

    def keep_steps(self) -> None:
        """Rule 6: steps that are reached from inputs, constants and float32 nodes through neutral nodes only."""
        exact: set[int] = set()
        pending: list[gs.Node] = []
        for node in self.graph.nodes:
            if self.precisions[id(node)] is Precision.FULL:
                exact.add(id(node))
            elif all(not t.inputs or id(t.inputs[0]) in exact for t in _float_variables(node)):
                if self._is_neutral(node) and node.op not in QDQ_OPS:
                    exact.add(id(node))
                if (node.op in STEP_OPS and _is_low(self, node)) or _is_cast_to_integers(node):
                    pending.append(node)
        while pending:
            node = pending.pop()
            if _is_low(self, node):
                self._keep(node, "it decides by values that nothing rounded")
            sources = [producer for tensor in _float_variables(node) for producer in tensor.inputs]
            pending.extend(source for source in sources if _is_low(self, source))

    def keep_between(self) -> None:
        """Rule 5: neutral nodes whose inputs all come from float32 nodes and whose outputs all go to such nodes."""
        from_full: set[int] = set()
        for node in self.graph.nodes:
            if self.precisions[id(node)] is Precision.FULL or (
                self._is_neutral(node) and self._has_only_full_sources(node, from_full)
            ):
                from_full.add(id(node))
        to_full: set[int] = set()
        for node in reversed(self.graph.nodes):
            if self.precisions[id(node)] is Precision.FULL or (
                self._is_neutral(node) and self._has_only_full_consumers(node, to_full)
            ):
                to_full.add(id(node))
        for node in self.graph.nodes:
            if id(node) in from_full and id(node) in to_full and _is_low(self, node):
                self._keep(node, "it lies between float32 nodes")

    def _keep(self, node: gs.Node, reason: str) -> None:
        self.precisions[id(node)] = Precision.FULL
        self.reasons[id(node)] = reason

    def _is_neutral(self, node: gs.Node) -> bool:
        return node.op in NEUTRAL_OPS and _is_low(self, node)

    def _has_only_full_sources(self, node: gs.Node, from_full: set[int]) -> bool:
        sources = _float_variables(node)
        return all(id(tensor.inputs[0]) in from_full if tensor.inputs else node.op in LAYOUT_OPS for tensor in sources)

    def _has_only_full_consumers(self, node: gs.Node, to_full: set[int]) -> bool:
        for tensor in node.outputs:
            if is_float32(tensor) and not all(
                id(consumer) in to_full or self.precisions.get(id(consumer)) in (Precision.ANY, None)
                for consumer in tensor.outputs
            ):
                return False
        return True

    def _seed_reason(self, node: gs.Node) -> str | None:
        if subgraphs_of(node):
            return "it holds subgraphs, which stay float32"
        if needs_float32(node):
            return "its integers are exact only in float32"
        tensors = [tensor for tensor in (*node.inputs, *node.outputs) if tensor.name]
        for tensor in tensors:
            if tensor.dtype is None or getattr(tensor, "type", "tensor_type") != "tensor_type":
                return f"{tensor.name!r} is not a tensor of known element type"
        types = node_types(node, self.graph)
        if types is None:
            return f"no ONNX schema is known for {node.domain or 'ai.onnx'}::{node.op}"
        if "output_dtype" in node.attrs and node.op == "DequantizeLinear":
            return "it states its own output type"
        if self.dtype == BFLOAT16 and node.op in WITHOUT_BFLOAT16:
            return f"TensorRT-RTX has no bfloat16 {node.op}"
        if node.op in RECURRENT_OPS and len(node.inputs) > 4 and node.inputs[4].name:
            return f"TensorRT-RTX has no {self.dtype.name} {node.op} with sequence lengths"
        if node.op in FLOAT32_OPS or (node.op == "GroupNormalization" and self.graph.opset < 21):
            return f"{node.op} needs float32 inside"
        if node.op == "Softmax" and not _is_attention_softmax(node):
            return "a Softmax outside attention is computed in the type of its input"
        if node.op in ("ScatterElements", "ScatterND") and node.attrs.get("reduction", "none") != "none":
            return f"{node.op} with a reduction needs float32 inside"
        return self._constant_reason(node, types) or self._range_reason(node)

    def _constant_reason(self, node: gs.Node, types: OpTypes) -> str | None:
        if node.op == "ConstantOfShape" and "value" in node.attrs:
            return refuse_constant(node.attrs["value"].values, node.op, self.dtype)
        for index, tensor in enumerate(node.inputs):
            if is_float32(tensor):
                if not _is_lowered(node, types, index, self.dtype):
                    if index == 0:
                        return f"{node.op} of opset {self.graph.opset} does not take {self.dtype.name}"
                elif isinstance(tensor, gs.Constant):
                    values = tensor.values
                    if node.op in QDQ_OPS and index == 1:
                        # A scale of 0 is no scale, so the smallest of a model's own scales counts, not the largest.
                        values = np.min(values, initial=np.inf)
                    reason = refuse_constant(np.asarray(values), node.op, self.dtype)
                    release_pages(tensor.values)
                    if reason is not None:
                        return reason
        return None

    def _range_reason(self, node: gs.Node) -> str | None:
        for tensor in (*node.inputs, *node.outputs):
            amax = self.observed_amax.get(tensor.name, 0.0)
            if is_float32(tensor) and amax > MAX_SAFE_FLOAT16:
                return f"{tensor.name!r} reached {amax:.4g} in calibration; float16 ends at 65504"
        return None


def _with_sources(graph: gs.Graph, observed_amax: Mapping[str, float]) -> Mapping[str, float]:
    """The ranges seen, with those beyond float16's also given to the tensors that the values came from."""
    amax = dict(observed_amax)
    for node in reversed(graph.nodes):
        reached = max((amax.get(tensor.name, 0.0) for tensor in node.outputs), default=0.0)
        if reached > MAX_SAFE_FLOAT16 and node.op in PASSING_OPS:
            source = node.inputs[0].name
            amax[source] = max(amax.get(source, 0.0), reached)
    return amax


def _is_low(planner: _Planner, node: gs.Node) -> bool:
    return planner.precisions.get(id(node)) is Precision.LOW


def _float_variables(node: gs.Node) -> list[gs.Tensor]:
    """The float32 inputs that are no constants."""
    return [tensor for tensor in node.inputs if is_float32(tensor) and not isinstance(tensor, gs.Constant)]


def _is_cast_to_integers(node: gs.Node) -> bool:
    dtype = tensor_dtype(node.outputs[0].dtype) if node.op == "Cast" and is_float32(node.inputs[0]) else None
    return dtype is not None and dtype.kind in "iu"


def _reads_one_float(node: gs.Node) -> bool:
    """True for a node with one float32 input, no constant among them, and no float32 output."""
    floats = [tensor for tensor in node.inputs if is_float32(tensor)]
    return len(floats) == 1 and not any(is_float32(tensor) for tensor in node.outputs)


def _is_attention_softmax(node: gs.Node) -> bool:
    """True when a product reads the result, directly or behind the Where that guards fully masked rows."""
    readers = list(node.outputs[0].outputs)
    readers += [reader for guard in readers if guard.op == "Where" for reader in guard.outputs[0].outputs]
    return any(reader.op == "MatMul" for reader in readers)


def _has_weight_matrix(node: gs.Node) -> bool:
    """True for a product with a constant matrix, unlike the outer product of positions and frequencies."""
    return node.op in ("Einsum", "MatMul") and any(
        isinstance(tensor, gs.Constant) and sum(size > 1 for size in tensor.shape) > 1 for tensor in node.inputs
    )
