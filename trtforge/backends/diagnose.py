"""The builder's messages, turned into errors that name the node, the reason and the remedy.

One row of `_RULES` per message that is known, tried in order; the first whose pattern is found gives `why` and `fix`.
Without one the message itself is the reason. Messages speak of short names (graph/names.py): they are put back into
the model's names here, made printable and cut, because a model's names are not trusted.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from trtforge.errors import BuildError
from trtforge.graph.names import NameMap

# Text of an error that quotes the builder, and of one name in it.
_MAX_QUOTE = 600
_MAX_NAME = 120
# Logged once by every build on a machine without a GPU; of no account.
_HARMLESS = "cudaError 35"
_SOURCE_PLACE = re.compile(r"\s*\(?In \S+ at /_src/[^\s)]*\)*|IBuilder::buildSerializedNetwork: |Error Code \d+: ")
_SHORT_NAME = re.compile(r"\b[nt]\d+\b")


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """What the builder said when it gave up.

    Attributes:
        messages: its error messages, oldest first.
        node: short name of the node that its parser blamed.
        op: operator of that node, which may be inside a subgraph of it.
    """

    messages: Sequence[str]
    node: str | None = None
    op: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Rule:
    """A known message; `why` and `fix` may use {op} and the pattern's groups {0}, {1} ..."""

    pattern: str
    why: str
    fix: str


_DYNAMIC_QUANTIZATION = (
    "DynamicQuantizeLinear|MatMulInteger|ConvInteger|DynamicQuantizeLSTM|DynamicQuantizeMatMul|QLinear[A-Za-z]*"
)
_RULES = (
    _Rule(
        r"Plugin not found, are the plugin name|plugin creator version \d+ was not found",
        "TensorRT-RTX has no operator {op}",
        "replace {op} by standard ONNX operators, for example by exporting the model again without fused operators",
    ),
    _Rule(
        r"Non-zero zero point is not supported",
        "it takes symmetric quantization only: every zero-point has to be 0",
        "start from the float model and let trtforge quantize it, or quantize again with symmetric ranges",
    ),
    _Rule(
        r"Scale coefficients must all be positive",
        "a quantization scale is zero, negative or not a number",
        "start from the float model and let trtforge quantize it, or mend the scale",
    ),
    _Rule(
        r"input has type Int32 but must have type FP8",
        "it dequantizes INT32, usually a quantized bias, which TensorRT-RTX does not support",
        "keep biases in float: start from the float model and let trtforge quantize it",
    ),
    _Rule(
        rf"^op=(?:{_DYNAMIC_QUANTIZATION})\n",
        "{op} belongs to dynamic or operator-oriented quantization, which TensorRT-RTX does not support",
        "start from the float model and let trtforge quantize it",
    ),
    _Rule(
        r"\nfalse$",
        "it does not support this use of {op} and gives no reason",
        "replace {op} by other ONNX operators; an attribute or an input of it is the likely cause",
    ),
    _Rule(
        r"kOPT values for profile (\d+) violate shape constraints: (.*)",
        "the opt shapes of optimisation profile {0} do not fit the model: {1}",
        "choose opt sizes that fit together; inputs that share a dimension need the same name for it in the profile",
    ),
    _Rule(
        r"Dimension mismatch for tensor (.+) and profile (\d+)\. At dimension axis (\d+), profile has (.*?) but tensor "
        r"has (\d+)",
        "optimisation profile {1} gives axis {2} of input '{0}' the range {3}, but the model fixes it to {4}",
        "correct the profile",
    ),
    _Rule(
        r"Failed to convert ONNX date type",
        "an input or a constant has an element type that TensorRT-RTX does not have",
        "cast it to float32, float16, int32 or int64 when exporting the model",
    ),
    _Rule(
        r"must resolve to a build-time constant|must be an initializer",
        "an input of {op} is computed at run time but has to be a constant",
        "make that input a constant when exporting the model",
    ),
    _Rule(
        r"for Turing \(SM75\): (.*)",
        "sm_75 cannot run it: {0}",
        "build with --int8 --fp16 or --fp16, or for sm_80 or newer",
    ),
    _Rule(
        r"must have same input types. But they are of types (\w+) and (\w+)",
        "its inputs have different element types, {0} and {1}",
        "insert a Cast in front of one of them",
    ),
    _Rule(
        r"model contains HW-specific datatypes: b16",
        "the model holds bf16, which sm_75 does not have",
        "build with --fp16 in the place of --bf16, or for sm_80 or newer",
    ),
    _Rule(
        r"model contains HW-specific datatypes: ([\w, ]+)",
        "the model holds {0}, which not every target has",
        "FP8 needs --gpu sm_89 or newer, FP4 needs sm_120; build one artifact for those and another for older targets",
    ),
    _Rule(
        r"(?i)could not find any implementation",
        "it has no kernel for this node in this type and shape",
        "keep the node in a wider type (recipe: exclude), or change its channels or groups",
    ),
    _Rule(
        r"(?i)out ?of ?memory|bad_alloc",
        "memory ran out",
        "close other programs, lower the largest shapes, or use a machine with more memory",
    ),
    _Rule(
        r"no integer solution|dimensions not compatible|Shape Error",
        "shapes inside the model do not fit: {message}",
        "check the model and the ranges of the profile; the model may need some sizes fixed",
    ),
)
_OTHERWISE = "export the part of the model around it in another way, or keep it out of the engine"


