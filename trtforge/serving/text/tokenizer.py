"""A tokenizer file of Hugging Face's `tokenizers` (`tokenizer.json`), and the tokens that it makes of texts.

The file is data and holds no code. The library that reads it is native, so it runs in a child process.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from trtforge.errors import InputError, missing_extra
from trtforge.frames import Arrays, Meta
from trtforge.hashing import sha256_of_file
from trtforge.isolation import Child, Handler
from trtforge.limits import DEFAULT_LIMITS, Limits
from trtforge.serving.repository import FileSource
from trtforge.textfile import kind_of

TOKENIZER_NAME = "tokenizer.json"
_SERVICE = "trtforge.serving.text.tokenizer:SERVICE"
_PAD_TOKENS = ("[PAD]", "<pad>", "<|pad|>")
# Characters of the texts of one call, which take up to 12 bytes each on the way to the child.
_CHUNK_CHARS = 2**22
# Seconds for one call, which takes a few.
_TIMEOUT_S = 600.0


@dataclasses.dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of one text, special ones included.

    Attributes:
        ids: of the tokens.
        type_ids: 0, or what the tokenizer's template says.
    """

    ids: tuple[int, ...]
    type_ids: tuple[int, ...]


class TextTokenizer:
    """A tokenizer without padding and truncation; use it as a context manager.

    Args:
        path: the file, or the folder that it is in.
        limits: bounds on untrusted input.

    Attributes:
        source: the file.
        pad_id: of the token that fills a row up.
        largest_id: of all tokens, and of the one that fills a row up.
        truncation: tokens that the file itself would cut a text to; None where it does not.

    Raises:
        InputError: no such file, it is too large, or it holds no tokenizer that can be used.
        UnavailableError: the package `tokenizers` is not installed.
    """

    def __init__(self, path: Path, limits: Limits = DEFAULT_LIMITS) -> None:
        file = _find_file(path, limits)
        if importlib.util.find_spec("tokenizers") is None:
            raise missing_extra("tokenizers", "serving")
        self.source = FileSource(file, sha256_of_file(file))
        self._child = Child(_SERVICE, purpose="tokenizer", env={"TOKENIZERS_PARALLELISM": "true"})
        try:
            facts, _ = self._child.call("load", {"path": str(file.absolute())}, timeout_s=_TIMEOUT_S)
        except BaseException:
            self.close()
            raise
        self.pad_id, self.largest_id = int(facts["pad_id"]), int(facts["largest_id"])
        self.truncation: int | None = facts["truncation"]

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens of each text.

        Raises:
            InputError: a text cannot be tokenized.
        """
        answer, _ = self._child.call("encode", {"texts": list(texts)}, timeout_s=_TIMEOUT_S)
        return [Tokens(tuple(ids), tuple(types)) for ids, types in answer["tokens"]]

    def count(self, texts: Sequence[str]) -> list[int]:
        """The number of tokens of each text.

        Raises:
            InputError: a text cannot be tokenized.
        """
        counts: list[int] = []
        start = 0
        while start < len(texts):
            stop, chars = start + 1, len(texts[start])
            while stop < len(texts) and chars + len(texts[stop]) <= _CHUNK_CHARS:
                chars += len(texts[stop])
                stop += 1
            _, answer = self._child.call("count", {"texts": list(texts[start:stop])}, timeout_s=_TIMEOUT_S)
            counts += answer["counts"].tolist()
            start = stop
        return counts

    def close(self) -> None:
        """End the child process."""
        self._child.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _find_file(path: Path, limits: Limits) -> Path:
    kind = kind_of(path, "tokenizer")
    file = path / TOKENIZER_NAME if kind == "folder" else path
    if kind_of(file, "tokenizer") != "file":
        raise InputError(
            f"--tokenizer {path} cannot be used",
            f"it has no {TOKENIZER_NAME}" if kind == "folder" else "no such file",
            f"give a {TOKENIZER_NAME}, or the folder that it is in; transformers writes one with "
            "AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)",
        )
    if file.stat().st_size > limits.text_bytes:
        raise InputError(
            f"tokenizer {file} is too large",
            f"it has more than {limits.text_bytes} bytes, which is the limit",
            f"check the file, or raise it with --limit text_bytes={2 * limits.text_bytes}",
        )
    return file


_tokenizer: Any = None


def _handle_load(meta: Meta, _: Arrays, __: Callable[[Meta], None]) -> tuple[Meta, Arrays]:
    global _tokenizer  # noqa: PLW0603 - the child's one tokenizer lives from call to call
    from tokenizers import Tokenizer

    path = meta["path"]
    try:
        _tokenizer = Tokenizer.from_file(path)
    except Exception as err:
        raise InputError(
            f"tokenizer {path} cannot be read", " ".join(str(err).split())[:400], "save it again with `tokenizers`"
        ) from None
    padding, truncation = _tokenizer.padding or {}, _tokenizer.truncation or {}
    if str(padding.get("direction", "right")).lower() == "left":
        raise InputError(
            f"tokenizer {path} pads on the left",
            "texts are padded on the right here, which gives such a model other positions",
            "export the model so that it takes padding on the right, and set the tokenizer's padding direction",
        )
    known = (_tokenizer.token_to_id(token) for token in _PAD_TOKENS)
    pad_id = padding["pad_id"] if padding else next((number for number in known if number is not None), 0)
    _tokenizer.no_padding()
    _tokenizer.no_truncation()
    # A tokenizer may pad with a token that is not in its vocabulary.
    largest = max(pad_id, *_tokenizer.get_vocab(with_added_tokens=True).values())
    return {"pad_id": pad_id, "largest_id": largest, "truncation": truncation.get("max_length")}, {}


def _encode(texts: Sequence[str]) -> list[Any]:
    try:
        found: list[Any] = _tokenizer.encode_batch_fast(texts)
    except Exception as err:
        raise InputError(
            "the tokenizer cannot read these texts", " ".join(str(err).split())[:400], "check the tokenizer"
        ) from None
    return found


def _handle_encode(meta: Meta, _: Arrays, __: Callable[[Meta], None]) -> tuple[Meta, Arrays]:
    return {"tokens": [[encoding.ids, encoding.type_ids] for encoding in _encode(meta["texts"])]}, {}


def _handle_count(meta: Meta, _: Arrays, __: Callable[[Meta], None]) -> tuple[Meta, Arrays]:
    return {}, {"counts": np.array([len(encoding) for encoding in _encode(meta["texts"])], np.int64)}


SERVICE: dict[str, Handler] = {"load": _handle_load, "encode": _handle_encode, "count": _handle_count}
