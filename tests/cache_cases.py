"""A codec of texts for tests of the stage cache, and short ways in and out of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trtforge.cache.store import Entry, open_cache
from trtforge.hashing import fingerprint
from trtforge.progress import Event

GB = 10**9
KEY = fingerprint("key")


class TextCodec:
    """A text as JSON, and once more in a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def save(self, value: str, scratch: Path) -> tuple[Any, dict[str, Path]]:
        (scratch / "text").write_text(value)
        return {"text": value}, {"text.txt": scratch / "text"}

    def load(self, entry: Entry) -> str:
        entry.fetch("text.txt", self.target)
        return str(entry.value["text"])


class Said(list[str]):
    """A reporter that keeps the texts."""

    def __call__(self, event: Event) -> None:
        self.append(event.detail)


def store(folder: Path, codec: TextCodec, text: str = "hello", key: str = KEY, stage: str = "calibrate") -> None:
    with open_cache(folder, GB, Said()) as cache:
        assert cache is not None
        cache.store(stage, key, text, codec, ["mind this"])


def find(folder: Path, codec: TextCodec, said: Said, key: str = KEY, stage: str = "calibrate") -> str | None:
    with open_cache(folder, GB, said) as cache:
        assert cache is not None
        found = cache.find(stage, key, codec)
    return None if found is None else found.value
