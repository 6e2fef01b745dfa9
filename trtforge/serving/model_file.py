"""`model.json` beside a packaged model: what the models of Triton's Python backend and the checks know of it.

The server gives a model its `config.pbtxt`, which holds neither the range of a dim nor the axis of the batch where
Triton batches. This file holds the shapes as the model itself has them, batch included.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import pydantic

from trtforge.manifest import ProfileInfo
from trtforge.textfile import FileModel, parse_json, read_text, validate

MODEL_FILE_NAME = "model.json"
Kind = Literal["tensorrt", "tensorrt-rtx", "onnxruntime"]


class Port(FileModel):
    """An input or output of the model.

    Attributes:
        dtype: numpy's name, or "bfloat16".
        shape: -1 where a dim is dynamic; the batch included.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


class ModelFile(FileModel):
    """The content of `model.json`.

    Attributes:
        kind: what runs the model.
        version: of what built the engine; the same has to run it. Empty for ONNX Runtime.
        file: the model, as a path from this file's folder.
        max_batch_size: as in `config.pbtxt`; 0 where Triton does not batch, and a request brings whole shapes.
        as_written: the graph holds Q/DQ, which ONNX Runtime computes as written with its optimisation off only.
        tf32: products of fp32 may use TF32; for who builds the engine again.
        inputs: in the order of the source.
        outputs: likewise.
        profiles: ranges of the inputs; a request has to lie inside one of them.
        integer_limits: for inputs that are indices, the number of rows that they choose from.
    """

    schema_version: Literal[1] = 1
    kind: Kind
    version: str = ""
    file: str
    max_batch_size: Annotated[int, pydantic.Field(ge=0)]
    as_written: bool = False
    tf32: bool = True
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    profiles: tuple[ProfileInfo, ...]
    integer_limits: dict[str, int] = pydantic.Field(default_factory=dict)

    def to_json(self) -> str:
        """The text of the file."""
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=True) + "\n"


def load_model_file(path: Path) -> ModelFile:
    """The content of a `model.json`.

    Raises:
        InputError: it cannot be read, or does not hold what it should.
    """
    return validate(ModelFile, parse_json(read_text(path, "model file"), str(path)), str(path))
