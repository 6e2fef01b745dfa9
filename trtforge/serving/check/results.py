"""What a check of a repository found, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class RequestCheck:
    """One request.

    Attributes:
        profile: name of the optimisation profile.
        place: "min", "opt", "max" or "outside".
        shapes: e.g. "ids [8, 128], mask [8, 128]".
        passed: answered right inside, refused outside.
        detail: the error against the reference, the refusal, or what went wrong.
        error: |answer - reference| / |reference| of the worst output; None where nothing was compared.
    """

    profile: str
    place: str
    shapes: str
    passed: bool
    detail: str
    error: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class LoadCheck:
    """Many requests at once.

    Attributes:
        sent: requests.
        answered: those that got an answer.
        wrong: answers that differ from the reference.
        batches: executions by batch size, from the server's statistics.
        expects_batches: the model's configuration lets the server join requests.
        first_failure: the server's words for the first request that was lost; empty where none was.
        turned_away: requests that the limits of the model's queue refused, as they are there to do.
    """

    sent: int
    answered: int
    wrong: int
    batches: Mapping[int, int]
    expects_batches: bool
    first_failure: str = ""
    turned_away: int = 0

    @property
    def lost(self) -> int:
        """Requests that should have been answered."""
        return self.sent - self.answered - self.turned_away

    @property
    def largest_batch(self) -> int:
        """Of all executions."""
        return max(self.batches, default=0)

    @property
    def passed(self) -> bool:
        """None was lost, all answers were right, and requests were joined where they may be."""
        is_batched = self.largest_batch > 1 or not self.expects_batches
        return self.answered > 0 and self.lost == 0 and self.wrong == 0 and is_batched


@dataclasses.dataclass(frozen=True, slots=True)
class ModelCheck:
    """What a model did.

    Attributes:
        requests: at the corners of its profiles, and outside.
        load: many at once; None where it did not come to that.
        failure: what ended the check; empty where it came to its end.
        note: what could not be compared, and why.
    """

    name: str
    kind: str
    requests: tuple[RequestCheck, ...] = ()
    load: LoadCheck | None = None
    failure: str = ""
    note: str = ""

    @property
    def passed(self) -> bool:
        """Everything was as it has to be."""
        is_right = all(request.passed for request in self.requests) and self.load is not None and self.load.passed
        return is_right and not self.failure


@dataclasses.dataclass(frozen=True, slots=True)
class CheckResult:
    """What the server did.

    Attributes:
        triton: version of the server.
        models: each model that was checked.
    """

    triton: str
    models: tuple[ModelCheck, ...]

    @property
    def passed(self) -> bool:
        """Every model did what it has to."""
        return all(model.passed for model in self.models)
