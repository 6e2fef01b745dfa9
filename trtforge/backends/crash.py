"""Where a build process died: the last node that its log speaks of."""

from __future__ import annotations

from pathlib import Path

from trtforge.backends.diagnose import describe_place, printable, translate
from trtforge.backends.trace import read_log
from trtforge.errors import REDUCE_HINT, ChildDiedError, Diagnosis

_CAUSE = "crash"


def locate_death(error: ChildDiedError, log: Path | None) -> ChildDiedError:
    """The error of a build process that died, with the node that it was on and a diagnosis.

    Args:
        error: what the isolation layer knows: signal, last progress, end of the log.
        log: everything that the builder said; None where none was kept.
    """
    if log is None:
        return error
    trace, names = read_log(log)
    node = trace.mentioned if trace.parsed else trace.node
    if node is None or node not in names.nodes:
        return error
    op, original = trace.op_of(node), names.nodes[node]
    shapes = tuple(translate(shape, names) for shape in trace.shapes_of(node))
    doing = "building a group of nodes, last named was" if trace.parsed else "parsing"
    reads = f", which reads {'; '.join(shapes)}" if shapes else ""
    place = f"it was {doing} {describe_place(original, op)}{reads}"
    located = ChildDiedError(error.what, f"{place}; {error.why}", f"{error.fix}; {REDUCE_HINT}")
    located.diagnosis = Diagnosis(_CAUSE, place, error.fix, original or None, printable(op), shapes, error.what)
    return located
