"""`check_repository` on the real server: sound packages pass, and each kind of fault is found and named."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from packaging_cases import DYNAMIC, PROFILES, SHAPES, Case, make_artifact, one_profile, span
from text_cases import ENCODER, save_tokenizer

from trtforge.errors import InputError, UnavailableError
from trtforge.gpu import find_gpus
from trtforge.hashing import sha256_of_file
from trtforge.manifest import ProfileInfo
from trtforge.packaging import PackageSpec, package
from trtforge.serving.check import LoadCheck, ModelCheck, check_repository
from trtforge.serving.model_folder import ServingOptions
from trtforge.serving.repository import load_repository
from trtforge.serving.text.plan import TextOptions
from trtforge.serving.triton.environment import TritonInstall

IDS = {"short": span((1, 1), (4, 8), (8, 16)), "long": span((1, 16), (2, 24), (4, 32))}
CASES: dict[str, tuple[Case, tuple[ProfileInfo, ...]]] = {
    "dynamic": (DYNAMIC, (one_profile(x=span((1, 4), (4, 4), (8, 4))),)),
    "profiles": (PROFILES, tuple(one_profile(name, ids=s, attention_mask=s) for name, s in IDS.items())),
    "shapes": (
        SHAPES,
        (
            ProfileInfo(
                name="default",
                inputs={"x": span((1, 4), (2, 4), (8, 4)), "size": span((2,), (2,), (2,))},
                values={"size": span((1, 4), (2, 4), (8, 4))},
            ),
        ),
    ),
}
# Beside a model: ONNX Runtime's answers, off by a tenth.
WRONG = """
import onnxruntime_model
class TritonPythonModel(onnxruntime_model.TritonPythonModel):
    def _run(self, feeds, names):
        return {name: value * 1.1 for name, value in super()._run(feeds, names).items()}
"""
# Takes what lies in no profile.
LENIENT = """
import answering
answering.check_ranges = lambda feeds, profiles: None
from onnxruntime_model import TritonPythonModel
"""
# Takes so long that 32 requests at once find others waiting.
SLOW = """
import time
import onnxruntime_model
class TritonPythonModel(onnxruntime_model.TritonPythonModel):
    def execute(self, requests):
        time.sleep(0.05)
        return super().execute(requests)
"""
# Answers every other request with an error.
LOSSY = """
import onnxruntime_model
import triton_python_backend_utils as pb_utils
class TritonPythonModel(onnxruntime_model.TritonPythonModel):
    count = 0
    def execute(self, requests):
        answers = super().execute(requests)
        for index in range(len(answers)):
            self.count += 1
            if self.count > 8 and self.count % 2:
                answers[index] = pb_utils.InferenceResponse(error=pb_utils.TritonError("out of luck"))
        return answers
"""


# Answers to the texts of a request in the wrong order.
REVERSED = """
import text_model
from text_model import TritonPythonModel
in_order = text_model.read_texts
text_model.read_texts = lambda raw: in_order(raw)[::-1]
"""
# Gives the answers of a batch to each other's requests.
SWAPPED = """
import onnxruntime_model
class TritonPythonModel(onnxruntime_model.TritonPythonModel):
    def execute(self, requests):
        return super().execute(requests)[::-1]