def error_from_refusal(refusal: Refusal, names: NameMap) -> BuildError:
    """The error for a user.

    Args:
        refusal: what the builder said.
        names: the way back to the model's names.
    """
    messages = [_clean(message) for message in refusal.messages if _HARMLESS not in message or "\n" in message]
    message = _translate("; ".join(dict.fromkeys(messages[-3:])), names)[:_MAX_QUOTE] or "it gave no reason"
    node = refusal.node or _first_node_in(messages, names)
    original = names.nodes.get(node) if node else None
    op = refusal.op or ""
    of_type = f" ({_printable(op)})" if op else ""
    if original:
        where = f"node '{_printable(original)}'{of_type}"
    else:
        where = f"a node without a name{of_type}" if node or op else "the model"
    why, fix = _explain(messages, message, op, names)
    return BuildError(f"TensorRT-RTX refuses {where}", why, fix, node=original or None)


def _explain(messages: Sequence[str], message: str, op: str, names: NameMap) -> tuple[str, str]:
    text = "\n".join([f"op={op}", *messages])
    for rule in _RULES:
        match = re.search(rule.pattern, text, re.MULTILINE)
        if match:
            groups = [_translate(group or "", names) for group in match.groups()]
            values = {"op": _printable(op) or "one of its operators", "message": message}
            return rule.why.format(*groups, **values), rule.fix.format(*groups, **values)
    return message, _OTHERWISE


def _clean(message: str) -> str:
    lines = [line for line in message.splitlines() if _HARMLESS not in line]
    return _SOURCE_PLACE.sub("", "\n".join(lines)).strip()


def _first_node_in(messages: Sequence[str], names: NameMap) -> str | None:
    found = (match[0] for message in messages for match in _SHORT_NAME.finditer(message))
    return next((name for name in found if name in names.nodes), None)


def _translate(text: str, names: NameMap) -> str:
    """The text on one line, with short names put back."""

    def original(match: re.Match[str]) -> str:
        return _printable(names.nodes.get(match[0]) or names.tensors.get(match[0]) or match[0])

    return _SHORT_NAME.sub(original, "; ".join(text.splitlines()))


def _printable(name: str) -> str:
    text = "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in name)
    return text if len(text) <= _MAX_NAME else f"{text[:_MAX_NAME]}..."


def missing_range_error(port: str, profile: int, shape: Sequence[int]) -> BuildError:
    """The error for an input with open sizes that a profile has no range for."""
    name = _printable(port)
    return BuildError(
        f"optimisation profile {profile} has no range for input '{name}'",
        f"its shape is {list(shape)}, -1 being open",
        f"add it to the profile:\ninputs: {{{name}: [...]}}",
    )


def missing_values_error(port: str, num_values: int) -> BuildError:
    """The error for a shape-tensor input whose values no profile bounds."""
    name, ones = _printable(port), ", ".join(["1"] * max(1, num_values))
    return BuildError(
        f"input '{name}' decides shapes, but the profile does not give its values",
        "the builder needs their smallest, usual and largest",
        f"add to the profile:\nvalues: {{{name}: {{min: [{ones}], opt: [{ones}], max: [{ones}]}}}}",
    )
