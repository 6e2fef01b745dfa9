"""Reads the layer table that TensorRT-RTX logs at the end of a build: one message, `Layers:`, then a row per kernel.

A text that does not fit gives a plan marked unreadable, never an exception: a new release must not break builds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from trtforge.backends.plan import EnginePlan, OriginalNames, PlanLayer, dtype_of
from trtforge.manifest import PlanTensor

_MAX_ROWS = 1_000_000


class _UnknownFormatError(Exception):
    """The text is not a table as this module knows it."""


def parse_plan(text: str, ports: Sequence[str], nodes: Mapping[str, str], tensors: Mapping[str, str]) -> EnginePlan:
    """The plan in the builder's engine-layer message.

    Args:
        text: the message, starting with "Layers:".
        ports: names of the model's inputs and outputs, which the table has verbatim.
        nodes: short name -> original name of the nodes.
        tensors: the same for tensors.
    """
    head, _, body = text.partition("\n")
    if head != "Layers:":
        return EnginePlan((), "the builder logged no layer table")
    names = OriginalNames(frozenset(ports), nodes, tensors)
    rows = body.partition("\n\n")[0].split("\n", _MAX_ROWS)
    try:
        return EnginePlan(tuple(_RowReader(row, names).read() for row in rows if row))
    except _UnknownFormatError as err:
        return EnginePlan((), f"the builder's layer table has an unknown format: {err}")


class _RowReader:
    """Reads one row from left to right.

    `Name: N, LayerType: T, Inputs: [ { Name: .., Dimensions: [..], .. Datatype: D, Format: F }, { .. }],
    Constants: [..], Outputs: [..], TacticName: K, StreamId: 0, Metadata: [ONNX Layer: A]<0x1F>[ONNX Layer: B]`

    A row that stands outside the compiled graph (ShapeHostToDevice, which a loop has) lacks Constants, has other fields
    for TacticName, and says `Location: Device` after an operand's name.
    """

    def __init__(self, text: str, names: OriginalNames) -> None:
        self._text = text
        self._position = 0
        # Only a port may hold the text that ends a name; such names are tried first, the longest of them first.
        self._odd_ports = sorted((port for port in names.ports if ", Dimensions: [" in port), key=len, reverse=True)
        self._names = names

    def read(self) -> PlanLayer:
        self._expect("Name: ")
        builder_name = self._until(", LayerType: ")
        layer_type = self._until(", Inputs: [")
        inputs = self._operands()
        constants: tuple[PlanTensor, ...] = ()
        if self._text.startswith("], Constants: [", self._position):
            self._expect("], Constants: [")
            constants = self._operands()
        self._expect("], Outputs: [")
        outputs = self._operands()
        self._expect("]")
        _, marker, tactic = self._until(", StreamId: ").partition(", TacticName: ")
        self._until(", Metadata: ")
        name, main_nodes = self._names.of_row(builder_name)
        onnx_nodes = self._names.in_metadata(self._text[self._position :])
        return PlanLayer(name, layer_type, tactic if marker else "", inputs, constants, outputs, onnx_nodes, main_nodes)

    def _expect(self, literal: str) -> None:
        if not self._text.startswith(literal, self._position):
            found = self._text[self._position : self._position + 40]
            raise _UnknownFormatError(f"expected {literal!r}, found {found!r}")
        self._position += len(literal)

    def _until(self, literal: str) -> str:
        end = self._text.find(literal, self._position)
        if end < 0:
            raise _UnknownFormatError(f"{literal!r} is missing in {self._text[:80]!r}")
        found = self._text[self._position : end]
        self._position = end + len(literal)
        return found

    def _operands(self) -> tuple[PlanTensor, ...]:
        operands = []
        while self._text.startswith(" { Name: ", self._position):
            self._expect(" { Name: ")
            name = self._operand_name()
            dims = self._until("]")
            self._until(", Datatype: ")
            dtype = self._until(", Format: ")
            self._until(" }")
            if self._text.startswith(",", self._position):
                self._position += 1
            shape = tuple(int(dim) for dim in re.findall(r"-?\d{1,18}", dims))
            operands.append(PlanTensor(name=name, dtype=dtype_of(dtype), shape=shape))
        return tuple(operands)

    def _operand_name(self) -> str:
        for port in self._odd_ports:
            if self._text.startswith(f"{port}, Dimensions: [", self._position):
                self._position += len(port) + len(", Dimensions: [")
                return port
        name = self._until(", Dimensions: [")
        if name not in self._names.ports:
            name = name.removesuffix(", Location: Device")
        return self._names.of_tensor(name)
