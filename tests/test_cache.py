"""The stage cache's folder: what it gives back, and what it does with what is not its own."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cache_cases import GB, KEY, Said, TextCodec, find, store

from trtforge.cache.folder import TAG
from trtforge.cache.store import Entry, StageCache, open_cache
from trtforge.errors import InputError, UnavailableError
from trtforge.hashing import fingerprint


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def codec(tmp_path: Path) -> TextCodec:
    return TextCodec(tmp_path / "out.txt")


def entry_of(folder: Path) -> Path:
    (entry,) = (folder / "entries").glob("*/*.json")
    return entry


def file_of(folder: Path) -> Path:
    (file,) = (folder / "files").iterdir()
    return file


def test_without_a_folder_there_is_no_cache(said: Said) -> None:
    with open_cache(None, GB, said) as cache:
        assert cache is None


def test_a_result_comes_back_with_its_warnings(tmp_path: Path, codec: TextCodec, said: Said) -> None:
    store(tmp_path / "c", codec)
    with open_cache(tmp_path / "c", GB, said) as cache:
        assert cache is not None
        found = cache.find("calibrate", KEY, codec)
        assert cache.find("calibrate", fingerprint("other"), codec) is None
        assert cache.find("verify", KEY, codec) is None
        assert cache.describe() == {"reused": ["calibrate"], "made": []}
    assert found is not None
    assert (found.value, found.warnings) == ("hello", ("mind this",))
    assert codec.target.read_text() == "hello"
    assert said == []


def test_the_folder_holds_nothing_but_what_was_stored(tmp_path: Path, codec: TextCodec) -> None:
    folder = tmp_path / "c"
    store(folder, codec)
    digest = hashlib.sha256(b"hello").hexdigest()
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {TAG, f"entries/calibrate/{KEY}.json", f"files/{digest}"}
    assert (folder / TAG).read_bytes().startswith(b"Signature: 8a477f597d28d172789f06886806bc55\n")


def test_equal_content_is_stored_once(tmp_path: Path, codec: TextCodec) -> None:
    store(tmp_path / "c", codec)
    store(tmp_path / "c", codec, key=fingerprint("other"))
    assert len(list((tmp_path / "c" / "files").iterdir())) == 1
    assert len(list((tmp_path / "c" / "entries" / "calibrate").iterdir())) == 2


def test_content_that_is_stored_once_more_becomes_young(tmp_path: Path, codec: TextCodec) -> None:
    """A bound that is reached at that moment leaves it to the entry that is still to come."""
    store(tmp_path / "c", codec)
    os.utime(file_of(tmp_path / "c"), (1e9, 1e9))
    store(tmp_path / "c", codec, key=fingerprint("other"))
    assert time.time() - file_of(tmp_path / "c").stat().st_mtime < 3600


def test_a_result_keeps_the_order_of_its_keys(tmp_path: Path, said: Said) -> None:
    class MappingCodec:
        def save(self, value: dict[str, int], scratch: Path) -> tuple[Any, dict[str, Path]]:
            return value, {}

        def load(self, entry: Entry) -> dict[str, int]:
            return dict(entry.value)

    with open_cache(tmp_path, GB, said) as cache:
        assert cache is not None
        cache.store("verify", KEY, {"z": 1, "a": 2}, MappingCodec(), [])
        found = cache.find("verify", KEY, MappingCodec())
    assert found is not None
    assert list(found.value) == ["z", "a"]


@pytest.mark.parametrize("what", ["entry", "entry cut", "file", "file grown", "empty file"])
def test_damage_is_said_and_made_good(tmp_path: Path, codec: TextCodec, said: Said, what: str) -> None:
    folder = tmp_path / "c"
    store(folder, codec)
    path = entry_of(folder) if what.startswith("entry") else file_of(folder)
    content = path.read_bytes()
    damaged = {
        "entry": content.replace(b"hello", b"HELLO"),
        "entry cut": content[: len(content) // 2],
        "file": b"HELLO",
        "file grown": content + b" and more",
        "empty file": b"",
    }
    path.write_bytes(damaged[what])
    assert find(folder, codec, said) is None
    assert len(said) == 1
    assert "the result of calibrate in" in said[0]
    assert "is damaged" in said[0]
    store(folder, codec)
    assert find(folder, codec, said) == "hello"
    assert len(said) == 1


def test_an_entry_that_was_moved_is_none(tmp_path: Path, codec: TextCodec, said: Said) -> None:
    store(tmp_path / "c", codec)
    entry = entry_of(tmp_path / "c")
    entry.rename(entry.with_name(f"{fingerprint('other')}.json"))
    assert find(tmp_path / "c", codec, said, fingerprint("other")) is None
    assert "it belongs to another place" in said[0]


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_file_is_never_read(tmp_path: Path, codec: TextCodec, said: Said, kind: str) -> None:
    store(tmp_path / "c", codec)
    file = file_of(tmp_path / "c")
    file.rename(tmp_path / "elsewhere")
    if kind == "link":
        file.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.mkdir()
    assert find(tmp_path / "c", codec, said) is None
    assert "is damaged" in said[0]
    assert (tmp_path / "elsewhere").read_text() == "hello"


@pytest.mark.parametrize("reads", ["a copy", "a hash"])
def test_content_that_the_disk_does_not_give_is_damage(
    tmp_path: Path, codec: TextCodec, said: Said, monkeypatch: pytest.MonkeyPatch, reads: str
) -> None:
    class Failing(io.FileIO):
        def readinto(self, _: Any) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        def readall(self) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    class OpeningCodec(TextCodec):
        def load(self, entry: Entry) -> str:
            with entry.open("text.txt") as file:
                return file.read().decode()

    store(tmp_path / "c", codec)
    monkeypatch.setattr(
        "trtforge.cache.store.open_stored", lambda path: io.BufferedReader(Failing(os.open(path, os.O_RDONLY)))
    )
    reader = codec if reads == "a copy" else OpeningCodec(codec.target)
    assert find(tmp_path / "c", reader, said) is None
    assert f"is damaged (text.txt cannot be read: {os.strerror(errno.EIO)}); it is made again" in said[0]
    assert not codec.target.exists()


def test_a_target_that_cannot_be_written_is_no_damage(tmp_path: Path, codec: TextCodec, said: Said) -> None:
    store(tmp_path / "c", codec)
    with pytest.raises(FileNotFoundError):
        find(tmp_path / "c", TextCodec(tmp_path / "nowhere" / "out.txt"), said)
    assert said == []
    assert find(tmp_path / "c", codec, said) == "hello"


def test_a_removed_file_means_that_the_stage_runs_again(tmp_path: Path, codec: TextCodec, said: Said) -> None:
    store(tmp_path / "c", codec)
    file_of(tmp_path / "c").unlink()
    assert find(tmp_path / "c", codec, said) is None
    assert said == []


def test_a_folder_that_is_something_else_is_refused_and_left(tmp_path: Path, codec: TextCodec) -> None:
    (tmp_path / "thesis.tex").write_text("text")
    with pytest.raises(InputError, match="is no trtforge cache, so it is not used as one") as caught:
        store(tmp_path, codec)
    assert caught.value.why == f"it has no {TAG}, and holds thesis.tex"
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_cache_of_another_program_is_refused(tmp_path: Path, codec: TextCodec) -> None:
    (tmp_path / TAG).write_text("Signature: 8a477f597d28d172789f06886806bc55\n# made by something else\n")
    with pytest.raises(InputError, match="is no trtforge cache of this version"):
        store(tmp_path, codec)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path, codec: TextCodec) -> None:
    (tmp_path / "c").write_text("")
    with pytest.raises(InputError, match="it is not a folder"):
        store(tmp_path / "c", codec)


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path, codec: TextCodec) -> None:
    with pytest.raises(UnavailableError, match="cannot be used") as caught:
        store(Path("/proc/1/nowhere/c"), codec)
    assert caught.value.fix == "give another folder with --cache"


def test_what_a_killed_build_began_is_removed_and_what_runs_is_not(tmp_path: Path, codec: TextCodec) -> None:
    folder = tmp_path / "c"
    store(folder, codec)
    killed, running = folder / "partial" / "build-killed", folder / "partial" / "build-running"
    for path in (killed, running):
        path.mkdir()
        (path / "half").write_text("half")
    handle = os.open(running, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    store(folder, codec, key=fingerprint("other"))
    assert [path.name for path in (folder / "partial").iterdir()] == ["build-running"]
    os.close(handle)


def test_a_full_disk_costs_the_cache_and_not_the_build(tmp_path: Path, codec: TextCodec, said: Said) -> None:
    """A limit on the size of files answers as a full disk does."""
    script = """
