"""Spell dilated operators out as operators without dilation; the outputs are the same.

A dilated ConvTranspose is one whose kernel has zeros between its taps. A dilated AveragePool is the mean of its input
shifted by each tap: one strided Slice per tap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.graph.edit import is_array
from trtforge.graph.names import UniqueNames

# Slices that one pool may become.
MAX_TAPS = 64
# Elements of a filled kernel: 256 MiB in float32.
MAX_KERNEL = 2**26
# The end of a Slice that runs to the end of its axis.
_TO_END = 2**31 - 1


def fill_kernel(node: gs.Node, graph: gs.Graph) -> str | None:
    """Give a dilated ConvTranspose dilation 1, in place.

    Returns:
        Why it cannot be done; None when it was.
    """
    weight = node.inputs[1]
    if not is_array(weight):
        return "its weight is no constant"
    dilations = [int(value) for value in node.attrs.get("dilations", [])]
    if all(step == 1 for step in dilations):
        return "it has no dilation"
    values = np.asarray(weight.values)
    kernel = [(size - 1) * step + 1 for size, step in zip(values.shape[2:], dilations, strict=True)]
    size = math.prod([*values.shape[:2], *kernel])
    if size > MAX_KERNEL:
        return f"its kernel would have {size} elements, and {MAX_KERNEL} is the most"
    filled = np.zeros((*values.shape[:2], *kernel), values.dtype)
    filled[(slice(None), slice(None), *(slice(None, None, step) for step in dilations))] = values
    node.inputs[1] = gs.Constant(UniqueNames(graph).tensor(f"{weight.name}_filled"), filled)
    node.attrs["dilations"] = [1] * len(kernel)
    node.attrs["kernel_shape"] = kernel
    return None


def spell_out_pool(node: gs.Node, graph: gs.Graph) -> str | None:
    """Replace a dilated AveragePool by Pad, Slices and Mean, in place.

    Returns:
        Why it cannot be done; None when it was.
    """
    attrs = node.attrs
    kernel = [int(value) for value in attrs["kernel_shape"]]
    rank = len(kernel)
    dilations = [int(value) for value in attrs.get("dilations", [1] * rank)]
    strides = [int(value) for value in attrs.get("strides", [1] * rank)]
    pads = [int(value) for value in attrs.get("pads", [0] * 2 * rank)]
    reason = _reason_against(node, kernel, strides, pads)
    if reason is not None:
        return reason
    names = UniqueNames(graph)
    source, added = node.inputs[0], []
    if any(pads):
        padded = gs.Variable(names.tensor(f"{node.name}_padded"), source.dtype)
        added.append(_pad(node, names, source, padded, pads))
        source = padded
    shifted = []
    for starts, ends in taps(kernel, dilations):
        shifted.append(gs.Variable(names.tensor(f"{node.name}_tap"), source.dtype))
        bounds = (starts, ends, list(range(2, 2 + rank)), strides)
        constants = [
            _constant(names, f"{node.name}_{word}", values) for word, values in zip(_WORDS, bounds, strict=True)
        ]
        added.append(gs.Node("Slice", names.node(f"{node.name}_Slice"), {}, [source, *constants], [shifted[-1]]))
    output = node.outputs[0]
    node.outputs.clear()
    node.inputs.clear()
    # The last node keeps the name, so that reports find it.
    added.append(gs.Node("Mean", node.name, {}, shifted, [output]))
    index = next(index for index, other in enumerate(graph.nodes) if other is node)
    graph.nodes[index : index + 1] = added
    return None


def taps(kernel: Sequence[int], dilations: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Starts and ends of the Slices that give a pool's input shifted by each tap of its dilated window."""
    for offsets in itertools.product(*(range(size) for size in kernel)):
        starts = [offset * step for offset, step in zip(offsets, dilations, strict=True)]
        # Counted from the end, so that sizes may be open.
        left = [(size - 1 - offset) * step for size, offset, step in zip(kernel, offsets, dilations, strict=True)]
        yield starts, [-value if value else _TO_END for value in left]


_WORDS = ("starts", "ends", "axes", "steps")


def _reason_against(node: gs.Node, kernel: Sequence[int], strides: Sequence[int], pads: Sequence[int]) -> str | None:
    attrs = node.attrs
    if node.op != "AveragePool":
        return f"{node.op} is no AveragePool"
    if attrs.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return f"its auto_pad is {attrs['auto_pad']}"
    if attrs.get("ceil_mode", 0) and any(stride > 1 for stride in strides):
        return "its ceil_mode is 1"
    if any(pads) and not attrs.get("count_include_pad", 0):
        return "it leaves its padding out of the mean"
    if int(np.prod(kernel)) > MAX_TAPS:
        return f"its window has {int(np.prod(kernel))} taps, and {MAX_TAPS} is the most"
    return None


def _pad(node: gs.Node, names: UniqueNames, source: gs.Tensor, padded: gs.Variable, pads: Sequence[int]) -> gs.Node:
    """The padding of a pool, whose zeros count."""
    half = len(pads) // 2
    widths = [0, 0, *pads[:half], 0, 0, *pads[half:]]
    fill = np.zeros((), source.dtype or np.float32)
    inputs = [
        source,
        _constant(names, f"{node.name}_pads", widths),
        gs.Constant(names.tensor(f"{node.name}_fill"), fill),
    ]
    return gs.Node("Pad", names.node(f"{node.name}_Pad"), {}, inputs, [padded])


def _constant(names: UniqueNames, name: str, values: Sequence[int]) -> gs.Constant:
    return gs.Constant(names.tensor(name), np.asarray(values, np.int64))
