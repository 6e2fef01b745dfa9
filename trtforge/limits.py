"""Bounds on untrusted input. Every one can be raised by `--limit NAME=VALUE` or through the API."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from trtforge.errors import InputError


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What trtforge is willing to read.

    Attributes:
        model_bytes: size of an ONNX file together with its external data.
        model_nodes: number of nodes in a model, subgraphs included.
        tensor_dims: rank of one tensor.
        data_bytes: size of one `.npz` file of calibration or evaluation data once decompressed.
        text_bytes: size of a YAML or JSON file.
        text_depth: nesting depth of a YAML or JSON file.
        cache_bytes: size of a stage cache; what was of no use for longest is removed.
    """

    model_bytes: int = 16 * 2**30
    model_nodes: int = 200_000
    tensor_dims: int = 32
    data_bytes: int = 8 * 2**30
    text_bytes: int = 64 * 2**20
    text_depth: int = 32
    cache_bytes: int = 20 * 10**9

    def override(self, settings: Iterable[str]) -> Limits:
        """Limits changed by `NAME=VALUE` strings, e.g. `["model_nodes=500000"]`.

        Raises:
            InputError: unknown name or a value that is not a positive integer.
        """
        names = [field.name for field in dataclasses.fields(self)]
        changes: dict[str, int] = {}
        for setting in settings:
            name, _, value = setting.partition("=")
            if name not in names or re.fullmatch(r"[1-9]\d{0,17}", value, re.ASCII) is None:
                raise InputError(
                    f"--limit {setting!r} cannot be used",
                    f"it takes NAME=VALUE with a positive integer; names: {', '.join(names)}",
                    f"for example --limit model_nodes={2 * self.model_nodes}",
                )
            changes[name] = int(value)
        return dataclasses.replace(self, **changes)


DEFAULT_LIMITS = Limits()
