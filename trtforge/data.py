"""Calibration and evaluation data: batches of named arrays, streamed, never unpickled.

A source is an `.npz` file (first axis = samples), a folder of `.npz` files (one batch each, shapes may differ), or
`package.module:function`, which yields feed dictionaries (one batch each). Arrays that have no common axis of samples
(a recurrent state, a scalar) are one feed, which is run whole and counts as one sample. An array named `labels` that is
not an input of the model holds one integer class per sample.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trtforge.batch import Batch, check_batch, join_batches
from trtforge.data_checks import (
    LABELS,
    check_array,
    check_counts,
    check_labels,
    check_names,
    data_error,
    has_sample_axis,
)
from trtforge.errors import InputError
from trtforge.hashing import fingerprint, sha256_of_file
from trtforge.limits import DEFAULT_LIMITS, Limits
from trtforge.npz import NpzFile
from trtforge.tensor import TensorSpec
from trtforge.textfile import kind_of
from trtforge.user_code import USER_ERRORS, load_function

ShapesByInput = dict[str, list[tuple[int, ...]]]
# Samples held at a time while data is checked and hashed.
_CHECK_BATCH = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Dataset:
    """Samples that can be read any number of times.

    Attributes:
        source: how the user named it.
        specs: the model's inputs, which every batch is checked against.
        num_samples: samples in the source.
        sha256: fingerprint of the content.
        has_labels: every batch has labels.
        read: gives the stored batches, cut to at most this many samples where the source allows.
        has_whole_feeds: some of it is run as it is, at no other batch size.
        start, stop: the samples that this view covers.
        smallest_batch: smaller remainders are left out.
    """

    source: str
    specs: tuple[TensorSpec, ...]
    num_samples: int
    sha256: str
    has_labels: bool
    read: Callable[[int], Iterator[Batch]]
    has_whole_feeds: bool = False
    start: int = 0
    stop: int | None = None
    smallest_batch: int = 1

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """Batches of `batch_size` samples, in order, across the borders of stored batches of one shape.

        A batch is smaller where the shape changes and at the end; below `smallest_batch`, the least that the engine
        takes, it is left out. A whole feed is a batch of its own.

        Raises:
            InputError: the source gives fewer samples than it did at first.
        """
        parts: list[Batch] = []
        held = 0
        for piece in self._pieces(batch_size):
            if parts and not piece.is_like(parts[0]):
                if held >= self.smallest_batch:
                    yield join_batches(parts)
                parts, held = [], 0
            if piece.is_whole:
                yield piece
                continue
            taken = 0
            while taken < len(piece):
                more = min(batch_size - held, len(piece) - taken)
                parts.append(piece.rows(taken, taken + more))
                taken, held = taken + more, held + more
                if held == batch_size:
                    if held >= self.smallest_batch:
                        yield join_batches(parts)
                    parts, held = [], 0
        if held >= self.smallest_batch:
            yield join_batches(parts)

    def _pieces(self, batch_size: int) -> Iterator[Batch]:
        """The samples of this view as they are stored."""
        position = 0
        stop = self.num_samples if self.stop is None else self.stop
        for stored in self.read(batch_size):
            first, last = max(self.start - position, 0), min(stop - position, len(stored))
            position += len(stored)
            if first < last:
                yield stored.rows(first, last)
            if position >= stop:
                return
        raise data_error(
            self.source,
            f"it gave {position} samples where it had {self.num_samples} when it was first read",
            "give data that can be read any number of times",
        )

    def view(self, start: int, stop: int) -> Dataset:
        """The samples start to stop of this dataset."""
        content = fingerprint([self.sha256, start, stop])
        return dataclasses.replace(self, start=start, stop=stop, sha256=content)

    def __len__(self) -> int:
        return (self.num_samples if self.stop is None else self.stop) - self.start

    def batch_shapes(self, batch_size: int, read: Sequence[str] = ()) -> tuple[ShapesByInput, ShapesByInput]:
        """The shape of every batch, by input; and the values, flattened, of the integer inputs in `read`."""
        shapes: ShapesByInput = {spec.name: [] for spec in self.specs}
        values: ShapesByInput = {name: [] for name in read}
        for batch in self.batches(batch_size):
            for name, feed in batch.feeds.items():
                shapes[name].append(feed.shape)
            for name in read:
                values[name].append(tuple(int(value) for value in batch.feeds[name].ravel()))
        return shapes, values

    def sample_hashes(self) -> set[bytes]:
        """A 16-byte hash of every sample, to find samples that two datasets share."""
        hashes = set()
        for batch in self.batches(_CHECK_BATCH):
            for row in range(len(batch)):
                digest = hashlib.blake2b(digest_size=16)
                for name in sorted(batch.feeds):
                    array = batch.feeds[name] if batch.is_whole else batch.feeds[name][row]
                    digest.update(np.ascontiguousarray(array).tobytes())
                hashes.add(digest.digest())
        return hashes


def open_dataset(source: str | Path, specs: Sequence[TensorSpec], limits: Limits = DEFAULT_LIMITS) -> Dataset:
    """Data for a model, checked in full: names, types, ranks, sizes, NaN.

    Args:
        source: `.npz`, a folder of them, or `package.module:function`. Naming a function runs the user's own code.
        specs: the model's inputs.
        limits: bounds on the decompressed size of one `.npz` file.

    Raises:
        InputError: nothing there, or arrays that do not fit the model; says which and how.
    """
    specs = tuple(specs)
    path = Path(source)
    kind = kind_of(path, "data")
    if kind == "folder":
        files = sorted(path.glob("*.npz"))
        if not files:
            raise data_error(source, "the folder holds no .npz file", "put one .npz file per batch into it")
        readers = [_NpzSource(file, specs, limits) for file in files]
        content = fingerprint([sha256_of_file(file) for file in files])
        return _checked(
            Dataset(
                str(source),
                specs,
                sum(reader.num_samples for reader in readers),
                content,
                all(reader.has_labels for reader in readers),
                lambda size: (batch for reader in readers for batch in reader.read(size)),
                any(reader.is_whole for reader in readers),
            )
        )
    if kind == "file":
        reader = _NpzSource(path, specs, limits)
        return _checked(
            Dataset(
                str(source),
                specs,
                reader.num_samples,
                sha256_of_file(path),
                reader.has_labels,
                reader.read,
                reader.is_whole,
            )
        )
    if ":" in str(source) and path.suffix != ".npz":
        return _dataset_from_function(str(source), specs)
    raise data_error(source, "no such file or folder", "give an .npz file, a folder of them or module:function")


def _checked(dataset: Dataset) -> Dataset:
    """Read a dataset once, so that NaN and damaged files show before any work starts."""
    for _ in dataset.batches(_CHECK_BATCH):
        pass
    return dataset


def _dataset_from_function(name: str, specs: tuple[TensorSpec, ...]) -> Dataset:
    function = load_function(name, "data")

    def read_hashed() -> Iterator[tuple[Batch, bytes]]:
        for feeds in _results_of(function, name):
            if not isinstance(feeds, Mapping):
                raise data_error(name, f"it yielded a {type(feeds).__name__}", "yield dictionaries of numpy arrays")
            batch = check_batch(feeds, specs, name)
            yield batch, _hash_of(batch)

    count, labelled, has_whole_feeds = 0, True, False
    hashes: list[bytes] = []
    for batch, digest in read_hashed():
        count += len(batch)
        labelled = labelled and batch.labels is not None
        has_whole_feeds = has_whole_feeds or batch.is_whole
        hashes.append(digest)
    if count == 0:
        raise data_error(name, "it yielded nothing", "yield at least one batch")

    def read(_: int) -> Iterator[Batch]:
        for index, (batch, digest) in enumerate(read_hashed()):
            if index >= len(hashes) or digest != hashes[index]:
                raise data_error(name, "it yields other data when it is read again", "make it repeatable: fix its seed")
            yield batch

    content = hashlib.sha256(b"".join(hashes)).hexdigest()
    return Dataset(name, specs, count, content, labelled, read, has_whole_feeds)


def _results_of(function: Callable[..., Any], name: str) -> Iterator[Any]:
    """What the user's function yields; what it raises becomes an InputError."""
    try:
        iterator = iter(function())
    except USER_ERRORS as err:
        raise _failed(name, err) from err
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        except USER_ERRORS as err:
            raise _failed(name, err) from err
        yield item


