"""`text.json` beside a front: what `python_models/text_model.py` has to know of the models behind it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import pydantic

from trtforge.textfile import FileModel, parse_json, read_text, validate

TEXT_FILE_NAME = "text.json"


class BucketInfo(FileModel):
    """A model behind the front.

    Attributes:
        length: of its rows.
        model: its name.
        max_batch_size: rows of one request to it; 0 means one row, with whole shapes.
    """

    length: Annotated[int, pydantic.Field(ge=1)]
    model: str
    max_batch_size: Annotated[int, pydantic.Field(ge=0)]


class OutputInfo(FileModel):
    """An output of the models.

    Attributes:
        sequence_axes: those that count tokens, where axis 0 counts texts.
    """

    name: str
    sequence_axes: tuple[int, ...]


class TextFile(FileModel):
    """The content of `text.json`.

    Attributes:
        tokenizer: the file, beside this one.
        pad_id: token that fills rows up.
        truncate: texts that are too long are cut; otherwise they are refused.
        inputs: types of the models' inputs, by name.
        outputs: of the models.
        buckets: by length.
    """

    schema_version: Literal[1] = 1
    tokenizer: str
    pad_id: int
    truncate: bool
    inputs: dict[str, str]
    outputs: tuple[OutputInfo, ...]
    buckets: tuple[BucketInfo, ...]

    def to_json(self) -> str:
        """The text of the file."""
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=True) + "\n"


def load_text_file(path: Path) -> TextFile:
    """The content of a `text.json`.

    Raises:
        InputError: it cannot be read, or does not hold what it should.
    """
    return validate(TextFile, parse_json(read_text(path, "text file"), str(path)), str(path))
