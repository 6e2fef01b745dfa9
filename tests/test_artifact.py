from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_graphsurgeon as gs
import pytest
from artifact_cases import A, B, everything_below, fill, put
from support import make_manifest

from trtforge import artifact, staging
from trtforge.artifact import commit, damaged_files, describe_files, find_artifact
from trtforge.errors import InputError, UnavailableError
from trtforge.manifest import MANIFEST_NAME, FileInfo, load_manifest
from trtforge.staging import open_staging

# What is at the target


def test_a_free_place_may_be_written(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "new", tmp_path / "deep" / "er", tmp_path / "empty"):
        assert find_artifact(target, A, False) is None


def test_an_artifact_made_from_equal_inputs_is_reported(tmp_path: Path) -> None:
    put(tmp_path / "out")
    assert find_artifact(tmp_path / "out", A, False) == load_manifest(tmp_path / "out")
    assert find_artifact(tmp_path / "out", A, True) is None


def test_an_artifact_made_from_other_inputs_needs_force(tmp_path: Path) -> None:
    put(tmp_path / "out")
    with pytest.raises(InputError, match="out holds an artifact made from other inputs") as caught:
        find_artifact(tmp_path / "out", B, False)
    assert "differ" in caught.value.why
    assert "--force" in caught.value.fix
    assert find_artifact(tmp_path / "out", B, True) is None


@pytest.mark.parametrize("damage", ["missing", "changed", "longer"])
def test_a_damaged_artifact_needs_force(tmp_path: Path, damage: str) -> None:
    put(tmp_path / "out")
    engine = tmp_path / "out" / "model.engine"
    if damage == "missing":
        engine.unlink()
    else:
        engine.write_bytes(b"enginE" if damage == "changed" else b"engine+")
    assert damaged_files(tmp_path / "out", load_manifest(tmp_path / "out")) == ["model.engine"]
    with pytest.raises(InputError, match="holds a damaged artifact\nwhy: its files do not match its manifest"):
        find_artifact(tmp_path / "out", A, False)
    assert find_artifact(tmp_path / "out", A, True) is None


def test_logs_may_change_without_damage(tmp_path: Path) -> None:
    put(tmp_path / "out")
    (tmp_path / "out" / "build.log").unlink()
    assert find_artifact(tmp_path / "out", A, False) is not None


def test_a_manifest_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"engine")
    put(tmp_path / "out")
    info = load_manifest(tmp_path / "out").files["model.engine"]
    for name in ("../secret", str(tmp_path / "secret"), "..", "."):
        assert damaged_files(tmp_path / "out", make_manifest(files={name: info})) == [name]


@pytest.mark.parametrize("content", [None, "{}", "not json", '{"name": "My web app", "icons": []}'])
@pytest.mark.parametrize("force", [False, True])
def test_a_folder_that_is_no_artifact_is_never_touched(tmp_path: Path, content: str | None, force: bool) -> None:
    target = tmp_path / "photos"
    target.mkdir()
    (target / "me.jpg").write_bytes(b"jpg")
    if content is not None:
        (target / MANIFEST_NAME).write_text(content)
    before = everything_below(tmp_path)
    with pytest.raises(InputError, match="photos is no artifact, so it is not touched") as caught:
        put(target, force=force)
    assert caught.value.why
    assert everything_below(tmp_path) == before


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("kind", ["file", "symlink", "dangling"])
def test_a_file_or_link_in_the_way_is_never_touched(tmp_path: Path, kind: str, force: bool) -> None:
    target = tmp_path / "out"
    if kind == "file":
        target.write_bytes(b"mine")
    else:
        put(tmp_path / "real") if kind == "symlink" else None
        target.symlink_to(tmp_path / "real")
    before = everything_below(tmp_path)
    with pytest.raises(InputError, match="out cannot become an artifact\nwhy: it is not a folder"):
        put(target, force=force)
    assert everything_below(tmp_path) == before


# Writing


def test_the_artifact_appears_whole_and_staging_disappears(tmp_path: Path) -> None:
    with open_staging(tmp_path / "a" / "out") as staging:
        assert staging.directory.parent.parent == tmp_path / "a"
        (staging.work / "big").write_bytes(b"x")
        fill(staging, A)
        assert not (tmp_path / "a" / "out").exists()
        assert commit(staging, A, False) is None
    assert everything_below(tmp_path) == [
        "a",
        "a/out",
        "a/out/build.log",
        "a/out/manifest.json",
        "a/out/model.engine",
        "a/out/model.onnx",
    ]


