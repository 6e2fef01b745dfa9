"""Attention regions as one packed projection and one `Attention` node of opset 23.

With B batch, S sequence, K input width, N heads and D head size:

    x [B, S, K] -> MatMul w [K, 3ND] -> Add b [3ND] -> Reshape [B, S, 3, N, D] -> Transpose [3, B, N, S, D]
        -> Gather 0, 1, 2 -> each [B, N, S, D] -> Attention (mask [.., S, S]) -> [B, N, S, D]

TensorRT-RTX 1.7.1 applies bias, head order and the query's scale in one kernel then, and keeps the product in INT8. The
operator without the packed projection takes more kernels than products around a Softmax, which are fused as well; so a
region whose query, key and value are not equal projections of one x stays as it is. A model's own `Attention` gets its
projections packed.

1. Scales of scores, query and key become the attribute.
2. A mask that only hides later keys becomes `is_causal`, and one that hides nothing goes. Any other is one tensor that
   is added: for bools TensorRT-RTX 1.7.1 makes eight more kernels (MiniLM 66 in all, 58 with an additive mask).
3. ONNX Runtime wants a row for each query and a column for each key, so a mask that is not known to have them is
   expanded, once for all regions that share it.

A row of which every key is hidden has no defined result: a guard that makes it 0 (Where(IsNaN(p), 0, p)) goes.
The new nodes have the names of the query's product and of the Softmax. What cannot be said this way is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from trtforge.fusion.lower_nodes import Array, NodeAdder, bias_of_terms
from trtforge.fusion.lower_weights import Weight, join_weights, read_weight
from trtforge.fusion.qkv_match import reads_packed_layout
from trtforge.fusion.regions import Attention, MaskTerm, Projection
from trtforge.fusion.sizes import KnownSizes, same_size
from trtforge.fusion.view import StoppedError
from trtforge.graph.signature import tensor_dtype

LOWERED_TO = "Attention-23"
# Opset that brings the operator; ONNX Runtime refuses it below.
_OPSET = 23


class AttentionLowering:
    """Rewrites attention regions of one graph.

    Args:
        graph: on which the regions were matched; `lower` and `finish` modify it.
    """

    def __init__(self, graph: gs.Graph) -> None:
        self._graph = graph
        self._nodes = {str(node.name): node for node in graph.nodes}
        self._tensors: dict[str, gs.Tensor] = graph.tensors()
        self._sizes = KnownSizes(graph)
        self._adder = NodeAdder(graph)
        self._masks: dict[tuple[str, ...], gs.Tensor] = {}
        self._results: list[gs.Variable] = []

    def check(self, region: Attention) -> None:
        """Refuse what cannot be rewritten.

        Raises:
            StoppedError: the reason, and the node at which it shows.
        """
        scores = self._nodes[region.scores]
        if self._graph.opset < _OPSET:
            raise StoppedError(scores, f"the operator needs opset {_OPSET}; this model stays at {self._graph.opset}")
        if region.spelling == "Attention" and reads_packed_layout(scores) and _keeps_mask(region):
            raise StoppedError(scores, "it has this form already")
        if any(self._sizes.rank(self._nodes[name].outputs[0]) != 4 for name in (region.scores, region.context)):
            what = "its query has three axes" if region.spelling == "Attention" else "batch and heads are one axis"
            raise StoppedError(scores, f"{what}, where [batch, heads, sequence, size] is needed")
        self._check_projections(region)
        if _has_bias(region):
            self._check_mask(region)

    def _check_projections(self, region: Attention) -> None:
        for role, part in (("query", region.query), ("key", region.key), ("value", region.value)):
            if part.projection is None:
                assert part.stop is not None
                raise StoppedError(self._nodes[part.stop.node], f"{part.stop.reason}, so the three are no one product")
            product = self._nodes[part.projection.linear.product]
            x = self._sizes.of(self._tensors[part.projection.linear.x]) or ()
            if 0 in x:
                raise StoppedError(product, "what it projects is empty, which ONNX Runtime's operator refuses")
            self._check_weight(region, product, part.projection, role)
            if part.projection.linear.x != _first(region).linear.x:
                raise StoppedError(product, "query, key and value are not projections of one tensor (cross-attention)")
            rows = part.projection.rows
            if part.projection.is_sequence_first or len(x) != 3 or not all(map(same_size, rows, x[:2])):
                raise StoppedError(product, f"its {role} is not known to keep batch and sequence of what it projects")
        shared = region.shared_heads()
        if shared is not None:
            assert region.key.projection is not None
            raise StoppedError(self._nodes[region.key.projection.linear.product], shared)

    def _check_weight(self, region: Attention, product: gs.Node, projection: Projection, role: str) -> None:
        """A quantized projection has to be like that of the query, and to read the same quantized x."""
        first = self._nodes[_first(region).linear.product]
        weight, other = read_weight(product, projection.linear), read_weight(first, _first(region).linear)
        if not all(isinstance(tensor, gs.Constant) for tensor in self._biases(projection)):
            raise StoppedError(product, f"the bias of its {role} is quantized")
        is_alike = (weight.scales is None) == (other.scales is None)
        if not is_alike or (weight.scales is not None and product.inputs[0] is not first.inputs[0]):
            raise StoppedError(product, f"its {role} is quantized in another way than its query")

    def _check_mask(self, region: Attention) -> None:
        for term in region.mask.terms:
            rank = self._sizes.rank(self._term(term))
            if rank not in (2, 4):
                raise StoppedError(self._nodes[term.node], f"its mask has {rank} axes, and the operator takes 2 or 4")

    def lower(self, region: Attention) -> None:
        """Rewrite a region that passed `check`."""
        context = self._nodes[region.context]
        inputs: list[gs.Tensor] = [*self._packed(region)]
        attrs: dict[str, Any] = {"scale": float(region.softmax_scale)}
        if _has_bias(region):
            inputs.append(self._mask(region))
        elif region.mask.is_causal:
            attrs["is_causal"] = 1
        result = context.outputs[0]
        self._adder.add(context, "Attention", inputs, attrs, result=result, wanted=region.softmax)
        self._results.append(result)

    def finish(self) -> tuple[str, ...]:
        """Put the new nodes in and take dead ones out; the names of the `Attention` nodes."""
        self._adder.finish()
        return tuple(str(tensor.inputs[0].name) for tensor in self._results)

    def _packed(self, region: Attention) -> list[gs.Variable]:
        """Query, key and value [B, N, S, D], from one product."""
        parts = [part.projection for part in (region.query, region.key, region.value)]
        projections = [projection for projection in parts if projection is not None]
        first = self._nodes[projections[0].linear.product]
        x = self._tensors[projections[0].linear.x]
        weight = join_weights([self._weight(projection) for projection in projections])
        if weight.scales is not None:
            x = first.inputs[0]
        tensor = self._adder.add(first, "MatMul", [x, self._stored(first, weight)], wanted=str(first.name))
        if any(projection.linear.bias is not None for projection in projections):
            dtype = weight.values.dtype if weight.scales is None else weight.scales.dtype
            bias = np.concatenate([self._bias(p, dtype) for p in projections])
            tensor = self._adder.add(first, "Add", [tensor, self._adder.constant(f"{first.name}_bias", bias)])
        shape = self._adder.constant(f"{first.name}_heads", np.array([0, 0, 3, region.num_heads, region.head_size]))
        tensor = self._adder.add(first, "Reshape", [tensor, shape])
        tensor = self._adder.add(first, "Transpose", [tensor], {"perm": [2, 0, 3, 1, 4]})
        indices = [self._adder.constant(f"{first.name}_index_{index}", np.array(index)) for index in range(3)]
        return [self._adder.add(first, "Gather", [tensor, index], {"axis": 0}) for index in indices]

    def _weight(self, projection: Projection) -> Weight:
        """[K, ND]."""
        product = self._nodes[projection.linear.product]
        return read_weight(product, projection.linear).columns(projection.columns())

    def _stored(self, first: gs.Node, weight: Weight) -> gs.Tensor:
        """The packed weight as a constant, or behind a DequantizeLinear."""
        values = self._adder.constant(f"{first.name}_weight", weight.values)
        if weight.scales is None:
            return values
        scales = self._adder.constant(f"{first.name}_scales", weight.scales)
        zero = self._adder.constant(f"{first.name}_zero", np.zeros(weight.scales.shape, np.int8))
        inputs = [values, scales, zero]
        return self._adder.add(first, "DequantizeLinear", inputs, {"axis": 1}, dtype=weight.scales.dtype)

    def _bias(self, projection: Projection, dtype: npt.DTypeLike) -> Array:
        """[ND], zeros where there is none."""
        columns = projection.columns()
        for tensor in self._biases(projection):
            return np.asarray(tensor.values).reshape(-1)[columns]
        return np.zeros(len(columns), dtype)

    def _biases(self, projection: Projection) -> list[gs.Tensor]:
        """One or none."""
        return [] if projection.linear.bias is None else [self._tensors[projection.linear.bias]]

    def _mask(self, region: Attention) -> gs.Tensor:
        """The operator's mask: rules 2 and 3."""
        key = tuple(f"{term.kind} {term.fill} {term.tensor}" for term in region.mask.terms)
        if key not in self._masks:
            place = self._nodes[region.context]
            dtype = tensor_dtype(self._tensors[_first(region).linear.x].dtype) or np.dtype(np.float32)
            mask = bias_of_terms(self._adder, region.mask.terms, self._tensors, place, dtype)
            rows, scores = (self._sizes.of(t) or () for t in (mask, self._nodes[region.scores].outputs[0]))
            is_whole = len(rows) >= 2 and all(map(same_size, rows[-2:], scores[-2:]))
            self._masks[key] = mask if is_whole else self._expanded(mask, region, place)
        return self._masks[key]

    def _expanded(self, mask: gs.Tensor, region: Attention, place: gs.Node) -> gs.Tensor:
        """Rule 3."""
        x = self._tensors[_first(region).linear.x]
        length = self._adder.add(place, "Shape", [x], {"start": 1, "end": 2}, dtype=np.int64)
        shape = self._adder.add(place, "Concat", [length, length], {"axis": 0})
        return self._adder.add(place, "Expand", [mask, shape])

    def _term(self, term: MaskTerm) -> gs.Tensor:
        return self._tensors[term.tensor]


def attention_refusals(graph: gs.Graph, regions: Sequence[Attention]) -> dict[str, str]:
    """Why some regions of a graph cannot be rewritten, by name. Nothing is changed."""
    lowering = AttentionLowering(graph)
    found: dict[str, str] = {}
    for region in regions:
        try:
            lowering.check(region)
        except StoppedError as stop:
            found[region.name] = str(stop)
    return found


def kind_of(region: Attention) -> tuple[object, ...]:
    """What decides how a builder fuses a region: equal ones need one decision."""
    terms = tuple(term.kind for term in region.mask.terms)
    return (region.num_heads, region.head_size, terms, region.mask.is_causal, region.mask.is_explained)


def _first(region: Attention) -> Projection:
    assert region.query.projection is not None
    return region.query.projection


def _keeps_mask(region: Attention) -> bool:
    """Whether the mask of an `Attention` is what rule 2 would make of it."""
    return not region.mask.terms or (_has_bias(region) and all(term.kind == "additive" for term in region.mask.terms))


def _has_bias(region: Attention) -> bool:
    """Whether its mask does more than hide later keys or nothing."""
    return bool(region.mask.terms) and not (region.mask.is_explained and region.mask.key_padding is None)
