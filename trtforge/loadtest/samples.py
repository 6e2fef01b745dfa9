"""Real samples for requests: rows of an `.npz` file, and lines of a text file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from trtforge.data_checks import LABELS
from trtforge.errors import InputError
from trtforge.limits import Limits
from trtforge.loadtest.request import numpy_dtype
from trtforge.loadtest.signature import OPEN, TEXT, ModelInput, Signature
from trtforge.loadtest.traffic import LengthBucket
from trtforge.npz import NpzFile
from trtforge.textfile import kind_of, read_text


def read_arrays(path: Path, limits: Limits) -> dict[str, np.ndarray]:
    """All arrays of an `.npz` file whose first axes are of one length.

    Raises:
        InputError: missing, damaged, too large, or arrays of different lengths.
    """
    if kind_of(path, "data") != "file":
        raise InputError(f"data {path} cannot be used", "there is no such file", "correct the path in the traffic file")
    file = NpzFile(path, limits)
    counts = {name: header.shape[0] if header.shape else 0 for name, header in file.headers.items()}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        why = ", ".join(f"{name} {count}" for name, count in counts.items()) or "it holds no array"
        raise InputError(f"data {path} has no rows to take", f"rows: {why}", "give every array the same first axis")
    return {name: file.read_whole(name) for name in file.headers}


class RowFile:
    """Samples of an `.npz` file that fit a model's inputs.

    Args:
        path: the file: one array per input, first axis = samples.
        signature: of the model.
        limits: bounds on the file.

    Raises:
        InputError: the file cannot be read, or does not fit; says what would.
    """

    def __init__(self, path: Path, signature: Signature, limits: Limits) -> None:
        self._signature = signature
        arrays = read_arrays(path, limits)
        ports = {port.name: port for port in signature.inputs}
        # Calibration and evaluation data may hold labels beside the inputs.
        extra = sorted(arrays.keys() - ports.keys() - {LABELS})
        missing = sorted(name for name, port in ports.items() if name not in arrays and not port.is_optional)
        if extra or missing:
            said = [f"it lacks {', '.join(missing)}"] if missing else []
            said += [f"the model has no input {', '.join(extra)}"] if extra else []
            why = f"{'; '.join(said)}; the model takes {signature.describe_inputs()}"
            raise InputError(f"samples {path} do not fit the model", why, "name the arrays as the inputs")
        self._arrays = {name: array for name, array in arrays.items() if name in ports}
        for name, array in self._arrays.items():
            _check_fit(path, ports[name], array)
        self.num_rows = len(next(iter(self._arrays.values())))
        self.row_bytes = sum(array.nbytes for array in self._arrays.values()) // self.num_rows

    def choose(self, random: np.random.Generator, batch: int) -> tuple[int, ...]:
        """Rows for a request; a row comes twice in one request only where there are fewer rows than samples."""
        return tuple(int(row) for row in random.choice(self.num_rows, batch, replace=batch > self.num_rows))

    def feeds(self, rows: Sequence[int]) -> Mapping[str, np.ndarray]:
        """The inputs of a request; one row where the model has no batch axis."""
        if not self._signature.has_batch_axis:
            return {name: array[rows[0]] for name, array in self._arrays.items()}
        return {name: array[list(rows)] for name, array in self._arrays.items()}


class TextFile:
    """Lines of a text file; empty ones are left out.

    Args:
        path: the file, UTF-8.
        limits: bounds on it.

    Raises:
        InputError: it cannot be read or has no text.
    """

    def __init__(self, path: Path, limits: Limits) -> None:
        self._path = path
        self.lines = [line for line in read_text(path, "texts", limits).splitlines() if line.strip()]
        if not self.lines:
            raise InputError(f"texts {path} cannot be used", "it has no line with text", "write one text a line")
        self._words = np.array([len(line.split()) for line in self.lines])

    def choose(
        self, random: np.random.Generator, shape: tuple[int, ...], lengths: LengthBucket | None
    ) -> tuple[int, ...]:
        """Lines for a request.

        Raises:
            InputError: no line has so many words.
        """
        low, high = (1, int(self._words.max())) if lengths is None else (lengths.min, lengths.max)
        fitting = np.flatnonzero((self._words >= low) & (self._words <= high))
        if not len(fitting):
            why = f"its lines have {self._words.min()} to {self._words.max()} words"
            raise InputError(
                f"no line of {self._path} has {low} to {high} words", why, "correct `lengths`, or add texts"
            )
        return tuple(int(line) for line in random.choice(fitting, math.prod(shape)))

    def array(self, lines: Sequence[int], shape: tuple[int, ...]) -> np.ndarray:
        """Texts as the input of a request."""
        return np.array([self.lines[line] for line in lines], dtype=object).reshape(shape)


def _check_fit(path: Path, port: ModelInput, array: np.ndarray) -> None:
    is_text = port.datatype == TEXT
    right_type = array.dtype.kind in "SU" if is_text else array.dtype == numpy_dtype(port.datatype)
    sizes = array.shape[1:]
    right_shape = len(sizes) == len(port.dims) and all(
        dim in (OPEN, size) for dim, size in zip(port.dims, sizes, strict=True)
    )
    if not right_type or not right_shape:
        why = f"a sample has {array.dtype.name} {list(sizes)}; the model takes {port.describe()}"
        fix = "save the samples as the model takes them"
        raise InputError(f"array {port.name!r} of samples {path} does not fit the model", why, fix)
