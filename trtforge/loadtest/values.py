"""Made values: numbers from the traffic file's range, and texts of common English words."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from trtforge.errors import InputError
from trtforge.loadtest.request import numpy_dtype
from trtforge.loadtest.signature import ModelInput
from trtforge.loadtest.traffic import InputValues, LengthBucket

# Words in a text where the traffic has no lengths.
_DEFAULT_WORDS = LengthBucket(min=8, max=8)
_WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out many "
    "then them these so some her would make like him into time has look two more write go see number no way could "
    "people my than first water been call who oil its now find long down day did get come made may part"
)


def make_values(
    random: np.random.Generator, port: ModelInput, values: InputValues, shape: tuple[int, ...]
) -> np.ndarray:
    """Values for one input of a request.

    Args:
        random: decides them.
        port: the input, which is not text.
        values: their range; by default [0, 1) for floats and 0 to 1 for integers.
        shape: with the batch axis.

    Raises:
        InputError: the range does not fit the type.
    """
    dtype = numpy_dtype(port.datatype)
    if port.datatype == "BOOL":
        return random.integers(0, 2, shape).astype(bool)
    low = 0.0 if values.min is None else values.min
    high = max(low, 1.0) if values.max is None else values.max
    if dtype.kind not in "iu":
        made: np.ndarray = random.uniform(low, high, shape).astype(dtype)
        return made
    info: Any = np.iinfo(dtype)
    first, last = math.ceil(low), math.floor(high)
    if not (info.min <= first <= last <= info.max):
        why = f"values from {low:g} to {high:g} were asked for; {port.datatype} holds {info.min} to {info.max}"
        fix = f"correct inputs.{port.name} in the traffic file"
        raise InputError(f"input {port.name!r} cannot have such values", why, fix)
    return random.integers(first, last, shape, dtype=dtype, endpoint=True)


def make_texts(random: np.random.Generator, shape: tuple[int, ...], lengths: LengthBucket | None) -> np.ndarray:
    """Texts of random common words.

    Args:
        random: decides them.
        shape: of the array.
        lengths: words in a text; 8 by default.
    """
    bucket = lengths or _DEFAULT_WORDS
    words = _WORDS.split()
    texts = []
    for _ in range(math.prod(shape)):
        count = int(random.integers(bucket.min, bucket.max, endpoint=True))
        texts.append(" ".join(words[place] for place in random.integers(0, len(words), count)))
    return np.array(texts, dtype=object).reshape(shape)
