"""Small passes that change how a graph is written, not what it computes."""

from __future__ import annotations

from collections.abc import Container

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.graph.edit import all_graphs, is_array, is_onnx_op, remove_nodes, replace_uses

_CONSTANT_DTYPES = {
    "value_float": np.float32,
    "value_floats": np.float32,
    "value_int": np.int64,
    "value_ints": np.int64,
}


def move_constants(graph: gs.Graph) -> int:
    """Turn Constant nodes into initializers, subgraphs included; one that gives a graph output stays.

    Returns:
        How many were turned.
    """
    moved: set[int] = set()
    for current in all_graphs(graph):
        kept_outputs = {id(tensor) for tensor in current.outputs}
        for node in current.nodes:
            if node.op != "Constant" or not is_onnx_op(node) or len(node.outputs) != 1:
                continue
            values = _constant_values(node)
            if values is not None and id(node.outputs[0]) not in kept_outputs:
                node.outputs[0].to_constant(values)
                moved.add(id(node))
    return remove_nodes(graph, lambda node: id(node) in moved)


def _constant_values(node: gs.Node) -> np.ndarray | None:
    """The value of a Constant node; None for text, which no builder reads."""
    if len(node.attrs) != 1:
        return None
    ((name, value),) = node.attrs.items()
    if name == "value" and isinstance(value, gs.Constant):
        return value.values if is_array(value) else None
    return np.array(value, _CONSTANT_DTYPES[name]) if name in _CONSTANT_DTYPES else None


def remove_identities(graph: gs.Graph) -> int:
    """Remove Identity nodes and Dropouts that do nothing, subgraphs included.

    Case 1: the result is no graph output: its readers read the source.
    Case 2: it is, and the source is computed in the same graph and no output itself: the source's producer takes over
        the output's name.
    Otherwise the node stays: it is what connects an input, a constant or an outer tensor with an output.

    Returns:
        How many were removed.
    """
    removed: set[int] = set()
    for current in all_graphs(graph):
        outputs = {id(tensor) for tensor in current.outputs}
        local = {id(tensor): node for node in current.nodes for tensor in node.outputs}
        for node in current.nodes:
            if not is_onnx_op(node) or not (node.op == "Identity" or _is_idle_dropout(node, outputs)):
                continue
            source, result = node.inputs[0], node.outputs[0]
            if id(result) not in outputs:
                replace_uses(result, source)
            elif id(source) in local and id(source) not in outputs and not isinstance(source, gs.Constant):
                _rename_output(local[id(source)], source, result, node)
                local[id(result)] = local[id(source)]
            else:
                continue
            removed.add(id(node))
    return remove_nodes(graph, lambda node: id(node) in removed)


def _is_idle_dropout(node: gs.Node, outputs: Container[int]) -> bool:
    """True for a Dropout that is not in training mode and whose mask nothing reads.

    Args:
        outputs: ids of the graph's outputs.
    """
    if node.op != "Dropout":
        return False
    mode = node.inputs[2] if len(node.inputs) > 2 and node.inputs[2].name else None
    is_training = mode is not None and not (is_array(mode) and not mode.values.any())
    return not is_training and not any(mask.outputs or id(mask) in outputs for mask in node.outputs[1:])


def give_output(node: gs.Node, index: int, tensor: gs.Variable) -> None:
    """Make a node's output another tensor, which then has no other producer; the old one has none."""
    list.clear(node.outputs[index].inputs)
    list.__setitem__(node.outputs, index, tensor)
    list.__setitem__(tensor.inputs, slice(None), [node])


def _rename_output(producer: gs.Node, source: gs.Variable, result: gs.Variable, identity: gs.Node) -> None:
    """Make a node produce `result` in place of `source`."""
    give_output(producer, next(index for index, tensor in enumerate(producer.outputs) if tensor is source), result)
    list.clear(identity.outputs)
    replace_uses(source, result)
