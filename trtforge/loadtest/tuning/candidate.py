"""Batching settings to try, and `config.pbtxt` with them.

A file is read and written with Triton's own protobuf message, so that whatever else it says is kept.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from trtforge.errors import InputError, missing_extra
from trtforge.textfile import FileModel

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelConfig as Message

# What `--preferred` takes beside sizes.
NONE: Literal["none"] = "none"
PACKAGED: Literal["packaged"] = "packaged"


class Candidate(FileModel):
    """Batching settings of every model that is tuned.

    Attributes:
        delay_us: how long a request may wait for others; None switches dynamic batching off, which is what Triton does
            where a configuration says nothing.
        preferred: batch sizes that are sent at once; "packaged" leaves those of the repository.
        instances: copies of the model in each of its instance groups.
    """

    delay_us: int | None
    preferred: tuple[int, ...] | Literal["packaged"] = ()
    instances: int = 1

    def __str__(self) -> str:
        copies = f"{self.instances} instance{'s' if self.instances > 1 else ''}"
        if self.delay_us is None:
            return f"no dynamic batching, {copies}"
        sizes = "packaged" if self.preferred == PACKAGED else "+".join(map(str, self.preferred)) or "none"
        return f"delay {self.delay_us} us, preferred {sizes}, {copies}"


# Triton's own: `max_batch_size` alone does not make it batch.
DEFAULT = Candidate(delay_us=None)


def candidates(
    delays_us: Sequence[int], preferred: Sequence[tuple[int, ...] | Literal["packaged"]], instances: Sequence[int]
) -> tuple[Candidate, ...]:
    """Every combination, and Triton's default first."""
    found = itertools.product(delays_us, dict.fromkeys(preferred), instances)
    combined = (Candidate(delay_us=delay, preferred=sizes, instances=count) for delay, sizes, count in found)
    return tuple(dict.fromkeys((DEFAULT, *combined)))


def parse_preferred(text: str) -> tuple[tuple[int, ...] | Literal["packaged"], ...]:
    """The choices of `--preferred`: `none,packaged,8,4+16`.

    Raises:
        InputError: a size is no positive number.
    """
    choices: list[tuple[int, ...] | Literal["packaged"]] = []
    for part in (part.strip() for part in text.split(",")):
        if part == PACKAGED:
            choices.append(PACKAGED)
        elif part == NONE:
            choices.append(())
        elif all(size.strip().isdecimal() and int(size) > 0 for size in part.split("+")):
            choices.append(tuple(sorted({int(size) for size in part.split("+")})))
        else:
            why = f"{part!r} is neither none nor packaged nor sizes with + between"
            raise InputError(f"--preferred {text!r} cannot be used", why, "--preferred none,8,4+16")
    return tuple(choices)


def packaged_sizes(text: str, source: str) -> tuple[int, ...]:
    """The preferred batch sizes of a `config.pbtxt`."""
    return tuple(_parse(text, source).dynamic_batching.preferred_batch_size)


def with_candidate(text: str, candidate: Candidate, source: str) -> str:
    """A `config.pbtxt` with a candidate's settings.

    Args:
        text: of the file.
        candidate: its preferred sizes that are above the model's `max_batch_size` are left out.
        source: names the file in an error.

    Raises:
        InputError: it is no model configuration.
    """
    message = _parse(text, source)
    if candidate.delay_us is None:
        message.ClearField("dynamic_batching")
    else:
        batching = message.dynamic_batching
        batching.max_queue_delay_microseconds = candidate.delay_us
        if isinstance(candidate.preferred, tuple):
            sizes = [size for size in candidate.preferred if size <= message.max_batch_size]
            batching.preferred_batch_size[:] = sizes
    for group in message.instance_group or [message.instance_group.add()]:
        group.count = candidate.instances
    return _text(message)


def without_batching(text: str, source: str) -> str:
    """A `config.pbtxt` without dynamic batching, and with its instances as they are."""
    message = _parse(text, source)
    message.ClearField("dynamic_batching")
    return _text(message)


def batch_limit(text: str, source: str) -> int:
    """`max_batch_size` of a `config.pbtxt`."""
    return int(_parse(text, source).max_batch_size)


def diff(before: Mapping[str, str], after: Mapping[str, str], source: str) -> str:
    """What changes in the configurations of models, as a unified diff; empty where nothing does.

    Args:
        before, after: text by the name of the model.
        source: names the file in an error.
    """
    lines: list[str] = []
    for name, text in before.items():
        place = f"{name}/config.pbtxt"
        # As `with_candidate` writes it, so that the diff shows the settings alone.
        written = _text(_parse(text, source)).splitlines()
        lines += difflib.unified_diff(written, after[name].splitlines(), place, f"{place} (tuned)", lineterm="", n=2)
    return "\n".join(lines)


def _text(message: Message | Any) -> str:
    from google.protobuf import text_format

    return str(text_format.MessageToString(message))


def _parse(text: str, source: str) -> Message | Any:
    try:
        from google.protobuf import text_format
        from tritonclient.grpc import model_config_pb2
    except ModuleNotFoundError as err:
        raise missing_extra(err.name or "tritonclient", "serving") from err
    try:
        return text_format.Parse(text, model_config_pb2.ModelConfig())
    except text_format.ParseError as err:
        raise InputError(f"{source} is no model configuration", str(err), "package the model again") from err
