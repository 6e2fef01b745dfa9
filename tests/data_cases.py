"""Samples on disk, and what reading them raises, for the tests of data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trtforge.data import open_dataset
from trtforge.errors import InputError
from trtforge.limits import Limits
from trtforge.tensor import TensorSpec

Specs = tuple[TensorSpec, ...]
TOKENS = (TensorSpec("ids", "int64", ("batch", "seq")), TensorSpec("mask", "int64", ("batch", "seq")))


def samples(count: int) -> np.ndarray:
    """[count, 4], all different."""
    return np.arange(count * 4, dtype=np.float32).reshape(count, 4)


def save(path: Path, **arrays: object) -> Path:
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def refusal(source: str | Path, specs: Specs, limits: Limits | None = None) -> InputError:
    with pytest.raises(InputError, match="cannot be used") as caught:
        open_dataset(source, specs, limits or Limits())
    assert str(source) in caught.value.what
    assert caught.value.fix
    return caught.value
