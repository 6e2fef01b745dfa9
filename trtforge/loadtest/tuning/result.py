"""What a search gave, as one value: `tune.json`."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from trtforge.loadtest.objective import Objective, Statistic
from trtforge.loadtest.tuning.plans import LoadKind
from trtforge.loadtest.tuning.search import Gain, Outcome

SCHEMA_VERSION = 1
# Requests of which ten are slower than the statistic; a mean is steady with fewer.
_MIN_REQUESTS: dict[Statistic, int] = {"p50": 20, "p90": 100, "p95": 200, "p99": 1_000, "p99.9": 10_000, "mean": 100}


@dataclasses.dataclass(frozen=True, slots=True)
class NamedGain:
    """A gain, what it is of, and the unit of its figures."""

    name: str
    unit: Literal["answers/s", "ms"]
    gain: Gain

    @property
    def change_text(self) -> str:
        """`+31.2 %`."""
        return "from nothing" if self.gain.change is None else f"{100 * self.gain.change:+.1f} %"

    @property
    def noise_text(self) -> str:
        """`noise -3.9 to +4.0 %`."""
        return "noise unknown" if self.gain.noise is None else f"noise {self.gain.noise}"

    @property
    def text(self) -> str:
        """`+31.2 % (noise -3.9 to +4.0 %)`."""
        return f"{self.change_text} ({self.noise_text})"


@dataclasses.dataclass(frozen=True, slots=True)
class TuneResult:
    """See the module.

    Attributes:
        model: that was asked.
        objectives: as asked for.
        kind: of the load.
        outcome: trials, the best and its gain.
        configs: text of `config.pbtxt` with the best settings, by model; empty where none is better than the default.
        diff: against the repository.
        is_applied: they are in the repository now.
        conditions: of the search.
    """

    model: str
    objectives: tuple[Objective, ...]
    kind: LoadKind
    outcome: Outcome
    configs: dict[str, str]
    diff: str
    is_applied: bool
    conditions: dict[str, Any]

    @property
    def passed(self) -> bool:
        """Some settings meet the objectives."""
        return any(capacity.throughput > 0 for capacity in self.outcome.capacities.values())

    @property
    def gains(self) -> tuple[NamedGain, ...]:
        """Those that were measured."""
        outcome, statistic = self.outcome, self.objectives[0].statistic
        unit = "requests/s" if self.kind == "open" else "users"
        found = []
        if outcome.throughput is not None:
            found.append(NamedGain("throughput within the objective", "answers/s", outcome.throughput))
        if outcome.latency is not None:
            found.append(NamedGain(f"{statistic} at {outcome.equal_load:.4g} {unit}", "ms", outcome.latency))
        return tuple(found)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What makes the figures doubtful."""
        outcome = self.outcome
        texts = [f"{trial.stage}: {trial.candidate}: {trial.failure}" for trial in outcome.trials if trial.failure]
        texts += [f"left out for want of time: {candidate}" for candidate in outcome.left_out]
        confirmed = [probe for trial in outcome.trials if trial.stage == "confirm" for probe in trial.probes]
        statistic = self.objectives[0].statistic
        fewest = min((probe.requests for probe in confirmed), default=_MIN_REQUESTS[statistic])
        if fewest < _MIN_REQUESTS[statistic]:
            least = f"the {statistic} takes {_MIN_REQUESTS[statistic]:,} to be no chance"
            texts.append(f"a probe has as few as {fewest:,} requests, and {least}: give --budget more minutes")
        if any(probe.is_client_saturated for trial in outcome.trials for probe in trial.probes):
            texts.append("the client was at its limit in some probes: their latencies hold its own delay")
        return tuple(texts)

    def verdict(self) -> tuple[str, str]:
        """One word, and a sentence with the figures that it rests on."""
        outcome = self.outcome
        named = " and ".join(map(str, self.objectives))
        if not self.passed:
            return "MISSED", f"No settings meet {named} at any load that was tried."
        if outcome.best is None:
            return "DEFAULT", f"Triton's default meets {named}; no other settings do."
        figures = "; ".join(f"{gain.name} {gain.text}" for gain in self.gains)
        if outcome.is_better:
            return "BETTER", f"{outcome.best}: better than Triton's default: {figures}."
        return "NO GAIN", f"Nothing beats Triton's default beyond the noise. The best was {outcome.best}: {figures}."

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        outcome = self.outcome
        gains = {"throughput": outcome.throughput, "latency": outcome.latency}
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": "tune",
            "model": self.model,
            "objectives": [str(objective) for objective in self.objectives],
            "load": self.kind,
            "passed": self.passed,
            "is_better": outcome.is_better,
            "is_applied": self.is_applied,
            "best": None if outcome.best is None else outcome.best.model_dump(mode="json"),
            "capacities": [
                {"candidate": candidate.model_dump(mode="json"), **dataclasses.asdict(capacity)}
                for candidate, capacity in outcome.capacities.items()
            ],
            "equal_load": outcome.equal_load,
            "gains": {name: None if found is None else dataclasses.asdict(found) for name, found in gains.items()},
            "warnings": list(self.warnings),
            "left_out": [candidate.model_dump(mode="json") for candidate in outcome.left_out],
            "trials": [trial.model_dump(mode="json") for trial in outcome.trials],
            "configs": self.configs,
            "conditions": self.conditions,
        }
