"""Errors that a user can act on: what happened, why, and how to fix it.

The library raises them and never prints; the command line renders them and maps the class to an exit code.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a builder refused or died of, as data.

    Attributes:
        cause: the kind of failure, e.g. "missing-operator"; the same for the same failure of another node.
        reason: why, in the model's names.
        remedy: what can be done about it.
        node: name of the ONNX node; None where nothing tells it.
        op: its operator, with its domain where that is not ONNX's; empty where unknown.
        shapes: its inputs as the builder saw them, e.g. "hidden float16[-1, 8]"; -1 marks a dynamic dim.
        message: the builder's own words.
    """

    cause: str
    reason: str
    remedy: str
    node: str | None = None
    op: str = ""
    shapes: tuple[str, ...] = ()
    message: str = ""


# What the fix of a failure says that nothing is known of.
REDUCE_HINT = "find the smallest part that fails with `trtforge reduce MODEL`"


class TrtForgeError(Exception):
    """Base of every error that trtforge raises on purpose.

    Args:
        what: one sentence that states what failed, with the actual value.
        why: the reason, with the allowed values where there are any.
        fix: what the user can do about it.

    Attributes:
        diagnosis: of a build that failed; None elsewhere.
    """

    exit_code = 2
    diagnosis: Diagnosis | None = None

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        parts = [self.what, f"why: {self.why}" if self.why else "", f"fix: {self.fix}" if self.fix else ""]
        return "\n".join(part for part in parts if part)


class InputError(TrtForgeError):
    """A file, option or value given by the user cannot be used."""


class UnavailableError(TrtForgeError):
    """The request is valid but cannot be met here: a missing extra, a target no backend has, a full disk."""


class BuildError(TrtForgeError):
    """The backend refused the graph.

    Args:
        node: name of the ONNX node that the backend blamed, when it named one.
        diagnosis: the same as data.
    """

    def __init__(
        self, what: str, why: str = "", fix: str = "", node: str | None = None, diagnosis: Diagnosis | None = None
    ) -> None:
        super().__init__(what, why, fix)
        self.node = node
        self.diagnosis = diagnosis


class ChildDiedError(TrtForgeError):
    """A child process ended without an answer: killed, out of memory, or crashed in native code."""


class InternalError(TrtForgeError):
    """A defect in trtforge itself; carries the text of the original traceback.

    Args:
        detail: the traceback.
    """

    exit_code = 3

    def __init__(self, what: str, why: str = "", fix: str = "", detail: str = "") -> None:
        super().__init__(what, why, fix)
        self.detail = detail


def missing_extra(package: str, extra: str) -> UnavailableError:
    """The error for an optional dependency that is not installed, with its install line."""
    return UnavailableError(
        f"the Python package '{package}' is not installed",
        f"this step needs the optional dependencies '{extra}'",
        f"pip install 'trtforge[{extra}]'",
    )
