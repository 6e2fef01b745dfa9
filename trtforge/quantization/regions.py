"""Regions: the nodes that are quantized or left float together, found by comparing a graph with its Q/DQ form.

Weighted nodes of one kind that read the same tensor with weights of equal depth (Q, K and V; the two halves of a gated
FFN) merge into one kernel, whose operands all have one type: they are one region. So are nodes that can only be
quantized together, such as the two products of an attention. Every other quantized node is a region of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence

import onnx_graphsurgeon as gs

from trtforge.quantization.sites import Dependent

# Node name -> index of a quantized input -> the tensor that the float graph reads there.
Sites = dict[str, dict[int, str]]


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """Nodes that share one precision.

    Attributes:
        name: of the first node.
        nodes: in graph order.
        flops: of all of them at the first profile's opt; 0 where unknown.
    """

    name: str
    nodes: tuple[str, ...]
    flops: int


def find_sites(base: gs.Graph, quantized: gs.Graph) -> Sites:
    """Inputs that the quantized graph reads through an inserted DequantizeLinear.

    Args:
        base: the float graph.
        quantized: the same graph with Q/DQ pairs inserted; other nodes keep their names.
    """
    original = {node.name: node for node in base.nodes}
    sites: Sites = {}
    for node in quantized.nodes:
        if node.name not in original:
            continue
        # One may have gained a bias.
        pairs = zip(original[node.name].inputs, node.inputs, strict=False)
        found = {
            index: before.name
            for index, (before, after) in enumerate(pairs)
            if after.name != before.name and after.inputs and after.inputs[0].op == "DequantizeLinear"
        }
        if found:
            sites[node.name] = found
    return sites


def find_regions(
    base: gs.Graph, sites: Sites, flops: Mapping[str, int], dependents: Sequence[Dependent] = ()
) -> tuple[Region, ...]:
    """The regions of all quantized nodes, in graph order.

    Args:
        base: the float graph, topologically sorted.
        sites: the quantized inputs (`find_sites`).
        flops: by node name (`graph.cost`).
        dependents: nodes that need others to be quantized; those that need one another are one region.
    """
    needs = {entry.node: entry.needs for entry in dependents}
    groups: dict[Hashable, list[str]] = {}
    for node in base.nodes:
        if node.name in sites:
            mutual = [node.name, *(name for name in needs.get(node.name, ()) if node.name in needs.get(name, ()))]
            key = _merge_key(node) if len(mutual) == 1 else tuple(sorted(mutual))
            groups.setdefault(key, []).append(node.name)
    return tuple(
        Region(members[0], tuple(members), sum(flops.get(name, 0) for name in members)) for members in groups.values()
    )


def find_needs(regions: Sequence[Region], dependents: Sequence[Dependent]) -> dict[str, frozenset[str]]:
    """The other regions that each region needs to be quantized, by region name; regions without needs are left out.

    Args:
        regions: all of them.
        dependents: see `find_regions`.
    """
    region_of = {node: region.name for region in regions for node in region.nodes}
    needs: dict[str, set[str]] = {}
    for entry in dependents:
        if entry.node in region_of:
            found = {region_of[node] for node in entry.needs if node in region_of} - {region_of[entry.node]}
            needs.setdefault(region_of[entry.node], set()).update(found)
    return {name: frozenset(found) for name, found in needs.items() if found}


def _merge_key(node: gs.Node) -> Hashable:
    """Equal for nodes that merge into one kernel."""
    weight = node.inputs[1] if len(node.inputs) > 1 else None
    if node.op not in ("Conv", "Gemm", "MatMul") or not isinstance(weight, gs.Constant):
        return str(node.name)
    is_first = node.op == "Conv" or bool(node.attrs.get("transB", 0))
    depth = tuple(weight.shape[1:] if is_first else weight.shape[:-1])
    attributes = tuple(sorted((name, str(value)) for name, value in node.attrs.items()))
    return node.op, node.inputs[0].name, depth, attributes
