"""Graphs in which any one region can be quantized alone, from the middle of a model onward.

The model is cut into segments at a few places. Of each segment's first node onward, one graph is made:

    inputs    the tensors that cross the cut, and one bool scalar per region of the segment
    operand   Where(switch, DequantizeLinear(QuantizeLinear(x)), x)      for every quantized input of those regions
    outputs   the model's, and on request the regions' own and the next cut's

so that one session serves all regions of a segment, a region is measured without running what lies before its segment,
and with every switch off the graph is the float graph, to the bit.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from trtforge.graph.edit import InputEdits, copy_graph, reads_of, remove_dead_nodes, sort_nodes
from trtforge.graph.names import UniqueNames
from trtforge.quantization.regions import Region, Sites

# More segments save at most a twelfth of the work and cost a session each.
MAX_SEGMENTS = 6
_REGIONS_PER_SEGMENT = 3
# A cut through a sequence or an optional could not be fed with arrays.
_NO_TENSOR_OPS = ("Optional", "Sequence", "SplitToSequence")


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """A part of the model, from one cut to the next.

    Attributes:
        regions: what it can quantize.
        inputs: the tensors that cross the cut before it; the model's inputs for the first segment.
        outputs: the model's outputs that are made after that cut.
        share: of the model's FLOPs, from this cut to the end.
    """

    regions: tuple[Region, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    share: float


@dataclasses.dataclass(frozen=True, slots=True)
class SwitchGraph:
    """A graph from a cut to the end, with a switch per region of the segment.

    Attributes:
        graph: to be run as written.
        switches: bool scalar input by region name; False is float.
        outputs: the segment's.
        node_outputs: the first output of every node of the segment's regions, by node name.
        crossing: what the next segment reads and this one computes.
    """

    graph: gs.Graph
    switches: dict[str, str]
    outputs: tuple[str, ...]
    node_outputs: dict[str, str]
    crossing: tuple[str, ...]


def plan_segments(base: gs.Graph, regions: Sequence[Region], flops: Mapping[str, int]) -> tuple[Segment, ...]:
    """Cut the graph into segments of about equal FLOPs, where few tensors cross and no region is split.

    Args:
        base: the float graph, topologically sorted.
        regions: in graph order.
        flops: by node name; a node without any counts as one operation.
    """
    index_of = {node.name: index for index, node in enumerate(base.nodes)}
    spans = [(min(index_of[n] for n in r.nodes), max(index_of[n] for n in r.nodes)) for r in regions]
    crossings = _Crossings(base)
    costs = np.cumsum([0.0] + [flops.get(node.name, 0) + 1.0 for node in base.nodes])
    before = costs / costs[-1]
    is_split = np.zeros(len(base.nodes) + 1, dtype=np.int64)
    for first, last in spans:
        is_split[first + 1] += 1
        is_split[last + 1] -= 1
    is_split = np.cumsum(is_split)
    places = [first for first, _ in spans if first > 0 and not is_split[first] and crossings.are_tensors(first)]
    count = max(1, min(MAX_SEGMENTS, len(regions) // _REGIONS_PER_SEGMENT))
    cuts = [0]
    for ideal in (number / count for number in range(1, count)):
        near = [place for place in places if place > cuts[-1] and abs(before[place] - ideal) <= 0.5 / count]
        if near:
            cuts.append(min(near, key=lambda place: (len(crossings.at(place)), abs(before[place] - ideal), place)))
    members: list[list[Region]] = [[] for _ in cuts]
    for region, (first, _) in zip(regions, spans, strict=True):
        members[bisect.bisect_right(cuts, first) - 1].append(region)
    inputs = [tuple(tensor.name for tensor in base.inputs), *(crossings.at(cut) for cut in cuts[1:])]
    outputs = [tensor.name for tensor in base.outputs]
    return tuple(
        Segment(tuple(group), names, crossings.made_from(cut, outputs), float(1.0 - before[cut]))
        for cut, group, names in zip(cuts, members, inputs, strict=True)
    )


class _Crossings:
    """Which tensors lie open between two neighbouring nodes."""

    def __init__(self, graph: gs.Graph) -> None:
        self._made = {tensor.name: -1 for tensor in graph.inputs}
        self._used: dict[str, int] = {}
        self._producers: dict[str, str] = {}
        for index, node in enumerate(graph.nodes):
            for tensor in reads_of(node):
                self._used[tensor.name] = index
            for tensor in node.outputs:
                self._made[tensor.name] = index
                self._producers[tensor.name] = node.op

    def at(self, place: int) -> tuple[str, ...]:
        """Tensors made before the node at `place` and read by it or later, in the order in which they are made."""
        return tuple(name for name, made in self._made.items() if made < place <= self._used.get(name, -1))

    def made_from(self, place: int, tensors: Sequence[str]) -> tuple[str, ...]:
        """Those of the tensors that the node at `place` or a later one makes."""
        return tuple(name for name in tensors if self._made.get(name, -1) >= place)

    def are_tensors(self, place: int) -> bool:
        """Whether all that crosses can be held in an array."""
        return not any(self._producers.get(name, "").startswith(_NO_TENSOR_OPS) for name in self.at(place))


def switch_graph(
    base: gs.Graph,
    quantized: gs.Graph,
    sites: Sites,
    segments: Sequence[Segment],
    number: int,
    dtypes: Mapping[str, npt.DTypeLike],
) -> SwitchGraph:
    """The graph of one segment and all that follows it.

    Args:
        base: the float graph.
        quantized: the same graph with all Q/DQ pairs.
        sites: the quantized inputs.
        segments: all of them.
        number: which.
        dtypes: element types of the segment's inputs.
    """
    segment = segments[number]
    graph = copy_graph(quantized)
    names = UniqueNames(graph)
    switches = {
        region.name: gs.Variable(names.tensor(f"{region.name}_switch"), np.bool_, ()) for region in segment.regions
    }
    switch_of = {node: switches[region.name] for region in segment.regions for node in region.nodes}
    _insert_switches(graph, base, sites, switch_of, names)
    tensors = graph.tensors()
    for name in segment.inputs:
        list.clear(tensors[name].inputs)
        tensors[name].dtype, tensors[name].shape = np.dtype(dtypes[name]), None
    node_outputs = {node.name: node.outputs[0].name for node in graph.nodes if node.name in switch_of}
    following = segments[number + 1].inputs if number + 1 < len(segments) else ()
    crossing = tuple(name for name in following if name not in segment.inputs)
    graph.inputs = [*(tensors[name] for name in segment.inputs), *switches.values()]
    graph.outputs = [tensors[name] for name in dict.fromkeys((*segment.outputs, *node_outputs.values(), *crossing))]
    remove_dead_nodes(graph)
    sort_nodes(graph)
    return SwitchGraph(
        graph,
        {region: switch.name for region, switch in switches.items()},
        segment.outputs,
        node_outputs,
        crossing,
    )


def _insert_switches(
    graph: gs.Graph, base: gs.Graph, sites: Sites, switch_of: Mapping[str, gs.Variable], names: UniqueNames
) -> None:
    """Give the switched nodes a choice of operands, and all other nodes their float operands."""
    original = {node.name: node for node in base.nodes}
    tensors = graph.tensors()
    chosen: dict[tuple[str, str], gs.Variable] = {}
    edits = InputEdits()
    added = []
    for node in graph.nodes:
        for index in sites.get(node.name, ()):
            before = original[node.name].inputs[index]
            if before.name not in tensors:
                # A weight whose only reader was quantized.
                tensors[before.name] = gs.Constant(before.name, before.values)
            operand = tensors[before.name]
            if node.name in switch_of:
                switch = switch_of[node.name]
                key = (node.inputs[index].name, switch.name)
                if key not in chosen:
                    output = gs.Variable(names.tensor(f"{before.name}_operand"), operand.dtype)
                    inputs = [switch, node.inputs[index], operand]
                    added.append(gs.Node("Where", names.node(f"{before.name}_Where"), inputs=inputs, outputs=[output]))
                    chosen[key] = output
                operand = chosen[key]
            edits.replace(node, index, operand)
    edits.apply()
    graph.nodes.extend(added)
