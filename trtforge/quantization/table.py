"""The calibration table: amax per activation tensor, tied to the model, the data and the recipe it came from.

A scale is amax / 127. The table keeps amax, not the scale: the scale's own type is decided when Q/DQ is inserted.
Equal tables have equal bytes: keys are sorted and floats are printed so that they read back exactly.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
import pydantic

from trtforge.errors import InputError
from trtforge.limits import DEFAULT_LIMITS, Limits
from trtforge.recipe import CalibrationMethod
from trtforge.textfile import FileModel, parse_json, read_text, validate

Sha256 = Annotated[str, pydantic.Field(pattern="^[0-9a-f]{64}$")]


class Equalization(FileModel):
    """What is done to an activation's channels before it is quantized: `x * multiplier - offset` (equalize.py).

    Attributes:
        alpha: of SmoothQuant; null where the multipliers are 1.
        multiplier: `[C]`, positive normal numbers of float16.
        offset: `[C]` numbers that float16 holds, or null.
    """

    alpha: Annotated[float, pydantic.Field(ge=0.0, le=1.0)] | None
    multiplier: tuple[Annotated[float, pydantic.Field(ge=2.0**-14, le=65504.0)], ...]
    offset: tuple[Annotated[float, pydantic.Field(ge=-65504.0, le=65504.0)], ...] | None = None

    def apply(self, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The equalized rows, `[R, C]`."""
        scaled = rows * np.asarray(self.multiplier, np.float32)
        return scaled if self.offset is None else scaled - np.asarray(self.offset, np.float32)


class TensorRange(FileModel):
    """What calibration decided and saw for one activation.

    Attributes:
        amax: the absolute value that maps to 127; of the equalized tensor where there is an equalization.
        axis: activations have one scale, so always null.
        min: smallest finite value seen.
        max: largest finite value seen.
        rms: root mean square of the finite values; max / rms tells how far outliers stand out.
        non_finite: NaN and infinities seen and ignored.
        equalization: what is done to its channels first; null for nothing.
    """

    amax: Annotated[float, pydantic.Field(ge=0.0, le=float(np.finfo(np.float32).max))]
    axis: None = None
    min: float
    max: float
    rms: float
    non_finite: Annotated[int, pydantic.Field(ge=0)] = 0
    equalization: Equalization | None = None


class CalibrationTable(FileModel):
    """A `calibration.json`.

    Attributes:
        method: how amax was chosen.
        percentile: the percentile used, null for other methods.
        samples: calibration samples seen.
        model_sha256: of the source model, external data included.
        data_sha256: of the calibration data.
        recipe_sha256: fingerprint of the recipe.
        tensors: range by tensor name of the normalised graph.
    """

    schema_version: Literal[1] = 1
    method: CalibrationMethod
    percentile: float | None = None
    samples: Annotated[int, pydantic.Field(ge=1)]
    model_sha256: Sha256
    data_sha256: Sha256
    recipe_sha256: Sha256
    tensors: dict[str, TensorRange]

    def to_json(self) -> str:
        """The file's text; equal tables give equal text."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, indent=1, allow_nan=False) + "\n"

    def check_model(self, sha256: str) -> None:
        """Refuse a table that was made from another model.

        Raises:
            InputError: the fingerprints differ.
        """
        if sha256 != self.model_sha256:
            raise InputError(
                "the calibration table was made from another model",
                f"its model_sha256 is {self.model_sha256[:12]}..., this model's is {sha256[:12]}...",
                "calibrate this model: trtforge calibrate MODEL --calib DATA, or give the data instead of the table",
            )

    def amax_of(self, tensors: Iterable[str]) -> dict[str, float]:
        """amax by tensor name, for the given tensors only.

        Raises:
            InputError: the table lacks some of them.
        """
        wanted = list(tensors)
        missing = [name for name in wanted if name not in self.tensors]
        if missing:
            raise InputError(
                f"the calibration table lacks {len(missing)} of the {len(wanted)} tensors to quantize",
                f"missing: {', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}",
                "calibrate again with this recipe and these options",
            )
        return {name: self.tensors[name].amax for name in wanted}


def load_table(path: Path, limits: Limits = DEFAULT_LIMITS) -> CalibrationTable:
    """The calibration table of a JSON file.

    Raises:
        InputError: missing or unreadable file, invalid JSON or content.
    """
    source = f"calibration table {path}"
    return validate(CalibrationTable, parse_json(read_text(path, "calibration table", limits), source), source)