import resource, sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from cache_cases import KEY, Said, TextCodec
from trtforge.cache.store import open_cache
said = Said()
codec = TextCodec(Path(sys.argv[1]) / "out.txt")
with open_cache(Path(sys.argv[1]) / "c", 10**9, said) as cache:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    cache.store("calibrate", KEY, "x" * 100_000, codec, [])
    cache.store("verify", KEY, "short", codec, [])
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(len(said), said[0])
"""
    command = [sys.executable, "-c", script, str(tmp_path), str(Path(__file__).parent), *sys.path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"1 the cache {tmp_path / 'c'} cannot be written (File too large)")
    assert done.stdout.strip().endswith("the build goes on without storing in it")
    left = [path for path in (tmp_path / "c").rglob("*") if path.is_file()]
    assert [path.name for path in left] == [TAG]


def test_a_cache_that_may_only_be_read_is_read(tmp_path: Path, codec: TextCodec, said: Said) -> None:
    """A file in the place of the scratch folder refuses every write, for root as well."""
    folder = tmp_path / "c"
    store(folder, codec)
    shutil.rmtree(folder / "partial")
    (folder / "partial").write_text("")
    assert find(folder, codec, said) == "hello"
    assert said == [f"the cache {folder} cannot be written ({os.strerror(errno.EEXIST)}); it is only read"]
    store(folder, codec, key=fingerprint("other"))
    assert entry_of(folder).stem == KEY


def test_the_bound_removes_what_was_of_no_use_for_longest(tmp_path: Path, codec: TextCodec, said: Said) -> None:
    folder = tmp_path / "c"
    keys = [fingerprint(number) for number in range(4)]
    for number, key in enumerate(keys):
        store(folder, codec, "x" * 1000 + str(number), key)
    for age, key in enumerate(reversed(keys)):
        moment = time.time() - 10_000 * (age + 1)
        os.utime(folder / "entries" / "calibrate" / f"{key}.json", (moment, moment))
    for file in (folder / "files").iterdir():
        os.utime(file, (1e9, 1e9))
    assert find(folder, codec, said, keys[0]) is not None  # the oldest, which is of use once more
    with open_cache(folder, 7500, said) as cache:
        assert cache is not None
        cache.store("calibrate", fingerprint("new"), "x" * 1000, codec, [])
    left = {path.stem for path in (folder / "entries" / "calibrate").iterdir()}
    assert left == {fingerprint("new"), keys[0], keys[3]}
    assert len(list((folder / "files").iterdir())) == 3
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 7700


def test_several_builds_write_the_same_result_at_once(tmp_path: Path, codec: TextCodec, said: Said) -> None:
    folder = tmp_path / "c"
    with open_cache(folder, GB, said) as first, open_cache(folder, GB, said) as second:
        assert first is not None
        assert second is not None
        first.store("calibrate", KEY, "hello", codec, [])
        second.store("calibrate", KEY, "hello", codec, [])
        assert second.find("calibrate", KEY, codec) is not None
    assert find(folder, codec, said) == "hello"
    assert list((folder / "partial").iterdir()) == []


def test_a_timing_file_lies_inside(tmp_path: Path, said: Said) -> None:
    with open_cache(tmp_path / "c", GB, said) as cache:
        assert isinstance(cache, StageCache)
        file = cache.timing_file("tensorrt-11.4-sm_90")
    assert file == tmp_path / "c" / "timing" / "tensorrt-11.4-sm_90.bin"
    assert file.parent.is_dir()


def test_no_entry_is_ever_unpickled(tmp_path: Path, codec: TextCodec, said: Said) -> None:
    """A pickle, rightly hashed, in the place of an entry."""
    folder = tmp_path / "c"
    store(folder, codec)
    text = b"\x80\x04cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR."
    entry_of(folder).write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
    assert find(folder, codec, said) is None
    assert not (tmp_path / "ran").exists()


def test_unknown_fields_are_damage(tmp_path: Path, codec: TextCodec, said: Said) -> None:
    folder = tmp_path / "c"
    store(folder, codec)
    content = json.loads(entry_of(folder).read_bytes().partition(b"\n")[2])
    text = json.dumps(content | {"more": 1}).encode()
    entry_of(folder).write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
    assert find(folder, codec, said) is None
    assert "is damaged" in said[0]
