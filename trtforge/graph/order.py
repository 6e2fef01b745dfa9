"""The order in which nodes can run, shared by the protobuf checks and the graph passes.

Kahn's algorithm with a heap instead of a queue: among the nodes that are ready, the one that stood first goes first, so
that a sorted list stays as it is and an unsorted one changes no more than it must.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def stable_order(needs: Sequence[set[int]]) -> list[int]:
    """Indices so that each comes after those it needs, else as early as it stood; shorter when there is a cycle.

    Args:
        needs: for each index, the indices that go before it.
    """
    users: list[list[int]] = [[] for _ in needs]
    for index, need in enumerate(needs):
        for other in need:
            users[other].append(index)
    missing = [len(need) for need in needs]
    ready = [index for index, count in enumerate(missing) if count == 0]
    order: list[int] = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for user in users[index]:
            missing[user] -= 1
            if missing[user] == 0:
                heapq.heappush(ready, user)
    return order
