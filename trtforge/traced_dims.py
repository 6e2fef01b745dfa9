"""The sizes that an exported model was traced for, kept in the ONNX file.

A trace holds for some sizes only: beyond them the source's code takes another branch, which the file does not have. So
the export writes the bounds into the file's `metadata_props`, as JSON under one key, and whoever reads the file later
is bound by them. The file may come from anyone and may have been edited: an entry that cannot hold is told and left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from trtforge.errors import InputError
from trtforge.export_info import DimInfo
from trtforge.limits import DEFAULT_LIMITS, Limits
from trtforge.profile import DimFact, DimReport
from trtforge.tensor import TensorSpec
from trtforge.textfile import FileModel, parse_json, validate

KEY = "trtforge.dims"
# Characters; an entry takes about 50, and a model has few dims.
_MOST_TEXT = 2**16
# The builders count sizes in int32.
_MOST_SIZE = 2**31 - 1


class _Written(FileModel):
    version: Literal[1]
    dims: dict[str, DimInfo]


@dataclasses.dataclass(frozen=True, slots=True)
class TracedDims:
    """What a file says of its trace.

    Attributes:
        specs: the inputs of the model, as the file has them.
        dims: the sizes that it holds for, by the name of a dim; a dim that nothing bounds is left out.
        notes: what was ignored, and why.
    """

    specs: Sequence[TensorSpec] = ()
    dims: Mapping[str, DimInfo] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def narrow(self, report: DimReport) -> DimReport:
        """What a graph says of its dims, within what the trace holds for."""
        return dataclasses.replace(report, dims=tuple(self._narrow(fact) for fact in report.dims))

    def _narrow(self, fact: DimFact) -> DimFact:
        shapes = {spec.name: spec.shape or () for spec in self.specs}
        low, high = fact.low, fact.high
        for name, axis in fact.axes:
            shape = shapes.get(name, ())
            dim = shape[axis] if axis < len(shape) else None
            traced = self.dims.get(dim) if isinstance(dim, str) else None
            if traced is not None:
                low = max(low, traced.min if traced.min > 1 else low)
                high = min((size for size in (high, traced.max) if size is not None), default=None)
        if fact.kind != "free" or (low, high) == (fact.low, fact.high) or (high is not None and low > high):
            return fact
        reason = "; ".join(text for text in (fact.reason, "the model was traced for these sizes") if text)
        return dataclasses.replace(fact, low=low, high=high, reason=reason)


def text_from_dims(dims: Mapping[str, DimInfo]) -> str | None:
    """The value of the metadata entry; None where nothing bounds a dim."""
    bounded = {name: info for name, info in sorted(dims.items()) if info.min > 1 or info.max is not None}
    return _Written(version=1, dims=bounded).model_dump_json() if bounded else None


def read_traced_dims(
    metadata: Iterable[tuple[str, str]], specs: Sequence[TensorSpec], limits: Limits = DEFAULT_LIMITS
) -> TracedDims:
    """What the metadata of a file says of its trace; nothing where it says nothing.

    Args:
        metadata: keys and values, in the file's order.
        specs: the model's inputs.
        limits: bounds on the text.
    """
    texts = [value for key, value in metadata if key == KEY]
    if not texts:
        return TracedDims(specs)
    if len(texts) > 1:
        return _ignored(specs, f"the file has it {len(texts)} times")
    if len(texts[0]) > min(_MOST_TEXT, limits.text_bytes):
        return _ignored(specs, f"it has {len(texts[0])} characters")
    try:
        content = validate(_Written, parse_json(texts[0], f"metadata {KEY!r}"), f"metadata {KEY!r}")
    except InputError as err:
        return _ignored(specs, err.why)
    known = {dim for spec in specs for dim in spec.shape or () if isinstance(dim, str)}
    is_range = {
        name: info.min <= _MOST_SIZE and (info.max is None or max(info.min, 1) <= info.max <= _MOST_SIZE)
        for name, info in content.dims.items()
    }
    dims = {name: info for name, info in content.dims.items() if name in known and is_range[name]}
    others = [name for name in content.dims if name not in known]
    empty = [name for name in content.dims if name in known and not is_range[name]]
    notes = [
        f"metadata {KEY!r} bounds {', '.join(repr(name[:40]) for name in found[:4])}{why}: ignored"
        for found, why in ((others, ", which no input has"), (empty, " to no size at all"))
        if found
    ]
    return TracedDims(specs, dims, tuple(notes))


def _ignored(specs: Sequence[TensorSpec], why: str) -> TracedDims:
    note = f"metadata {KEY!r}, the sizes that the model was traced for, cannot be used and is ignored: {why[:300]}"
    return TracedDims(specs, {}, (note,))
