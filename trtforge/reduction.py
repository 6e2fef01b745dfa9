"""The smallest part of a graph that still fails: which nodes to keep is searched with as few trials as may be.

1. Where the failure names a node: that node alone, then with its neighbours, and theirs.
2. Else the shortest beginning of the graph that fails, and of that the shortest end, by bisection.
3. Of what is left, parts are dropped as long as it still fails: halves first, single nodes last (Zeller's ddmin).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

# Trials that one search makes; each builds a part of the model.
MAX_TRIALS = 120
# Rings of neighbours around a blamed node that are tried.
_MAX_RINGS = 4


class Parts(Protocol):
    """The graph, as far as the search sees it; see `graph.cut.Scissors`."""

    def neighbours(self, nodes: Sequence[int]) -> set[int]:
        """The nodes and those next to them."""

    def close(self, nodes: Sequence[int]) -> list[int]:
        """The nodes with those that have to come along, in order."""


@dataclasses.dataclass(slots=True)
class Search:
    """A search in progress.

    Args:
        parts: the graph.
        fails: whether these nodes alone fail the same way; called once for each set.
        max_trials: calls of `fails` that it may make.

    Attributes:
        trials: calls made so far.
        is_complete: nothing more could be dropped; False where the trials ran out first.
    """

    parts: Parts
    fails: Callable[[Sequence[int]], bool]
    max_trials: int = MAX_TRIALS
    trials: int = 0
    is_complete: bool = True
    _known: dict[tuple[int, ...], bool] = dataclasses.field(default_factory=dict)

    def run(self, num_nodes: int, blamed: int | None = None) -> list[int]:
        """The nodes of the smallest failing part that was found, in order.

        Args:
            num_nodes: of the graph, all of which together fail.
            blamed: the node that the failure names.
        """
        nodes = list(range(num_nodes))
        around = None if blamed is None else self._around(blamed)
        if around is not None:
            nodes = around
        else:
            nodes = self._shortest(nodes, lambda part, size: part[:size])
            nodes = self._shortest(nodes, lambda part, size: part[len(part) - size :])
        return self._drop_parts(nodes)

    def _try(self, nodes: Sequence[int]) -> list[int] | None:
        """The closed set of these nodes where it fails; None where it does not, or where no trial is left."""
        closed = self.parts.close(nodes)
        key = tuple(closed)
        if key not in self._known:
            if self.trials >= self.max_trials:
                self.is_complete = False
                return None
            self.trials += 1
            self._known[key] = self.fails(closed)
        return closed if self._known[key] else None

    def _around(self, blamed: int) -> list[int] | None:
        ring = {blamed}
        for _ in range(_MAX_RINGS):
            found = self._try(sorted(ring))
            if found is not None:
                return found
            ring = self.parts.neighbours(sorted(ring))
        return None

    def _shortest(self, nodes: list[int], take: Callable[[list[int], int], list[int]]) -> list[int]:
        """The fewest nodes from one side that fail, as if more nodes never failed less; `nodes` where none do."""
        low, high, best = 0, len(nodes), nodes
        while high - low > 1:
            middle = (low + high) // 2
            found = self._try(take(nodes, middle))
            if found is None:
                low = middle
            else:
                high = middle
                best = found if len(found) < len(best) else best
        return best

    def _drop_parts(self, nodes: list[int]) -> list[int]:
        pieces = 2
        while len(nodes) > 1:
            size = -(-len(nodes) // pieces)
            for start in range(0, len(nodes), size):
                found = self._try(nodes[:start] + nodes[start + size :])
                if found is not None and len(found) < len(nodes):
                    nodes, pieces = found, max(pieces - 1, 2)
                    break
                if not self.is_complete:
                    return nodes
            else:
                if size == 1:
                    break
                pieces = min(pieces * 2, len(nodes))
        return nodes
