"""Which optimisation profile of an engine runs a request."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

Sizes = Sequence[int]


class EngineError(Exception):
    """An engine cannot be loaded here, or does not run these inputs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """min, opt and max of an input's shape, or of the values of an input that become shapes."""

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]

    def holds(self, sizes: Sizes) -> bool:
        """Whether the sizes lie between min and max."""
        return len(sizes) == len(self.min) and all(
            low <= size <= high for low, size, high in zip(self.min, sizes, self.max, strict=True)
        )

    def distance(self, sizes: Sizes) -> float:
        """How far the sizes are from opt: the sum of |log(size / opt)|."""
        return sum(abs(math.log(max(size, 1) / max(opt, 1))) for size, opt in zip(sizes, self.opt, strict=True))


@dataclasses.dataclass(frozen=True, slots=True)
class EngineProfile:
    """One optimisation profile, by input name.

    Attributes:
        shapes: of every input that has a dynamic dim.
        values: of inputs whose values become shapes.
    """

    shapes: Mapping[str, Span]
    values: Mapping[str, Span]

    def reason_against(self, shapes: Mapping[str, Sizes], values: Mapping[str, Sizes]) -> str:
        """Why the profile does not run these inputs; empty where it does."""
        for kind, spans, given in (("shape", self.shapes, shapes), ("values", self.values, values)):
            for name, span in spans.items():
                if not span.holds(given[name]):
                    return f"{name} has {kind} {list(given[name])}, it takes {list(span.min)} to {list(span.max)}"
        return ""

    def distance(self, shapes: Mapping[str, Sizes]) -> float:
        """How far the shapes are from those that the profile is tuned for."""
        return sum(span.distance(shapes[name]) for name, span in self.shapes.items())


def choose_profile(profiles: Sequence[EngineProfile], shapes: Mapping[str, Sizes], values: Mapping[str, Sizes]) -> int:
    """The number of the profile that runs these inputs; of several, the one tuned for the nearest shapes.

    Args:
        profiles: of the engine, in its order.
        shapes: of every input.
        values: of the inputs whose values become shapes.

    Raises:
        EngineError: no profile takes them; says what each takes.
    """
    reasons = [profile.reason_against(shapes, values) for profile in profiles]
    fitting = [index for index, reason in enumerate(reasons) if not reason]
    if not fitting:
        raise EngineError("; ".join(f"profile {index}: {reason}" for index, reason in enumerate(reasons)))
    return min(fitting, key=lambda index: profiles[index].distance(shapes))
