"""Read an `.npz` file in slices along the first axis: memory does not grow with it, and nothing is ever unpickled.

Untrusted: an array's header must state exactly the bytes that its zip entry has, and the sum of all entries is bounded
before anything is unpacked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import lzma
import math
import os
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from trtforge.errors import InputError, UnavailableError
from trtforge.limits import Limits

# Bytes of a Fortran-ordered array that are held while its samples are put together.
_SPOOL_BYTES = 2**20
_DAMAGE = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError)


@dataclasses.dataclass(frozen=True, slots=True)
class NpyHeader:
    """What an `.npy` stream says of its array."""

    shape: tuple[int, ...]
    fortran_order: bool
    dtype: np.dtype


class NpzFile:
    """The arrays of an `.npz` file.

    Args:
        path: the file.
        limits: bounds on its size once unpacked.

    Raises:
        InputError: not an `.npz` file, damaged, or too large.
    """

    def __init__(self, path: Path, limits: Limits) -> None:
        self._path = path
        with self._open_zip() as archive:
            entries = {info.filename[:-4]: info for info in archive.infolist() if info.filename.endswith(".npy")}
            self._check_size(sum(info.file_size for info in entries.values()), limits)
            self.headers = {name: self._header(archive, info) for name, info in entries.items()}

    def read(self, names: Sequence[str], num_rows: int) -> Iterator[dict[str, np.ndarray]]:
        """The named arrays, which are of one length, in slices of at most `num_rows` of the first axis."""
        headers = {name: self.headers[name] for name in names}
        length = next(iter(headers.values())).shape[0]
        with self._open_zip() as archive, contextlib.ExitStack() as stack:
            streams = {name: stack.enter_context(self._open_array(archive, name)) for name in names}
            for name, header in headers.items():
                if header.fortran_order:
                    streams[name] = stack.enter_context(self._spool_rows(streams[name], header))
            for start in range(0, length, num_rows):
                count = min(num_rows, length - start)
                yield {name: self._read_samples(streams[name], header, count) for name, header in headers.items()}

    def read_whole(self, name: str) -> np.ndarray:
        """One array."""
        with self._open_zip() as archive, self._open_array(archive, name) as stream:
            return self._read_rows(stream, self.headers[name])

    def _open_zip(self) -> zipfile.ZipFile:
        try:
            return zipfile.ZipFile(self._path)
        except (*_DAMAGE, NotImplementedError, struct.error) as err:
            raise self._error(f"it is no .npz file ({err})", "save it with numpy.savez") from err

    def _check_size(self, size: int, limits: Limits) -> None:
        if size > limits.data_bytes:
            raise self._error(
                f"it unpacks to {size} bytes; the limit is {limits.data_bytes}",
                f"check the file, or raise it with --limit data_bytes={size}",
            )

    def _header(self, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> NpyHeader:
        name = info.filename[:-4]
        try:
            with archive.open(info) as stream:
                header = _read_header(stream)
                left = info.file_size - stream.tell()
        except Exception as err:  # numpy parses a header as Python text; what that raises is not a closed list
            raise self._error(f"array '{name}' is damaged ({err})", "save the file again") from err
        if header.dtype.hasobject:
            raise self._error(f"array '{name}' is pickled", "save plain arrays; trtforge never unpickles data")
        if min(header.shape, default=0) < 0 or math.prod(header.shape) * header.dtype.itemsize != left:
            why = f"array '{name}' states shape {list(header.shape)} {header.dtype.name} but holds {left} bytes"
            raise self._error(why, "save the file again")
        return header

    @contextlib.contextmanager
    def _open_array(self, archive: zipfile.ZipFile, name: str) -> Iterator[IO[bytes]]:
        """The entry's stream, after the header."""
        with archive.open(f"{name}.npy") as stream:
            _read_header(stream)
            yield stream

    def _read_samples(self, stream: IO[bytes], header: NpyHeader, count: int) -> np.ndarray:
        """The next samples of an array's own stream, or of the spooled one where it is in Fortran order."""
        if not header.fortran_order:
            return self._read_rows(stream, dataclasses.replace(header, shape=(count, *header.shape[1:])))
        rows = self._read_rows(stream, NpyHeader((count, *header.shape[:0:-1]), False, header.dtype))
        return rows.transpose(0, *range(rows.ndim - 1, 0, -1))

    def _spool_rows(self, stream: IO[bytes], header: NpyHeader) -> IO[bytes]:
        """A temporary file with the rows of a Fortran-ordered array one after the other, each still in that order.

        The array's stream has the first element of every row, then the second of every row, and so on.
        """
        length, width = header.shape[0], math.prod(header.shape[1:])
        row_bytes = width * header.dtype.itemsize
        step = max(1, _SPOOL_BYTES // (length * header.dtype.itemsize))
        try:
            with contextlib.ExitStack() as on_error:
                file = on_error.enter_context(tempfile.TemporaryFile())
                for start in range(0, width, step):
                    shape = (length, min(step, width - start))
                    part = np.ascontiguousarray(self._read_rows(stream, dataclasses.replace(header, shape=shape)))
                    for row in range(length):
                        place = row * row_bytes + start * header.dtype.itemsize
                        if os.pwrite(file.fileno(), part[row].data, place) != part[row].nbytes:
                            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                on_error.pop_all()
                return file
        except OSError as err:
            raise UnavailableError(
                f"data {self._path} cannot be sorted into samples",
                f"it is in Fortran order; {err.strerror} in {tempfile.gettempdir()}",
                "save it in C order (numpy.ascontiguousarray), or free space there",
            ) from err

    def _read_rows(self, stream: IO[bytes], header: NpyHeader) -> np.ndarray:
        size = math.prod(header.shape) * header.dtype.itemsize
        try:
            raw = stream.read(size)
        except _DAMAGE as err:
            raise self._error(f"it is damaged ({err})", "save the file again") from err
        if len(raw) != size:
            raise self._error(f"it ends after {len(raw)} of {size} bytes", "save the file again")
        if header.fortran_order:
            return np.frombuffer(raw, dtype=header.dtype).reshape(header.shape[::-1]).T
        return np.frombuffer(raw, dtype=header.dtype).reshape(header.shape)

    def _error(self, why: str, fix: str) -> InputError:
        return InputError(f"data {self._path} cannot be used", why, fix)


def _read_header(stream: IO[bytes]) -> NpyHeader:
    """The header of an `.npy` stream, which is left at the first element; raises ValueError."""
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return NpyHeader(*np.lib.format.read_array_header_1_0(stream))
    if version == (2, 0):
        return NpyHeader(*np.lib.format.read_array_header_2_0(stream))
    raise ValueError(f"npy format {version[0]}.{version[1]} is not read")
