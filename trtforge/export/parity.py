"""Compare the ONNX model in ONNX Runtime with the original in torch; no torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from trtforge.errors import ChildDiedError, InputError
from trtforge.export_info import ExportRun, OutputDifference
from trtforge.reference import ReferenceModel

# Largest difference from torch, relative to the output's largest value. Two fp32 runtimes differ by 1e-6 over a few
# layers and 1e-5 over many; a wrong mask, position or baked size shows as 1e-2 and more.
TOLERANCE = 1e-3
# The same for an output in half precision, whose steps are 2^-8 to 2^-11.
HALF_TOLERANCE = 2e-2
# Share of an integer or boolean output that has to be equal: a tie of two scores may go either way.
EQUAL_SHARE = 0.999

Array = npt.NDArray[Any]


def compare_run(model: ReferenceModel, inputs: Mapping[str, Array], expected: Mapping[str, Array]) -> ExportRun:
    """Run the ONNX model on the inputs and compare every output with torch's."""
    shapes = {name: tuple(array.shape) for name, array in inputs.items()}
    try:
        actual = model.run(inputs)
    except (InputError, ChildDiedError) as err:
        return ExportRun(inputs=shapes, outputs={}, error=f"{err.what}: {err.why}")
    wrong = [
        f"output '{name}' has shape {list(actual[name].shape)}, in torch {list(array.shape)}"
        for name, array in expected.items()
        if name in actual and actual[name].shape != array.shape
    ]
    wrong += [f"output '{name}' is missing" for name in expected if name not in actual]
    if wrong:
        return ExportRun(inputs=shapes, outputs={}, error="; ".join(wrong))
    return ExportRun(inputs=shapes, outputs={name: difference(actual[name], array) for name, array in expected.items()})


def difference(actual: Array, expected: Array) -> OutputDifference:
    """How far one output is from torch's; NaN and infinity have to be in the same places."""
    if expected.dtype.kind in "biu":
        share = float(np.mean(actual == expected)) if expected.size else 1.0
        error = None if expected.dtype.kind == "b" else float(_largest(actual.astype(np.float64) - expected))
        return OutputDifference(max_abs_error=error, max_abs_value=None, passed=share >= EQUAL_SHARE)
    tolerance = TOLERANCE if expected.dtype.itemsize >= 4 else HALF_TOLERANCE
    a, e = actual.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(e)
    if not np.array_equal(a[~finite], e[~finite], equal_nan=True) or not np.isfinite(a[finite]).all():
        return OutputDifference(max_abs_error=None, max_abs_value=None, passed=False)
    error, value = float(_largest(a[finite] - e[finite])), float(_largest(e[finite]))
    return OutputDifference(max_abs_error=error, max_abs_value=value, passed=error <= tolerance * value + 1e-6)


def _largest(values: Array) -> Any:
    return np.abs(values).max(initial=0.0)
