"""Models in a repository: written whole, once, and never over what is not ours."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trtforge.errors import InputError, UnavailableError
from trtforge.hashing import sha256_of_file
from trtforge.serving.model_config import ModelConfig
from trtforge.serving.repository import (
    FileSource,
    ModelFolder,
    PackagedModel,
    damaged_models,
    load_repository,
    replace_config,
    write_models,
)

ENGINE = b"engine" * 100
ENTRY = """{"schema_version": 1, "trtforge_version": "1", "models": [{"name": "NAME", "kind": "onnxruntime",
"model": "m", "model_sha256": "", "artifact_sha256": "", "precision": "fp16", "targets": [], "max_batch_size": 0,
"files": {"FILE": ""}}]}"""
FILL = """
import resource, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_package_repository import FileSource, UnavailableError, folder_of, write_models
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
try:
    write_models(Path({models!r}), [folder_of(FileSource(Path({engine!r}), {sha256!r}))])
except UnavailableError as err:
    print(err)
"""


@pytest.fixture
def engine(tmp_path: Path) -> FileSource:
    path = tmp_path / "source.engine"
    path.write_bytes(ENGINE)
    return FileSource(path, hashlib.sha256(ENGINE).hexdigest())


def folder_of(engine: FileSource, name: str = "m", batch: int = 4, version: int = 1) -> ModelFolder:
    entry = PackagedModel(
        name=name,
        kind="onnxruntime",
        model="source",
        model_sha256="a" * 64,
        artifact_sha256="b" * 64,
        precision="fp16",
        targets=("sm_86",),
        version=version,
        max_batch_size=batch,
    )
    config = ModelConfig(name, "python", batch, (), ())
    return ModelFolder(entry, config, {f"{version}/model.py": b"code", f"{version}/model.engine": engine})


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_repository_says_which_model_is_which(tmp_path: Path, engine: FileSource) -> None:
    repository = tmp_path / "deep" / "models"
    written = write_models(repository, [folder_of(engine, "b"), folder_of(engine, "a")])
    assert written == ("b", "a")
    manifest = load_repository(repository)
    assert [model.name for model in manifest.models] == ["a", "b"]
    model = manifest.model("a")
    assert model is not None
    assert set(model.files) == {"config.pbtxt", "1/model.py", "1/model.engine"}
    assert all(sha256_of_file(repository / "a" / name) == sha256 for name, sha256 in model.files.items())
    assert damaged_models(repository, manifest) == []
    # Nothing else: Triton takes every folder for a model.
    assert {path.name for path in repository.iterdir()} == {"a", "b", "trtforge.json"}
    assert {path.name for path in repository.parent.iterdir()} == {"models"}


def test_the_same_again_changes_nothing(tmp_path: Path, engine: FileSource) -> None:
    repository = tmp_path / "models"
    write_models(repository, [folder_of(engine)])
    times = {path: path.stat().st_mtime_ns for path in repository.rglob("*")}
    written = write_models(repository, [folder_of(engine)])
    assert written == ()
    assert {path: path.stat().st_mtime_ns for path in repository.rglob("*")} == times


def test_models_come_one_by_one(tmp_path: Path, engine: FileSource) -> None:
    write_models(tmp_path / "models", [folder_of(engine, "a")])
    write_models(tmp_path / "models", [folder_of(engine, "b")])
    assert [model.name for model in load_repository(tmp_path / "models").models] == ["a", "b"]


def test_a_file_of_several_models_is_stored_once(tmp_path: Path, engine: FileSource) -> None:
    write_models(tmp_path / "models", [folder_of(engine, "a"), folder_of(engine, "b")])
    assert (tmp_path / "models/a/1/model.engine").samefile(tmp_path / "models/b/1/model.engine")
    assert not (tmp_path / "models/a/1/model.engine").samefile(engine.path)


def test_a_file_system_without_hard_links_gets_copies(
    tmp_path: Path, engine: FileSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(target), None, str(path))

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    write_models(tmp_path / "models", [folder_of(engine, "a"), folder_of(engine, "b")])
    assert damaged_models(tmp_path / "models", load_repository(tmp_path / "models")) == []


def test_what_code_leaves_there_when_it_runs_is_no_damage(tmp_path: Path, engine: FileSource) -> None:
    repository = tmp_path / "models"
    write_models(repository, [folder_of(engine)])
    (repository / "m/1/__pycache__").mkdir()
    (repository / "m/1/__pycache__/model.cpython-312.pyc").write_bytes(b"code")
    assert damaged_models(repository, load_repository(repository)) == []
    assert write_models(repository, [folder_of(engine)]) == ()
    (repository / "m/1/other.py").write_bytes(b"code")
    assert damaged_models(repository, load_repository(repository)) == ["m"]


def test_another_model_of_the_name_needs_force(tmp_path: Path, engine: FileSource) -> None:
    repository = tmp_path / "models"
    write_models(repository, [folder_of(engine)])
    before = files_below(repository)
    with pytest.raises(InputError, match="holds another model or configuration") as caught:
        write_models(repository, [folder_of(engine, batch=8)])
    assert "--force" in caught.value.fix
    assert files_below(repository) == before
    assert write_models(repository, [folder_of(engine, batch=8)], force=True) == ("m",)
    assert "max_batch_size: 8" in (repository / "m/config.pbtxt").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"models", "source.engine"}


def test_a_changed_folder_needs_force(tmp_path: Path, engine: FileSource) -> None:
    repository = tmp_path / "models"
    write_models(repository, [folder_of(engine)])
    (repository / "m/config.pbtxt").write_text("mine")
    assert damaged_models(repository, load_repository(repository)) == ["m"]
    with pytest.raises(InputError, match="holds files that were changed since"):
        write_models(repository, [folder_of(engine)])
    write_models(repository, [folder_of(engine)], force=True)
    assert damaged_models(repository, load_repository(repository)) == []


def test_a_folder_of_somebody_else_is_never_touched(tmp_path: Path, engine: FileSource) -> None:
    repository = tmp_path / "models"
    (repository / "m").mkdir(parents=True)
    (repository / "m/config.pbtxt").write_text("mine")
    for force in (False, True):
        with pytest.raises(InputError, match="was not written by trtforge, so it is not touched"):
            write_models(repository, [folder_of(engine)], force)
    assert files_below(repository) == {"m/config.pbtxt": b"mine"}


def test_one_clash_of_several_writes_none(tmp_path: Path, engine: FileSource) -> None:
    repository = tmp_path / "models"
    write_models(repository, [folder_of(engine, "b")])
    with pytest.raises(InputError, match="another model"):
        write_models(repository, [folder_of(engine, "a"), folder_of(engine, "b", batch=8)])
    assert [model.name for model in load_repository(repository).models] == ["b"]
    assert not (repository / "a").exists()


def test_two_models_of_one_name_are_refused(tmp_path: Path, engine: FileSource) -> None:
    with pytest.raises(InputError, match="two models would be called 'm'"):
        write_models(tmp_path / "models", [folder_of(engine), folder_of(engine)])
    assert not (tmp_path / "models").exists()


def test_a_removed_model_is_forgotten(tmp_path: Path, engine: FileSource) -> None:
    repository = tmp_path / "models"
    write_models(repository, [folder_of(engine, "a")])
    shutil.rmtree(repository / "a")
    write_models(repository, [folder_of(engine, "b")])
    assert [model.name for model in load_repository(repository).models] == ["b"]


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_place_that_is_no_folder_is_refused(tmp_path: Path, engine: FileSource, kind: str) -> None:
    place = tmp_path / "models"
    if kind == "file":
        place.write_text("mine")
    else:
        place.symlink_to(tmp_path)
    with pytest.raises(InputError, match="cannot become a repository"):
        write_models(place, [folder_of(engine)])


def test_a_mount_point_is_refused_with_a_folder_to_take(engine: FileSource) -> None:
    with pytest.raises(UnavailableError, match="cannot be written in one step") as caught:
        write_models(Path("/proc"), [folder_of(engine)])
    assert "--triton /proc/models" in caught.value.fix


def test_a_source_that_changed_meanwhile_is_refused(tmp_path: Path, engine: FileSource) -> None:
    engine.path.write_bytes(b"other")
    with pytest.raises(InputError, match="changed since its hash was taken"):
        write_models(tmp_path / "models", [folder_of(engine)])
    assert {path.name for path in tmp_path.iterdir()} == {"source.engine"}


def test_a_new_version_goes_beside_the_old_one_without_force(tmp_path: Path, engine: FileSource) -> None:
    repository = tmp_path / "models"
    write_models(repository, [folder_of(engine)])
    new = folder_of(engine, version=2)
    old = load_repository(repository).models[0]
    kept = {name: FileSource(repository / "m" / name, old.files[name]) for name in old.files if name.startswith("1/")}
    with pytest.raises(InputError, match="another model"):
        write_models(repository, [dataclasses.replace(new, files={**kept, **new.files})])
    write_models(repository, [dataclasses.replace(new, files={**kept, **new.files}, extends=1)])
    assert {name for name in files_below(repository / "m") if name != "config.pbtxt"} == {
        "1/model.py",
        "1/model.engine",
        "2/model.py",
        "2/model.engine",
    }


def test_a_new_configuration_is_recorded(tmp_path: Path, engine: FileSource) -> None:
    repository = tmp_path / "models"
    write_models(repository, [folder_of(engine)])
    replace_config(repository, "m", 'name: "m"\n')
    assert (repository / "m/config.pbtxt").read_text() == 'name: "m"\n'
    assert damaged_models(repository, load_repository(repository)) == []
    with pytest.raises(InputError, match="has no model 'other'"):
        replace_config(repository, "other", "")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{}", "missing key"),
        ("[]", "does not hold a mapping"),
        ('{"schema_version": 2}', "schema_version"),
        ("{", "JSON"),
        (ENTRY.replace("NAME", "../m"), "models.0.name"),
        (ENTRY.replace("FILE", "1/../../../m"), "'1/../../../m' leads out of the model's folder"),
        (ENTRY.replace("FILE", "/etc/hosts"), "'/etc/hosts' leads out of the model's folder"),
    ],
)
def test_a_damaged_manifest_is_refused_and_kept(tmp_path: Path, engine: FileSource, content: str, reason: str) -> None:
    repository = tmp_path / "models"
    repository.mkdir()
    (repository / "trtforge.json").write_text(content)
    with pytest.raises(InputError) as caught:
        write_models(repository, [folder_of(engine)], force=True)
    assert reason in str(caught.value)
    assert files_below(repository) == {"trtforge.json": content.encode()}


def test_a_folder_without_a_manifest_is_no_repository(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no repository of trtforge"):
        load_repository(tmp_path)


# Dies as if it was killed: in the middle of a file, or after the model is in its place and before it is recorded.
KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_package_repository import FileSource, folder_of
from trtforge.serving import repository

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def copy_half(source, path):
    path.write_bytes(source.path.read_bytes()[:10])
    die()

setattr(repository, {name!r}, copy_half if {name!r} == "_copy" else die)
repository.write_models(Path({models!r}), [folder_of(FileSource(Path({engine!r}), {sha256!r}))])
"""


