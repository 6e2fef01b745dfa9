"""What every lowering does: new nodes in front of old ones, and mask terms as one tensor.

New nodes are collected and put in together, so that the graph stays as it was until then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from trtforge.fusion.regions import MaskTerm
from trtforge.graph.edit import remove_dead_nodes, sort_nodes
from trtforge.graph.names import UniqueNames

Array = np.ndarray[Any, np.dtype[Any]]


class NodeAdder:
    """Adds nodes to a graph.

    Args:
        graph: `finish` modifies it.
    """

    def __init__(self, graph: gs.Graph) -> None:
        self._graph = graph
        self._names = UniqueNames(graph)
        self._added: dict[int, list[gs.Node]] = {}
        self._wanted: list[tuple[gs.Node, str]] = []

    def add(
        self,
        before: gs.Node,
        op: str,
        inputs: Sequence[gs.Tensor],
        attrs: Mapping[str, Any] | None = None,
        *,
        result: gs.Variable | None = None,
        wanted: str | None = None,
        dtype: npt.DTypeLike | None = None,
        domain: str | None = None,
    ) -> gs.Variable:
        """The result of a new node in front of another.

        Args:
            result: what it gives; by default a new tensor of `dtype`, or of the type of its first data input.
            wanted: the name that it gets where no other node has it in the end.
            domain: of the operator.
        """
        if result is None:
            result = gs.Variable(
                self._names.tensor(f"{before.name}_{op}"), dtype or inputs[1 if op == "Where" else 0].dtype
            )
        result.inputs.clear()
        name = self._names.node(f"{before.name}_{op}")
        node = gs.Node(op, name, dict(attrs or {}), list(inputs), [result], domain)
        self._added.setdefault(id(before), []).append(node)
        if wanted is not None:
            self._wanted.append((node, wanted))
        return result

    def constant(self, name: str, values: Array) -> gs.Constant:
        """A new constant."""
        return gs.Constant(self._names.tensor(name), values)

    def finish(self) -> None:
        """Put the new nodes in and take dead ones out."""
        nodes: list[gs.Node] = []
        for node in self._graph.nodes:
            nodes += self._added.get(id(node), ())
            nodes.append(node)
        self._graph.nodes = nodes
        sort_nodes(self._graph)
        remove_dead_nodes(self._graph)
        taken = {node.name for node in self._graph.nodes}
        for node, name in self._wanted:
            if name not in taken:
                node.name = name


def bias_of_terms(
    adder: NodeAdder, terms: Sequence[MaskTerm], tensors: Mapping[str, gs.Tensor], place: gs.Node, dtype: np.dtype[Any]
) -> gs.Tensor:
    """What the terms of a mask do to the scores, as one tensor of `dtype` that is added."""
    bias: gs.Tensor | None = None
    for term in terms:
        tensor = tensors[term.tensor]
        if term.kind == "additive":
            bias = tensor if bias is None else adder.add(place, "Add", [bias, tensor])
            continue
        other = adder.constant("no_bias", np.zeros((), dtype)) if bias is None else bias
        fill = adder.constant("hidden", np.asarray(_finite(term.fill, dtype), dtype))
        bias = adder.add(place, "Where", [tensor, *((other, fill) if term.kind == "keep" else (fill, other))])
    assert bias is not None
    return bias


def _finite(fill: float | None, dtype: np.dtype[Any]) -> float:
    """The fill of a term within the range of a type; of `Attention`'s own bool masks, one of which a float16 softmax
    makes 0 and that no score takes out of the range.
    """
    lowest = float(ml_dtypes.finfo(dtype).min)  # type: ignore[no-untyped-call]
    return -1e4 if fill is None else max(fill, lowest)
