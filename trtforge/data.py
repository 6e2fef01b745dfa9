"""Calibration and evaluation data: batches of named arrays, streamed, never unpickled.

A source is an `.npz` file (first axis = samples), a folder of `.npz` files (one batch each, shapes may differ), or
`package.module:function`, which yields feed dictionaries (one batch each). An array named `labels` that is not an
input of the model holds one integer class per sample.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trtforge.data_checks import LABELS, check_array, check_counts, check_names, data_error
from trtforge.errors import InputError
from trtforge.hashing import fingerprint, sha256_of_file
from trtforge.limits import DEFAULT_LIMITS, Limits
from trtforge.npz import NpzFile
from trtforge.tensor import TensorSpec
from trtforge.textfile import kind_of
from trtforge.user_code import USER_ERRORS, load_function

# Samples held at a time while data is checked and hashed.
_CHECK_BATCH = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Arrays of some samples.

    Attributes:
        feeds: one array per model input, first axis = samples.
        labels: [N] class indices, or None.
    """

    feeds: dict[str, np.ndarray]
    labels: np.ndarray | None

    def __len__(self) -> int:
        return len(next(iter(self.feeds.values())))

    def rows(self, start: int, stop: int) -> Batch:
        """Samples start to stop."""
        labels = None if self.labels is None else self.labels[start:stop]
        return Batch({name: feed[start:stop] for name, feed in self.feeds.items()}, labels)

    def is_like(self, other: Batch) -> bool:
        """Whether both can be one batch: samples of one shape, with or without labels alike."""
        return (self.labels is None) == (other.labels is None) and all(
            feed.shape[1:] == other.feeds[name].shape[1:] for name, feed in self.feeds.items()
        )


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
        start, stop: the samples that this view covers.
        smallest_batch: smaller remainders are left out.
    """

    source: str
    specs: tuple[TensorSpec, ...]
    num_samples: int
    sha256: str
    has_labels: bool
    read: Callable[[int], Iterator[Batch]]
    start: int = 0
    stop: int | None = None
    smallest_batch: int = 1

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """Batches of `batch_size` samples, in order, across the borders of stored batches of one shape.

        A batch is smaller where the shape changes and at the end; below `smallest_batch`, the least that the engine
        takes, it is left out.

        Raises:
            InputError: the source gives fewer samples than it did at first.
        """
        parts: list[Batch] = []
        held = 0
        for piece in self._pieces(batch_size):
            if parts and not piece.is_like(parts[0]):
                if held >= self.smallest_batch:
                    yield _join(parts)
                parts, held = [], 0
            taken = 0
            while taken < len(piece):
                more = min(batch_size - held, len(piece) - taken)
                parts.append(piece.rows(taken, taken + more))
                taken, held = taken + more, held + more
                if held == batch_size:
                    if held >= self.smallest_batch:
                        yield _join(parts)
                    parts, held = [], 0
        if held >= self.smallest_batch:
            yield _join(parts)

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

    def batch_shapes(self, batch_size: int) -> dict[str, list[tuple[int, ...]]]:
        """For each input, the shape of every batch."""
        shapes: dict[str, list[tuple[int, ...]]] = {spec.name: [] for spec in self.specs}
        for batch in self.batches(batch_size):
            for name, feed in batch.feeds.items():
                shapes[name].append(feed.shape)
        return shapes

    def sample_hashes(self) -> set[bytes]:
        """A 16-byte hash of every sample, to find samples that two datasets share."""
        hashes = set()
        for batch in self.batches(_CHECK_BATCH):
            for row in range(len(batch)):
                digest = hashlib.blake2b(digest_size=16)
                for name in sorted(batch.feeds):
                    digest.update(np.ascontiguousarray(batch.feeds[name][row]).tobytes())
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
            )
        )
    if kind == "file":
        reader = _NpzSource(path, specs, limits)
        return _checked(
            Dataset(str(source), specs, reader.num_samples, sha256_of_file(path), reader.has_labels, reader.read)
        )
    if ":" in str(source) and path.suffix != ".npz":
        return _dataset_from_function(str(source), specs)
    raise data_error(source, "no such file or folder", "give an .npz file, a folder of them or module:function")


def check_batch(feeds: Mapping[str, Any], specs: Sequence[TensorSpec], source: str) -> Batch:
    """One batch from the user, checked against the model's inputs.

    Raises:
        InputError: names, types or shapes that do not fit, NaN, or no samples.
    """
    try:
        arrays = {str(name): np.asarray(value) for name, value in feeds.items()}
    except Exception as err:
        raise data_error(source, f"it holds what is no array ({err})", "give numpy arrays") from err
    names = {spec.name for spec in specs}
    labels = arrays.pop(LABELS, None) if LABELS not in names else None
    check_names(arrays, names, source)
    for spec in specs:
        check_array(spec, arrays[spec.name].dtype, arrays[spec.name].shape, source)
        if arrays[spec.name].dtype.kind == "f" and np.isnan(arrays[spec.name]).any():
            raise data_error(source, f"input '{spec.name}' holds NaN", "remove those samples")
    sizes = {spec.name: len(arrays[spec.name]) for spec in specs}
    check_counts(sizes, labels, source)
    return Batch({spec.name: arrays[spec.name] for spec in specs}, labels)


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

    count, labelled = 0, True
    hashes: list[bytes] = []
    for batch, digest in read_hashed():
        count += len(batch)
        labelled = labelled and batch.labels is not None
        hashes.append(digest)
    if count == 0:
        raise data_error(name, "it yielded nothing", "yield at least one batch")

    def read(_: int) -> Iterator[Batch]:
        for index, (batch, digest) in enumerate(read_hashed()):
            if index >= len(hashes) or digest != hashes[index]:
                raise data_error(name, "it yields other data when it is read again", "make it repeatable: fix its seed")
            yield batch

    return Dataset(name, specs, count, hashlib.sha256(b"".join(hashes)).hexdigest(), labelled, read)


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


def _join(batches: Sequence[Batch]) -> Batch:
    """Batches of one shape as one."""
    if len(batches) == 1:
        return batches[0]
    feeds = {name: np.concatenate([batch.feeds[name] for batch in batches]) for name in batches[0].feeds}
    labels = [batch.labels for batch in batches if batch.labels is not None]
    return Batch(feeds, np.concatenate(labels) if labels else None)


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
        for spec in specs:
            check_array(spec, headers[spec.name].dtype, headers[spec.name].shape, str(path))
        sizes = {name: headers[name].shape[0] for name in self._names}
        check_counts(sizes, headers[LABELS] if self.has_labels else None, str(path))
        self.num_samples = next(iter(sizes.values()))

    def read(self, batch_size: int) -> Iterator[Batch]:
        """Batches of at most `batch_size` samples."""
        labels = self._file.read_whole(LABELS) if self.has_labels else None
        start = 0
        for feeds in self._file.read(self._names, batch_size):
            for name, array in feeds.items():
                self._check_nan(name, array, start)
            batch = Batch(feeds, None)
            yield batch if labels is None else Batch(feeds, labels[start : start + len(batch)])
            start += len(batch)

    def _check_nan(self, name: str, array: np.ndarray, start: int) -> None:
        if array.dtype.kind == "f" and np.isnan(array).any():
            row = start + int(np.argwhere(np.isnan(array))[0][0])
            raise data_error(
                self._path, f"input '{name}' holds NaN, first in sample {row}", "remove or repair those samples"
            )
