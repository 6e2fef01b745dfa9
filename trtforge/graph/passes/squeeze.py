"""Write down which axes a Squeeze without axes removes: a builder must know the rank before it knows the sizes."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.graph.bounds import SizeRanges, dim_range
from trtforge.graph.edit import all_graphs, is_onnx_op
from trtforge.graph.names import UniqueNames


def state_squeezed_axes(graph: gs.Graph, sizes: SizeRanges | None) -> tuple[int, list[str]]:
    """Give every Squeeze without axes the axes of size 1, in place, subgraphs included.

    Args:
        graph: with inferred types, from opset 13 on.
        sizes: of the symbolic dims. Without it, nodes with an axis that may or may not be 1 are left; with it, such
            an axis stays, because an engine has one rank. Where none is left to remove, the node becomes an Identity.

    Returns:
        How many nodes changed, and one sentence for each that keeps an axis which may be 1.
    """
    num_changed, notes = 0, []
    names: UniqueNames | None = None
    for current in all_graphs(graph):
        for node in current.nodes:
            if node.op != "Squeeze" or not is_onnx_op(node) or (len(node.inputs) > 1 and node.inputs[1].name):
                continue
            shape = node.inputs[0].shape
            if shape is None:
                continue
            ranges = [dim_range(dim, sizes or {}) for dim in shape]
            open_axes = [axis for axis, (low, high) in enumerate(ranges) if low <= 1 < high]
            if open_axes and sizes is None:
                continue
            num_changed += 1
            axes = [axis for axis, span in enumerate(ranges) if span == (1, 1)]
            list.__setitem__(node.inputs, slice(1, None), [])
            if axes:
                names = names or UniqueNames(graph)
                node.inputs.append(gs.Constant(names.tensor(f"{node.name}_axes"), np.array(axes, np.int64)))
            else:
                # No axes would mean every axis of size 1.
                node.op = "Identity"
                node.attrs.clear()
            if open_axes:
                removed = f"axes {axes}, which it left open" if axes else "nothing"
                kept = ", ".join(map(str, open_axes))
                notes.append(f"Squeeze {node.name!r} removes {removed}; axis {kept} may be 1 and stays")
    return num_changed, notes
