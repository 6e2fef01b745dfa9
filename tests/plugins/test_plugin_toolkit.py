"""The tools that build the plugin: where they are found, and what is said where one is missing or too old."""

from __future__ import annotations

from pathlib import Path

import pytest
from tool_stand_ins import make_program

from trtforge.cli.app import run
from trtforge.errors import InputError, UnavailableError
from trtforge.plugins import toolkit
from trtforge.plugins.compile import LibraryRequest, build_library

VERSION_HEADER = """
#define TRT_MAJOR_ENTERPRISE {major}
#define TRT_MINOR_ENTERPRISE 2
#define TRT_PATCH_ENTERPRISE 3
#define NV_TENSORRT_MAJOR TRT_MAJOR_ENTERPRISE //!< TensorRT major version.
#define NV_TENSORRT_MINOR TRT_MINOR_ENTERPRISE
#define NV_TENSORRT_PATCH 3
"""


def make_headers(folder: Path, major: str = "11") -> Path:
    folder.mkdir(parents=True)
    (folder / "NvInferRuntime.h").touch()
    (folder / "NvInferVersion.h").write_text(VERSION_HEADER.format(major=major))
    return folder


@pytest.mark.parametrize(
    ("program", "what", "fix"),
    [
        ("nvcc", "nvcc was not found", "nvidia-cuda-nvcc"),
        ("cmake", "cmake was not found", "pip install cmake"),
        ("g++", "no C++ compiler was found", "install g++"),
        ("make", "neither ninja nor make was found", "pip install ninja"),
    ],
)
def test_missing_tool_is_named_with_what_to_install(
    tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], program: str, what: str, fix: str
) -> None:
    (tools / program).unlink()
    assert run(["plugin", "build", "--kernels", "-o", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert f"error: {what}" in message
    assert fix in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("program", "text", "what"),
    [
        ("nvcc", "echo 'release 12.8, V12.8.61'", "is CUDA 12.8.61"),
        ("nvcc", "echo nothing", "does not tell its version"),
        ("nvcc", "exit 1", "does not run"),
        ("cmake", "echo 'cmake version 3.18.4'", "is CMake 3.18.4"),
    ],
)
def test_tool_that_is_too_old_or_broken_is_refused(
    tools: Path, tmp_path: Path, program: str, text: str, what: str
) -> None:
    make_program(tools, program, text)
    with pytest.raises(UnavailableError, match=what):
        build_library(LibraryRequest(tmp_path / "out", kernels_only=True))


def test_toolkit_in_wheels_is_found_with_its_libraries(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = (tools / "nvcc").rename(tools / "unused")
    root = tmp_path / "nvidia" / "cu13"
    make_program(root / "bin", "nvcc", nvcc.read_text().partition("\n")[2])
    (root / "lib").mkdir()
    (root / "lib" / "libcudart_static.a").touch()
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path / "nvidia")]})
    monkeypatch.setattr(toolkit.importlib.util, "find_spec", lambda name: spec if name == "nvidia" else None)
    found = toolkit.find_toolkit()
    assert (found.nvcc, found.version, found.library_dir) == (root / "bin" / "nvcc", "13.0.88", root / "lib")


def test_tools_that_pip_installed_are_found_off_the_path(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = tmp_path / "environment"
    make_program(environment, "cmake", (tools / "cmake").read_text().partition("\n")[2])
    make_program(environment, "ninja", "true")
    (tools / "cmake").unlink()
    monkeypatch.setattr(toolkit, "_PYTHON_PROGRAMS", environment)
    found = toolkit.find_build_tools()
    assert (found.cmake, found.generator, found.program) == (environment / "cmake", "Ninja", environment / "ninja")


def test_headers_are_found_where_named_and_their_version_read(tools: Path, tmp_path: Path) -> None:
    headers = make_headers(tmp_path / "root" / "include")
    assert toolkit.find_headers(headers).version == "11.2.3"
    assert toolkit.find_headers(None, tmp_path / "root").include_dir == headers


def test_missing_headers_are_told_where_to_get(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRTFORGE_TENSORRT_INCLUDE_DIR", raising=False)
    monkeypatch.delenv("TensorRT_ROOT", raising=False)
    assert run(["plugin", "build", "-o", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert "error: TensorRT's headers were not found" in message
    assert "--tensorrt-include" in message
    assert "--kernels" in message


def test_named_folder_without_headers_is_refused(tools: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no TensorRT headers"):
        toolkit.find_headers(tmp_path)
    with pytest.raises(InputError, match=r"holds the headers of TensorRT 8\.2\.3"):
        toolkit.find_headers(make_headers(tmp_path / "old", "8"))
    with pytest.raises(InputError, match="names no version"):
        toolkit.find_headers(make_headers(tmp_path / "odd", "eleven"))


def test_named_folder_without_a_toolkit_is_refused(tools: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no CUDA toolkit"):
        toolkit.find_toolkit(tmp_path)
