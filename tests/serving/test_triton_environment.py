"""Where the server is looked for, and an install that never leaves half an environment."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from command_checks import Watch

from trtforge.errors import InputError, UnavailableError
from trtforge.serving.triton import install
from trtforge.serving.triton.environment import RECORD_NAME, TRITON_VERSION, TritonInstall, find_triton
from trtforge.serving.triton.install import install_triton
from trtforge.staging import locked

INSTALL = """
import sys
from pathlib import Path
from trtforge.serving.triton.install import install_triton
install_triton(Path(sys.argv[1]), python=Path(sys.argv[2]))
"""


def make_nvidia_folder(folder: Path) -> Path:
    """What /opt/tritonserver holds, as far as it is looked at."""
    for name in ("bin", "backends/python", "backends/tensorrt", "caches/local"):
        (folder / name).mkdir(parents=True)
    (folder / "bin/tritonserver").touch()
    (folder / "TRITON_VERSION").write_text("2.60.0\n")
    return folder


def write_record(folder: Path, **changes: object) -> None:
    record = {
        "schema_version": 1,
        "triton": TRITON_VERSION,
        "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "packages": install._requirements(),
        "complete": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECORD_NAME).write_text(json.dumps(record | changes))


def make_environment(folder: Path, **changes: object) -> Path:
    """What an install leaves, without its contents."""
    binary = folder / "lib/python3.11/site-packages/pytriton/tritonserver/bin/tritonserver"
    binary.parent.mkdir(parents=True)
    binary.touch()
    write_record(folder, **changes)
    return folder


def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip finds nothing, as on a machine without a network."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")


def test_the_first_place_with_a_server_is_taken(tmp_path: Path) -> None:
    nvidia, own = make_nvidia_folder(tmp_path / "opt"), make_environment(tmp_path / "own")
    found = find_triton([tmp_path / "nothing", nvidia, own])
    assert (found.root, found.version, found.python) == (nvidia, "2.60.0", None)
    assert found.backend_names() == ["python", "tensorrt"]
    assert found.cache_names() == ["local"]
    assert find_triton([own, nvidia]).python == own / "bin/python"


def test_a_missing_server_is_reported_with_the_command_that_installs_it(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError) as caught:
        find_triton([tmp_path / "nothing"])
    assert str(tmp_path / "nothing") in caught.value.why
    assert "trtforge triton install" in caught.value.fix


def test_half_an_environment_is_none(tmp_path: Path) -> None:
    folder = make_environment(tmp_path / "own", complete=False)
    with pytest.raises(UnavailableError):
        find_triton([folder])


def test_the_server_gets_its_own_packages_and_none_of_ours(tmp_path: Path) -> None:
    variables = find_triton([make_environment(tmp_path / "own")]).environment()
    assert variables["PATH"].startswith(f"{tmp_path}/own/bin:")
    assert variables["PYTHONPATH"] == ""


def test_the_same_environment_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_index(monkeypatch)
    folder = make_environment(tmp_path / "own")
    before = sorted(folder.rglob("*"))
    assert install_triton(folder) == find_triton([folder])
    assert sorted(folder.rglob("*")) == before


def test_a_folder_with_other_files_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="files that trtforge did not write"):
        install_triton(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_failed_install_leaves_nothing_and_carries_the_words_of_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_index(monkeypatch)
    # Of an install that was killed.
    folder = make_environment(tmp_path / "own", complete=False)
    with pytest.raises(UnavailableError) as caught:
        install_triton(folder)
    assert "No matching distribution found for nvidia-pytriton" in caught.value.why
    assert list(folder.iterdir()) == []


def write_python(path: Path, version: str, venv: str) -> Path:
    """An interpreter that says its version, and does a shell command in the place of making an environment."""
    facts = json.dumps([version, "/nowhere", "libpython.a"])
    path.write_text(f"#!/bin/sh\ncase \"$1\" in -m) {venv};; *) echo '{facts}';; esac\n")
    path.chmod(0o755)
    return path


def test_a_failed_install_removes_the_folder_that_it_made(tmp_path: Path) -> None:
    python = write_python(tmp_path / "python", "3.11", "echo 'Error: ensurepip is not available' >&2; exit 1")
    with pytest.raises(UnavailableError) as caught:
        install_triton(tmp_path / "a/b", python=python)
    assert caught.value.why == "Error: ensurepip is not available"
    assert not (tmp_path / "a").exists()


def test_another_python_on_the_path_is_taken_where_this_one_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_python(tmp_path / "python3.12", "3.12", "echo 'Error: made by 3.12' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(sys, "version_info", (3, 13, 0))
    with pytest.raises(UnavailableError) as caught:
        install_triton(tmp_path / "own")
    assert caught.value.why == "Error: made by 3.12"


def test_an_interpreter_in_this_folder_is_taken_before_one_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_python(tmp_path / "python3.11", "3.11", "echo 'Error: made here' >&2; exit 1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnavailableError) as caught:
        install_triton(tmp_path / "own", python=Path("python3.11"))
    assert caught.value.why == "Error: made here"


@pytest.mark.parametrize(
    ("program", "why"), [("nothing", "No such file or directory"), ("/bin/cat", "does not answer")]
)
def test_what_is_no_interpreter_is_refused(tmp_path: Path, program: str, why: str) -> None:
    with pytest.raises(InputError, match="cannot be run") as caught:
        install_triton(tmp_path / "own", python=Path(program))
    assert why in caught.value.why


def test_the_next_install_waits_for_what_one_that_was_killed_still_does(tmp_path: Path) -> None:
    python = write_python(tmp_path / "python", "3.11", "echo $$ >$3/started; exec sleep 600")
    folder = tmp_path / "own"
    with subprocess.Popen([sys.executable, "-c", INSTALL, folder, python]) as killed:
        deadline = time.monotonic() + 60
        while not (folder / "started").exists() or not (folder / "started").read_text().endswith("\n"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        killed.kill()
    step = psutil.Process(int((folder / "started").read_text()))
    try:
        with pytest.raises(BlockingIOError), locked(folder, wait=False):
            pass
    finally:
        step.kill()
    # Waits until the step is gone.
    with locked(folder):
        assert (folder / RECORD_NAME).exists()


def test_an_interpreter_without_packages_for_it_is_refused(tmp_path: Path) -> None:
    python = write_python(tmp_path / "python", "3.14", "true")
    with pytest.raises(UnavailableError) as caught:
        install_triton(tmp_path / "own", python=python)
    assert "3.14" in caught.value.what
    assert "3.11 and 3.12" in caught.value.why
    assert not (tmp_path / "own").exists()


def test_install_names_the_option_for_another_folder(watch: Watch) -> None:
    (watch.folder / "notes.txt").write_text("mine")
    assert "--dir" in watch.refusal(["triton", "install", "--dir", "."])


def test_info_describes_the_server(triton_install: TritonInstall, watch: Watch) -> None:
    code, out, _ = watch.run(["triton", "info", "--triton-env", str(triton_install.root), "--json"])
    shown = json.loads(out)
    assert code == 0
    assert shown["version"] == triton_install.version
    assert "python" in shown["backends"]
    assert shown["packages"]["onnxruntime"]


def test_info_without_a_server_says_how_to_install_it(watch: Watch) -> None:
    assert "trtforge triton install" in watch.refusal(["triton", "info", "--triton-env", "nothing"])
