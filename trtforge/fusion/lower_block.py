"""Transformer blocks for a TensorRT plugin: whether a build has one, and what becomes of each block.

What makes a node of a block (`lower_block_node`) is imported where there is a plugin, so that no other build waits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import onnx_graphsurgeon as gs

from trtforge.fusion.regions import AttentionFfnBlock, NearMiss

# What all op types begin with.
_NAME = b"AttentionFFN"


@dataclasses.dataclass(frozen=True, slots=True)
class LoweredBlock:
    """A block that became one node.

    Attributes:
        region: the block's name.
        op_type: of the node.
        node: its name.
    """

    region: str
    op_type: str
    node: str


@dataclasses.dataclass(frozen=True, slots=True)
class BlockReport:
    """What `lower_blocks` did.

    Attributes:
        lowered: blocks that are one node each now.
        unfit: why other blocks stay, by name.
        near_misses: places that begin like a block and are none.
    """

    lowered: tuple[LoweredBlock, ...]
    unfit: dict[str, str]
    near_misses: tuple[NearMiss, ...]


def brings_blocks(libraries: Sequence[Path]) -> bool:
    """Whether a plugin library has the operator: its name is in the file. Other plugins are for other models."""
    return any(_NAME in path.read_bytes() for path in libraries)


def lower_blocks(graph: gs.Graph) -> BlockReport:
    """Make one node of each block of a graph that is ready to be built, in place."""
    from trtforge.fusion.lower_block_node import BlockLowering
    from trtforge.fusion.match import match_regions
    from trtforge.fusion.view import StoppedError

    matches = match_regions(graph)
    lowering = BlockLowering(graph)
    unfit: dict[str, str] = {}
    for block in matches.blocks():
        try:
            lowering.lower(block)
        except StoppedError as stop:
            unfit[block.name] = str(stop)
    misses = tuple(miss for miss in matches.near_misses if miss.pattern == AttentionFfnBlock.pattern)
    return BlockReport(lowering.finish(), unfit, misses)
