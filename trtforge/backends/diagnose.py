"""The builder's messages, turned into errors that name the node, the reason and the remedy.

What is known of messages is in messages.py; without a row there the message itself is the reason. Messages speak of
short names (graph/names.py): they are put back into the model's names here, made printable and cut, because a model's
names are not trusted.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from trtforge.backends.message_rule import Rule
from trtforge.backends.messages import RULES, UNKNOWN
from trtforge.backends.trace import SHORT_NAME, BuildTrace
from trtforge.errors import BuildError, Diagnosis
from trtforge.graph.names import NameMap

# Text of an error that quotes the builder, and of one name in it.
_MAX_QUOTE = 600
_MAX_NAME = 120
# Logged once by every build on a machine without a GPU; of no account.
_HARMLESS = "cudaError 35"
# Where in its own source the builder stood.
_SOURCE_PLACE = re.compile(
    r"\s*\(?In \S+ at /_src/[^\s)]*\)*|IBuilder::buildSerializedNetwork: |Error Code \d+: |"
    r"\[[\w.]+:\d+: ~?\w+\]\s*|MyelinCheckException: [\w.]+:\d+: |^Value: There are \d+ errors:\s*\d*",
    re.MULTILINE,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """What the builder said when it gave up.

    Attributes:
        messages: its error messages, oldest first.
        node: short name of the node that its parser blamed.
        op: operator of that node, which may be inside a subgraph of it.
        context: everything else that it logged as an error: searched where the messages say nothing, never quoted.
    """

    messages: Sequence[str]
    node: str | None = None
    op: str | None = None
    context: Sequence[str] = ()


def error_from_refusal(
    refusal: Refusal, names: NameMap, trace: BuildTrace | None = None, builder: str = "TensorRT-RTX"
) -> BuildError:
    """The error for a user, with its diagnosis.

    Args:
        refusal: what the builder said.
        names: the way back to the model's names.
        trace: how far the build came; tells operators and shapes, and the node where no message does.
        builder: what the error calls it.
    """
    trace = trace or BuildTrace()
    messages = [_clean(message) for message in refusal.messages if _HARMLESS not in message or "\n" in message]
    context = [_clean(message) for message in refusal.context]
    message = translate("; ".join(dict.fromkeys(messages[-3:])), names)[:_MAX_QUOTE] or "it gave no reason"
    node = refusal.node or _first_node_in(messages, names, trace)
    op = refusal.op or trace.op_of(node)
    rule, match = _find_rule(messages, context, op)
    if node is None:
        node = _suspect(rule, match, trace)
        op = op or trace.op_of(node)
    groups = [translate(group or "", names) for group in match.groups()] if match else []
    values = {"op": printable(op) or "one of its operators", "message": message, "builder": builder}
    why, fix = rule.why.format(*groups, **values), rule.fix.format(*groups, **values)
    original = names.nodes.get(node, "") if node else ""
    shapes = tuple(translate(shape, names) for shape in trace.shapes_of(node))
    diagnosis = Diagnosis(rule.cause, why, fix, original or None, printable(op), shapes, message)
    where = describe_place(original, op) if node or op else "the model"
    return BuildError(f"{builder} refuses {where}", why, fix, node=original or None, diagnosis=diagnosis)


def _find_rule(messages: Sequence[str], context: Sequence[str], op: str) -> tuple[Rule, re.Match[str] | None]:
    """The first rule whose pattern the messages hold; where none does, the rest of the log is searched too."""
    for lines in (messages, [*messages, *context]):
        text = "\n".join([f"op={op}", *lines])
        for rule in RULES:
            if match := re.search(rule.pattern, text, re.MULTILINE):
                return rule, match
    return UNKNOWN, None


def _suspect(rule: Rule, match: re.Match[str] | None, trace: BuildTrace) -> str | None:
    """The node to blame where the builder names none."""
    if rule.subject == "model":
        return None
    if not trace.parsed:
        return trace.node
    if rule.subject == "last":
        return trace.mentioned
    # Inputs and outputs of the model keep their names, which are no short ones.
    ports = match.groups() if match else ()
    touching = [trace.maker_of(port) or trace.reader_of(port) for port in ports if port]
    if any(touching):
        return next(filter(None, touching))
    suspects = [node for node, op in trace.nodes() if op in rule.ops]
    return suspects[0] if len(suspects) == 1 else None


def _clean(message: str) -> str:
    lines = [line for line in message.splitlines() if _HARMLESS not in line]
    return _SOURCE_PLACE.sub("", "\n".join(lines)).strip()


def _first_node_in(messages: Sequence[str], names: NameMap, trace: BuildTrace) -> str | None:
    """The first node that the messages name; where they name none, the one that makes the first tensor named."""
    found = [match[1] for message in messages for match in SHORT_NAME.finditer(message)]
    makers = (trace.maker_of(name) for name in found)
    return next((name for name in found if name in names.nodes), None) or next(filter(None, makers), None)


def translate(text: str, names: NameMap) -> str:
    """The text on one line, with short names put back."""

    def original(match: re.Match[str]) -> str:
        return printable(names.nodes.get(match[1]) or names.tensors.get(match[1]) or match[1])

    return SHORT_NAME.sub(original, "; ".join(text.splitlines()))


def printable(name: str) -> str:
    """A name of an untrusted model as an error quotes it."""
    text = "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in name)
    return text if len(text) <= _MAX_NAME else f"{text[:_MAX_NAME]}..."


def describe_place(node: str, op: str) -> str:
    """A node as an error names it: by its name where it has one, and its operator where that is known."""
    of_type = f" ({printable(op)})" if op else ""
    return f"node '{printable(node)}'{of_type}" if node else f"a node without a name{of_type}"


def missing_range_error(port: str, profile: int, shape: Sequence[int]) -> BuildError:
    """The error for an input with open sizes that a profile has no range for."""
    name = printable(port)
    return _profile_error(
        "profile-missing-range",
        f"optimisation profile {profile} has no range for input '{name}'",
        f"its shape is {list(shape)}, -1 being open",
        f"add it to the profile:\ninputs: {{{name}: [...]}}",
    )


def missing_values_error(port: str, num_values: int) -> BuildError:
    """The error for a shape-tensor input whose values no profile bounds."""
    name, ones = printable(port), ", ".join(["1"] * max(1, num_values))
    return _profile_error(
        "profile-missing-values",
        f"input '{name}' decides shapes, but the profile does not give its values",
        "the builder needs their smallest, usual and largest",
        f"add to the profile:\nvalues: {{{name}: {{min: [{ones}], opt: [{ones}], max: [{ones}]}}}}",
    )


def _profile_error(cause: str, what: str, why: str, fix: str) -> BuildError:
    return BuildError(what, why, fix, diagnosis=Diagnosis(cause, f"{what}: {why}", fix))
