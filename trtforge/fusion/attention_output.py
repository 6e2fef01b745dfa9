"""The linear layer behind attention, which reads the heads of each row side by side."""

from __future__ import annotations

import math

import onnx_graphsurgeon as gs

from trtforge.fusion.linear import Linears
from trtforge.fusion.regions import Linear, Stop
from trtforge.fusion.sizes import same_size
from trtforge.fusion.view import View, casts_to_float, op_name, perm_of, producer_of

# Nodes between P V and the output projection.
_MAX_STEPS = 16


class AttentionOutput:
    """The linear layer that reads [B, S, N * D] behind attention, or what reads it instead.

    Attributes:
        labels: of the axes of the tensor that was reached; W is N and D side by side, BS or SB rows of both.
        nodes: layout nodes in between.
        linear, stop: one of them, once followed.
    """

    def __init__(self, labels: list[str]) -> None:
        self.labels = labels
        self.nodes: list[gs.Node] = []
        self.linear: Linear | None = None
        self.stop: Stop | None = None

    def follow(self, view: View, linears: Linears, tensor: gs.Tensor) -> None:
        """Look for it behind P V."""
        for _ in range(_MAX_STEPS):
            reader = view.only_reader(tensor)
            if reader is None:
                node = producer_of(tensor) or view.graph.nodes[0]
                self.stop = Stop(str(node.name), "its result is an output, or has several readers")
                return
            if self.labels[-1] == "W" and linears.of_product(reader) is not None:
                self.linear = linears.of_product(reader)
                return
            reason = self._go_over(view, reader)
            if reason is not None:
                self.stop = Stop(str(reader.name), reason)
                return
            self.nodes.append(reader)
            tensor = reader.outputs[0]
        self.stop = Stop(str(self.nodes[-1].name), "no linear layer reads its result")

    def _go_over(self, view: View, node: gs.Node) -> str | None:
        """Follow one node; the reason where it is no layout node."""
        op, perm = op_name(node), perm_of(node, len(self.labels)) if op_name(node) == "Transpose" else None
        if perm is not None:
            self.labels = [self.labels[axis] for axis in perm]
            return None
        if op == "Identity" or casts_to_float(node):
            return None
        if op != "Reshape":
            return f"{node.op} stands between attention and its output projection"
        labels = self._joined(view, node)
        if labels is None:
            return "a Reshape does not put its heads side by side, or is not known to keep batch and sequence"
        self.labels = labels
        return None

    def _joined(self, view: View, node: gs.Node) -> list[str] | None:
        """Labels behind a Reshape."""
        before, after, labels = view.sizes.of(node.inputs[0]), view.sizes.of(node.outputs[0]), self.labels
        if before is None or after is None or len(before) != len(labels):
            return None
        if before == after:
            return labels
        if labels[-1] == "W":
            is_rows = len(after) == 2 and len(labels) == 3 and same_size(before[-1], after[-1])
            return ["".join(labels[:2]), "W"] if is_rows else None
        if labels == ["BN", "S", "D"]:
            keeps = len(after) == 4 and same_size(before[1], after[2]) and same_size(before[2], after[3])
            return ["B", "N", "S", "D"] if keeps else None
        width = after[-1]
        if labels == ["S", "BN", "D"]:
            keeps = len(after) == 3 and same_size(before[0], after[0])
            return ["S", "B", "W"] if keeps and isinstance(width, int) else None
        numbers = [size for size in before[2:] if isinstance(size, int)]
        if labels[2:] != ["N", "D"] or len(numbers) != 2 or math.prod(numbers) != width:
            return None
        if len(after) == 2:
            return ["".join(labels[:2]), "W"]
        # With the width kept, one size proves the other.
        keeps = len(after) == 3 and any(same_size(a, b) for a, b in zip(before[:2], after[:2], strict=True))
        return [*labels[:2], "W"] if keeps else None
