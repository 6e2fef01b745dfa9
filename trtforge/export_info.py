"""What is known of a model that was exported from PyTorch: its shapes, and how far ONNX differs from torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import pydantic

from trtforge.textfile import FileModel


class DimInfo(FileModel):
    """Sizes that the traced model takes along one dynamic dim; `max` is None where nothing bounds it."""

    min: Annotated[int, pydantic.Field(ge=0)]
    max: int | None

    def covers(self, low: int, high: int) -> bool:
        """Whether the traced model holds from one size to another.

        torch's own least size of 2 is no property of a model, so 0 and 1 are taken where nothing else bounds a dim.
        """
        return (self.min <= 1 or low >= self.min) and (self.max is None or high <= self.max)

    @property
    def limits(self) -> str:
        """`1 to 3`."""
        return f"{self.min} to {'any' if self.max is None else self.max}"


class FixedDim(FileModel):
    """A dim that was to be dynamic and that the model fixes to one size, with what fixes it."""

    name: str
    size: int
    reason: str


class OutputDifference(FileModel):
    """One output: the largest absolute difference from torch, and the largest absolute value it is measured against."""

    max_abs_error: float | None
    max_abs_value: float | None
    passed: bool


class ExportRun(FileModel):
    """Both models on the same seeded inputs of one shape.

    Attributes:
        inputs: shape of every input.
        outputs: difference of every output; empty when ONNX Runtime failed.
        error: why ONNX Runtime could not run it, or an output had another shape; else None.
    """

    inputs: dict[str, tuple[int, ...]]
    outputs: dict[str, OutputDifference]
    error: str | None = None

    @property
    def passed(self) -> bool:
        """Every output agrees."""
        return self.error is None and all(output.passed for output in self.outputs.values())


class ExportInfo(FileModel):
    """How the ONNX model came to be.

    Attributes:
        kind: what it was exported from.
        architecture: class of the PyTorch model.
        opset: of the ONNX file.
        opset_reason: why that one.
        exporter: versions, e.g. "torch 2.13.0".
        source_sha256: over the files of the source; None for a function.
        dims: the dynamic dims by name.
        fixed: dims that could not be made dynamic.
        notes: what the user should know of it.
        runs: comparisons with torch.
    """

    kind: Literal["function", "folder", "program"]
    architecture: str
    opset: int
    opset_reason: str
    exporter: str
    source_sha256: str | None
    dims: dict[str, DimInfo]
    fixed: tuple[FixedDim, ...] = ()
    notes: tuple[str, ...] = ()
    runs: tuple[ExportRun, ...]

    @property
    def passed(self) -> bool:
        """ONNX Runtime gave what torch gave, at every shape."""
        return all(run.passed for run in self.runs)


@dataclasses.dataclass(frozen=True, slots=True)
class Exported:
    """An export that a job works on.

    Attributes:
        path: the ONNX file.
        info: how it came to be.
        seconds: what it took.
    """

    path: Path
    info: ExportInfo
    seconds: float
