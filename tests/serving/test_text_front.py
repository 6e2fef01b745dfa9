"""A packaged text model in the real server: strings in, the answers of the words' own rows out."""

from __future__ import annotations

import dataclasses
import re
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from packaging_cases import build_case
from text_cases import ENCODER, LATE_ENCODER, TABLE, TYPED_ENCODER, WORDS, expected, ids_of, save_tokenizer

from trtforge.packaging import PackageSpec, package
from trtforge.serving.model_folder import ServingOptions
from trtforge.serving.text.plan import TextOptions
from trtforge.serving.triton.client import RequestError, TritonClient
from trtforge.serving.triton.environment import TritonInstall
from trtforge.serving.triton.server import TritonServer

BUCKETS = (4, 8, 16)
# Sums of at most 16 terms, against float64: rounding of the terms and of each sum.
ULPS = 32 * np.finfo(np.float32).eps


@dataclasses.dataclass(frozen=True)
class Served:
    """The repository, and the server that loaded it."""

    repository: Path
    server: TritonServer
    client: TritonClient

    def ask(self, texts: Sequence[str | bytes], outputs: list[str] | None = None, model: str = "words") -> dict:
        return self.client.infer(model, {"text": np.array([[text] for text in texts], object)}, outputs)

    def tokens(self) -> dict[tuple[str, str, str], int]:
        """The server's own counters, by model, bucket and kind."""
        text = urllib.request.urlopen(self.server.metrics, timeout=60).read().decode()
        line = r'trtforge_text_tokens_total\{bucket="(\d+)",kind="(\w+)",model="(\w+)"\} (\d+)'
        return {(model, bucket, kind): int(n) for bucket, kind, model, n in re.findall(line, text)}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, triton_install: TritonInstall) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("front")
    artifact = build_case(folder, ENCODER, "words").directory
    save_tokenizer(folder / "tokenizer")
    # A delay in which the texts of a test meet, however busy the machine is.
    options = ServingOptions(queue_delay_us=200_000, threads=1)
    spec = PackageSpec(artifacts=(artifact,), repository=folder / "models", cpu=True, options=options)
    for name, truncate in (("words", False), ("cut", True)):
        text = TextOptions(folder / "tokenizer", BUCKETS, truncate=truncate)
        package(dataclasses.replace(spec, name=name, text=text))
    typed = build_case(folder, TYPED_ENCODER, "typed").directory
    package(dataclasses.replace(spec, artifacts=(typed,), text=TextOptions(folder / "tokenizer", (4, 8))))
    # A model that fails on one of its tokenizer's words, which fails on words that it does not know.
    late = build_case(folder, LATE_ENCODER, "late").directory
    save_tokenizer(folder / "late_tokenizer", [*WORDS, "six"], unknown="none")
    package(dataclasses.replace(spec, artifacts=(late,), text=TextOptions(folder / "late_tokenizer", (16,))))
    save_tokenizer(folder / "bare_tokenizer", has_ends=False)
    bare = TextOptions(folder / "bare_tokenizer", (4,))
    package(dataclasses.replace(spec, artifacts=(late,), name="bare", text=bare))
    with TritonServer(triton_install, folder / "models", log=folder / "triton.log") as server:
        server.wait_ready()
        with TritonClient(server.grpc, "grpc") as client:
            yield Served(folder / "models", server, client)


def assert_answers(texts: Sequence[str], answer: dict[str, np.ndarray]) -> None:
    wanted = expected(texts)
    assert set(answer) == set(wanted)
    for name, values in wanted.items():
        assert answer[name].shape == values.shape, name
        np.testing.assert_allclose(answer[name], values, rtol=ULPS, atol=ULPS * np.abs(values).max(), err_msg=name)


@pytest.mark.parametrize(
    "texts",
    [
        ["red"],
        [""],
        ["one two three four five red green blue one two three four five red"],
        # One of each bucket, not in their order, and one of them twice.
        ["one two three four five red", "red", "blue one two", "", "two " * 12, "red"],
        ["red unknown \N{SNOWMAN}"],
    ],
    ids=["short", "empty", "longest", "mixed", "unknown"],
)
def test_texts_are_answered_with_their_own_tokens(served: Served, texts: list[str]) -> None:
    assert_answers(texts, served.ask(texts))


def test_a_model_of_one_text_gets_each_with_its_types(served: Served) -> None:
    texts = ["red green", "", "one two three four five", "blue"]
    answer = served.ask(texts, model="typed")
    assert answer["y"].shape == (4, 7, 4)
    for index, text in enumerate(texts):
        ids = ids_of(text)
        types = np.array([0, *[1] * (len(ids) - 2), 0])
        np.testing.assert_array_equal(answer["y"][index, : len(ids)], TABLE[ids] + types[:, None].astype(np.float32))
        assert not answer["y"][index, len(ids) :].any()
    assert int(served.client.config("typed_b4")["max_batch_size"]) == 0


def test_outputs_are_the_models_and_a_mask(served: Served) -> None:
    metadata = served.client.metadata("words")
    assert [(port["name"], [int(size) for size in port["shape"]]) for port in metadata["inputs"]] == [("text", [-1, 1])]
    shapes = {port["name"]: [int(size) for size in port["shape"]] for port in metadata["outputs"]}
    assert shapes == {
        "hidden": [-1, -1, 4],
        "products": [-1, -1, -1],
        "embedding": [-1, 4],
        "score": [-1, 1],
        "attention_mask": [-1, -1],
    }
    assert list(shapes)[:4] == [port["name"] for port in served.client.metadata("words_b8")["outputs"]]


