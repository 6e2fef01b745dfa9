"""What a server's log says went wrong, in the server's own words."""

from __future__ import annotations

import re

# `E1201 08:23:41.3 20046 model_lifecycle.cc:642] "failed to load 'bad' version 1: Internal: ValueError: ..."`
_FAILED_MODEL = re.compile(
    r"""^E\d{4} .*\] "failed to load '(?P<model>[^']+)' version (?P<version>\d+): (?P<why>.*)"$"""
)
# A folder whose config.pbtxt cannot be used is refused before its model is looked at.
_REFUSED_CONFIG = re.compile(r'^E\d{4} .*model_repository_manager\.cc:\d+\] "(?P<why>.*)"$')
# A process of the Python backend that ends this early leaves release 2.51 waiting for it without an end.
_DEAD_STUB = re.compile(
    r"^(?:I\d{4} .*\]\s+\"?Failed to preinitialize Python stub: |\S*/triton_python_backend_stub: )(?P<why>.*?)\"?$"
)
_FATAL = re.compile(r"^(?:E\d{4} .*main\.cc:\d+\] \"|error: |\S*/tritonserver: )(?P<why>.*?)\"?$")
# What C++ says of an exception that nobody caught, and Triton of a signal.
_CRASH = re.compile(r"^(?P<why>terminate called .*|\s*what\(\): .*|Signal \(\d+\) received\.?)$")
# Now and then the server and a model's process meet at a lock of their shared memory
# (https://github.com/triton-inference-server/server/issues/8882).
_BY_CHANCE = re.compile(r"^\s*what\(\): +boost::interprocess::lock_exception$")
_IN_USE = re.compile(r"already in use", re.IGNORECASE)
# Of one message, characters that an error quotes.
_LONGEST = 500


def failed_models(text: str) -> dict[str, str]:
    """Why models failed to load, by name."""
    return {match["model"]: _one_line(match["why"]) for match in _matches(_FAILED_MODEL, text)}


def failure_in(text: str) -> str | None:
    """The models that failed to load and why, else what ended the server; None where the log holds neither."""
    failed = [f"model {name}: {why}" for name, why in failed_models(text).items()]
    failed += [_one_line(match["why"]) for match in _matches(_REFUSED_CONFIG, text)]
    failed += [_one_line(match["why"]) for match in _matches(_DEAD_STUB, text)]
    failed = failed or [_one_line(match["why"]) for match in _matches(_FATAL, text)]
    failed = failed or [_one_line(match["why"]) for match in _matches(_CRASH, text)]
    return "; ".join(dict.fromkeys(failed)) or None


def is_stuck(text: str) -> bool:
    """Whether the server waits for a process that is gone."""
    return bool(_matches(_DEAD_STUB, text))


def crashed_by_chance(text: str) -> bool:
    """Whether the server ended of what does not come again when it is started again."""
    return bool(_matches(_BY_CHANCE, text))


def ports_are_taken(text: str) -> bool:
    """Whether a port was in use."""
    return any(_IN_USE.search(match["why"]) for match in _matches(_FATAL, text))


def _matches(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    return [match for line in text.splitlines() if (match := pattern.match(line)) is not None]


def _one_line(words: str) -> str:
    """Triton writes the newlines of a message as `\\n`."""
    flat = " ".join(words.replace("\\n", " ").replace('\\"', '"').split())
    return "".join(char for char in flat if char.isprintable())[:_LONGEST]
