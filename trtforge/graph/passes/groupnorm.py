"""GroupNormalization across opset 21.

Up to opset 20, scale and bias have one element per group; from 21 on, one per channel (ONNX changelog). onnx's version
converter (1.23) leaves them as they are, which changes the result or fails. Each element is repeated C / num_groups
times here.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.errors import InputError
from trtforge.graph.edit import all_graphs, is_onnx_op
from trtforge.graph.names import UniqueNames


def widen_group_norms(graph: gs.Graph) -> int:
    """Repeat scale and bias of every GroupNormalization of a graph that came from an opset below 21, in place.

    Returns:
        How many nodes were changed.

    Raises:
        InputError: the number of channels is not static.
    """
    num_changed = 0
    names = UniqueNames(graph)
    for current in all_graphs(graph):
        nodes = []
        for node in current.nodes:
            if node.op == "GroupNormalization" and is_onnx_op(node):
                nodes += _widen(node, names)
                num_changed += 1
            nodes.append(node)
        current.nodes = nodes
    return num_changed


def _widen(node: gs.Node, names: UniqueNames) -> list[gs.Node]:
    """Repeat both operands of one node; gives the nodes that compute those that are not constant."""
    shape, num_groups = node.inputs[0].shape, node.attrs.get("num_groups", 0)
    channels = shape[1] if shape is not None and len(shape) > 1 else None
    if not isinstance(channels, int) or num_groups < 1 or channels % num_groups:
        raise InputError(
            f"GroupNormalization {node.name!r} cannot be raised to opset 21",
            f"its channels ({channels}) must be a static multiple of num_groups ({num_groups})",
            "export the model with opset 21 or newer",
        )
    repeats, added = channels // num_groups, []
    for index in (1, 2):
        tensor = node.inputs[index]
        wide_name = names.tensor(f"{node.name}_{'scale' if index == 1 else 'bias'}_per_channel")
        if isinstance(tensor, gs.Constant):
            node.inputs[index] = gs.Constant(wide_name, np.repeat(tensor.values, repeats))
            continue
        column = gs.Variable(names.tensor(f"{wide_name}_column"), tensor.dtype, [num_groups, 1])
        grid = gs.Variable(names.tensor(f"{wide_name}_grid"), tensor.dtype, [num_groups, repeats])
        wide = gs.Variable(wide_name, tensor.dtype, [channels])
        constants = {
            "axes": np.array([1]),
            "size": np.array([num_groups, repeats]),
            "flat": np.array([-1]),
        }
        axes, size, flat = (gs.Constant(names.tensor(f"{wide_name}_{key}"), value) for key, value in constants.items())
        added += [
            gs.Node("Unsqueeze", names.node(f"{wide_name}_unsqueeze"), inputs=[tensor, axes], outputs=[column]),
            gs.Node("Expand", names.node(f"{wide_name}_expand"), inputs=[column, size], outputs=[grid]),
            gs.Node("Reshape", names.node(f"{wide_name}_reshape"), inputs=[grid, flat], outputs=[wide]),
        ]
        node.inputs[index] = wide
    return added
