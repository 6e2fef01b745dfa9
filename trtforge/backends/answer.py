"""What a build worker answers, checked: a hostile model may have taken the process over."""

from __future__ import annotations

from typing import Annotated

import pydantic

from trtforge.backends.inspection_json import parse_inspection
from trtforge.backends.layer_table import parse_plan
from trtforge.backends.plan import EnginePlan
from trtforge.errors import ChildDiedError
from trtforge.isolation import Arrays, Meta
from trtforge.textfile import FileModel


class BuildAnswer(FileModel):
    """The answer of `worker.py`.

    Attributes:
        inspection: the engine inspector's JSON; empty where the engine cannot be loaded, as without a GPU.
        layers: the engine-layer message; empty where the builder logged none.
        ports: names of the inputs and outputs.
        nodes, tensors: original name by short name.
        engine_sha256: of the engine; a wrong one shows when the artifact is next checked.
        build_s: seconds in the builder.
        version: of the builder.
        plugin_layers: layers of the network that a plugin computes.
    """

    inspection: str
    layers: str
    ports: list[str]
    nodes: dict[str, str]
    tensors: dict[str, str]
    engine_sha256: Annotated[str, pydantic.Field(pattern="^[0-9a-f]{64}$")]
    build_s: float
    version: str
    plugin_layers: Annotated[int, pydantic.Field(ge=0)]


def read_answer(reply: Meta) -> BuildAnswer:
    """The checked answer.

    Raises:
        ChildDiedError: fields are missing or wrong.
    """
    try:
        return BuildAnswer.model_validate(reply)
    except pydantic.ValidationError as err:
        raise _not_accepted(f"{err.error_count()} of its fields are missing or wrong") from err


def read_timing_cache(arrays: Arrays) -> bytes:
    """The bytes of the timing cache that the builder measured.

    Raises:
        ChildDiedError: there are none.
    """
    if "timing_cache" not in arrays:
        raise _not_accepted("its timing cache is missing")
    return arrays["timing_cache"].tobytes()


def _not_accepted(why: str) -> ChildDiedError:
    what = "the engine build process sent an answer that trtforge does not accept"
    return ChildDiedError(what, why, "do not trust this model")


def read_plan(answer: BuildAnswer) -> EnginePlan:
    """The engine's kernels: from its inspector where the engine could be loaded, else from the builder's log."""
    if answer.inspection:
        return parse_inspection(answer.inspection, answer.ports, answer.nodes, answer.tensors)
    return parse_plan(answer.layers, answer.ports, answer.nodes, answer.tensors)
