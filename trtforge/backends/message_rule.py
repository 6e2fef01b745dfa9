"""One message of a builder that is known."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """A known message; `why` and `fix` may use {op}, {builder}, {message} and the pattern's groups {0}, {1} ...

    Attributes:
        cause: kind of failure; remedies go by it.
        pattern: regular expression, searched line by line.
        why: the reason.
        fix: what a user can do.
        ops: operators that alone give this message; the only one of them is blamed where the builder names no node.
        subject: "node"; "model" for what no node is searched for; "last" for the last node that the builder spoke of,
            where it names none.
    """

    cause: str
    pattern: str
    why: str
    fix: str
    ops: tuple[str, ...] = ()
    subject: str = "node"
