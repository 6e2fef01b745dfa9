"""Tensors that leave float16's range on real samples, and the nodes that stay float32 for them.

The power of a loud spectrum passes 65504, and its logarithm, which is the model's output, is a small number: cast to
float16 such a model gives NaN, and nothing in its graph tells. So where a float16 graph misses its budget, the float32
graph runs over the samples and its tensors are observed (`calibrate.observe_model`). Only tensors count that a node
reads or writes in float16. They are tapped in groups: ONNX Runtime holds every tapped tensor of a batch at once.

Masks are no overflow: a constant such as -1e9 becomes a smaller one in float16 (cast_constants.py), and what adding,
choosing or moving makes of it is as large by design.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.graph.signature import is_float32
from trtforge.progress import Note
from trtforge.quantization.calibrate import Pass, observe_model
from trtforge.quantization.cast import CastReport
from trtforge.quantization.cast_constants import is_bound
from trtforge.quantization.cast_ops import MAX_SAFE_FLOAT16, NEUTRAL_OPS, QDQ_OPS

# Bytes of tapped tensors of one batch; numpy's copies take as much again.
MAX_TAP_BYTES = 256 * 2**20
# What a tensor counts of whose size nothing is known.
_UNKNOWN_BYTES = MAX_TAP_BYTES // 16
_CARRIES_MASK = NEUTRAL_OPS | {"ConstantOfShape", "ScatterND", "Trilu"}


@dataclasses.dataclass(frozen=True, slots=True)
class Overflow:
    """What was seen beyond float16's range; nothing where `amax` is empty.

    Attributes:
        samples: which ones were run, e.g. "16 calibration samples".
        amax: the largest absolute value of each tensor that passes `MAX_SAFE_FLOAT16`, by name in graph order.
    """

    samples: str
    amax: Mapping[str, float]

    def describe(self) -> str:
        """One sentence for the user."""
        name, value = max(self.amax.items(), key=lambda item: item[1])
        count = "1 tensor is" if len(self.amax) == 1 else f"{len(self.amax)} tensors are"
        return (
            f"{count} too large for float16 on {self.samples}, {name!r} with {value:.4g} "
            "the most: what computes or reads them stays float32"
        )

    def kept_nodes(self, graph: gs.Graph) -> dict[str, str]:
        """The nodes that stay float32, by name, and why.

        Args:
            graph: topologically sorted, before its casts; with Q/DQ where it is quantized. What a DequantizeLinear
                gives is as large as what the QuantizeLinear before it takes.
        """
        origin = {name: name for name in self.amax}
        kept: dict[str, str] = {}
        for node in graph.nodes:
            if node.op in QDQ_OPS and (source := origin.get(node.inputs[0].name)) is not None:
                origin[node.outputs[0].name] = source
            reached = [origin[tensor.name] for tensor in (*node.inputs, *node.outputs) if tensor.name in origin]
            if reached:
                name = max(reached, key=lambda source: self.amax[source])
                kept[node.name] = f"{name!r} reached {self.amax[name]:.4g} on {self.samples}; float16 ends at 65504"
        return kept


def tensors_to_observe(graph: gs.Graph, cast: CastReport) -> tuple[str, ...]:
    """The float32 tensors that are float16 after the cast, without those that carry masks, in graph order.

    Args:
        graph: the float32 graph, topologically sorted.
        cast: what became of it.
    """
    cast_nodes, masks = frozenset(cast.cast_nodes), _mask_tensors(graph, cast.clamped_constants)
    names = (
        tensor.name
        for node in graph.nodes
        if node.name in cast_nodes
        for tensor in (*node.inputs, *node.outputs)
        if is_float32(tensor) and not isinstance(tensor, gs.Constant) and tensor.name not in masks
    )
    return tuple(dict.fromkeys(names))


def _mask_tensors(graph: gs.Graph, clamped: Collection[str]) -> frozenset[str]:
    """What is made of the clamped constants that are no bounds, up to the first operator that computes with it."""
    constants, masks = frozenset(clamped), set[str]()
    for node in graph.nodes:
        sources = {tensor.name for tensor in node.inputs}
        is_fill = not is_bound(node.op) and not constants.isdisjoint(sources)
        is_fill |= node.op == "ConstantOfShape" and _fills_beyond_float16(node)
        if node.op in _CARRIES_MASK and (is_fill or not masks.isdisjoint(sources)):
            masks.update(tensor.name for tensor in node.outputs)
    return frozenset(masks)


def _fills_beyond_float16(node: gs.Node) -> bool:
    """Whether a ConstantOfShape makes values that the cast replaces by smaller ones."""
    value = node.attrs.get("value")
    return value is not None and float(np.abs(value.values).max(initial=0)) > float(np.finfo(np.float16).max)


def batch_bytes(shapes: Mapping[str, Sequence[int]], share: float) -> dict[str, int]:
    """Bytes of float32 tensors at a batch that is a share of the one that the shapes are for, by name."""
    return {name: int(4 * math.prod(shape) * share) for name, shape in shapes.items()}


def find_overflow(
    work: Pass, samples: str, num_bytes: Mapping[str, int], note: Note, warn: Callable[[str], None]
) -> Overflow:
    """Run the float32 graph over the samples, once per group of tensors, and see how far they reach.

    Args:
        work: graph, samples and tensors (`tensors_to_observe`).
        samples: what the samples are called.
        num_bytes: size of a tensor at one batch, by name, where it is known.
        note: takes progress.
        warn: takes what the user must know.

    Raises:
        InputError: ONNX Runtime cannot run the graph with these tensors as outputs.
        ChildDiedError: the process that runs it died.
    """
    amax: dict[str, float] = {}
    for group in group_tensors(tuple(work.channel_axes), num_bytes):
        seen = observe_model(dataclasses.replace(work, channel_axes=dict.fromkeys(group)), note, warn)
        amax |= {name: observer.amax for name, observer in seen.observers.items()}
    return Overflow(samples, {name: value for name, value in amax.items() if value > MAX_SAFE_FLOAT16})


def group_tensors(names: Sequence[str], num_bytes: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
    """Consecutive tensors whose sizes together stay below `MAX_TAP_BYTES`; a larger one makes a group of its own."""
    group: list[str] = []
    total = 0
    for name in names:
        size = num_bytes.get(name, _UNKNOWN_BYTES)
        if group and total + size > MAX_TAP_BYTES:
            yield tuple(group)
            group, total = [], 0
        group.append(name)
        total += size
    if group:
        yield tuple(group)
