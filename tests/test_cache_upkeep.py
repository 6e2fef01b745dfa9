"""What a stage cache holds, and removing what is old."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from cache_cases import GB, KEY, Said, TextCodec, find, store

from trtforge.cache.folder import TAG
from trtforge.cache.store import open_cache
from trtforge.cache.upkeep import clear_cache, describe_cache
from trtforge.errors import InputError
from trtforge.hashing import fingerprint

DAY = 86400.0


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def codec(tmp_path: Path) -> TextCodec:
    return TextCodec(tmp_path / "out.txt")


@pytest.fixture
def folder(tmp_path: Path, codec: TextCodec) -> Path:
    """Two results of one stage, one of them three days old, and one of another stage that shares a file."""
    folder = tmp_path / "c"
    store(folder, codec)
    store(folder, codec, "something else", fingerprint("old"))
    store(folder, codec, stage="verify")
    old = time.time() - 3 * DAY
    os.utime(folder / "entries" / "calibrate" / f"{fingerprint('old')}.json", (old, old))
    for file in (folder / "files").iterdir():
        os.utime(file, (old, old))
    return folder


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def test_stages_are_counted_and_shared_files_count_once_in_all(folder: Path) -> None:
    info = describe_cache(folder)
    assert {name: stage.entries for name, stage in info.stages.items()} == {"calibrate": 2, "verify": 1}
    on_disk = sum((folder / name).stat().st_size for name in files_in(folder) if name != TAG)
    assert info.bytes == on_disk
    assert sum(stage.bytes for stage in info.stages.values()) == on_disk + len("hello")
    calibrate = info.stages["calibrate"]
    assert 2.9 * DAY < calibrate.newest - calibrate.oldest < 3.1 * DAY
    assert info.entries == 3


def test_an_empty_cache_holds_nothing(tmp_path: Path) -> None:
    with open_cache(tmp_path, GB, Said()):
        pass
    info = describe_cache(tmp_path)
    assert (info.entries, info.bytes, info.stages) == (0, 0, {})


def test_clear_removes_everything_but_the_mark(folder: Path) -> None:
    before = describe_cache(folder)
    (folder / "timing").mkdir()
    (folder / "timing" / "tensorrt-11.4-sm_90.bin").write_bytes(b"12345")
    removed = clear_cache(folder)
    assert (removed.entries, removed.bytes) == (3, before.bytes + 5)
    assert files_in(folder) == [TAG]


def test_clear_by_age_keeps_what_is_of_use(folder: Path, codec: TextCodec, said: Said) -> None:
    removed = clear_cache(folder, older_than_days=2)
    assert removed.entries == 1
    assert removed.bytes > len("something else")
    assert find(folder, codec, said) == "hello"
    assert find(folder, codec, said, stage="verify") == "hello"
    assert len(list((folder / "files").iterdir())) == 1
    assert said == []
    assert clear_cache(folder, older_than_days=2).entries == 0


def test_using_a_result_makes_it_young(folder: Path, codec: TextCodec, said: Said) -> None:
    assert find(folder, codec, said, fingerprint("old")) == "something else"
    assert clear_cache(folder, older_than_days=2).entries == 0


def test_clear_by_age_leaves_a_file_whose_entry_is_still_to_come(folder: Path) -> None:
    young = folder / "files" / fingerprint("young")
    young.write_text("stored a moment ago")
    clear_cache(folder, older_than_days=0)
    assert [path.name for path in (folder / "files").iterdir()] == [young.name]


@pytest.mark.parametrize("place", ["", "entries", "entries/calibrate", "files", "timing", "partial"])
def test_clear_touches_nothing_that_is_not_the_caches(folder: Path, place: str) -> None:
    (folder / "timing").mkdir()
    theirs = folder / place / "notes.txt"
    theirs.write_text("keep me")
    clear_cache(folder)
    assert files_in(folder) == sorted([TAG, str(theirs.relative_to(folder))])


@pytest.mark.parametrize("place", ["entries", "entries/calibrate", "files", "timing", "partial"])
def test_clear_follows_no_link_out_of_the_cache(folder: Path, tmp_path: Path, place: str) -> None:
    """Names as in the cache, outside of it."""
    outside = tmp_path / "outside"
    inside = folder / place
    inside.mkdir(exist_ok=True)
    inside.rename(outside)
    for name in (f"{KEY}.json", KEY, "a.bin"):
        (outside / name).write_text("keep me")
    (outside / "build-abc").mkdir()
    (outside / "build-abc" / "file").write_text("keep me")
    kept = files_in(outside)
    inside.symlink_to(outside)
    clear_cache(folder)
    describe_cache(folder)
    assert files_in(outside) == kept
    assert inside.is_symlink()


def test_clear_removes_no_link_and_no_target(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("keep me")
    links = [folder / "files" / KEY, folder / "entries" / "calibrate" / f"{fingerprint('link')}.json"]
    for link in links:
        link.symlink_to(target)
    clear_cache(folder)
    assert all(link.is_symlink() for link in links)
    assert target.read_text() == "keep me"


def test_what_is_no_cache_is_neither_cleared_nor_described(tmp_path: Path) -> None:
    (tmp_path / "entries" / "calibrate").mkdir(parents=True)
    (tmp_path / "entries" / "calibrate" / f"{KEY}.json").write_text("keep me")
    for act in (clear_cache, describe_cache):
        with pytest.raises(InputError, match="is no trtforge cache") as caught:
            act(tmp_path)
        assert caught.value.why == f"it has no {TAG}"
        with pytest.raises(InputError, match="is no trtforge cache") as caught:
            act(tmp_path / "missing")
        assert caught.value.why == "there is no such folder"
    assert files_in(tmp_path) == [f"entries/calibrate/{KEY}.json"]


def test_clear_leaves_what_a_running_build_writes(folder: Path, codec: TextCodec, said: Said) -> None:
    with open_cache(folder, GB, said) as cache:
        assert cache is not None
        (scratch,) = (folder / "partial").iterdir()
        (scratch / "half").write_text("half")
        clear_cache(folder)
        assert (scratch / "half").exists()
        cache.store("calibrate", KEY, "hello", codec, [])
    assert find(folder, codec, said) == "hello"
