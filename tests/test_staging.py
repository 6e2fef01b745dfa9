"""Places that cannot be written, and single files that are put in place whole."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from artifact_cases import A, everything_below, put

from trtforge import staging
from trtforge.artifact import find_artifact
from trtforge.errors import InputError, UnavailableError
from trtforge.staging import locked, open_staging, replace_file

# Places that cannot be written

FILL = """
import resource, sys
from pathlib import Path
from trtforge.staging import open_staging
from trtforge.errors import UnavailableError
limit = int(sys.argv[2])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    with open_staging(Path(sys.argv[1])) as staging:
        (staging.directory / "model.engine").write_bytes(bytes(1 << 20))
except UnavailableError as err:
    print(err)
"""


def run_fill(target: Path, limit: int) -> str:
    command = [sys.executable, "-c", FILL, str(target), str(limit)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def test_a_file_size_limit_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    text = run_fill(tmp_path / "new" / "out", 1 << 16)
    assert text == (
        f"{tmp_path}/new/out cannot be written\n"
        "why: File too large\nfix: free some space, or choose another folder with -o\n"
    )
    assert everything_below(tmp_path) == []


def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    if shutil.which("mount") is None or os.getuid() != 0:
        pytest.skip("mounting a small file system needs root")
    command = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(tmp_path)]
    mounted = subprocess.run(command, capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"this machine does not let tests mount: {mounted.stderr.decode().strip()}")
    try:
        text = run_fill(tmp_path / "new" / "out", 0)
        left = everything_below(tmp_path)
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert "cannot be written\nwhy: No space left on device\nfix: free some space" in text
    assert left == []


def test_a_folder_that_is_removed_while_its_lock_is_waited_for_is_reported(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()

    def wait_for_it() -> None:
        with locked(folder):
            pass

    with ThreadPoolExecutor(1) as pool:
        with locked(folder):
            waiting = pool.submit(wait_for_it)
            deadline = time.monotonic() + 60
            # Both have it open.
            while sum(os.path.realpath(handle) == str(folder) for handle in Path("/proc/self/fd").iterdir()) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            folder.rmdir()
        with pytest.raises(UnavailableError, match="was removed while this command waited") as caught:
            waiting.result()
    assert caught.value.fix == "run this command again"


@pytest.mark.parametrize("below", ["out", "deep/out"])
def test_a_path_below_a_file_is_reported(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(UnavailableError, match="cannot be written\nwhy: Not a directory") as caught:
        put(tmp_path / "file" / below)
    assert caught.value.fix == "choose another folder with -o"
    assert everything_below(tmp_path) == ["file"]


def test_a_parent_that_is_a_dangling_link_is_reported(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(UnavailableError, match="cannot be written"):
        put(tmp_path / "link" / "out")
    assert everything_below(tmp_path) == ["link"]


@pytest.mark.parametrize("length", [250, 300])
def test_a_name_that_is_too_long_is_reported(tmp_path: Path, length: int) -> None:
    target = tmp_path / ("n" * length)
    with pytest.raises(UnavailableError, match="cannot be written\nwhy: File name too long"):
        find_artifact(target, A, False)
        put(target)
    assert everything_below(tmp_path) == []


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission_is_reported(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o555)
    with pytest.raises(UnavailableError, match="cannot be written\nwhy: Permission denied"):
        put(tmp_path / "theirs" / "out")


def test_other_system_errors_are_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), open_staging(tmp_path / "out"):
        (tmp_path / "nothing").read_bytes()


# Single files


def test_replace_file_changes_a_file_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    reader = path.open()
    replace_file(path, "größe")
    assert path.read_text(encoding="utf-8") == "größe"
    assert reader.read() == "old"
    reader.close()
    assert path.stat().st_mode & 0o777 == 0o644
    assert everything_below(tmp_path) == ["f"]


def test_replace_file_says_where_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UnavailableError, match="cannot be written"):
        replace_file(tmp_path / "file" / "f", "text")


def test_write_text_replaces_other_content_only_with_force(tmp_path: Path) -> None:
    path = tmp_path / "new" / "f"
    staging.write_text(path, "one", force=False)
    staging.write_text(path, "one", force=False)
    with pytest.raises(InputError, match="f exists\nwhy: it is not replaced unasked"):
        staging.write_text(path, "two", force=False)
    assert path.read_text() == "one"
    staging.write_text(path, "two", force=True)
    assert path.read_text() == "two"