@pytest.mark.parametrize("name", ["_copy", "replace_file"])
def test_a_killed_job_leaves_nothing_half_and_the_next_one_ends_its_work(
    tmp_path: Path, engine: FileSource, name: str
) -> None:
    repository = tmp_path / "models"
    program = KILLED.format(
        tests=str(Path(__file__).parent),
        name=name,
        models=str(repository),
        engine=str(engine.path),
        sha256=engine.sha256,
    )
    result = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert result.returncode == -signal.SIGKILL, result.stderr
    found = files_below(repository)
    whole = {"m/1/model.py", "m/1/model.engine", "m/config.pbtxt"}
    assert set(found) == (set() if name == "_copy" else whole)
    assert all(content == ENGINE for path, content in found.items() if path.endswith(".engine"))
    write_models(repository, [folder_of(engine)])
    assert set(files_below(repository)) == {*whole, "trtforge.json"}
    assert damaged_models(repository, load_repository(repository)) == []
    assert {path.name for path in tmp_path.iterdir()} == {"models", "source.engine"}


def test_a_place_that_is_full_is_reported_and_left_as_it_was(tmp_path: Path, engine: FileSource) -> None:
    models = tmp_path / "models"
    program = FILL.format(
        tests=str(Path(__file__).parent), models=str(models), engine=str(engine.path), sha256=engine.sha256
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout == (
        f"{models} cannot be written\nwhy: File too large\n"
        "fix: free some space, or choose another folder with --triton\n"
    )
    assert {path.name for path in tmp_path.iterdir()} == {"source.engine"}


def test_the_manifest_is_plain_json(tmp_path: Path, engine: FileSource) -> None:
    write_models(tmp_path / "models", [folder_of(engine)])
    content = json.loads((tmp_path / "models/trtforge.json").read_text())
    assert content["schema_version"] == 1
    assert content["models"][0]["kind"] == "onnxruntime"
