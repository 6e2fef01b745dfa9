"""What is a right answer, and whether one is.

A float output is right where, for every sample, the norm of its difference to the expected output is at most
`tolerance` times the norm of the expected output. Integers and flags must be equal. NaN is never right where none is
expected.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from trtforge.errors import InputError
from trtforge.limits import DEFAULT_LIMITS, Limits
from trtforge.loadtest.payloads import DraftCell
from trtforge.loadtest.samples import TextFile, read_arrays
from trtforge.loadtest.signature import TEXT, Signature
from trtforge.loadtest.traffic import Traffic
from trtforge.reference import ReferenceModel

Answer = Mapping[str, np.ndarray]


class AnswerBook:
    """The right answers to the requests of a load test; use it through `open_answers`.

    Args:
        signature: of the model under test.
        model: that computes the answers; None without one.
        rows: answers by row, by the name of the sample file's bucket; "" for the one text file.
    """

    def __init__(self, signature: Signature, model: ReferenceModel | None, rows: Mapping[str, Answer]) -> None:
        self._signature = signature
        self._model = model
        self._compared = [] if model is None else _compared_outputs(model, signature)
        self._rows = rows

    def answers(self, cell: DraftCell) -> Iterator[Answer]:
        """The answer to each request of a cell; empty where any is right.

        Raises:
            InputError: the model does not take the request.
            ChildDiedError: it died on it.
        """
        rows = self._rows.get(cell.bucket or "") or self._rows.get("")
        for draft in cell.drafts:
            if self._model is not None:
                yield self._model.run(draft.feeds, self._compared)
            elif rows is not None:
                axis = slice(None) if self._signature.has_batch_axis else 0
                yield {name: array[list(draft.rows)][axis] for name, array in rows.items()}
            else:
                yield {}


@contextlib.contextmanager
def open_answers(
    traffic: Traffic, signature: Signature, folder: Path, limits: Limits = DEFAULT_LIMITS
) -> Iterator[AnswerBook]:
    """The right answers that a traffic file states.

    Args:
        traffic: states them.
        signature: of the model under test.
        folder: where the traffic's paths start.
        limits: bounds on the files.

    Raises:
        InputError: a file cannot be read, or its outputs are not the model's.
    """
    rows: dict[str, Answer] = {}
    for sample in traffic.samples:
        if sample.expect is not None:
            samples = read_arrays(folder / sample.file, limits)
            count = len(next(iter(samples.values())))
            rows[sample.name] = _read_rows(folder / sample.expect, signature, count, limits)
    expected = traffic.expect
    if expected is not None and expected.file is not None:
        rows[""] = _read_rows(folder / expected.file, signature, _num_texts(traffic, folder, limits), limits)
    if expected is None or expected.model is None:
        yield AnswerBook(signature, None, rows)
        return
    with ReferenceModel(folder / expected.model) as model:
        yield AnswerBook(signature, model, rows)


def difference(answer: Answer, expected: Answer, tolerance: float, has_batch_axis: bool) -> str | None:
    """Why an answer is wrong; None where it is right.

    Args:
        answer: outputs by name.
        expected: those that are looked at.
        tolerance: see the module.
        has_batch_axis: samples are the first axis; else an output is one sample.
    """
    for name, right in expected.items():
        given = answer.get(name)
        if given is None:
            return f"output {name} is missing"
        if given.shape != right.shape:
            return f"output {name} has shape {list(given.shape)}, not {list(right.shape)}"
        if not right.size:
            continue
        if right.dtype.kind in "iub":
            if not np.array_equal(given, right):
                return f"output {name} differs in {int(np.count_nonzero(given != right))} of {right.size} elements"
            continue
        error = _relative_error(given, right, has_batch_axis and right.ndim > 0)
        if not error <= tolerance:
            return f"output {name} has a relative error of {error:.2g}, above {tolerance:g}"
    return None


def _relative_error(given: np.ndarray, right: np.ndarray, has_batch_axis: bool) -> float:
    """The largest of all samples; NaN where the answer holds NaN and the expected one does not."""
    samples = len(right) if has_batch_axis else 1
    wide, wanted = (np.asarray(array, np.float64).reshape(samples, -1) for array in (given, right))
    # Where both are equal their difference is zero, also for infinities and NaN.
    with np.errstate(invalid="ignore"):
        apart = np.where((wide == wanted) | (np.isnan(wide) & np.isnan(wanted)), 0.0, wide - wanted)
    lengths = np.linalg.norm(np.where(np.isfinite(wanted), wanted, 0.0), axis=1)
    errors = np.linalg.norm(apart, axis=1)
    shares = np.divide(errors, lengths, out=np.where(errors > 0, np.inf, errors), where=lengths > 0)
    return float(shares.max(initial=0.0))


def _compared_outputs(model: ReferenceModel, signature: Signature) -> list[str]:
    """The outputs of numbers that both models have."""
    texts = [port.name for port in signature.inputs if port.datatype == TEXT]
    if texts:
        why = f"the served model takes text: {', '.join(texts)}"
        fix = "give the answers to a text file: `expect.file`"
        raise InputError("`expect.model` cannot be used", why, fix)
    served = [name for name in signature.outputs if name not in signature.text_outputs]
    shared = [name for name in model.outputs if name in served]
    if not shared:
        why = f"it has {', '.join(model.outputs)}; the served model gives {', '.join(served) or 'text alone'}"
        fix = "correct `expect.model`"
        raise InputError("the expected model has no output of numbers that the served one has", why, fix)
    return shared


def _read_rows(path: Path, signature: Signature, count: int, limits: Limits) -> Answer:
    arrays = read_arrays(path, limits)
    unknown = sorted(arrays.keys() - set(signature.outputs))
    if unknown:
        why = f"the model gives {', '.join(signature.outputs)}"
        raise InputError(f"expected answers {path} hold {', '.join(unknown)}", why, "name the arrays as the outputs")
    rows = len(next(iter(arrays.values())))
    if rows != count:
        why = f"it has {rows} rows; there are {count} samples"
        raise InputError(f"expected answers {path} cannot be used", why, "give one row a sample")
    texts = [name for name, array in arrays.items() if array.dtype.kind not in "biuf" or name in signature.text_outputs]
    if texts:
        raise InputError(f"expected answers {path} hold text", f"in {', '.join(texts)}", "only numbers are compared")
    return arrays


def _num_texts(traffic: Traffic, folder: Path, limits: Limits) -> int:
    files: Sequence[str] = [values.file for values in traffic.inputs.values() if values.file is not None]
    if len(files) != 1:
        why = f"its rows belong to the lines of one text file; the traffic has {len(files)}"
        raise InputError("`expect.file` cannot be used", why, "give one input a text file, or use `expect.model`")
    return len(TextFile(folder / files[0], limits).lines)
