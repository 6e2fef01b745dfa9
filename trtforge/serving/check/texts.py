"""What the front of a text model does: texts of every length bucket, one that is too long, and many at once.

What is expected comes from the models' own graph: the text's tokens, padded to its bucket, in ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from trtforge.errors import InputError
from trtforge.serving.check.load import Content, check_load
from trtforge.serving.check.reference import Arrays, Reference, worst_error
from trtforge.serving.check.results import ModelCheck, RequestCheck
from trtforge.serving.model_file import MODEL_FILE_NAME, load_model_file
from trtforge.serving.repository import PackagedModel, RepositoryManifest
from trtforge.serving.text.text_file import TEXT_FILE_NAME, BucketInfo, TextFile, load_text_file
from trtforge.serving.text.tokenizer import TextTokenizer, Tokens
from trtforge.serving.triton.client import RequestError, TritonClient

_TEXT, _MASK = "text", "attention_mask"
_WORDS = (
    "time",
    "has",
    "come",
    "to",
    "talk",
    "of",
    "many",
    "things",
    ":",
    "shoes",
    "and",
    "ships",
    ",",
    "cabbages",
    "kings",
)
# Different contents among the requests that are sent at once.
_NUM_CONTENTS = 24


def check_texts(
    client: TritonClient,
    repository: Path,
    manifest: RepositoryManifest,
    entry: PackagedModel,
    artifacts: Mapping[str, Path],
    num_requests: int,
) -> ModelCheck:
    """Send texts to a front.

    Args:
        client: over gRPC, of a server that has the front and its models loaded.
        repository: its folder.
        manifest: of the repository.
        entry: the front.
        artifacts: by name of model, for the graph; models that run on ONNX Runtime bring their own.
        num_requests: sent at once.

    Raises:
        InputError: a file of the package cannot be read, or ONNX Runtime cannot load the graph.
        UnavailableError: the package `tokenizers` is not installed.
        ChildDiedError: ONNX Runtime or the tokenizer died.
    """
    folder = repository / entry.name / str(entry.version)
    facts = load_text_file(folder / TEXT_FILE_NAME)
    with ExitStack() as stack:
        tokenizer = stack.enter_context(TextTokenizer(folder / facts.tokenizer))
        references = _open_references(stack, repository, manifest, facts, artifacts)
        probe = _Probe(client, entry.name, facts, tokenizer, references)
        try:
            requests = tuple(probe.check_text(*case) for case in probe.cases())
            load = check_load(
                client,
                [bucket.model for bucket in facts.buckets],
                probe.infer,
                probe.contents(),
                num_requests,
                max(reference.joined for reference in references.values()),
            )
        except RequestError as err:
            return ModelCheck(entry.name, entry.kind, failure=str(err))
        note = next(filter(None, (reference.note for reference in references.values())), "")
    return ModelCheck(entry.name, entry.kind, requests, load, note=note)


def _open_references(
    stack: ExitStack,
    repository: Path,
    manifest: RepositoryManifest,
    facts: TextFile,
    artifacts: Mapping[str, Path],
) -> dict[int, Reference]:
    """ONNX Runtime for each length; models of one graph share it."""
    by_graph: dict[str, Reference] = {}
    by_length = {}
    for bucket in facts.buckets:
        entry = manifest.model(bucket.model)
        if entry is None:
            raise InputError(
                f"{repository} lacks the model {bucket.model}", "texts are sent to it", "package the texts' model again"
            )
        folder = repository / entry.name / str(entry.version)
        graph = f"{entry.artifact_sha256} {entry.kind}"
        if graph not in by_graph:
            model = load_model_file(folder / MODEL_FILE_NAME)
            by_graph[graph] = stack.enter_context(Reference(model, entry, folder, artifacts.get(entry.name)))
        by_length[bucket.length] = by_graph[graph]
    return by_length


class _Probe:
    """Requests to one front."""

    def __init__(
        self,
        client: TritonClient,
        name: str,
        facts: TextFile,
        tokenizer: TextTokenizer,
        references: dict[int, Reference],
    ) -> None:
        self._client = client
        self._name = name
        self._facts = facts
        self._references = references
        # Texts of one word more each, up to one that is too long.
        count = facts.buckets[-1].length + 1
        words = [_WORDS[index % len(_WORDS)] for index in range(count)]
        self._texts = [" ".join(words[: index + 1]) for index in range(count)]
        self._tokens = tokenizer.encode(self._texts)

    def cases(self) -> list[tuple[str, str, int]]:
        """(bucket, place, which text): the shortest and the longest of each bucket, and one that is too long."""
        cases = []
        low = 0
        for bucket in self._facts.buckets:
            inside = [index for index, found in enumerate(self._tokens) if low < len(found.ids) <= bucket.length]
            places = {inside[0]: "min", inside[-1]: "max"} if inside else {}
            cases += [(f"bucket {bucket.length}", place, index) for index, place in places.items()]
            low = bucket.length
        too_long = next((index for index, found in enumerate(self._tokens) if len(found.ids) > low), None)
        return cases if too_long is None else [*cases, (f"bucket {low}", "outside", too_long)]

    def check_text(self, bucket: str, place: str, index: int) -> RequestCheck:
        """One text; one that is too long has to be refused, unless the front cuts it."""
        shown = f"a text of {len(self._tokens[index].ids)} tokens"
        has_answer = place != "outside" or self._facts.truncate
        try:
            answer = self.infer({_TEXT: np.array([[self._texts[index]]], object)})
        except RequestError as err:
            if err.kind != "refused":
                raise
            return RequestCheck(bucket, place, shown, not has_answer, f"refused: {err.why}")
        if not has_answer:
            return RequestCheck(bucket, place, shown, False, "answered, though it is too long")
        if place == "outside":
            return RequestCheck(bucket, place, shown, True, "cut and answered")
        error = worst_error(self._expected([index]), answer)
        passed = error is None or error <= self._reference(index).joined
        detail = "answered" if error is None else f"differs from ONNX Runtime by {error:.2g}"
        return RequestCheck(bucket, place, shown, passed, detail, error)

    def contents(self) -> list[Content]:
        """Requests of one to three texts of all lengths."""
        random = np.random.default_rng(0)
        fitting = [i for i, found in enumerate(self._tokens) if len(found.ids) <= self._facts.buckets[-1].length]
        contents = []
        for number in range(_NUM_CONTENTS):
            chosen = random.choice(fitting, 1 + number % 3).tolist()
            texts = np.array([[self._texts[index]] for index in chosen], object)
            contents.append(Content({_TEXT: texts}, self._expected(chosen)))
        return contents

    def infer(self, feeds: Arrays) -> Arrays:
        """The answer, without the mask that the front adds."""
        answer = self._client.infer(self._name, feeds)
        return {output.name: answer[output.name] for output in self._facts.outputs}

    def _bucket(self, index: int) -> BucketInfo:
        return next(bucket for bucket in self._facts.buckets if len(self._tokens[index].ids) <= bucket.length)

    def _reference(self, index: int) -> Reference:
        return self._references[self._bucket(index).length]

    def _expected(self, chosen: Sequence[int]) -> Arrays | None:
        """What the front has to answer to some texts."""
        rows = [self._row(index) for index in chosen]
        known = [row for row in rows if row is not None]
        if len(known) < len(rows):
            return None
        lengths = [len(self._tokens[index].ids) for index in chosen]
        return {
            output.name: _join([row[output.name] for row in known], lengths, output.sequence_axes)
            for output in self._facts.outputs
        }

    def _row(self, index: int) -> Arrays | None:
        """What the model behind answers to one text, padded to its bucket."""
        feeds = _padded(self._tokens[index], self._bucket(index).length, self._facts)
        answer = self._reference(index).run(feeds)
        return None if answer is None else {name: array[0] for name, array in answer.items()}


def _padded(tokens: Tokens, length: int, facts: TextFile) -> Arrays:
    """The inputs of a model for one text."""
    count = len(tokens.ids)
    arrays = {
        "input_ids": np.full((1, length), facts.pad_id),
        _MASK: np.zeros((1, length)),
        "token_type_ids": np.zeros((1, length)),
    }
    arrays["input_ids"][0, :count] = tokens.ids
    arrays[_MASK][0, :count] = 1
    arrays["token_type_ids"][0, :count] = tokens.type_ids
    return {name: arrays[name].astype(dtype) for name, dtype in facts.inputs.items()}


def _join(rows: Sequence[np.ndarray], lengths: Sequence[int], axes: Sequence[int]) -> np.ndarray:
    """Rows as one array, cut to the longest text along the axes that count tokens; what pads the others is 0.

    A number for each text has an axis of size 1, because Triton has no outputs without one.
    """
    if not axes:
        return np.stack([row.reshape(row.shape or (1,)) for row in rows])
    longest = max(lengths)
    joined = []
    for row, length in zip(rows, lengths, strict=True):
        shape = [longest if axis + 1 in axes else size for axis, size in enumerate(row.shape)]
        own = tuple(slice(length) if axis + 1 in axes else slice(None) for axis in range(row.ndim))
        whole = np.zeros(shape, row.dtype)
        whole[own] = row[own]
        joined.append(whole)
    return np.stack(joined)
