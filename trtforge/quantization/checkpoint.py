"""A calibration's saved state, from which the same command goes on after it was interrupted or killed.

The file is an `.npz` of plain arrays, replaced in one step. It names what it belongs to by a fingerprint; one of other
inputs, or a damaged one, is reported and removed. It stays only where going on makes sense: after an interruption and
where the process that runs the model died.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trtforge.errors import ChildDiedError, InputError
from trtforge.limits import DEFAULT_LIMITS
from trtforge.npz import NpzFile
from trtforge.quantization.observation import MAX_ROW_BYTES, Observation
from trtforge.staging import check_free, make_parents, translate_write_errors

Arrays = Mapping[str, npt.NDArray[Any]]

# Seconds between two saves, and how many times longer than a save the pause after it is at least.
_INTERVAL_S = 3.0
_PAUSE_PER_SAVE = 20.0
# Rows, and generously what else an observation holds.
_LIMITS = dataclasses.replace(DEFAULT_LIMITS, data_bytes=2 * MAX_ROW_BYTES)
_IDENTITY = "identity"


class Checkpoint:
    """The saved state of one calibration; `open_checkpoint` gives it.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unfinished = path.with_name(f".{path.name}.new")
        self._due = time.monotonic() + _INTERVAL_S

    @property
    def is_due(self) -> bool:
        """Whether it is time to save."""
        return time.monotonic() >= self._due

    def load(self, identity: str, make_empty: Callable[[], Observation], warn: Callable[[str], None]) -> Observation:
        """What was saved, or an empty observation where that is nothing, of other inputs or damaged; such a file goes.

        Args:
            identity: fingerprint of everything that the state depends on.
            make_empty: makes an observation of the same tensors.
            warn: is told why a file is not used.
        """
        if not self.path.exists():
            return make_empty()
        try:
            arrays = _read(self.path)
            found = arrays.pop(_IDENTITY).tobytes().decode("ascii")
            if found == identity:
                observation = make_empty()
                observation.restore(arrays)
                return observation
            why = "it belongs to another calibration (model, data, recipe, options or versions differ)"
        except InputError as err:
            why = err.why
        except (KeyError, ValueError, EOFError, OSError, zlib.error, zipfile.BadZipFile) as err:
            why = f"it is damaged ({type(err).__name__})"
        self.remove()
        warn(f"{self.path} is ignored and removed: {why}")
        return make_empty()

    def save(self, identity: str, state: Arrays) -> None:
        """Write the state of an observation in the place of the one before.

        Raises:
            UnavailableError: the place cannot be written.
        """
        started = time.monotonic()
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **{_IDENTITY: np.frombuffer(identity.encode("ascii"), np.uint8)}, **state)
        with translate_write_errors(self.path):
            self._unfinished.write_bytes(buffer.getbuffer())
            self._unfinished.replace(self.path)
        ended = time.monotonic()
        self._due = ended + max(_INTERVAL_S, _PAUSE_PER_SAVE * (ended - started))

    def remove(self) -> None:
        """Remove the file, and what a killed process left of an unfinished one."""
        for path in (self.path, self._unfinished):
            with contextlib.suppress(OSError):
                path.unlink()


@contextlib.contextmanager
def open_checkpoint(path: Path) -> Iterator[Checkpoint]:
    """A checkpoint for the length of a calibration.

    Raises:
        InputError: something else than a file is in its place.
        UnavailableError: the place cannot be written.
    """
    path = path.absolute()
    check_free(path, force=True)
    with contextlib.ExitStack() as stack:
        with translate_write_errors(path):
            make_parents(path.parent, stack)
        checkpoint = Checkpoint(path)
        try:
            yield checkpoint
        except ChildDiedError:
            raise
        except Exception:
            checkpoint.remove()
            raise
        checkpoint.remove()


def _read(path: Path) -> dict[str, npt.NDArray[Any]]:
    """All arrays of an `.npz` file whose size is bounded."""
    NpzFile(path, _LIMITS)
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}