def test_an_empty_folder_becomes_the_artifact(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert put(tmp_path / "out") is None
    assert (tmp_path / "out" / "model.engine").read_bytes() == b"engine"


def test_force_replaces_and_leaves_nothing_of_the_old_one(tmp_path: Path) -> None:
    put(tmp_path / "out")
    (tmp_path / "out" / "report.html").write_text("old")
    put(tmp_path / "out", B, b"new", force=True)
    assert everything_below(tmp_path) == [
        "out",
        "out/build.log",
        "out/manifest.json",
        "out/model.engine",
        "out/model.onnx",
    ]
    assert (tmp_path / "out" / "model.engine").read_bytes() == b"new"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_build_leaves_nothing_not_even_the_parents_it_made(tmp_path: Path, error: type[BaseException]) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(error), open_staging(tmp_path / "mine" / "a" / "b" / "out") as staging:
        fill(staging, A)
        raise error
    assert everything_below(tmp_path) == ["mine"]


def test_parents_that_others_use_by_then_stay(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), open_staging(tmp_path / "a" / "out"):
        (tmp_path / "a" / "other").mkdir()
        raise RuntimeError
    assert everything_below(tmp_path) == ["a", "a/other"]


def test_a_relative_target_survives_a_change_of_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with open_staging(Path("out")) as staging:
        fill(staging, A)
        monkeypatch.chdir("/")
        commit(staging, A, False)
    assert (tmp_path / "out" / MANIFEST_NAME).is_file()


READ = """
import os, sys
engine, stop = sys.argv[1:]
missing, contents = 0, set()
print("ready", flush=True)
while not os.path.exists(stop):
    for _ in range(300):
        try:
            os.stat(engine)
        except OSError:
            missing += 1
    with open(engine, "rb") as file:
        contents.add(file.read())
print(missing, len(contents), all(content == content[:1] * 1000 for content in contents))
"""


def test_a_reader_never_misses_the_artifact_while_it_is_replaced(tmp_path: Path) -> None:
    target, stop = tmp_path / "out", tmp_path / "stop"
    put(target, A, bytes(1000))
    command = [sys.executable, "-c", READ, str(target / "model.engine"), str(stop)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "ready\n"
        for index in range(1, 150):
            put(target, A, bytes([index]) * 1000, force=True)
        stop.touch()
        missing, seen, are_whole = reader.stdout.read().split()
    assert (missing, are_whole) == ("0", "True")
    assert int(seen) > 1


def test_without_an_atomic_swap_the_artifact_is_replaced_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The C library of some systems has no renameat2."""
    put(tmp_path / "out")
    monkeypatch.setattr(staging.ctypes, "CDLL", lambda *_, **__: object())
    put(tmp_path / "out", B, b"new", force=True)
    assert (tmp_path / "out" / "model.engine").read_bytes() == b"new"
    assert everything_below(tmp_path) == [
        "out",
        "out/build.log",
        "out/manifest.json",
        "out/model.engine",
        "out/model.onnx",
    ]


# Several builds


def test_of_two_builds_from_other_inputs_one_wins_and_one_says_so(tmp_path: Path) -> None:
    target = tmp_path / "out"
    ready = threading.Barrier(2)
    results: dict[str, object] = {}

    def build(inputs: str) -> None:
        try:
            with open_staging(target) as staging:
                fill(staging, inputs, inputs.encode())
                ready.wait()
                results[inputs] = commit(staging, inputs, False)
        except InputError as err:
            results[inputs] = err

    threads = [threading.Thread(target=build, args=(inputs,)) for inputs in (A, B)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [inputs for inputs, result in results.items() if result is None]
    (loser,) = [result for result in results.values() if result is not None]
    assert isinstance(loser, InputError)
    assert "made from other inputs" in loser.what
    assert (target / "model.engine").read_bytes() == winner.encode()
    assert load_manifest(target).inputs_sha256 == winner
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_of_two_builds_from_equal_inputs_the_second_gets_the_firsts_manifest(tmp_path: Path) -> None:
    with open_staging(tmp_path / "out") as first, open_staging(tmp_path / "out") as second:
        fill(first, A, b"first")
        fill(second, A, b"second")
        assert commit(first, A, False) is None
        assert commit(second, A, False) == load_manifest(tmp_path / "out")
    assert (tmp_path / "out" / "model.engine").read_bytes() == b"first"


HOLD = """
import sys, time
from pathlib import Path
from trtforge.staging import open_staging
with open_staging(Path(sys.argv[1])) as staging:
    (staging.directory / "model.engine").write_bytes(b"half")
    print("ready", flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def building(target: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that is in the middle of a build."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(target)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("name", ["out", "out[1]*?"])
def test_what_a_killed_build_left_is_removed_and_a_living_one_is_left_alone(tmp_path: Path, name: str) -> None:
    target = tmp_path / name
    other = tmp_path / "another"
    with building(target) as killed, building(other), building(target):
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert len(list(tmp_path.iterdir())) == 3
        assert put(target) is None
        left = sorted(path.name.split(".partial-")[0] for path in tmp_path.iterdir())
        assert left == sorted([f".{name}", ".another", name])


def test_an_interrupted_process_leaves_nothing(tmp_path: Path) -> None:
    with building(tmp_path / "a" / "out") as process:
        process.send_signal(signal.SIGINT)
        process.wait()
    assert everything_below(tmp_path) == []


# Single files


def test_describe_files_hashes_what_is_used_further(tmp_path: Path) -> None:
    for name in ("model.onnx", "model.engine", "build.log", "report.html", MANIFEST_NAME):
        (tmp_path / name).write_bytes(b"abc")
    (tmp_path / "folder").mkdir()
    sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    info = FileInfo(sha256=sha256, bytes=3)
    assert list(describe_files(tmp_path).items()) == [("model.engine", info), ("model.onnx", info)]
    assert describe_files(tmp_path, {"model.engine"}) == {"model.onnx": info}


def test_write_model_leaves_only_the_model(tmp_path: Path, mlp: Path) -> None:
    path = tmp_path / "new" / "m.onnx"
    artifact.write_model(gs.import_onnx(onnx.load(mlp)), path)
    assert len(onnx.load(path).graph.node) == 3
    assert everything_below(tmp_path / "new") == ["m.onnx"]
    with pytest.raises(UnavailableError, match="cannot be written"):
        artifact.write_model(gs.import_onnx(onnx.load(mlp)), path / "below" / "m.onnx")
    assert everything_below(tmp_path / "new") == ["m.onnx"]
