"""Constants that are added to the output channels of weighted nodes, where they cost the least."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.graph.edit import InputEdits, pinned_names
from trtforge.graph.names import UniqueNames


class OutputBias:
    """Adds constants at the outputs of nodes of one graph; `finish` has to be called at the end.

    Args:
        graph: modified in place.
        names: of the graph.
    """

    def __init__(self, graph: gs.Graph, names: UniqueNames) -> None:
        self._graph = graph
        self._names = names
        self._pinned = pinned_names(graph)
        self._behind: dict[str, gs.Node] = {}

    def add(self, node: gs.Node, vector: np.ndarray) -> None:
        """Add a constant to each output channel: into the node's bias, or the Add behind it, or a new Add.

        Args:
            node: MatMul, Gemm or Conv.
            vector: `[output channels]`.
        """
        place = _bias_of(node, len(vector), self._pinned)
        if place is not None:
            holder, index = place
            old = holder.inputs[index]
            values = old.values.astype(np.float64) + vector.reshape(old.shape)
            replace_constant(holder, index, self._constant(f"{old.name}_corrected", values))
        elif node.op in {"Conv", "Gemm"} and len(node.inputs) == 2 and node.attrs.get("beta", 1.0) == 1:
            node.inputs.append(self._constant(f"{node.name}_bias", vector))
        else:
            self._put_behind(node, vector)

    def finish(self) -> None:
        """Put the new nodes in their places."""
        if self._behind:
            nodes = [(node, self._behind.get(node.name)) for node in self._graph.nodes]
            self._graph.nodes = [entry for pair in nodes for entry in pair if entry is not None]

    def _put_behind(self, node: gs.Node, vector: np.ndarray) -> None:
        """A new Add, which takes over the name of the node's output."""
        output = node.outputs[0]
        product = gs.Variable(self._names.tensor(f"{output.name}_product"), np.float32, output.shape)
        node.outputs.clear()
        node.outputs.append(product)
        shape = (-1, *[1] * (len(node.inputs[1].shape) - 2)) if node.op == "Conv" else (-1,)
        bias = self._constant(f"{node.name}_bias", vector.reshape(shape))
        self._behind[node.name] = gs.Node(
            "Add", self._names.node(f"{node.name}_bias_Add"), inputs=[product, bias], outputs=[output]
        )

    def _constant(self, name: str, values: np.ndarray) -> gs.Constant:
        return gs.Constant(self._names.tensor(name), values.astype(np.float32))


def replace_constant(node: gs.Node, index: int, constant: gs.Constant) -> None:
    """Put another constant at one input of a node."""
    edits = InputEdits()
    edits.replace(node, index, constant)
    edits.apply()


def is_row(tensor: gs.Tensor) -> bool:
    """True for a float32 constant with all its values along the last axis."""
    is_constant = isinstance(tensor, gs.Constant) and tensor.dtype == np.float32 and len(tensor.shape) > 0
    return is_constant and int(np.prod(tensor.shape)) == tensor.shape[-1]


def _bias_of(node: gs.Node, size: int, pinned: Collection[str]) -> tuple[gs.Node, int] | None:
    """The node and input index of a constant bias of `size` values that only this node's output gets."""
    has_bias = node.op in {"Conv", "Gemm"} and len(node.inputs) > 2 and bool(node.inputs[2].name)
    if has_bias and node.attrs.get("beta", 1.0) == 1 and _is_vector(node.inputs[2], size):
        return node, 2
    output = node.outputs[0]
    is_private = len(output.outputs) == 1 and output.name not in pinned
    if node.op in {"Gemm", "MatMul"} and is_private and output.outputs[0].op == "Add":
        add = output.outputs[0]
        index = 1 if add.inputs[0] is output else 0
        return (add, index) if _is_vector(add.inputs[index], size) else None
    return None


def _is_vector(tensor: gs.Tensor, size: int) -> bool:
    return is_row(tensor) and tensor.shape[-1] == size
