"""What the linter and the fixer say."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One place where a rule is broken.

    Attributes:
        rule: name of the rule.
        node: name of the node.
        what, why, fix: as in errors.py.
        severity: "error" or "warning".
    """

    rule: str
    node: str
    what: str
    why: str
    fix: str
    severity: Literal["error", "warning"]


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    """One change that the fixer made.

    Attributes:
        rule: name of the rule that was broken.
        nodes: names of the nodes that broke it; a pair is changed as one.
        what: what was done, and how far numbers move.
    """

    rule: str
    nodes: tuple[str, ...]
    what: str
