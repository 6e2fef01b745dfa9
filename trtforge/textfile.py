"""Read YAML and JSON files from users: bounded in size and depth, no duplicate keys, no aliases, no tags."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import pydantic
import yaml

from trtforge.errors import InputError
from trtforge.limits import DEFAULT_LIMITS, Limits

ModelT = TypeVar("ModelT", bound=pydantic.BaseModel)


class FileModel(pydantic.BaseModel):
    """Base of every type that is read from or written to a file: frozen, unknown keys refused."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys, aliases (they expand exponentially), deep nesting and explicit tags.

    PyYAML's own constructors fail with KeyError, IndexError or AttributeError on a tag that does not fit its value.
    """

    max_depth = DEFAULT_LIMITS.text_depth
    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not allowed", event.start_mark)
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if event.tag is not None:
            raise yaml.composer.ComposerError(None, None, "tags (!name) are not allowed", event.start_mark)
        self._depth += 1
        if self._depth > self.max_depth:
            raise yaml.composer.ComposerError(
                None, None, f"nested deeper than {self.max_depth} levels", event.start_mark
            )
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, (list, dict)):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a plain value", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def kind_of(path: Path, what: str) -> Literal["file", "folder", "other"] | None:
    """What lies at a user's path, links followed; None where nothing does.

    Args:
        path: the path.
        what: how an error names it, e.g. "profile".

    Raises:
        InputError: the system cannot look there: a name that is too long, a folder that may not be entered.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as err:
        reason = err.strerror if isinstance(err, OSError) else None
        raise InputError(f"{what} {path} cannot be read", reason or str(err), "check the path") from err
    return "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "other"


def read_text(path: Path, what: str, limits: Limits = DEFAULT_LIMITS) -> str:
    """The text of a user's file.

    Args:
        path: the file.
        what: how an error names it, e.g. "profile".

    Raises:
        InputError: missing, unreadable, too large or not UTF-8.
    """
    try:
        with path.open("rb") as file:
            # A device or a pipe states no size, so the bound is on what is read.
            data = file.read(limits.text_bytes + 1)
        if len(data) > limits.text_bytes:
            raise InputError(
                f"{what} {path} is too large",
                f"it has more than {limits.text_bytes} bytes, which is the limit",
                f"check the file, or raise it with --limit text_bytes={2 * limits.text_bytes}",
            )
        return data.decode("utf-8")
    except FileNotFoundError as err:
        raise InputError(f"{what} {path} does not exist", "no such file", "check the path") from err
    except (OSError, UnicodeDecodeError) as err:
        reason = "it is not UTF-8 text" if isinstance(err, UnicodeDecodeError) else (err.strerror or str(err))
        raise InputError(f"{what} {path} cannot be read", reason, "check the file") from err


def parse_yaml(text: str, source: str, limits: Limits = DEFAULT_LIMITS) -> Any:
    """The value of a YAML text.

    Raises:
        InputError: not YAML, nested too deep, aliases or duplicate keys; names the line.
    """
    try:
        loader = _StrictLoader(text)
        loader.max_depth = limits.text_depth
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as err:
        mark = getattr(err, "problem_mark", None)
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        reason = getattr(err, "problem", None) or str(err) or "nested too deep"
        why = f"{' '.join(reason.split())}{place}"
        raise InputError(f"{source} is not valid YAML", why, "correct that line") from err


def parse_json(text: str, source: str) -> Any:
    """The value of a JSON text; NaN, Infinity and duplicate keys are refused.

    Raises:
        InputError: not JSON, or nested too deep.
    """

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value: dict[str, Any] = {}
        for key, item in pairs:
            if key in value:
                raise ValueError(f"duplicate key {key!r}")
            value[key] = item
        return value

    def refuse_constant(name: str) -> Any:
        raise ValueError(f"{name} is not a JSON number")

    try:
        return json.loads(text, parse_constant=refuse_constant, object_pairs_hook=refuse_duplicates)
    except (ValueError, RecursionError) as err:
        raise InputError(f"{source} is not valid JSON", str(err) or "nested too deep", "correct the file") from err


def _given(problem: Mapping[str, object]) -> str:
    """The value that pydantic complains of, where it is short; our own messages hold it already."""
    value = problem["input"]
    is_short = isinstance(value, bool | int | float | str | None) and len(str(value)) <= 40
    return f", not {value!r}" if is_short and str(problem["msg"]).startswith("Input should be") else ""


def validate(model: type[ModelT], value: Any, source: str) -> ModelT:
    """A file's value as a model, with every problem named by its place.

    Raises:
        InputError: unknown key, missing key or wrong type; lists the allowed keys of the place.
    """
    if not isinstance(value, dict):
        raise InputError(
            f"{source} does not hold a mapping",
            f"found {type(value).__name__}; expected the keys {', '.join(model.model_fields)}",
            "see the README for an example of the format",
        )
    try:
        return model.model_validate(value)
    except pydantic.ValidationError as err:
        problems = []
        for problem in err.errors():
            place = ".".join(str(part) for part in problem["loc"]) or "(top level)"
            if problem["type"] == "extra_forbidden":
                problems.append(f"unknown key '{place}'")
            elif problem["type"] == "missing":
                problems.append(f"missing key '{place}'")
            else:
                problems.append(f"{place}: {problem['msg'].removeprefix('Value error, ')}{_given(problem)}")
        raise InputError(
            f"{source} has {len(problems)} problem{'s' if len(problems) > 1 else ''}",
            "; ".join(problems[:8]),
            f"allowed keys at the top level: {', '.join(model.model_fields)}",
        ) from err