def _failed(name: str, err: BaseException) -> InputError:
    return data_error(name, f"it failed with {type(err).__name__}: {err}", "correct the function")


def _hash_of(batch: Batch) -> bytes:
    arrays = batch.feeds if batch.labels is None else {**batch.feeds, LABELS: batch.labels}
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype.name} {arrays[name].shape} ".encode())
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return digest.digest()


class _NpzSource:
    """An `.npz` file whose arrays fit the model."""

    def __init__(self, path: Path, specs: tuple[TensorSpec, ...], limits: Limits) -> None:
        self._path = path
        self._names = [spec.name for spec in specs]
        self._file = NpzFile(path, limits)
        headers = self._file.headers
        self.has_labels = LABELS in headers and LABELS not in self._names
        found = {name: header for name, header in headers.items() if name in self._names or name != LABELS}
        check_names(found, set(self._names), str(path))
        labels = headers[LABELS] if self.has_labels else None
        shapes = {name: headers[name].shape for name in self._names}
        self.is_whole = not has_sample_axis(shapes, specs)
        for spec in specs:
            check_array(spec, headers[spec.name].dtype, shapes[spec.name], str(path), self.is_whole)
        if self.is_whole:
            self.num_samples = 1
            check_labels(labels, 1, str(path))
            return
        sizes = {name: shape[0] for name, shape in shapes.items()}
        check_counts(sizes, labels, str(path))
        self.num_samples = next(iter(sizes.values()))

    def read(self, batch_size: int) -> Iterator[Batch]:
        """Batches of at most `batch_size` samples."""
        labels = self._file.read_whole(LABELS) if self.has_labels else None
        if self.is_whole:
            whole = {name: self._file.read_whole(name) for name in self._names}
            for name, array in whole.items():
                self._check_nan(name, np.atleast_1d(array), None)
            yield Batch(whole, labels, is_whole=True)
            return
        start = 0
        for feeds in self._file.read(self._names, batch_size):
            for name, array in feeds.items():
                self._check_nan(name, array, start)
            batch = Batch(feeds, None)
            yield batch if labels is None else Batch(feeds, labels[start : start + len(batch)])
            start += len(batch)

    def _check_nan(self, name: str, array: np.ndarray, start: int | None) -> None:
        """Refuse NaN; `start` is the number of the first sample, None where there is no axis of samples."""
        if array.dtype.kind == "f" and np.isnan(array).any():
            row = "" if start is None else f", first in sample {start + int(np.argwhere(np.isnan(array))[0][0])}"
            raise data_error(self._path, f"input '{name}' holds NaN{row}", "remove or repair those samples")
