"""Calibration and evaluation data: batches of named arrays, streamed, never unpickled.

A source is an `.npz` file (first axis = samples), a folder of `.npz` files (one batch each, shapes may differ), or
`package.module:function`, which yields feed dictionaries (one batch each). An array named `labels` that is not an
input of the model holds one integer class per sample.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import math
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from trtforge.errors import InputError
from trtforge.hashing import fingerprint, sha256_of_file
from trtforge.limits import DEFAULT_LIMITS, Limits
from trtforge.tensor import TensorSpec

LABELS = "labels"


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
        """Batches of at most `batch_size` samples, in order; batches of different shape are not merged.

        A remainder below `smallest_batch`, the least that the engine takes, is left out.
        """
        position = 0
        stop = self.num_samples if self.stop is None else self.stop
        for stored in self.read(batch_size):
            first, last = max(self.start - position, 0), min(stop - position, len(stored))
            position += len(stored)
            for row in range(first, last, batch_size):
                if min(row + batch_size, last) - row >= self.smallest_batch:
                    yield stored.rows(row, min(row + batch_size, last))
            if position >= stop:
                return

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
        for batch in self.batches(64):
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
        limits: bounds on the decompressed size of one batch.

    Raises:
        InputError: nothing there, or arrays that do not fit the model; says which and how.
    """
    specs = tuple(specs)
    path = Path(source)
    if path.is_dir():
        files = sorted(path.glob("*.npz"))
        if not files:
            raise _data_error(source, "the folder holds no .npz file", "put one .npz file per batch into it")
        readers = [_NpzFile(file, specs, limits) for file in files]
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
    if path.is_file():
        reader = _NpzFile(path, specs, limits)
        return _checked(
            Dataset(str(source), specs, reader.num_samples, sha256_of_file(path), reader.has_labels, reader.read)
        )
    if ":" in str(source) and path.suffix != ".npz":
        return _dataset_from_function(str(source), specs)
    raise _data_error(source, "no such file or folder", "give an .npz file, a folder of them or module:function")


