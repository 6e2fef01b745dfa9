"""Put the body of an If, Loop or Scan in the place of its node.

Tensors and nodes have unique names over all graphs (`names.make_names_unique`), so a body whose nodes move keeps its
names, and only copies need new ones. Tensors of the graphs around a body are shared objects and stay what they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import onnx_graphsurgeon as gs

from trtforge.graph.edit import all_nodes, subgraphs_of
from trtforge.graph.names import UniqueNames


def detach(nodes: Iterable[gs.Node]) -> None:
    """Take nodes that are in no graph any more, and all that they hold, out of their tensors' lists."""
    gone = [inner for node in nodes for inner in (node, *(n for sub in subgraphs_of(node) for n in all_nodes(sub)))]
    removed = {id(node) for node in gone}
    touched = {id(tensor): tensor for node in gone for tensor in (*node.inputs, *node.outputs)}
    for tensor in touched.values():
        for users in (tensor.inputs, tensor.outputs):
            list.__setitem__(users, slice(None), [node for node in users if id(node) not in removed])


def forward(results: Sequence[gs.Tensor], outputs: Sequence[gs.Tensor], names: UniqueNames) -> list[gs.Node]:
    """Identity nodes that make `outputs`, whose producer is gone, equal to `results`; an omitted output gets none."""
    nodes = []
    for result, output in zip(results, outputs, strict=True):
        if output.name:
            list.clear(output.inputs)
            node = gs.Node("Identity", names.node(f"{output.name}_value"), inputs=[result], outputs=[output])
            nodes.append(node)
    return nodes


def copy_body(body: gs.Graph, given: Sequence[gs.Tensor], names: UniqueNames) -> tuple[list[gs.Node], list[gs.Tensor]]:
    """A copy of a body's nodes that reads the given tensors in place of its inputs.

    Args:
        body: stays as it is.
        given: one tensor for each input of the body; tensors from around it are read as they are.
        names: gives the copies their names.

    Returns:
        The nodes, and the tensors that stand for the body's outputs.
    """
    tensors = {id(port): tensor for port, tensor in zip(body.inputs, given, strict=True)}
    nodes = [_copy_node(node, tensors, names) for node in body.nodes]
    return nodes, [tensors.get(id(tensor), tensor) for tensor in body.outputs]


def _copy_node(node: gs.Node, tensors: dict[int, gs.Tensor], names: UniqueNames) -> gs.Node:
    attrs = {
        name: _copy_subgraph(value, tensors, names) if isinstance(value, gs.Graph) else value
        for name, value in node.attrs.items()
    }
    inputs = [tensors.get(id(tensor), tensor) for tensor in node.inputs]
    outputs = [_copy_tensor(tensor, tensors, names) for tensor in node.outputs]
    return gs.Node(node.op, names.node(node.name), attrs, inputs, outputs, node.domain)


def _copy_tensor(tensor: gs.Tensor, tensors: dict[int, gs.Tensor], names: UniqueNames) -> gs.Tensor:
    if not tensor.name:
        return gs.Variable.empty()
    copy = gs.Variable(names.tensor(tensor.name), tensor.dtype, tensor.shape, tensor.type)
    tensors[id(tensor)] = copy
    return copy


def _copy_subgraph(graph: gs.Graph, around: Mapping[int, gs.Tensor], names: UniqueNames) -> gs.Graph:
    tensors = dict(around)
    inputs = [_copy_tensor(tensor, tensors, names) for tensor in graph.inputs]
    nodes = [_copy_node(node, tensors, names) for node in graph.nodes]
    outputs = [tensors.get(id(tensor), tensor) for tensor in graph.outputs]
    return gs.Graph(
        nodes,
        inputs,
        outputs,
        name=graph.name,
        opset=graph.opset,
        import_domains=graph.import_domains,
        functions=graph.functions,
    )
