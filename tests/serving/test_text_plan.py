"""Which artifacts can be served with a tokenizer, and what becomes of them. No server runs here."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from command_checks import Watch
from packaging_cases import Case, make_artifact, span
from support import make_manifest
from text_cases import ENCODER, TABLE, WORDS, ids_of, save_tokenizer

from trtforge.errors import InputError, UnavailableError
from trtforge.limits import Limits
from trtforge.manifest import BackendInfo, IoInfo, ProfileInfo
from trtforge.packaging import PackageSpec, package
from trtforge.serving.artifact import Artifact, open_artifact
from trtforge.serving.model_file import load_model_file
from trtforge.serving.model_folder import ServingOptions
from trtforge.serving.repository import load_repository
from trtforge.serving.text.models import bucket_artifact, profile_numbers
from trtforge.serving.text.plan import TextOptions, plan_text
from trtforge.serving.text.text_file import load_text_file
from trtforge.serving.text.tokenizer import TextTokenizer


def lengths_of(
    low: int, opt: int, high: int, name: str = "default", batch: tuple[int, int, int] = (1, 4, 8)
) -> ProfileInfo:
    ranges = span((batch[0], low), (batch[1], opt), (batch[2], high))
    return ProfileInfo(name=name, inputs={"input_ids": ranges, "attention_mask": ranges})


def open_case(folder: Path, case: Case = ENCODER, *profiles: ProfileInfo) -> Artifact:
    make_artifact(folder / "words", case, profiles=profiles or (lengths_of(1, 8, 16),))
    return open_artifact(folder / "words", lambda _: None)


def with_tokenizer(folder: Path, **options: object) -> TextOptions:
    save_tokenizer(folder / "tokenizer")
    return dataclasses.replace(TextOptions(folder / "tokenizer"), **options)


def test_axes_of_tokens_are_seen_in_a_run(tmp_path: Path) -> None:
    plan = plan_text(open_case(tmp_path), with_tokenizer(tmp_path))
    assert plan.shapes == {"hidden": (-1, -1, 4), "products": (-1, -1, -1), "embedding": (-1, 4), "score": (-1,)}
    assert plan.sequence_axes("products") == (1, 2)
    assert plan.sequence_axes("score") == ()
    assert plan.buckets.lengths == (16,)


def test_a_model_of_one_length_has_no_axis_of_tokens(tmp_path: Path) -> None:
    plan = plan_text(open_case(tmp_path, ENCODER, lengths_of(8, 8, 8)), with_tokenizer(tmp_path))
    assert plan.shapes["hidden"] == (-1, 8, 4)
    assert plan.buckets.lengths == (8,)


def test_where_nothing_runs_the_model_names_tell_its_axes(tmp_path: Path) -> None:
    artifact = open_case(tmp_path)
    (artifact.path / "model.onnx").write_bytes(b"no model")
    plan = plan_text(artifact, with_tokenizer(tmp_path))
    assert plan.shapes == {"hidden": (-1, -1, 4), "products": (-1, -1, -1), "embedding": (-1, 4), "score": (-1,)}


def test_an_output_that_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    graph = """twice (int64[batch,seq] input_ids, int64[batch,seq] attention_mask) => (int64[batch,n] y) {
        y = Concat<axis = 1>(input_ids, attention_mask)
    }"""
    artifact = open_case(tmp_path, Case(graph))
    with pytest.raises(InputError, match="cannot be served with a tokenizer") as caught:
        plan_text(artifact, with_tokenizer(tmp_path))
    assert "output 'y' of one text has shape [1, 4] for 2 tokens and [1, 20] for 10" in caught.value.why


def test_an_output_without_an_axis_of_texts_is_refused(tmp_path: Path) -> None:
    graph = """whole (int64[batch,seq] input_ids, int64[batch,seq] attention_mask) => (int64 y) {
        y = ReduceSum<keepdims = 0>(input_ids)
    }"""
    artifact = open_case(tmp_path, Case(graph))
    with pytest.raises(InputError, match=r"output 'y' of one text has shape \[\] for 2 tokens"):
        plan_text(artifact, with_tokenizer(tmp_path))


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        ({"ids": "int64", "attention_mask": "int64"}, "it has no input input_ids"),
        ({"input_ids": "int64"}, "it has no input attention_mask"),
        (
            {"input_ids": "int64", "attention_mask": "int64", "pixels": "float32"},
            "it has the input pixels as well",
        ),
        ({"input_ids": "int64", "attention_mask": "float32"}, "input 'attention_mask' has type float32"),
    ],
)
def test_a_model_that_takes_no_text_is_refused(tmp_path: Path, inputs: dict[str, str], why: str) -> None:
    artifact = open_case(tmp_path)
    ranges = span((1, 1), (4, 8), (8, 16))
    io = tuple(IoInfo(name=name, mode="input", dtype=dtype, shape=("batch", "seq")) for name, dtype in inputs.items())
    profile = ProfileInfo(name="default", inputs=dict.fromkeys(inputs, ranges))
    changed = make_manifest(io=io, profiles=(profile,), files=artifact.manifest.files)
    with pytest.raises(InputError, match="cannot be served with a tokenizer") as caught:
        plan_text(dataclasses.replace(artifact, manifest=changed), with_tokenizer(tmp_path))
    assert why in caught.value.why


@pytest.mark.parametrize(
    ("mask", "why"),
    [
        (span((1, 1), (4, 8), (8, 32)), "has other ranges than input_ids in profile 'default'"),
        (span((1, 1, 1), (4, 8, 1), (8, 16, 1)), "has 3 axes, not 2"),
    ],
)
def test_inputs_of_other_shapes_are_refused(tmp_path: Path, mask: object, why: str) -> None:
    artifact, profile = open_case(tmp_path), lengths_of(1, 8, 16)
    other = profile.model_copy(update={"inputs": {**profile.inputs, "attention_mask": mask}})
    manifest = artifact.manifest.model_copy(update={"profiles": (other,)})
    with pytest.raises(InputError, match=f"input 'attention_mask' {why}"):
        plan_text(dataclasses.replace(artifact, manifest=manifest), with_tokenizer(tmp_path))


def test_a_profile_that_takes_no_single_text_is_refused(tmp_path: Path) -> None:
    artifact = open_case(tmp_path, ENCODER, lengths_of(1, 8, 16, batch=(2, 4, 8)))
    with pytest.raises(InputError, match="takes no batch below 2 in profile 'default', and texts come one by one"):
        plan_text(artifact, with_tokenizer(tmp_path))


def test_a_tokenizer_with_more_tokens_than_the_model_has_rows_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "other", [*WORDS, "six"])
    with pytest.raises(InputError, match="is not this model's") as caught:
        plan_text(open_case(tmp_path), TextOptions(tmp_path / "other"))
    assert caught.value.why == f"it has tokens up to {len(WORDS)}, and the model's table has {len(TABLE)} rows"


def test_a_padding_token_that_the_model_has_no_row_for_is_refused(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    tokenizer.enable_padding(pad_id=len(WORDS))
    tokenizer.save(str(tmp_path / "tokenizer/tokenizer.json"))
    with pytest.raises(InputError, match="is not this model's") as caught:
        plan_text(open_case(tmp_path), TextOptions(tmp_path / "tokenizer"))
    assert caught.value.why == f"it has tokens up to {len(WORDS)}, and the model's table has {len(TABLE)} rows"


def test_a_folder_without_a_tokenizer_says_how_to_get_one(tmp_path: Path) -> None:
    artifact = open_case(tmp_path)
    with pytest.raises(InputError, match=r"it has no tokenizer\.json") as caught:
        plan_text(artifact, TextOptions(tmp_path))
    assert "save_pretrained" in caught.value.fix
    with pytest.raises(InputError, match="no such file"):
        plan_text(artifact, TextOptions(tmp_path / "nothing.json"))


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('{"model": {"type": "WordLevel"}}')
    with pytest.raises(InputError, match=r"t\.json cannot be read"):
        plan_text(open_case(tmp_path), TextOptions(tmp_path / "t.json"))


def test_a_tokenizer_above_the_limit_is_refused(tmp_path: Path) -> None:
    options = with_tokenizer(tmp_path)
    with pytest.raises(InputError, match="--limit text_bytes="):
        plan_text(open_case(tmp_path), options, Limits(text_bytes=100))


def test_a_tokenizer_that_pads_on_the_left_is_refused(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    tokenizer.enable_padding(direction="left")
    tokenizer.save(str(tmp_path / "tokenizer/tokenizer.json"))
    with pytest.raises(InputError, match="pads on the left"):
        plan_text(open_case(tmp_path), TextOptions(tmp_path / "tokenizer"))


@pytest.mark.parametrize(("truncate", "what"), [(False, "refused; --truncate cuts it"), (True, "cut to 16")])
def test_the_tokenizers_own_padding_and_truncation_are_not_used(tmp_path: Path, truncate: bool, what: str) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    tokenizer.enable_padding(length=12, pad_id=7)
    tokenizer.enable_truncation(12)
    tokenizer.save(str(tmp_path / "tokenizer/tokenizer.json"))
    (tmp_path / "texts.txt").write_text("one\none two three four\n" + "five " * 20)
    options = TextOptions(tmp_path / "tokenizer", (4, 16), tmp_path / "texts.txt", truncate=truncate)
    plan = plan_text(open_case(tmp_path), options)
    assert plan.pad_id == 7
    # 3, 6 and 22 tokens.
    assert plan.notes == (
        "length buckets 4, 16 (as given): 25 real of 36 tokens sent for 3 texts, padding 30.6%; "
        "1 of the texts are longer than the last",
        f"a text of more than 16 tokens is {what} (the tokenizer's own limit of 12 is not used)",
    )


def test_without_the_package_the_install_line_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UnavailableError, match="'tokenizers' is not installed") as caught:
        plan_text(open_case(tmp_path), with_tokenizer(tmp_path))
    assert caught.value.fix == "pip install 'trtforge[serving]'"


def test_tokens_are_counted_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtforge.serving.text.tokenizer._CHUNK_CHARS", 8)
    save_tokenizer(tmp_path / "tokenizer")
    with TextTokenizer(tmp_path / "tokenizer") as tokenizer:
        # One is longer than a piece.
        texts = ["red", "one two", "", "one two three four", "red", "red"]
        assert tokenizer.count(texts) == [3, 4, 2, 6, 3, 3]
        assert [list(tokens.ids) for tokens in tokenizer.encode(texts)] == [ids_of(text) for text in texts]
        assert tokenizer.count([]) == []


def test_words_that_cannot_be_tokenized_are_named(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer", unknown="none")
    (tmp_path / "texts.txt").write_text("red unknown")
    options = TextOptions(tmp_path / "tokenizer", lengths=tmp_path / "texts.txt")
    with pytest.raises(InputError, match="the tokenizer cannot read these texts"):
        plan_text(open_case(tmp_path), options)


def test_buckets_are_chosen_for_texts(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("one two three four five red\n" * 3 + "one two three four five red blue " * 2)
    options = with_tokenizer(tmp_path, lengths=tmp_path / "texts.txt", max_padding=0.01)
    assert plan_text(open_case(tmp_path), options).buckets.lengths == (8, 16)


def test_a_bound_needs_texts_and_no_lengths(tmp_path: Path) -> None:
    artifact = open_case(tmp_path)
    with pytest.raises(InputError, match="--max-padding needs texts"):
        plan_text(artifact, with_tokenizer(tmp_path, max_padding=0.1))
    with pytest.raises(InputError, match="--max-padding and --buckets exclude each other"):
        plan_text(artifact, with_tokenizer(tmp_path, max_padding=0.1, buckets=(8,)))


def test_a_bucket_is_the_artifact_at_one_length(tmp_path: Path) -> None:
    profiles = (lengths_of(1, 4, 8, "short"), lengths_of(8, 12, 16, "long"), lengths_of(1, 8, 16, "all"))
    artifact = open_case(tmp_path, ENCODER, *profiles)
    plan = plan_text(artifact, with_tokenizer(tmp_path))
    assert plan.buckets.lengths == (8, 16)
    assert [profile_numbers(artifact.manifest, length) for length in (4, 8, 16)] == [(0, 2), (0, 1, 2), (1, 2)]
    manifest = bucket_artifact(artifact, plan, 16).manifest
    assert manifest.profiles == (lengths_of(16, 16, 16, "long"), lengths_of(16, 16, 16, "all"))
    assert {port.name: port.shape for port in manifest.io} == {
        "input_ids": ("batch", 16),
        "attention_mask": ("batch", 16),
        "hidden": ("batch", 16, 4),
        "products": ("batch", 16, 16),
        "embedding": ("batch", 4),
        "score": ("batch",),
    }


def test_a_package_of_engines_has_one_model_for_each_bucket_and_a_front(tmp_path: Path) -> None:
    profiles = (lengths_of(1, 4, 8, "short"), lengths_of(8, 12, 16, "long"))
    changes = {"backend": BackendInfo(name="tensorrt", version="10.7.0.23"), "targets": ("sm_90",)}
    make_artifact(tmp_path / "words", ENCODER, profiles=profiles, **changes)
    result = package(
        PackageSpec(
            artifacts=(tmp_path / "words",),
            repository=tmp_path / "models",
            name="words",
            triton_version="24.12",
            text=with_tokenizer(tmp_path),
        )
    )
    entries = {entry.name: entry for entry in load_repository(tmp_path / "models").models}
    assert {name: (entry.kind, entry.bucket) for name, entry in entries.items()} == {
        "words": ("text", None),
        "words_b8": ("tensorrt", 8),
        "words_b16": ("tensorrt", 16),
    }
    assert not entries["words"].needs_gpu
    assert (entries["words"].backend_version, entries["words"].triton) == ("", None)
    configs = {model.entry.name: model.config for model in result.models}
    assert configs["words"].backend == "python"
    assert configs["words"].instances[0].kind == "KIND_CPU"
    assert configs["words_b8"].instances[0].profiles == ("0", "1")
    assert configs["words_b16"].instances[0].profiles == ("1",)
    facts = load_text_file(tmp_path / "models/words/1/text.json")
    assert [(bucket.length, bucket.model) for bucket in facts.buckets] == [(8, "words_b8"), (16, "words_b16")]
    engines = [tmp_path / f"models/words_b{length}/1/model.plan" for length in (8, 16)]
    assert engines[0].samefile(engines[1])
    assert load_model_file(tmp_path / "models/words_b8/1/model.json").profiles[0].inputs["input_ids"].max == (8, 8)


def test_bfloat16_outputs_are_refused(tmp_path: Path) -> None:
    manifest = make_artifact(tmp_path / "words", ENCODER, profiles=(lengths_of(1, 8, 16),))
    io = tuple(
        port.model_copy(update={"dtype": "bfloat16", "source_dtype": port.dtype}) if port.mode == "output" else port
        for port in manifest.io
    )
    (tmp_path / "words/manifest.json").write_text(manifest.model_copy(update={"io": io}).to_json())
    spec = PackageSpec((tmp_path / "words",), tmp_path / "models", text=with_tokenizer(tmp_path))
    with pytest.raises(InputError, match="has type bfloat16, which a text front cannot hand on"):
        package(spec)
    assert not (tmp_path / "models").exists()


def test_the_command_packages_text_models(watch: Watch) -> None:
    make_artifact(watch.folder / "words", ENCODER, profiles=(lengths_of(1, 8, 16),))
    save_tokenizer(watch.folder / "tokenizer")
    base = ["package", "words", "--triton", "models", "--cpu", "--name", "words"]
    code, out, _ = watch.run([*base, "--tokenizer", "tokenizer", "--buckets", "4,8", "--json"])
    assert code == 0
    assert [model["name"] for model in json.loads(out)["models"]] == ["words_b4", "words_b8", "words"]
    assert "length buckets 4, 8 (as given)" in json.loads(out)["notes"]
    code, _, err = watch.run([*base, "--buckets", "4"])
    assert code == 2
    assert "--buckets needs --tokenizer" in err
    code, _, err = watch.run([*base, "--tokenizer", "nowhere"])
    assert code == 2
    assert "--tokenizer nowhere cannot be used" in err


def test_buckets_that_a_new_front_no_longer_asks_are_named(tmp_path: Path) -> None:
    make_artifact(tmp_path / "words", ENCODER, profiles=(lengths_of(1, 8, 16),))
    text = with_tokenizer(tmp_path, buckets=(4, 8))
    spec = PackageSpec((tmp_path / "words",), tmp_path / "models", cpu=True, name="words", text=text)
    about = "words no longer asks words_b4 of an earlier package: remove these folders"
    assert about not in package(spec).notes
    changed = dataclasses.replace(spec, text=dataclasses.replace(text, buckets=(8, 16)), force=True)
    result = package(changed)
    assert about in result.notes
    assert {model.entry.name: model.is_new for model in result.models} == {
        "words_b8": False,
        "words_b16": True,
        "words": True,
    }
    shutil.rmtree(tmp_path / "models/words_b4")
    assert about not in package(changed).notes


def test_a_response_cache_is_refused(tmp_path: Path) -> None:
    make_artifact(
        tmp_path / "words",
        ENCODER,
        profiles=(lengths_of(1, 8, 16),),
        backend=BackendInfo(name="tensorrt", version="10.7.0.23"),
    )
    spec = PackageSpec((tmp_path / "words",), tmp_path / "models", text=with_tokenizer(tmp_path))
    with pytest.raises(InputError, match="--response-cache cannot be used with --tokenizer"):
        package(dataclasses.replace(spec, options=ServingOptions(response_cache=True)))
    assert not (tmp_path / "models").exists()
