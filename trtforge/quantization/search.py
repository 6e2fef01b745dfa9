"""The smallest set of regions to leave float, by FLOPs, so that a budget on the model's outputs is met.

Errors of small independent perturbations add in power, and the loss of a cosine is proportional to that power:

    loss of a set  ~  scale * sum of the losses of its quantized regions, each measured alone

The scale comes from the last set that was measured, so it also covers what the sum leaves out. Regions ordered by loss
per FLOP make a chain of sets, each of which keeps one region more; real evaluations bracket the first that meets the
budget, starting where the prediction points. Then the largest kept regions are lowered again one at a time, where that
still meets it. A few dozen regions take about ten evaluations.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from trtforge.quantization.regions import Region

# Evaluations spent on lowering kept regions again.
MAX_REFINEMENTS = 6
# A set that is predicted to lose more than this many times what is allowed is not evaluated when refining.
_HOPELESS = 1.5
# What is asked beyond the measured difference, after a set has missed the budget on the confirming samples.
_HEADROOM = 0.9
# Times that a set may miss the budget on the confirming samples before the search gives up.
MAX_CONFIRMATIONS = 4

Kept = frozenset[str]
Data = Literal["chosen", "confirmed"]
# Loss of a set of regions that stay float, at least 0; inf when an output is not finite.
Evaluate = Callable[[Kept], float]


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """A set that was evaluated.

    Attributes:
        kept: names of the regions left float.
        data: the samples: those that the search chooses by, or those that confirm its choice.
        predicted: the loss expected.
        measured: the loss found.
        allowed: the largest loss that meets the budget.
    """

    kept: Kept
    data: Data
    predicted: float
    measured: float
    allowed: float

    @property
    def met(self) -> bool:
        """Whether the budget was met."""
        return self.measured <= self.allowed


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a search found.

    Attributes:
        kept: the regions to leave float; when the budget was not met, those of the best set tried.
        met: the budget was met, on the confirming samples where there are any.
        trials: every set tried, in order.
    """

    kept: Kept
    met: bool
    trials: tuple[Trial, ...]


def search(
    regions: Sequence[Region],
    losses: Mapping[str, float],
    choose: Evaluate,
    allowed: float,
    confirm: Evaluate | None = None,
    confirm_allowed: float = math.inf,
    needs: Mapping[str, frozenset[str]] | None = None,
) -> Outcome:
    """Find the set.

    Args:
        regions: all of them, in graph order.
        losses: loss by region name when it alone is quantized.
        choose: evaluates a set; deterministic.
        allowed: the loss that the budget allows there.
        confirm: evaluates a set on further samples; None to trust `choose`.
        confirm_allowed: the loss that the budget allows there.
        needs: regions that a region needs to be quantized (`regions.find_needs`); it stays float with any of them.

    Returns:
        The outcome; without regions, that of the empty set.
    """
    return _Search(regions, losses, choose, allowed, needs or {}).run(confirm, confirm_allowed)


class _Search:
    def __init__(
        self,
        regions: Sequence[Region],
        losses: Mapping[str, float],
        choose: Evaluate,
        allowed: float,
        needs: Mapping[str, frozenset[str]],
    ) -> None:
        self.flops = {region.name: region.flops for region in regions}
        self.losses = {region.name: max(losses[region.name], 0.0) for region in regions}
        position = {region.name: index for index, region in enumerate(regions)}
        self.order = sorted(
            self.losses, key=lambda name: (-self.losses[name] / max(self.flops[name], 1), position[name])
        )
        self.needs = needs
        self.choose = choose
        self.allowed = allowed
        self.scale = 1.0
        self.trials: list[Trial] = []
        self._known: dict[Kept, float] = {}
        self._refused: list[Kept] = []

    def run(self, confirm: Evaluate | None, confirm_allowed: float) -> Outcome:
        for _ in range(MAX_CONFIRMATIONS):
            kept = self._smallest()
            if kept is None:
                break
            if confirm is None:
                return Outcome(kept, True, tuple(self.trials))
            loss = confirm(kept)
            self.trials.append(Trial(kept, "confirmed", self._predict(kept), loss, confirm_allowed))
            if loss <= confirm_allowed:
                return Outcome(kept, True, tuple(self.trials))
            # The confirming samples lose more: ask as much more of the others.
            self._refused.append(kept)
            self.allowed = min(self.allowed, _HEADROOM * self._known[kept] * confirm_allowed / loss)
        return Outcome(self._best(), False, tuple(self.trials))

    def _smallest(self) -> Kept | None:
        """The smallest set known to meet the budget; None when even all regions in float miss it."""
        if self._meets(frozenset()):
            return frozenset()
        count = self._bracket()
        return None if count is None else self._refine(self._prefix(count))

    def _bracket(self) -> int | None:
        """How many regions of the order have to stay float."""
        low, high, step = 0, len(self.order) + 1, 1
        count = self._predicted_count()
        while high - low > 1:
            met = self._meets(self._prefix(count))
            if met:
                high = count
            else:
                low = count
            count += -step if met else step
            step *= 2
            if not low < count < high:
                count = (low + high) // 2
        return high if high <= len(self.order) else None

    def _refine(self, kept: Kept) -> Kept:
        """The set without those regions that turn out not to be needed, largest first."""
        evaluations = 0
        position = {name: index for index, name in enumerate(self.order)}
        for name in sorted(kept, key=lambda name: (-self.flops[name], -position[name])):
            smaller = kept - {name}
            if name not in kept or self._closed(smaller) != smaller:
                continue
            if evaluations == MAX_REFINEMENTS or self._predict(smaller) > _HOPELESS * self.allowed:
                continue
            evaluations += smaller not in self._known
            if self._meets(smaller):
                kept = smaller
        return kept

    def _meets(self, kept: Kept) -> bool:
        """Whether a set meets the budget; one that keeps less than a set that the confirmation refused does not."""
        if any(kept <= refused for refused in self._refused):
            return False
        if kept not in self._known:
            predicted = self._predict(kept)
            loss = self.choose(kept)
            self._known[kept] = loss
            self.trials.append(Trial(kept, "chosen", predicted, loss, self.allowed))
            total = self._sum(kept)
            if 0.0 < loss < math.inf and total > 0.0:
                self.scale = loss / total
        return self._known[kept] <= self.allowed

    def _predict(self, kept: Kept) -> float:
        return self.scale * self._sum(kept)

    def _sum(self, kept: Kept) -> float:
        """The losses of what is quantized."""
        return math.fsum(loss for name, loss in self.losses.items() if name not in kept)

    def _prefix(self, count: int) -> Kept:
        return self._closed(frozenset(self.order[:count]))

    def _closed(self, kept: Kept) -> Kept:
        """The set with every region that loses one it needs."""
        while lost := {name for name, needed in self.needs.items() if name not in kept and needed & kept}:
            kept |= lost
        return kept

    def _predicted_count(self) -> int:
        counts = range(1, len(self.order) + 1)
        return next((n for n in counts if self._predict(self._prefix(n)) <= self.allowed), max(len(self.order), 1))

    def _best(self) -> Kept:
        """Of all sets tried, the one with the least loss; of equal ones, the one with fewer FLOPs in float."""

        def rank(trial: Trial) -> tuple[float, int]:
            return trial.measured, sum(self.flops[name] for name in trial.kept)

        confirmed = [trial for trial in self.trials if trial.data == "confirmed"]
        return min(confirmed or self.trials, key=rank).kept
