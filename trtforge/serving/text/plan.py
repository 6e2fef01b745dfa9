"""What a text model is behind its front: which inputs it takes, where its outputs count tokens, which lengths it gets.

The front knows three inputs, by the names that Hugging Face gives them: input_ids and attention_mask, and
token_type_ids where the model has it. Each is [batch, tokens]. Without a mask, padding would change the answers. Which
axes of the outputs count tokens is seen in ONNX Runtime, which runs one text at two lengths; where it cannot run the
model, the names of dims say so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from trtforge.errors import InputError, TrtForgeError
from trtforge.limits import DEFAULT_LIMITS, Limits
from trtforge.manifest import MODEL_NAME, IoInfo, Manifest
from trtforge.reference import ReferenceModel
from trtforge.serving.artifact import Artifact
from trtforge.serving.repository import FileSource
from trtforge.serving.text.lengths import (
    DEFAULT_MAX_PADDING,
    LengthBuckets,
    count_padding,
    default_buckets,
    given_buckets,
    measured_buckets,
    read_lines,
)
from trtforge.serving.text.tokenizer import TextTokenizer

IDS_INPUT, MASK, TYPES_INPUT = "input_ids", "attention_mask", "token_type_ids"
_INPUTS = (IDS_INPUT, MASK, TYPES_INPUT)
_INTEGERS = frozenset(["int32", "int64"])
# The second of two lengths that the model is run at is so much longer than the first, or the longest.
_LONGER = 8


@dataclasses.dataclass(frozen=True, slots=True)
class TextOptions:
    """How a text model is served.

    Attributes:
        tokenizer: `tokenizer.json`, or the folder that it is in.
        buckets: lengths that texts are padded to; empty means that they are chosen.
        lengths: texts, one a line, that the lengths are chosen for.
        max_padding: share of padding that they may have at most; None takes the default.
        truncate: texts that are too long are cut; otherwise they are refused.
    """

    tokenizer: Path
    buckets: tuple[int, ...] = ()
    lengths: Path | None = None
    max_padding: float | None = None
    truncate: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class TextPlan:
    """A text model that can be served.

    Attributes:
        tokenizer: the file.
        pad_id: token that fills rows up.
        buckets: lengths that texts are padded to.
        shapes: of each output: -1 for axis 0, which counts texts, and for axes that count tokens; None for another
            axis of unknown size. Where the model takes one length only, no axis counts tokens.
        truncate: texts that are too long are cut.
        notes: what the user has to know.
    """

    tokenizer: FileSource
    pad_id: int
    buckets: LengthBuckets
    shapes: Mapping[str, tuple[int | None, ...]]
    truncate: bool
    notes: tuple[str, ...]

    def sequence_axes(self, output: str) -> tuple[int, ...]:
        """Axes of an output that count tokens."""
        return tuple(axis for axis, size in enumerate(self.shapes[output]) if axis > 0 and size == -1)


def plan_text(artifact: Artifact, options: TextOptions, limits: Limits = DEFAULT_LIMITS) -> TextPlan:
    """How an artifact is served as a text model.

    Raises:
        InputError: it is no text model, or the tokenizer, the texts or the options do not fit it.
        UnavailableError: the package `tokenizers` is not installed.
    """
    _check_options(options)
    _check_ports(artifact.manifest)
    spans = length_spans(artifact.manifest)
    with TextTokenizer(options.tokenizer, limits) as tokenizer:
        rows = artifact.facts.integer_limits.get(IDS_INPUT)
        if rows is not None and tokenizer.largest_id >= rows:
            raise InputError(
                f"--tokenizer {options.tokenizer} is not this model's",
                f"it has tokens up to {tokenizer.largest_id}, and the model's table has {rows} rows",
                "give the tokenizer that the model was trained with",
            )
        buckets = _choose_buckets(options, spans, tokenizer, limits)
        notes = (buckets.describe(), _describe_limit(buckets.lengths[-1], tokenizer.truncation, options.truncate))
        source, pad_id = tokenizer.source, tokenizer.pad_id
    shapes = _find_output_shapes(artifact, spans)
    return TextPlan(source, pad_id, buckets, shapes, options.truncate, notes)


def _describe_limit(largest: int, own: int | None, truncate: bool) -> str:
    """What becomes of a text that is too long."""
    what = f"cut to {largest}" if truncate else "refused; --truncate cuts it"
    other = "" if own in (None, largest) else f" (the tokenizer's own limit of {own} is not used)"
    return f"a text of more than {largest} tokens is {what}{other}"


def length_spans(manifest: Manifest) -> list[tuple[int, int]]:
    """Smallest and largest length of each profile."""
    spans = (profile.inputs[IDS_INPUT] for profile in manifest.profiles)
    return [(span.min[1], span.max[1]) for span in spans]


def _check_options(options: TextOptions) -> None:
    if options.max_padding is not None and options.buckets:
        raise InputError("--max-padding and --buckets exclude each other", "each makes the lengths", "give one")
    if options.max_padding is not None and options.lengths is None:
        raise InputError("--max-padding needs texts", "padding is counted on them", "give them with --lengths FILE")


def _check_ports(manifest: Manifest) -> None:
    inputs = {port.name: port for port in manifest.io if port.mode == "input"}
    missing = [name for name in (IDS_INPUT, MASK) if name not in inputs]
    other = [name for name in inputs if name not in _INPUTS]
    if missing or other:
        what = f"it has no input {' or '.join(missing)}" if missing else f"it has the input {', '.join(other)} as well"
        raise InputError(
            f"{manifest.model.name} cannot be served with a tokenizer",
            f"{what}; a text model takes {IDS_INPUT}, {MASK} and, where it has it, {TYPES_INPUT}",
            "export it with these inputs, or package it without --tokenizer",
        )
    for port in inputs.values():
        _check_port(port, manifest)


def _check_port(port: IoInfo, manifest: Manifest) -> None:
    def refuse(why: str) -> InputError:
        what = f"{manifest.model.name} cannot be served with a tokenizer"
        return InputError(what, f"input '{port.name}' {why}", "export it with int64 inputs [batch, tokens]")

    if port.dtype not in _INTEGERS:
        raise refuse(f"has type {port.dtype}, not int64 or int32")
    for profile in manifest.profiles:
        span, ids = profile.inputs[port.name], profile.inputs[IDS_INPUT]
        if len(span.opt) != 2:
            raise refuse(f"has {len(span.opt)} axes, not 2")
        if span != ids:
            raise refuse(f"has other ranges than {IDS_INPUT} in profile '{profile.name}'")
        if span.min[0] > 1:
            raise refuse(f"takes no batch below {span.min[0]} in profile '{profile.name}', and texts come one by one")


def _choose_buckets(
    options: TextOptions, spans: Sequence[tuple[int, int]], tokenizer: TextTokenizer, limits: Limits
) -> LengthBuckets:
    if options.lengths is None:
        return given_buckets(options.buckets, spans) if options.buckets else default_buckets(spans)
    found = tokenizer.count(read_lines(options.lengths, limits))
    if options.buckets:
        given = given_buckets(options.buckets, spans)
        return dataclasses.replace(given, count=count_padding(found, given.lengths))
    bound = DEFAULT_MAX_PADDING if options.max_padding is None else options.max_padding
    return measured_buckets(found, spans, bound, options.lengths.name)


def _find_output_shapes(artifact: Artifact, spans: Sequence[tuple[int, int]]) -> dict[str, tuple[int | None, ...]]:
    """The shape of each output; see `TextPlan.shapes`.

    Raises:
        InputError: an output cannot be cut to a text.
    """
    low, high = min(span[0] for span in spans), max(span[1] for span in spans)
    first, second = min(max(low, 2), high), min(max(low, 2) + _LONGER, high)
    try:
        with ReferenceModel(artifact.path / MODEL_NAME, as_written=artifact.facts.has_qdq) as reference:
            short = reference.run(_one_text(artifact.manifest, first))
            long = short if second == first else reference.run(_one_text(artifact.manifest, second))
    except TrtForgeError:
        # Such as bf16, which ONNX Runtime has on no CPU.
        return _declared_shapes(artifact.manifest)
    found: dict[str, tuple[int | None, ...]] = {}
    for name, array in short.items():
        sizes = list(zip(array.shape, long[name].shape, strict=True))
        moved = [axis for axis, (before, after) in enumerate(sizes) if before != after]
        other = [axis for axis in moved if sizes[axis] != (first, second)]
        if not sizes or sizes[0] != (1, 1) or other:
            shapes = f"{list(array.shape)} for {first} tokens and {list(long[name].shape)} for {second}"
            raise InputError(
                f"{artifact.manifest.model.name} cannot be served with a tokenizer",
                f"output '{name}' of one text has shape {shapes}; it has to be [1, ...] with the axes of tokens as "
                "long as the text",
                "take the output out of the model, or package it without --tokenizer",
            )
        found[name] = (-1, *(-1 if axis in moved else size for axis, size in enumerate(array.shape) if axis > 0))
    return found


def _declared_shapes(manifest: Manifest) -> dict[str, tuple[int | None, ...]]:
    """The same from the names of dims, where nothing here can run the model."""
    tokens = next((port.shape[1] for port in manifest.io if port.name == IDS_INPUT and port.shape), None)
    found: dict[str, tuple[int | None, ...]] = {}
    for port in manifest.io:
        if port.mode == "output":
            if not port.shape:
                raise InputError(
                    f"{manifest.model.name} cannot be served with a tokenizer",
                    f"the model does not say which axes output '{port.name}' has, and ONNX Runtime cannot run it here",
                    "state the output's shape in the model",
                )
            inner = (dim if isinstance(dim, int) else -1 if dim == tokens else None for dim in port.shape[1:])
            found[port.name] = (-1, *inner)
    return found


def _one_text(manifest: Manifest, length: int) -> dict[str, np.ndarray]:
    types = {port.name: port.source_dtype or port.dtype for port in manifest.io if port.mode == "input"}
    return {name: np.full((1, length), name != TYPES_INPUT, dtype) for name, dtype in types.items()}
