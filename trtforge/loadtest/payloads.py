"""Make the requests of a load test from its traffic file, and check them against the model's signature.

Equal traffic, files and signature give equal requests.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from trtforge.errors import InputError
from trtforge.limits import DEFAULT_LIMITS, Limits
from trtforge.loadtest.request import NUMPY_TYPES, Request, RequestCell, numpy_dtype, tensor_from_array
from trtforge.loadtest.samples import RowFile, TextFile
from trtforge.loadtest.shapes import check_batches, request_shape
from trtforge.loadtest.signature import TEXT, ModelInput, Signature
from trtforge.loadtest.traffic import InputValues, LengthBucket, SampleFile, Traffic
from trtforge.loadtest.values import make_texts, make_values

# Bytes of all prepared requests of a step.
_MAX_BYTES = 2**30
# Bytes of a text: a reference to it, and a common word with the space after it.
_POINTER_BYTES, _WORD_BYTES = 8, 5
_FIX = "correct the traffic file"
_Group = LengthBucket | SampleFile | None


@dataclasses.dataclass(frozen=True, slots=True)
class Draft:
    """A request before it is packed.

    Attributes:
        feeds: inputs by name.
        num_bytes: that they take in memory.
        rows: that its samples are, of the sample file or the text file; empty for made values.
    """

    feeds: Mapping[str, np.ndarray]
    num_bytes: int
    rows: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class DraftCell:
    """As `RequestCell`, of drafts."""

    bucket: str | None
    batch: int
    weight: float
    drafts: tuple[Draft, ...]


class RequestMaker:
    """Makes requests for one model.

    Args:
        traffic: what to make.
        signature: of the model.
        folder: where the traffic's paths start.
        limits: bounds on the files.

    Raises:
        InputError: the traffic does not fit the model, or one of its files cannot be used; says what would fit.
    """

    def __init__(self, traffic: Traffic, signature: Signature, folder: Path, limits: Limits = DEFAULT_LIMITS) -> None:
        self._traffic = traffic
        self._signature = signature
        _check_names(traffic, signature)
        check_batches(traffic, signature)
        self._texts = {
            name: TextFile(folder / values.file, limits)
            for name, values in traffic.inputs.items()
            if values.file is not None
        }
        self._samples = {sample.name: RowFile(folder / sample.file, signature, limits) for sample in traffic.samples}
        self._inputs = [port for port in signature.inputs if not port.is_optional or port.name in traffic.inputs]

    def cells(self, batch: int | None) -> Iterator[DraftCell]:
        """The requests of a step.

        Args:
            batch: of the step; None for the traffic's mix.

        Raises:
            InputError: values that cannot be made, or more of them than fit in memory.
        """
        batches = self._traffic.batch_weights if batch is None else {batch: 1.0}
        groups: list[_Group] = [*self._traffic.lengths, *self._traffic.samples] or [None]
        total = sum(batches.values()) * sum(1.0 if group is None else group.weight for group in groups)
        left = _MAX_BYTES
        for place, group in enumerate(groups):
            for samples, batch_weight in batches.items():
                weight = (1.0 if group is None else group.weight) * batch_weight / total
                # Each cell has its own generator: its requests do not change with the weight of another one.
                random = np.random.default_rng([self._traffic.seed, place, samples])
                drafts = []
                for _ in range(max(1, round(self._traffic.distinct * weight))):
                    drafts.append(self._draft(random, group, samples, left))
                    left -= drafts[-1].num_bytes
                yield DraftCell(None if group is None else group.name, samples, weight, tuple(drafts))

    def pack(self, cell: DraftCell, answers: Sequence[Mapping[str, np.ndarray]]) -> RequestCell:
        """The requests of a cell, with the right answer to each; an empty one where any answer is right."""
        datatypes = {port.name: port.datatype for port in self._signature.inputs}
        requests = tuple(
            Request(
                tuple(tensor_from_array(name, datatypes[name], array) for name, array in draft.feeds.items()), expected
            )
            for draft, expected in zip(cell.drafts, answers, strict=True)
        )
        return RequestCell(cell.bucket, cell.batch, cell.weight, requests)

    def unranged_inputs(self) -> list[str]:
        """Names of integer inputs whose range the traffic leaves open."""
        if self._traffic.samples:
            return []
        ranged = {name for name, values in self._traffic.inputs.items() if (values.min, values.max) != (None, None)}
        return [port.name for port in self._inputs if "INT" in port.datatype and port.name not in ranged]

    def _draft(self, random: np.random.Generator, group: _Group, batch: int, left: int) -> Draft:
        """A request that takes no more than the bytes that are left: sizes are looked at before anything is made."""
        if isinstance(group, SampleFile):
            samples = self._samples[group.name]
            num_bytes = self._reserved(batch * samples.row_bytes, left)
            rows = samples.choose(random, batch)
            return Draft(samples.feeds(rows), num_bytes, rows)
        length = None if group is None else int(random.integers(group.min, group.max, endpoint=True))
        feeds: dict[str, np.ndarray] = {}
        rows = ()
        values = {port.name: self._traffic.inputs.get(port.name, InputValues()) for port in self._inputs}
        shapes = [
            (port, request_shape(self._signature, port, values[port.name], length, batch)) for port in self._inputs
        ]
        num_bytes = self._reserved(sum(math.prod(shape) * _element_bytes(port, group) for port, shape in shapes), left)
        for port, shape in shapes:
            if port.name in self._texts:
                rows = self._texts[port.name].choose(random, shape, group)
                feeds[port.name] = self._texts[port.name].array(rows, shape)
            elif port.datatype == TEXT:
                feeds[port.name] = make_texts(random, shape, group)
            else:
                feeds[port.name] = make_values(random, port, values[port.name], shape)
        return Draft(feeds, num_bytes, rows)

    def _reserved(self, num_bytes: int, left: int) -> int:
        if num_bytes > left:
            what = f"{self._traffic.distinct} distinct requests need too much memory"
            why = f"they take more than {_MAX_BYTES} bytes; the next one takes {num_bytes}"
            raise InputError(what, why, "lower `distinct`, the lengths or the batch size in the traffic file")
        return num_bytes


def _element_bytes(port: ModelInput, lengths: LengthBucket | None) -> int:
    """Of one element of an input; of a text at most."""
    if port.datatype != TEXT:
        return numpy_dtype(port.datatype).itemsize
    return _POINTER_BYTES + (0 if lengths is None else _WORD_BYTES * lengths.max)


def _check_names(traffic: Traffic, signature: Signature) -> None:
    known: dict[str, ModelInput] = {port.name: port for port in signature.inputs}
    for name, values in traffic.inputs.items():
        if name not in known:
            why = f"it takes {signature.describe_inputs()}"
            raise InputError(f"model {signature.name!r} has no input {name!r}", why, _FIX)
        if values.file is not None and known[name].datatype != TEXT:
            why = f"the model takes {known[name].describe()}, which is no text"
            raise InputError(f"input {name!r} cannot come from a text file", why, _FIX)
    for name in traffic.outputs:
        if name not in signature.outputs:
            why = f"it gives {', '.join(signature.outputs)}"
            raise InputError(f"model {signature.name!r} has no output {name!r}", why, _FIX)
    for port in signature.inputs:
        if port.datatype not in NUMPY_TYPES and port.datatype != TEXT:
            why = f"types that can be sent: {', '.join(NUMPY_TYPES)}, {TEXT}"
            raise InputError(f"input {port.name!r} has the type {port.datatype}", why, "test another model")
