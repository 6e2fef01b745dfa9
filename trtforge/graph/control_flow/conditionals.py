"""Replace an If whose condition is known by the branch that it takes.

The condition is a constant here: folding knows the ranks and the static sizes that exporters compare, specialise.py the
sizes that the profiles fix. The branch's nodes move to where the If stood, in order, and nested Ifs with them.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from trtforge.graph.control_flow.inline import detach, forward
from trtforge.graph.edit import all_graphs, is_array, is_onnx_op
from trtforge.graph.names import UniqueNames


def resolve_conditionals(graph: gs.Graph) -> list[str]:
    """Replace every If with a constant condition by its branch, in place, subgraphs included.

    Returns:
        What was done, one sentence for each If.
    """
    notes: list[str] = []
    gone: list[gs.Node] = []
    names: UniqueNames | None = None
    for current in all_graphs(graph):
        if not any(_taken_branch(node) for node in current.nodes):
            continue
        names = names or UniqueNames(graph)
        pending, nodes = [*reversed(current.nodes)], []
        while pending:
            node = pending.pop()
            taken = _taken_branch(node)
            if taken is None:
                nodes.append(node)
                continue
            branch = node.attrs.pop(taken)
            # Before the branch, so that nested Ifs are met on the way.
            pending.extend(reversed([*branch.nodes, *forward(branch.outputs, node.outputs, names)]))
            notes.append(f"If {node.name!r} always takes its {taken}, which stands in its place")
            gone.append(node)
        current.nodes = nodes
    for node in gone:
        list.clear(node.outputs)
    detach(gone)
    return notes


def _taken_branch(node: gs.Node) -> str | None:
    """The attribute that holds the branch which an If takes, or None where only the run can tell."""
    if node.op != "If" or not is_onnx_op(node) or not is_array(node.inputs[0]) or node.inputs[0].values.size != 1:
        return None
    return "then_branch" if bool(node.inputs[0].values.item()) else "else_branch"
