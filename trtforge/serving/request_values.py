"""Values for requests that nobody sends: warm-up, and the checks of a packaged model.

They are of the kind that the model meets: floats are normal, indices lie inside their table, masks let everything
through, and inputs whose values become shapes take the profile's. The same seed gives the same values.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import ml_dtypes  # noqa: F401 - makes bfloat16 a numpy type
import numpy as np

from trtforge.errors import InputError
from trtforge.manifest import ProfileInfo
from trtforge.serving.model_file import ModelFile, Port

Point = Literal["min", "opt", "max"]
Sizes = dict[str, tuple[int, ...]]
POINTS: tuple[Point, ...] = ("min", "opt", "max")
# Of all inputs: a message of gRPC holds no more.
_MOST_BYTES = 2**31
# Integers of an input that no table says anything of: two values, as flags and token types have.
_SMALL = 2


def profile_point(profile: ProfileInfo, point: Point) -> tuple[Sizes, Sizes]:
    """Shapes of all inputs at a profile's min, opt or max, and values of those whose values become shapes."""
    shapes = {name: tuple(getattr(span, point)) for name, span in profile.inputs.items()}
    return shapes, {name: tuple(getattr(span, point)) for name, span in profile.values.items()}


def request_values(
    model: ModelFile, shapes: Mapping[str, Sequence[int]], given: Mapping[str, Sequence[int]], seed: int = 0
) -> dict[str, np.ndarray]:
    """One array per input.

    Args:
        model: its inputs, and what it says of indices.
        shapes: of each input, batch included.
        given: values of the inputs whose values become shapes.
        seed: another one gives other values.

    Raises:
        InputError: they are more than one request can bring.
    """
    size = sum(math.prod(shapes[port.name]) * numpy_type(port.dtype).itemsize for port in model.inputs)
    if size > _MOST_BYTES:
        raise InputError(
            "a request cannot be made up",
            f"inputs of {', '.join(str(list(shapes[port.name])) for port in model.inputs)} are {size / 2**30:.1f} GiB, "
            f"and a request has {_MOST_BYTES // 2**30} at most",
            "build the artifact with smaller profiles",
        )
    return {
        port.name: np.array(given[port.name], numpy_type(port.dtype)).reshape(shapes[port.name])
        if port.name in given
        else _values(port, shapes[port.name], model.integer_limits.get(port.name), seed)
        for port in model.inputs
    }


def numpy_type(name: str) -> np.dtype[Any]:
    """numpy's type of a name, "bfloat16" among them."""
    dtype: np.dtype[Any] = np.dtype(name)
    return dtype


def _values(port: Port, shape: Sequence[int], rows: int | None, seed: int) -> np.ndarray:
    random = np.random.default_rng([seed, zlib.crc32(port.name.encode())])
    dtype = numpy_type(port.dtype)
    if dtype == np.bool_ or "mask" in port.name.lower():
        return np.ones(shape, dtype)
    is_integer = dtype.kind in "iu"
    if not is_integer and rows is None:
        return random.standard_normal(shape, np.float32).astype(dtype)
    limit = rows or (256 if dtype == np.uint8 else _SMALL)
    return random.integers(0, min(limit, np.iinfo(dtype).max) if is_integer else limit, shape).astype(dtype)
