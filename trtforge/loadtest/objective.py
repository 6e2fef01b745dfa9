"""Service-level objectives: `p99=50ms` asks that 99 % of the answers take at most 50 ms.

    objective = STATISTIC = NUMBER UNIT      STATISTIC: p50, p90, p95, p99, p99.9 or mean      UNIT: s, ms or us

Several hold together: `p99=50ms,mean=10ms`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from trtforge.errors import InputError

Statistic = Literal["p50", "p90", "p95", "p99", "p99.9", "mean"]
STATISTICS: tuple[Statistic, ...] = get_args(Statistic)
_MILLISECONDS = {"s": 1e3, "ms": 1.0, "us": 1e-3}
_PATTERN = re.compile(r"([a-z0-9.]+)\s*=\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)")
_EXAMPLE = "--slo p99=50ms"


@dataclasses.dataclass(frozen=True, slots=True)
class Objective:
    """One statistic of latency and its limit.

    Attributes:
        statistic: of the latencies of successful answers.
        limit_ms: what it must not exceed, in milliseconds.
    """

    statistic: Statistic
    limit_ms: float

    def __str__(self) -> str:
        return f"{self.statistic}={self.limit_ms:g}ms"

    def is_met(self, statistics_ms: Mapping[str, float | None]) -> bool:
        """Whether a run meets it.

        Args:
            statistics_ms: by statistic, in milliseconds; what is unknown meets nothing.
        """
        value = statistics_ms.get(self.statistic)
        return value is not None and value <= self.limit_ms


def parse_objectives(texts: Iterable[str]) -> tuple[Objective, ...]:
    """Objectives as typed; each text may hold several with commas between.

    Raises:
        InputError: no objective, an unknown statistic or unit, a limit that is no positive number, a statistic twice.
    """
    objectives = [_parse(part.strip()) for text in texts for part in text.split(",")]
    seen: set[str] = set()
    for objective in objectives:
        if objective.statistic in seen:
            raise InputError(f"--slo gives {objective.statistic} twice", "one limit each is meant", "leave one out")
        seen.add(objective.statistic)
    return tuple(objectives)


def _parse(text: str) -> Objective:
    match = _PATTERN.fullmatch(text.lower())
    if match is None:
        raise InputError(f"--slo {text!r} is no objective", "it takes STATISTIC=NUMBER and a unit", _EXAMPLE)
    name, number, unit = match.groups()
    statistic = next((known for known in STATISTICS if known == name), None)
    if statistic is None:
        raise InputError(f"--slo {text!r}: {name!r} is not known", f"known: {', '.join(STATISTICS)}", _EXAMPLE)
    if unit not in _MILLISECONDS:
        given = f"{unit!r} is no unit" if unit else "the unit is missing"
        raise InputError(f"--slo {text!r}: {given}", f"known: {', '.join(_MILLISECONDS)}", _EXAMPLE)
    try:
        limit_ms = float(number) * _MILLISECONDS[unit]
    except ValueError as err:
        raise InputError(f"--slo {text!r}: {number!r} is no number", "a limit is a positive number", _EXAMPLE) from err
    if not math.isfinite(limit_ms) or limit_ms <= 0:
        raise InputError(f"--slo {text!r}: a limit of {number} is never met", "it must be positive", _EXAMPLE)
    return Objective(statistic, limit_ms)