def test_only_what_is_asked_for_is_answered(served: Served) -> None:
    assert set(served.ask(["red"], ["embedding"])) == {"embedding"}
    # The mask needs no model: nothing ran for it.
    before = served.client.statistics("words_b4")["inference_count"]
    assert served.ask(["red"], ["attention_mask"])["attention_mask"].tolist() == [[1, 1, 1]]
    assert served.client.statistics("words_b4")["inference_count"] == before


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["red", "one " * 15], "text 1 has 17 tokens; this model takes 16 at most"),
        (["one " * 20, "red", "one " * 15], "text 0 has 22 tokens; this model takes 16 at most"),
        (["red", b"ab\xff"], "text 1 is not UTF-8: invalid start byte at byte 2"),
        ([b"\xe2\x82"], "text 0 is not UTF-8: unexpected end of data at byte 0"),
        (["a" * (2**20 + 1)], "text 0 has 1048577 bytes; the limit is 1048576"),
    ],
)
def test_what_is_no_text_is_refused(served: Served, texts: list[str | bytes], message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)) as caught:
        served.ask(texts)
    assert caught.value.kind == "refused"


def test_a_text_without_a_token_is_refused(served: Served) -> None:
    assert served.ask(["red"], model="bare")["attention_mask"].tolist() == [[1]]
    with pytest.raises(RequestError, match="text 1 has no token that the model knows"):
        served.ask(["red", ""], model="bare")


def test_a_bad_request_does_not_spoil_its_neighbours(served: Served) -> None:
    texts = ["red", "one " * 20, "green blue", "blue " * 14] * 8

    def ask(text: str) -> dict | str:
        try:
            return served.ask([text])
        except RequestError as err:
            return err.why

    with ThreadPoolExecutor(len(texts)) as pool:
        answers = list(pool.map(ask, texts))
    for text, answer in zip(texts, answers, strict=True):
        if len(ids_of(text)) > 16:
            assert "has 22 tokens" in answer
        else:
            assert_answers([text], answer)


@pytest.mark.parametrize(
    ("bad", "message"), [("six", "late_b16: .*indices element out of data bounds"), ("other", "cannot be tokenized")]
)
def test_what_fails_on_the_way_fails_alone(served: Served, bad: str, message: str) -> None:
    texts = ["red", bad, "green blue"] * 8

    def ask(text: str) -> dict | str:
        try:
            return served.ask([text], model="late")
        except RequestError as err:
            return err.why

    with ThreadPoolExecutor(len(texts)) as pool:
        answers = list(pool.map(ask, texts))
    for text, answer in zip(texts, answers, strict=True):
        if text == bad:
            assert isinstance(answer, str)
            assert re.search(message, answer)
        else:
            assert_answers([text], answer)


def test_a_front_that_truncates_answers_for_the_first_tokens(served: Served) -> None:
    words = ["one", "two", "three", "four", "five", "red", "green", "blue"] * 2
    answer = served.ask([" ".join(words)], model="cut")
    # 16 tokens: 14 words between the first and the last.
    assert_answers([" ".join(words[:14])], answer)


def test_requests_of_many_clients_meet_in_their_bucket(served: Served) -> None:
    texts = ["red", "one two three", "one " * 10] * 24
    before = {length: served.client.statistics(f"words_b{length}") for length in BUCKETS}
    with ThreadPoolExecutor(len(texts)) as pool:
        answers = list(pool.map(lambda text: served.ask([text]), texts))
    for text, answer in zip(texts, answers, strict=True):
        assert_answers([text], answer)
    for length in BUCKETS:
        after = served.client.statistics(f"words_b{length}")
        inferences, executions = (
            int(after[key]) - int(before[length][key]) for key in ("inference_count", "execution_count")
        )
        assert inferences == 24
        assert executions < inferences


def test_a_request_of_more_texts_than_a_model_takes_is_divided(served: Served) -> None:
    texts = ["red green"] * 20
    before = served.client.statistics("words_b4")
    assert_answers(texts, served.ask(texts))
    after = served.client.statistics("words_b4")
    assert int(after["inference_count"]) - int(before["inference_count"]) == 20
    assert {int(entry["batch_size"]) for entry in after["batch_stats"]} <= set(range(1, 9))


def test_the_server_counts_real_tokens_and_padding(served: Served) -> None:
    before = served.tokens()
    served.ask(["red", "", "one two three four five"])
    changed = {key: count - before[key] for key, count in served.tokens().items() if count != before[key]}
    # 3 and 2 tokens in rows of 4, and 7 in a row of 8.
    assert changed == {
        ("words", "4", "real"): 5,
        ("words", "4", "padding"): 3,
        ("words", "8", "real"): 7,
        ("words", "8", "padding"): 1,
    }


def test_the_models_of_all_buckets_are_one_file(served: Served) -> None:
    files = [served.repository / f"words_b{length}/1/model.onnx" for length in BUCKETS]
    assert len({file.stat().st_ino for file in files}) == 1
