"""Warm-up requests at min, opt and max of every profile, so that no client waits for what a first run sets up.

Where Triton batches, a request of n samples is n requests of one sample whose values are in a file; else the file
holds whole inputs. Files of one model take `LIMIT_BYTES` at most: what comes after that is zeros, which take no file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from trtforge.serving.model_config import TensorConfig, WarmupInput, WarmupRequest
from trtforge.serving.model_file import ModelFile
from trtforge.serving.request_values import POINTS, numpy_type, profile_point, request_values

FOLDER = "warmup"
LIMIT_BYTES = 16 * 2**20


def make_warmup(model: ModelFile, inputs: Sequence[TensorConfig]) -> tuple[tuple[WarmupRequest, ...], dict[str, bytes]]:
    """The requests, and the content of their files by name; requests of equal shapes are made once.

    Args:
        model: its profiles.
        inputs: as the configuration has them.
    """
    requests: list[WarmupRequest] = []
    files: dict[str, bytes] = {}
    seen: set[object] = set()
    left = LIMIT_BYTES
    for index, profile in enumerate(model.profiles):
        for point in POINTS:
            shapes, given = profile_point(profile, point)
            batch = _batch(shapes, model.max_batch_size)
            key = (batch, tuple(shapes.items()), tuple(given.items()))
            # A profile may start at a past of length 0, which no request can bring.
            if key in seen or any(0 in shape for shape in shapes.values()):
                continue
            seen.add(key)
            wanted = {name: (1, *shape[1:]) if batch else shape for name, shape in shapes.items()}
            sizes = {port.name: math.prod(wanted[port.name]) * numpy_type(port.dtype).itemsize for port in inputs}
            fits = sum(sizes.values()) <= left
            if fits:
                left -= sum(sizes.values())
                names = {port.name: f"profile{index}_{point}_{number}" for number, port in enumerate(inputs)}
                values = request_values(model, wanted, given)
                files |= {names[name]: np.ascontiguousarray(array).tobytes() for name, array in values.items()}
            requests.append(
                WarmupRequest(
                    f"{profile.name} {point}",
                    batch or 1,
                    tuple(
                        WarmupInput(
                            port.name,
                            port.dtype,
                            _dims(wanted[port.name], bool(batch)),
                            names[port.name] if fits else None,
                        )
                        for port in inputs
                    ),
                )
            )
    return tuple(requests), files


def _batch(shapes: Mapping[str, Sequence[int]], most: int) -> int:
    return min(next(iter(shapes.values()))[0], most) if most else 0


def _dims(shape: Sequence[int], is_batched: bool) -> tuple[int, ...]:
    """The shape as the client writes it."""
    inner = tuple(shape[1:] if is_batched else shape)
    return inner or (1,)