"""
FAULTY = {"wrong": WRONG, "lenient": LENIENT, "lossy": LOSSY, "swapped": SWAPPED}


def package_case(folder: Path, name: str, case: str, code: str | None = None, **options: Any) -> Path:
    """Package a case in `folder/models`; with other code in the place of its `model.py`, where some is given."""
    graph, profiles = CASES[case]
    make_artifact(folder / name, graph, profiles=profiles)
    serving = ServingOptions(threads=1, warmup=False, **options)
    repository = folder / "models"
    package(PackageSpec(artifacts=(folder / name,), repository=repository, name=name, cpu=True, options=serving))
    if code is not None:
        replace_model(repository, name, "onnxruntime_model.py", code)
    return repository


def package_texts(folder: Path, name: str, code: str | None = None) -> Path:
    """Package `text_cases.ENCODER` with its tokenizer, for lengths 4, 8 and 16."""
    lengths = span((1, 1), (4, 8), (8, 16))
    make_artifact(folder / name, ENCODER, profiles=(one_profile(input_ids=lengths, attention_mask=lengths),))
    save_tokenizer(folder / name / "tokenizer")
    text = TextOptions(folder / name / "tokenizer", (4, 8, 16))
    serving = ServingOptions(threads=1, warmup=False)
    repository = folder / "models"
    package(
        PackageSpec(artifacts=(folder / name,), repository=repository, name=name, cpu=True, options=serving, text=text)
    )
    if code is not None:
        replace_model(repository, name, "text_model.py", code)
    return repository


def replace_model(repository: Path, name: str, module: str, code: str) -> None:
    """Put other code in the place of a model's, which becomes a module, and record it as what was packaged."""
    folder = repository / name
    (folder / "1" / module).write_bytes((folder / "1/model.py").read_bytes())
    (folder / "1/model.py").write_text(code)
    files = {str(path.relative_to(folder)): sha256_of_file(path) for path in folder.rglob("*") if path.is_file()}
    manifest = load_repository(repository)
    models = [e.model_copy(update={"files": files}) if e.name == name else e for e in manifest.models]
    (repository / "trtforge.json").write_text(manifest.model_copy(update={"models": tuple(models)}).to_json())


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sound packages, and some with faults."""
    folder = tmp_path_factory.mktemp("check")
    for name in CASES:
        package_case(folder, name, name)
    for name, code in FAULTY.items():
        package_case(folder, name, "profiles", code)
    package_case(folder, "limited", "dynamic", SLOW, queue_size=4)
    package_texts(folder, "words")
    return package_texts(folder, "reversed", REVERSED)


@pytest.fixture(scope="module")
def checked(repository: Path, triton_install: TritonInstall) -> Mapping[str, ModelCheck]:
    """What a check of all of them finds, by name."""
    result = check_repository(repository, triton_install, num_requests=48)
    assert result.triton == triton_install.version
    assert not result.passed
    return {model.name: model for model in result.models}


@pytest.mark.parametrize("name", CASES)
def test_a_sound_package_passes(checked: Mapping[str, ModelCheck], name: str) -> None:
    found = checked[name]
    assert found.passed, found
    assert found.note == ""
    places = [request.place for request in found.requests]
    assert {"min", "outside"} <= set(places)
    # One ONNX Runtime release on the graph's own shapes.
    assert max(request.error for request in found.requests if request.error is not None) <= 1e-5
    assert all(request.detail.startswith("refused: ") for request in found.requests if request.place == "outside")
    assert found.load is not None
    assert (found.load.answered, found.load.wrong) == (found.load.sent, 0)
    assert found.load.expects_batches == (name in ("dynamic", "profiles"))


def test_joined_requests_are_seen_in_the_statistics(checked: Mapping[str, ModelCheck]) -> None:
    load = checked["dynamic"].load
    assert load is not None
    assert 1 < load.largest_batch <= 8
    assert sum(size * count for size, count in load.batches.items()) == load.sent


def test_wrong_answers_are_found(checked: Mapping[str, ModelCheck]) -> None:
    found = checked["wrong"]
    inside = [request for request in found.requests if request.place != "outside"]
    assert not any(request.passed for request in inside)
    assert all(request.error == pytest.approx(0.1, rel=1e-3) for request in inside)
    assert found.load is not None
    assert found.load.wrong == found.load.answered > 0
    assert not found.passed


def test_answers_to_what_no_profile_takes_are_found(checked: Mapping[str, ModelCheck]) -> None:
    answered = [r for r in checked["lenient"].requests if r.place == "outside" and not r.passed]
    assert [request.detail for request in answered] == ["answered, though it lies outside of every profile"]
    assert answered[0].shapes == "ids [4, 33], attention_mask [4, 33]"
    assert not checked["lenient"].passed


def test_lost_requests_are_counted(checked: Mapping[str, ModelCheck]) -> None:
    load = checked["lossy"].load
    assert load is not None
    assert 0 < load.answered < load.sent
    assert load.first_failure == "out of luck"
    assert not checked["lossy"].passed


def test_answers_to_other_requests_of_the_batch_are_found(checked: Mapping[str, ModelCheck]) -> None:
    found = checked["swapped"]
    assert all(request.passed for request in found.requests)
    assert found.load is not None
    assert found.load.answered == found.load.sent
    assert found.load.wrong > 0
    assert not found.passed


def test_requests_that_a_queue_turns_away_are_not_lost(checked: Mapping[str, ModelCheck]) -> None:
    found = checked["limited"]
    assert found.passed, found
    load = found.load
    assert load is not None
    assert load.answered + load.turned_away == load.sent
    assert load.turned_away > 0


def test_a_text_model_is_checked_by_its_texts(checked: Mapping[str, ModelCheck]) -> None:
    found = checked["words"]
    assert found.passed, found
    assert found.kind == "text"
    assert [(request.profile, request.place, request.shapes) for request in found.requests] == [
        ("bucket 4", "min", "a text of 3 tokens"),
        ("bucket 4", "max", "a text of 4 tokens"),
        ("bucket 8", "min", "a text of 5 tokens"),
        ("bucket 8", "max", "a text of 8 tokens"),
        ("bucket 16", "min", "a text of 9 tokens"),
        ("bucket 16", "max", "a text of 16 tokens"),
        ("bucket 16", "outside", "a text of 17 tokens"),
    ]
    assert [request.error for request in found.requests][:6] == pytest.approx([0.0] * 6, abs=1e-5)
    assert found.load is not None
    assert found.load.largest_batch > 1


def test_texts_in_the_wrong_order_are_found(checked: Mapping[str, ModelCheck]) -> None:
    found = checked["reversed"]
    assert all(request.passed for request in found.requests)
    assert found.load is not None
    assert found.load.answered == found.load.sent
    assert 0 < found.load.wrong < found.load.sent
    assert not found.passed


def test_the_models_behind_a_front_are_checked_with_it(repository: Path, triton_install: TritonInstall) -> None:
    result = check_repository(repository, triton_install, ["words"], num_requests=4)
    assert [model.name for model in result.models] == ["words_b16", "words_b4", "words_b8", "words"]


def test_a_model_that_does_not_load_is_named(tmp_path: Path, triton_install: TritonInstall) -> None:
    package_case(tmp_path, "sound", "dynamic")
    repository = package_case(tmp_path, "broken", "dynamic", "raise ImportError('no such library')")
    result = check_repository(repository, triton_install)
    found = {model.name: model.failure for model in result.models}
    assert not result.passed
    assert found["broken"].startswith("it did not load: Internal: ImportError: no such library")
    assert found["sound"].startswith("not checked: the server did not start")


def test_files_that_are_not_what_was_packaged_are_refused(tmp_path: Path, triton_install: TritonInstall) -> None:
    repository = package_case(tmp_path, "changed", "dynamic")
    (repository / "changed/config.pbtxt").write_text("")
    with pytest.raises(InputError, match=r"changed in .* is not what was packaged"):
        check_repository(repository, triton_install)


def test_a_model_that_is_not_there_is_refused(tmp_path: Path, triton_install: TritonInstall) -> None:
    repository = package_case(tmp_path, "sound", "dynamic")
    with pytest.raises(InputError, match="no model 'other'") as caught:
        check_repository(repository, triton_install, ["other"])
    assert "sound" in caught.value.why


def test_an_engine_needs_a_gpu_to_be_checked(tmp_path: Path, triton_install: TritonInstall) -> None:
    try:
        find_gpus()
    except UnavailableError:
        pass
    else:
        pytest.skip("there is a GPU here")
    make_artifact(tmp_path / "engine")
    package(PackageSpec(artifacts=(tmp_path / "engine",), repository=tmp_path / "models", name="engine"))
    with pytest.raises(UnavailableError, match="engine cannot be checked here") as caught:
        check_repository(tmp_path / "models", triton_install)
    assert "--cpu" in caught.value.fix


def test_a_load_without_batches_fails_where_they_are_expected() -> None:
    load = LoadCheck(sent=8, answered=8, wrong=0, batches={1: 8}, expects_batches=True)
    assert not load.passed
    assert dataclasses.replace(load, batches={1: 6, 2: 1}).passed
    assert dataclasses.replace(load, expects_batches=False).passed


def test_a_load_fails_where_requests_were_lost_or_none_was_answered() -> None:
    load = LoadCheck(sent=8, answered=6, wrong=0, batches={2: 3}, expects_batches=True, turned_away=2)
    assert load.passed
    assert not dataclasses.replace(load, turned_away=1).passed
    assert not dataclasses.replace(load, answered=0, turned_away=8).passed
