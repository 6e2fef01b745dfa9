"""What the rewriting of operators reports."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Rewrite:
    """One node that was replaced.

    Attributes:
        rule: full name of its operator, such as "com.microsoft.FastGelu".
        node: its name.
        what: what took its place, and how far numbers move.
    """

    rule: str
    node: str
    what: str


@dataclasses.dataclass(frozen=True, slots=True)
class Refused:
    """One node that TensorRT does not take and that cannot be written in operators that it does.

    Attributes:
        node: its name.
        op: full name of its operator.
        reason: why it stays.
        fix: what the user can do.
    """

    node: str
    op: str
    reason: str
    fix: str


class RefusedError(Exception):
    """Raised by a rule: the node has no standard form.

    Args:
        reason, fix: as in `Refused`.
    """

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.fix = fix


class NotYetError(Exception):
    """Raised by a rule: a type, rank or size is not known; a later round may know it.

    Args:
        missing: what is not known, as the end of "it needs to know ...".
    """

    def __init__(self, missing: str) -> None:
        super().__init__(missing)
        self.missing = missing
