"""Requests in the form in which they are sent, and how they cross from the job to the process that sends them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trtforge.frames import Arrays, Meta

# In KServe's words. BF16 is held as ml_dtypes has it; text as bytes with lengths between.
NUMPY_TYPES = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
    "BF16": "bfloat16",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """One input of a request.

    Attributes:
        datatype: in KServe's words.
        shape: with the batch axis.
        data: its elements as KServe's binary form has them.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What is sent, and the answer that is right.

    Attributes:
        inputs: all of one batch size.
        expected: right outputs by name; empty where any answer is.
    """

    inputs: tuple[Tensor, ...]
    expected: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True)
class RequestCell:
    """Requests of one length bucket and batch size.

    Attributes:
        bucket: its name; None without lengths.
        batch: samples in each.
        weight: of the cell among all.
        requests: at least one; they are sent in turn.
    """

    bucket: str | None
    batch: int
    weight: float
    requests: tuple[Request, ...]

    @property
    def name(self) -> str:
        """`length 8-32, batch 4`."""
        return (f"length {self.bucket}, " if self.bucket is not None else "") + f"batch {self.batch}"


def numpy_dtype(datatype: str) -> np.dtype[Any]:
    """The numpy type of a KServe type; raises KeyError for text and for what is not known."""
    name = NUMPY_TYPES[datatype]
    if name == "bfloat16":
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return dtype
    return np.dtype(name)


def tensor_from_array(name: str, datatype: str, array: np.ndarray) -> Tensor:
    """An input in its binary form: little-endian elements, or texts each with its length before it."""
    if datatype == "BYTES":
        texts = [text.encode() if isinstance(text, str) else bytes(text) for text in array.ravel().tolist()]
        data = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    else:
        data = np.ascontiguousarray(array).tobytes()
    return Tensor(name, datatype, array.shape, data)


def pack_cells(cells: Sequence[RequestCell]) -> tuple[Meta, Arrays]:
    """As JSON and arrays of bytes."""
    arrays: Arrays = {}

    def keep(array: np.ndarray) -> str:
        key = str(len(arrays))
        arrays[key] = array
        return key

    described = [
        {
            "bucket": cell.bucket,
            "batch": cell.batch,
            "weight": cell.weight,
            "requests": [
                {
                    "inputs": [
                        [one.name, one.datatype, list(one.shape), keep(np.frombuffer(one.data, np.uint8))]
                        for one in request.inputs
                    ],
                    "expected": {name: keep(array) for name, array in request.expected.items()},
                }
                for request in cell.requests
            ],
        }
        for cell in cells
    ]
    return {"cells": described}, arrays


def unpack_cells(meta: Meta, arrays: Arrays) -> tuple[RequestCell, ...]:
    """What `pack_cells` packed."""
    return tuple(
        RequestCell(
            cell["bucket"],
            cell["batch"],
            cell["weight"],
            tuple(
                Request(
                    tuple(
                        Tensor(name, datatype, tuple(shape), arrays[key].tobytes())
                        for name, datatype, shape, key in request["inputs"]
                    ),
                    {name: arrays[key] for name, key in request["expected"].items()},
                )
                for request in cell["requests"]
            ),
        )
        for cell in meta["cells"]
    )
