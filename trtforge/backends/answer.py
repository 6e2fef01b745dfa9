"""What a build worker answers, checked: a hostile model may have taken the process over."""

from __future__ import annotations

from typing import Annotated

import pydantic

from trtforge.errors import ChildDiedError
from trtforge.isolation import Meta
from trtforge.textfile import FileModel


class BuildAnswer(FileModel):
    """The answer of `worker.py`.

    Attributes:
        layers: the engine-layer message; empty where the builder logged none.
        ports: names of the inputs and outputs.
        nodes, tensors: original name by short name.
        engine_sha256: of the engine; a wrong one shows when the artifact is next checked.
        build_s: seconds in the builder.
        version: of the builder.
    """

    layers: str
    ports: list[str]
    nodes: dict[str, str]
    tensors: dict[str, str]
    engine_sha256: Annotated[str, pydantic.Field(pattern="^[0-9a-f]{64}$")]
    build_s: float
    version: str


def read_answer(reply: Meta) -> BuildAnswer:
    """The checked answer.

    Raises:
        ChildDiedError: fields are missing or wrong.
    """
    try:
        return BuildAnswer.model_validate(reply)
    except pydantic.ValidationError as err:
        raise ChildDiedError(
            "the engine build process sent an answer that trtforge does not accept",
            f"{err.error_count()} of its fields are missing or wrong",
            "do not trust this model",
        ) from err
