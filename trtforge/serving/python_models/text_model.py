"""The front of a text model, in Triton's Python backend: strings in, the model's answers out.

    text [N, 1] -> tokens -> rows padded to a length bucket -> <name>_b<length> -> outputs [N, ...]

The server hands over whatever requests wait. Their texts are tokenized together, and those of one bucket go to its
model as one request, or as several of its `max_batch_size`; the server joins these with what other instances of the
front send. All buckets run at once. Everything here is done by one thread: a server of release 24.10 crashes where the
metrics are changed by several. What comes in meanwhile waits in the server's queue and makes the next batch.

Outputs with an axis of tokens have the length of the longest text of the request; `attention_mask` tells which tokens
are real, and everything beyond a text's own is zero. `text.json` beside this file says what it needs to know.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Encoding, Tokenizer

TEXT, MASK = "text", "attention_mask"
# Bytes of one text: far above what any model reads, and a bound on what tokenizing may take.
MAX_TEXT_BYTES = 2**20


class TritonPythonModel:
    """What the server calls."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Read `text.json` and the tokenizer, which brings neither padding nor truncation of its own."""
        folder = Path(args["model_repository"]) / args["model_version"]
        self._facts = json.loads((folder / "text.json").read_text())
        self._buckets = self._facts["buckets"]
        self._lengths = [bucket["length"] for bucket in self._buckets]
        self._axes = {port["name"]: port["sequence_axes"] for port in self._facts["outputs"]}
        self._tokenizer = Tokenizer.from_file(str(folder / self._facts["tokenizer"]))
        self._tokenizer.no_padding()
        direction = (self._tokenizer.truncation or {}).get("direction", "right")
        self._tokenizer.no_truncation()
        if self._facts["truncate"]:
            self._tokenizer.enable_truncation(self._lengths[-1], direction=direction)
        self._tokens = TokenCounters(args["model_name"], self._lengths)

    async def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One response for each request."""
        calls = [Call(request) for request in requests]
        groups = self._group(self._tokenize(calls))
        for bucket, rows in groups:
            self._tokens.add(bucket["length"], rows)
        await asyncio.gather(*[self._answer(bucket, rows) for bucket, rows in groups])
        return [call.respond(self._axes) for call in calls]

    def _tokenize(self, calls: Sequence[Call]) -> list[Row]:
        """The texts of all calls, tokenized together; where that fails, those of each call alone."""
        try:
            encodings = self._tokenizer.encode_batch_fast([text for call in calls for text in call.texts])
        except Exception as err:
            if len(calls) == 1:
                calls[0].error = f"the request cannot be tokenized: {err}"
                return []
            return [row for call in calls for row in self._tokenize([call])]
        places = [(call, place) for call in calls for place in range(len(call.texts))]
        rows = [Row(call, place, encoding) for (call, place), encoding in zip(places, encodings, strict=True)]
        for row in rows:
            row.call.take_length(row, self._lengths[-1])
        return [row for row in rows if row.call.error is None]

    def _group(self, rows: Sequence[Row]) -> list[tuple[dict[str, Any], list[Row]]]:
        """(bucket, its rows) for each request to a model."""
        groups = []
        for bucket, low in zip(self._buckets, [0, *self._lengths], strict=False):
            own = [row for row in rows if low < row.length <= bucket["length"]]
            size = max(1, bucket["max_batch_size"])
            groups += [(bucket, own[start : start + size]) for start in range(0, len(own), size)]
        return groups

    async def _answer(self, bucket: Mapping[str, Any], rows: Sequence[Row]) -> None:
        """Ask a bucket's model for every output that one of the rows' calls wants, and give each row its part."""
        wanted = sorted(set().union(*(row.call.model_outputs for row in rows)))
        if not wanted:
            return
        answer = await pb_utils.InferenceRequest(
            model_name=bucket["model"],
            requested_output_names=wanted,
            inputs=self._inputs(bucket["length"], rows),
            preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU),
        ).async_exec()
        if answer.has_error():
            by_call = [[row for row in rows if row.call is call] for call in dict.fromkeys(row.call for row in rows)]
            if len(by_call) == 1:
                rows[0].call.error = f"{bucket['model']}: {answer.error().message()}"
            else:
                # The request that the model cannot answer fails alone.
                await asyncio.gather(*[self._answer(bucket, own) for own in by_call])
            return
        values = {name: pb_utils.get_output_tensor_by_name(answer, name).as_numpy() for name in wanted}
        for index, row in enumerate(rows):
            row.call.done[row.place] = {name: value[index] for name, value in values.items()}

    def _inputs(self, length: int, rows: Sequence[Row]) -> list[Any]:
        """The inputs that the model has, for some rows padded to a length."""
        feeds = {
            "input_ids": np.full((len(rows), length), self._facts["pad_id"], np.int64),
            "attention_mask": np.zeros((len(rows), length), np.int64),
            "token_type_ids": np.zeros((len(rows), length), np.int64),
        }
        for index, row in enumerate(rows):
            feeds["input_ids"][index, : row.length] = row.encoding.ids
            feeds["attention_mask"][index, : row.length] = 1
            feeds["token_type_ids"][index, : row.length] = row.encoding.type_ids
        return [pb_utils.Tensor(name, feeds[name].astype(dtype)) for name, dtype in self._facts["inputs"].items()]


class Row:
    """One text of a request.

    Attributes:
        call: the request.
        place: of the text in it.
        encoding: its tokens.
    """

    def __init__(self, call: Call, place: int, encoding: Encoding) -> None:
        self.call = call
        self.place = place
        self.encoding = encoding
        self.length = len(encoding.ids)


class Call:
    """A request.

    Attributes:
        texts: its strings; none where one is no text.
        lengths: tokens of each.
        model_outputs: names of the outputs that it wants of the model.
        done: what the model answered, by the text's place.
        error: why the request is refused; None where it is not.
    """

    def __init__(self, request: Any) -> None:
        self._wanted = list(request.requested_output_names())
        self.model_outputs = {name for name in self._wanted if name != MASK}
        self.done: dict[int, dict[str, np.ndarray]] = {}
        self.lengths: list[int] = []
        self.error: str | None = None
        self.texts: list[str] = []
        try:
            self.texts = read_texts(pb_utils.get_input_tensor_by_name(request, TEXT).as_numpy().reshape(-1))
        except ValueError as err:
            self.error = str(err)

    def take_length(self, row: Row, largest: int) -> None:
        """Note the length of a text; refuse the request where it has too many tokens, or none."""
        self.lengths.append(row.length)
        if row.length > largest:
            self.error = self.error or f"text {row.place} has {row.length} tokens; this model takes {largest} at most"
        elif row.length == 0:
            self.error = self.error or f"text {row.place} has no token that the model knows"

    def respond(self, axes: Mapping[str, Sequence[int]]) -> Any:
        """The response, once all of its texts are done."""
        if self.error is not None:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(self.error))
        return pb_utils.InferenceResponse([self._output(name, axes) for name in self._wanted])

    def _output(self, name: str, axes: Mapping[str, Sequence[int]]) -> Any:
        if name == MASK:
            mask = np.arange(max(self.lengths)) < np.array(self.lengths)[:, None]
            return pb_utils.Tensor(name, mask.astype(np.int64))
        values = [self.done[place][name] for place in range(len(self.texts))]
        return pb_utils.Tensor(name, join_rows(values, self.lengths, axes[name]))


def read_texts(raw: Sequence[bytes]) -> list[str]:
    """The strings of a request.

    Raises:
        ValueError: there is none, or one is no text.
    """
    if len(raw) == 0:
        raise ValueError("the request has no text")
    texts = []
    for place, value in enumerate(raw):
        if len(value) > MAX_TEXT_BYTES:
            raise ValueError(f"text {place} has {len(value)} bytes; the limit is {MAX_TEXT_BYTES}")
        try:
            texts.append(value.decode("utf-8"))
        except UnicodeDecodeError as err:
            raise ValueError(f"text {place} is not UTF-8: {err.reason} at byte {err.start}") from err
    return texts


def join_rows(values: Sequence[np.ndarray], lengths: Sequence[int], axes: Sequence[int]) -> np.ndarray:
    """One array from the outputs of single texts.

    Args:
        values: of each text, without an axis of texts, padded to its bucket.
        lengths: tokens of each text.
        axes: those that count tokens, where the axis of texts is 0; they are cut to the longest text.
    """
    if not axes:
        return np.stack(values)
    inner = [max(lengths) if axis + 1 in axes else size for axis, size in enumerate(values[0].shape)]
    joined = np.zeros([len(values), *inner], values[0].dtype)
    for index, (value, length) in enumerate(zip(values, lengths, strict=True)):
        own = tuple(slice(length) if axis + 1 in axes else slice(None) for axis in range(value.ndim))
        joined[(index, *own)] = value[own]
    return joined


class TokenCounters:
    """Counts tokens in the server's metrics, by length bucket: real ones, and those that pad them.

    The server's library wants a family to outlive its metrics.
    """

    def __init__(self, model: str, lengths: Sequence[int]) -> None:
        family = pb_utils.MetricFamily(
            name="trtforge_text_tokens_total",
            description="Tokens sent to the models of a text front, by length bucket; kind is real or padding",
            kind=pb_utils.MetricFamily.COUNTER,
        )
        self._counters = {
            (length, kind): family.Metric(labels={"model": model, "bucket": str(length), "kind": kind})
            for length in lengths
            for kind in ("real", "padding")
        }
        self._family = family

    def add(self, length: int, rows: Sequence[Row]) -> None:
        """Count some rows of a bucket."""
        real = sum(row.length for row in rows)
        self._counters[length, "real"].increment(real)
        self._counters[length, "padding"].increment(length * len(rows) - real)
