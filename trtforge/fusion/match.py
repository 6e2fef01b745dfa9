"""All regions of a graph, by one registry of patterns in the order in which they build on one another.

    linear layers, normalisations -> attention, FFN -> block

Every search starts at one node and looks at a bounded number of nodes around it, so the time is linear in the nodes.
A block that begins to match and does not is a near miss of the block; so is an attention without one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import onnx_graphsurgeon as gs

from trtforge.fusion.activation import chain_behind
from trtforge.fusion.attention import looks_like_attention, match_attention
from trtforge.fusion.block import Parts, match_block
from trtforge.fusion.ffn import match_ffn
from trtforge.fusion.linear import Linears, rows_of
from trtforge.fusion.norm import Norms
from trtforge.fusion.regions import Attention, AttentionFfnBlock, Ffn, Matches, NearMiss, Region
from trtforge.fusion.sizes import DAMAGE
from trtforge.fusion.view import StoppedError, View
from trtforge.graph.edit import all_nodes, subgraphs_of


class _Search:
    """What was found so far; a pattern adds to it."""

    def __init__(self, graph: gs.Graph) -> None:
        self.view = View(graph)
        self.linears = Linears(self.view)
        self.norms = Norms(self.view)
        self.nodes = {str(node.name): node for node in graph.nodes}
        self.attentions: list[Attention] = []
        self.ffns: list[Ffn] = []
        self.blocks: list[AttentionFfnBlock] = []
        self.near_misses: list[NearMiss] = []
        self.ffn_misses: dict[str, NearMiss] = {}

    def miss(self, pattern: str, anchor: gs.Node, stop: StoppedError) -> NearMiss:
        """Note a near miss."""
        found = NearMiss(pattern, str(anchor.name), stop.node, str(stop))
        self.near_misses.append(found)
        return found


def _find_attentions(search: _Search) -> None:
    for node in search.view.graph.nodes:
        try:
            _find_inner_attentions(search, node)
            if looks_like_attention(search.view, node):
                search.attentions.append(match_attention(search.view, search.linears, node))
        except StoppedError as stop:
            search.miss(Attention.pattern, node, stop)
        except DAMAGE as err:
            search.miss(Attention.pattern, node, _damaged(node, err))


def _find_inner_attentions(search: _Search, node: gs.Node) -> None:
    inner = [member for body in subgraphs_of(node) for member in all_nodes(body)]
    count = sum(looks_like_attention(search.view, member) for member in inner)
    if count:
        what = f"{count} in its subgraphs, where nothing is fused"
        search.miss(Attention.pattern, node, StoppedError(node, what))


def _find_ffns(search: _Search) -> None:
    for down in search.linears.all:
        product = search.nodes[down.product]
        try:
            ffn = match_ffn(search.view, search.linears, product, down)
        except StoppedError as stop:
            missed = search.miss(Ffn.pattern, product, stop)
            for start in _starts(search, product):
                search.ffn_misses[start] = missed
        except DAMAGE as err:
            search.miss(Ffn.pattern, product, _damaged(product, err))
        else:
            if ffn is not None:
                search.ffns.append(ffn)


def _starts(search: _Search, product: gs.Node) -> set[str]:
    """What the first linear layers of an FFN that did not match read."""
    tensor = rows_of(search.view, product.inputs[0])
    chain = chain_behind(tensor, lambda start: search.linears.behind(start) is not None)
    ups = [search.linears.behind(start) for start in chain.starts]
    return {up.x for up in ups if up is not None}


def _find_blocks(search: _Search) -> None:
    by_x: dict[str, list[Ffn]] = {}
    for ffn in search.ffns:
        by_x.setdefault(ffn.up.x, []).append(ffn)
    parts = Parts(search.view, search.linears, search.norms, by_x, search.ffn_misses, search.nodes)
    for attention in search.attentions:
        try:
            search.blocks.append(match_block(parts, attention))
        except StoppedError as stop:
            search.miss(AttentionFfnBlock.pattern, search.nodes[attention.name], stop)
        except DAMAGE as err:
            anchor = search.nodes[attention.name]
            search.miss(AttentionFfnBlock.pattern, anchor, _damaged(anchor, err))


def _damaged(node: gs.Node, err: Exception) -> StoppedError:
    return StoppedError(node, f"the inputs or attributes of a node do not fit its operator ({err})")


PATTERNS: Mapping[str, Callable[[_Search], None]] = MappingProxyType(
    {
        Attention.pattern: _find_attentions,
        Ffn.pattern: _find_ffns,
        AttentionFfnBlock.pattern: _find_blocks,
    }
)
"""Every pattern, in the order in which they are looked for."""


def match_regions(graph: gs.Graph) -> Matches:
    """Find the regions of a graph's main level; nothing is changed.

    Args:
        graph: normalised (sorted, names unique, types inferred); Q/DQ and casts may be in it already.
    """
    if not graph.nodes:
        return Matches((), ())
    search = _Search(graph)
    for find in PATTERNS.values():
        find(search)
    taken = {block.attention.name for block in search.blocks} | {block.ffn.name for block in search.blocks}
    found: list[Region] = [*search.attentions, *search.ffns]
    alone = [region for region in found if region.name not in taken]
    place = {name: index for index, name in enumerate(search.nodes)}
    regions: list[Region] = sorted((*search.blocks, *alone), key=lambda region: place[region.name])
    misses = sorted(search.near_misses, key=lambda miss: place[miss.anchor])
    return Matches(tuple(regions), tuple(misses))
