"""Scales of Resize in float16 or float64, as converters to float16 leave them: ONNX has float32 only.

Neither type inference nor ONNX Runtime goes on behind such a node, so this is the first thing that is done to a graph.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.graph.edit import all_nodes, is_array, is_onnx_op
from trtforge.graph.names import UniqueNames

# Where the scales are: in Upsample and in Resize of opset 10, and in Resize since.
_FIRST, _SINCE = 1, 2


def mend_resize_scales(graph: gs.Graph) -> list[str]:
    """Store constant scales of Resize and Upsample as float32, in place, subgraphs included.

    Returns:
        One sentence for each node that was changed.
    """
    notes = []
    names: UniqueNames | None = None
    for node in all_nodes(graph):
        if node.op not in ("Resize", "Upsample") or not is_onnx_op(node):
            continue
        index = _FIRST if node.op == "Upsample" or graph.opset < 11 else _SINCE
        scales = node.inputs[index] if len(node.inputs) > index else None
        if scales is None or not is_array(scales) or not scales.values.size or scales.values.dtype == np.float32:
            continue
        names = names or UniqueNames(graph)
        was = scales.values.dtype
        node.inputs[index] = gs.Constant(names.tensor(f"{scales.name}_float32"), scales.values.astype(np.float32))
        notes.append(f"the scales of {node.op} {node.name!r} are float32, as ONNX has them; they came as {was}")
    return notes
