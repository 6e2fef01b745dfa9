"""Which tensors get Q/DQ pairs, and why each remaining candidate stays float.

1.  A Conv, ConvTranspose, Gemm or MatMul with a constant float32 weight is quantized on its activation and its weight,
    never on its output or bias (weighted.py: which, and where INT8 gains nothing).
2.  The products of attention stay float unless the recipe asks for them and they fuse in INT8 (attention_sites.py):
    other Q/DQ can end the fusion, and all of it costs accuracy.
3.  A residual Add reads INT8 where its skip input is stored in INT8 anyway (residuals.py).
4.  Tensors before and behind a Concat or a MaxPool share one scale (shared_scales.py).
5.  Q/DQ that the model came with stays, and is completed (arrived.py).
6.  A product of which a Log reads the result stays float (log_arguments.py).

Hence no pair stands inside SiLU, GELU, LayerNormalization or Softmax, whether one operator or a chain of them: none of
their nodes is one of these kinds.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

import onnx_graphsurgeon as gs

from trtforge.errors import InputError
from trtforge.graph.cost import GEMM_OPS, Shapes, constant_weight
from trtforge.graph.edit import all_nodes
from trtforge.graph.intake import needs_float32
from trtforge.quantization.arrived import Operands, find_pairs, operands_of
from trtforge.quantization.attention_sites import attention_reason, find_attentions
from trtforge.quantization.log_arguments import products_before_log
from trtforge.quantization.residuals import skip_inputs
from trtforge.quantization.shared_scales import scale_groups
from trtforge.quantization.sites import (
    ActivationSite,
    Dependent,
    KeptFloat,
    KeptQuantized,
    Placement,
    ReusedSite,
    WeightSite,
    share_amax,
)
from trtforge.quantization.weighted import MIN_SIDE, WITHOUT_INT8, channel_axis, size_reason, weight_reason
from trtforge.recipe import QuantRecipe
from trtforge.target import BackendName

__all__ = [
    "MIN_SIDE",
    "ActivationSite",
    "Dependent",
    "KeptFloat",
    "KeptQuantized",
    "Placement",
    "ReusedSite",
    "WeightSite",
    "plan_placement",
    "share_amax",
]


def plan_placement(
    graph: gs.Graph,
    shapes: Shapes,
    recipe: QuantRecipe,
    backend: BackendName = BackendName.TENSORRT_RTX,
    largest: Shapes | None = None,
) -> Placement:
    """Decide for every weighted node, attention product and residual Add whether it runs in INT8.

    Args:
        graph: normalised, with unique node names.
        shapes: sizes by tensor name at the shapes that matter most (a profile's opt); tensors may be missing, then
            only the weight's shape is judged.
        recipe: exclusions, weight granularity, and whether attention is quantized.
        backend: the builder, some of which lack INT8 kernels.
        largest: sizes by tensor name at the largest shapes of all profiles, which limit quantized attention; `shapes`
            by default.

    Raises:
        InputError: an exclude pattern that matches no node of these kinds.
    """
    planner = _Planner(graph, shapes, recipe, backend)
    planner.place_weighted()
    planner.place_attention(shapes if largest is None else largest)
    planner.place_residuals()
    return planner.placement()


class _Planner:
    """Collects the sites; each step sees what the steps before it placed."""

    def __init__(self, graph: gs.Graph, shapes: Shapes, recipe: QuantRecipe, backend: BackendName) -> None:
        self.graph = graph
        self.shapes = shapes
        self.recipe = recipe
        self.without_int8 = WITHOUT_INT8[backend]
        self.candidates = [node for node in all_nodes(graph) if node.op in (*GEMM_OPS, "Attention")]
        named = [*self.candidates, *(node for node in graph.nodes if _adds_activations(node))]
        self.excluded = match_patterns(recipe.exclude, [node.name for node in named])
        self.activations: list[ActivationSite] = []
        self.weights: list[WeightSite] = []
        self.reused: list[ReusedSite] = []
        self.dependents: list[Dependent] = []
        self.kept_float: dict[str, str] = {}
        self.kept_quantized: dict[str, str] = {}
        self._outer = {id(node) for node in graph.nodes}
        self._graph_inputs = {tensor.name for tensor in graph.inputs}
        self._pairs = find_pairs(graph)
        self._before_log = products_before_log(graph)

    def place_weighted(self) -> None:
        """Rules 1 and 5."""
        for node in self.candidates:
            operands = operands_of(node)
            if operands.is_complete:
                self.kept_quantized[node.name] = "both its operands came with Q/DQ"
            elif not operands.is_float:
                self._complete(node, operands)
            else:
                reason = self._context_reason(node) or weight_reason(node) or self._size_reason(node)
                if reason is not None:
                    self.kept_float[node.name] = reason
                else:
                    self._add_activation(node)
                    self._add_weight(node)

    def place_attention(self, largest: Shapes) -> None:
        """Rule 2."""
        if not self.recipe.attention:
            return
        quantized = {site.node for site in self.activations} | {site.node for site in self.reused}
        quantized |= set(self.kept_quantized)
        for attention in find_attentions(self.graph):
            names = [node.name for node in attention.nodes]
            if not all(name in self.kept_float for name in names):
                continue
            reason = next((self._context_reason(node) for node in attention.nodes if node.name in self.excluded), None)
            reason = reason or attention_reason(attention, self.shapes, largest, quantized)
            for node in attention.nodes:
                if reason is not None:
                    self.kept_float[node.name] = reason
                    continue
                del self.kept_float[node.name]
                self._add_activation(node)
                self.activations.append(ActivationSite(node.name, 1, node.inputs[1].name))
                company = [*names, *(reader.name for reader in attention.readers)]
                self.dependents.append(Dependent(node.name, tuple(name for name in company if name != node.name)))

    def place_residuals(self) -> None:
        """Rule 3."""
        quantized = {(site.node, site.input_index): site.tensor for site in self.activations}
        for node, index, needs in skip_inputs(self.graph, quantized):
            if node.name in self.excluded:
                self.kept_float[node.name] = self._context_reason(node) or ""
            else:
                self.activations.append(ActivationSite(node.name, index, node.inputs[index].name))
                self.dependents.append(Dependent(node.name, needs))

    def placement(self) -> Placement:
        """Everything that was placed, in graph order; rule 4."""
        order = {node.name: index for index, node in enumerate(all_nodes(self.graph))}
        self.activations.sort(key=lambda site: (order[site.node], site.input_index))
        return Placement(
            tuple(self.activations),
            tuple(self.weights),
            tuple(
                KeptFloat(node, reason) for node, reason in sorted(self.kept_float.items(), key=lambda i: order[i[0]])
            ),
            tuple(KeptQuantized(node, reason) for node, reason in self.kept_quantized.items()),
            tuple(self.reused),
            scale_groups(self.graph, {site.tensor for site in self.activations}),
            tuple(self.dependents),
        )

    def _complete(self, node: gs.Node, operands: Operands) -> None:
        """Rule 5 for a node of which one operand came with Q/DQ."""
        weight = constant_weight(node)
        if weight is None:
            self.kept_quantized[node.name] = "one of its two activations came with Q/DQ; the other stays float"
            return
        is_weight_there = (operands.second if weight[0] == 1 else operands.first) is not None
        side = "weight" if is_weight_there else "activation"
        reason = None if operands.other_dtype is None else f"it is {operands.other_dtype}, not int8"
        reason = reason or self._context_reason(node)
        if not is_weight_there or weight[0] == 0:
            reason = reason or weight_reason(node)
        reason = reason or self._size_reason(node)
        if reason is None and is_weight_there and isinstance(node.inputs[0], gs.Constant):
            reason = "its other input is a constant"
        if reason is not None:
            self.kept_quantized[node.name] = f"only its {side} came with Q/DQ, and that is all: {reason}"
        elif is_weight_there:
            self._add_activation(node)
            self.kept_quantized[node.name] = "its weight came with Q/DQ; its activation is quantized now"
        else:
            self._add_weight(node)
            self.kept_quantized[node.name] = "its activation came with Q/DQ; its weight is quantized now"

    def _add_activation(self, node: gs.Node) -> None:
        tensor = node.inputs[0].name
        if tensor in self._pairs:
            self.reused.append(ReusedSite(node.name, 0, tensor, self._pairs[tensor]))
        else:
            self.activations.append(ActivationSite(node.name, 0, tensor))

    def _add_weight(self, node: gs.Node) -> None:
        axis = None if self.recipe.weights == "per_tensor" else channel_axis(node)
        self.weights.append(WeightSite(node.name, 1, node.inputs[1].name, axis))

    def _context_reason(self, node: gs.Node) -> str | None:
        if node.name in self.excluded:
            return f"excluded by the recipe's pattern {self.excluded[node.name]!r}"
        if id(node) not in self._outer:
            return "it lies in the body of an If, Loop or Scan"
        if needs_float32(node):
            return "its integers are exact only in float32"
        if id(node) in self._before_log:
            return "a Log reads its result: INT8's error is small beside the largest value only"
        if node.op == "Attention":
            return "fused attention runs in the float type"
        return self.without_int8.get(node.op)

    def _size_reason(self, node: gs.Node) -> str | None:
        """Nothing is said of a weight whose shape is unknown, as it may be behind a model's own Q/DQ."""
        shape = node.inputs[1].shape
        if not shape or not all(isinstance(dim, int) for dim in shape):
            return None
        return size_reason(node, self.shapes, self._graph_inputs)


def _adds_activations(node: gs.Node) -> bool:
    return node.op == "Add" and not any(isinstance(tensor, gs.Constant) for tensor in node.inputs)


def match_patterns(patterns: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """The excluded nodes with the pattern that excluded each; `*` and `?` are the only special characters."""
    excluded: dict[str, str] = {}
    for pattern in patterns:
        regex = re.compile(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."), re.DOTALL)
        matched = [name for name in names if regex.fullmatch(name)]
        if not matched:
            close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
            raise InputError(
                f"the recipe's exclude pattern {pattern!r} matches no node that could be quantized",
                f"closest names: {', '.join(close) or 'none, the model has no Conv, Gemm or MatMul'}",
                "correct the pattern or remove it",
            )
        for name in matched:
            excluded.setdefault(name, pattern)
    return excluded
