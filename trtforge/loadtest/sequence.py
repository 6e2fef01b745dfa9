"""The order of a step's requests, which the seed decides."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any

from trtforge.loadtest.request import Request, RequestCell
from trtforge.loadtest.senders import Sender


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is ready to be sent.

    Attributes:
        cell: its place in the list of cells.
        wire: its message.
        request: what it was made from.
    """

    cell: int
    wire: Any
    request: Request


class RequestSequence:
    """The requests of a step, in an order that the seed decides: a cell by weight, then its next request.

    Args:
        cells: their requests.
        sender: makes the messages.
        seed: equal seeds give equal sequences.
    """

    def __init__(self, cells: Sequence[RequestCell], sender: Sender, seed: int) -> None:
        self._requests = [
            [Prepared(place, sender.prepare(request), request) for request in cell.requests]
            for place, cell in enumerate(cells)
        ]
        self._weights = [cell.weight for cell in cells]
        self._seed = seed

    def __iter__(self) -> Iterator[Prepared]:
        random_ = random.Random(self._seed)
        places = range(len(self._requests))
        next_in_cell = [0] * len(self._requests)
        while True:
            (place,) = random_.choices(places, self._weights)
            requests = self._requests[place]
            yield requests[next_in_cell[place] % len(requests)]
            next_in_cell[place] += 1