def load_function(name: str, purpose: str) -> Callable[..., Any]:
    """The user's function `package.module:function`; the working directory can be imported from.

    Raises:
        InputError: not of that form, not importable, or no such function.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute.isidentifier():
        raise InputError(f"{purpose} {name!r} cannot be used", "it is not package.module:function", "correct the name")
    sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except Exception as err:
        raise InputError(
            f"{purpose} {name!r} cannot be imported",
            f"{type(err).__name__}: {err}",
            "run from the folder that holds the module, or install its package",
        ) from err
    finally:
        sys.path.remove(str(Path.cwd()))
    if not callable(function):
        raise InputError(f"{purpose} {name!r} is no function", f"it is a {type(function).__name__}", "correct the name")
    result: Callable[..., Any] = function
    return result


def check_batch(feeds: Mapping[str, Any], specs: Sequence[TensorSpec], source: str) -> Batch:
    """One batch from the user, checked against the model's inputs.

    Raises:
        InputError: names, types or shapes that do not fit, NaN, or no samples.
    """
    arrays = {name: np.asarray(value) for name, value in feeds.items()}
    names = {spec.name for spec in specs}
    labels = arrays.pop(LABELS, None) if LABELS not in names else None
    _check_names(arrays, names, source)
    for spec in specs:
        _check_array(spec, arrays[spec.name].dtype, arrays[spec.name].shape, source)
        if arrays[spec.name].dtype.kind == "f" and np.isnan(arrays[spec.name]).any():
            raise _data_error(source, f"input '{spec.name}' holds NaN", "remove those samples")
    sizes = {spec.name: len(arrays[spec.name]) for spec in specs}
    _check_counts(sizes, labels, source)
    return Batch({spec.name: arrays[spec.name] for spec in specs}, labels)


def _data_error(source: str | Path, why: str, fix: str) -> InputError:
    return InputError(f"data {source} cannot be used", why, fix)


def _check_names(found: Mapping[str, Any], names: set[str], source: str) -> None:
    missing, extra = sorted(names - set(found)), sorted(set(found) - names)
    if missing or extra:
        problems = [f"no array for input {', '.join(missing)}"] if missing else []
        problems += [f"unknown array {', '.join(extra)}"] if extra else []
        raise _data_error(
            source,
            "; ".join(problems),
            f"name the arrays after the model's inputs: {', '.join(sorted(names))}"
            + ("" if LABELS in names else f" (and '{LABELS}' for classes)"),
        )


def _check_array(spec: TensorSpec, dtype: np.dtype, shape: tuple[int, ...], source: str) -> None:
    if dtype.hasobject:
        raise _data_error(source, f"array '{spec.name}' is pickled", "save plain arrays; trtforge never unpickles data")
    if dtype.name != spec.dtype:
        raise _data_error(
            source, f"input '{spec.name}' is {dtype.name}; the model takes {spec.dtype}", f"save it as {spec.dtype}"
        )
    if not shape:
        raise _data_error(source, f"input '{spec.name}' has no axis of samples", "make samples its first axis")
    if spec.shape is None:
        return
    if len(shape) != len(spec.shape):
        raise _data_error(
            source,
            f"input '{spec.name}' has {len(shape)} axes {list(shape)}; the model takes {spec.describe()}",
            "save it with the model's axes, samples first",
        )
    for axis, (size, dim) in enumerate(zip(shape, spec.shape, strict=True)):
        if axis and isinstance(dim, int) and size != dim:
            raise _data_error(
                source,
                f"axis {axis} of input '{spec.name}' has size {size}; the model takes {spec.describe()}",
                "save it in the model's shape",
            )


def _check_counts(sizes: Mapping[str, int], labels: Any, source: str) -> None:
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise _data_error(source, f"the inputs have different numbers of samples: {listed}", "save them together")
    count = next(iter(sizes.values()), 0)
    if count == 0:
        raise _data_error(source, "it holds no samples", "save at least one, better a hundred or more")
    if labels is not None and (labels.dtype.kind not in "iu" or labels.shape != (count,)):
        raise _data_error(
            source,
            f"'{LABELS}' is {labels.dtype.name} {list(labels.shape)}",
            f"save one integer class per sample: shape [{count}]",
        )


def _checked(dataset: Dataset) -> Dataset:
    """Read a dataset once, so that NaN and damaged files show before any work starts."""
    for _ in dataset.batches(64):
        pass
    return dataset


def _dataset_from_function(name: str, specs: tuple[TensorSpec, ...]) -> Dataset:
    function = load_function(name, "data")

    def read(_: int) -> Iterator[Batch]:
        for feeds in function():
            if not isinstance(feeds, Mapping):
                raise _data_error(name, f"it yielded a {type(feeds).__name__}", "yield dictionaries of numpy arrays")
            yield check_batch(feeds, specs, name)

    count, digest, labelled = 0, hashlib.sha256(), True
    for batch in read(0):
        count += len(batch)
        labelled = labelled and batch.labels is not None
        for key in sorted(batch.feeds):
            digest.update(f"{key}{batch.feeds[key].shape}".encode())
            digest.update(np.ascontiguousarray(batch.feeds[key]).tobytes())
    if count == 0:
        raise _data_error(name, "it yielded nothing", "yield at least one batch")
    return Dataset(name, specs, count, digest.hexdigest(), labelled, read)


class _NpzFile:
    """An `.npz` file read in slices of samples, so that memory does not grow with their number."""

    def __init__(self, path: Path, specs: tuple[TensorSpec, ...], limits: Limits) -> None:
        self._path, self._specs = path, specs
        names = {spec.name for spec in specs}
        with self._open_zip() as archive:
            members = {info.filename[:-4]: info for info in archive.infolist() if info.filename.endswith(".npy")}
            self._check_size(sum(info.file_size for info in members.values()), limits)
            headers = {name: self._header(archive, info) for name, info in members.items()}
        self.has_labels = LABELS in headers and LABELS not in names
        _check_names({name: None for name in headers if name in names or name != LABELS}, names, str(path))
        for spec in specs:
            _check_array(spec, headers[spec.name].dtype, headers[spec.name].shape, str(path))
        sizes = {spec.name: headers[spec.name].shape[0] for spec in specs}
        _check_counts(sizes, self._labels() if self.has_labels else None, str(path))
        self.num_samples = next(iter(sizes.values()))

    def read(self, batch_size: int) -> Iterator[Batch]:
        """Batches of at most `batch_size` samples."""
        labels = self._labels() if self.has_labels else None
        with self._open_zip() as archive, contextlib.ExitStack() as stack:
            streams = {spec.name: stack.enter_context(archive.open(f"{spec.name}.npy")) for spec in self._specs}
            headers = {name: _read_header(stream) for name, stream in streams.items()}
            whole = {name: self._read_rows(streams[name], h) for name, h in headers.items() if h.fortran_order}
            for start in range(0, self.num_samples, batch_size):
                stop = min(start + batch_size, self.num_samples)
                feeds = {}
                for name, header in headers.items():
                    rows = dataclasses.replace(header, shape=(stop - start, *header.shape[1:]))
                    feeds[name] = whole[name][start:stop] if name in whole else self._read_rows(streams[name], rows)
                    self._check_nan(name, feeds[name], start)
                yield Batch(feeds, None if labels is None else labels[start:stop])

    def _open_zip(self) -> zipfile.ZipFile:
        try:
            return zipfile.ZipFile(self._path)
        except (zipfile.BadZipFile, OSError) as err:
            raise _data_error(self._path, f"it is no .npz file ({err})", "save it with numpy.savez") from err

    def _check_size(self, size: int, limits: Limits) -> None:
        if size > limits.data_bytes:
            raise _data_error(
                self._path,
                f"it unpacks to {size} bytes; the limit is {limits.data_bytes}",
                f"check the file, or raise it with --limit data_bytes={size}",
            )

    def _check_nan(self, name: str, array: np.ndarray, start: int) -> None:
        if array.dtype.kind == "f" and np.isnan(array).any():
            row = start + int(np.argwhere(np.isnan(array))[0][0])
            raise _data_error(
                self._path, f"input '{name}' holds NaN, first in sample {row}", "remove or repair those samples"
            )

    def _header(self, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> _NpyHeader:
        name = info.filename[:-4]
        try:
            with archive.open(info) as stream:
                header = _read_header(stream)
                left = info.file_size - stream.tell()
        except (ValueError, zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as err:
            raise _data_error(self._path, f"array '{name}' is damaged ({err})", "save the file again") from err
        if not header.dtype.hasobject and math.prod(header.shape) * header.dtype.itemsize != left:
            why = f"array '{name}' states shape {list(header.shape)} {header.dtype.name} but holds {left} bytes"
            raise _data_error(self._path, why, "save the file again")
        return header

    def _labels(self) -> np.ndarray:
        with self._open_zip() as archive, archive.open(f"{LABELS}.npy") as stream:
            header = _read_header(stream)
            if header.dtype.hasobject:
                raise _data_error(self._path, f"array '{LABELS}' is pickled", "save plain integers")
            return self._read_rows(stream, header)

    def _read_rows(self, stream: IO[bytes], header: _NpyHeader) -> np.ndarray:
        size = math.prod(header.shape) * header.dtype.itemsize
        try:
            raw = stream.read(size)
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as err:
            raise _data_error(self._path, f"it is damaged ({err})", "save the file again") from err
        if len(raw) != size:
            raise _data_error(self._path, f"it ends after {len(raw)} of {size} bytes", "save the file again")
        if header.fortran_order:
            return np.frombuffer(raw, dtype=header.dtype).reshape(header.shape[::-1]).T
        return np.frombuffer(raw, dtype=header.dtype).reshape(header.shape)


@dataclasses.dataclass(frozen=True, slots=True)
class _NpyHeader:
    """What an `.npy` stream says of its array."""

    shape: tuple[int, ...]
    fortran_order: bool
    dtype: np.dtype


def _read_header(stream: IO[bytes]) -> _NpyHeader:
    """The header of an `.npy` stream, which is left at the first element; raises ValueError."""
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return _NpyHeader(*np.lib.format.read_array_header_1_0(stream))
    if version == (2, 0):
        return _NpyHeader(*np.lib.format.read_array_header_2_0(stream))
    raise ValueError(f"npy format {version[0]}.{version[1]} is not read")
