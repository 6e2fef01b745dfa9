"""`trtforge plugin build|info`: a real library, what it says of itself, and what is refused with which remedy."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from plugin_library import ARCHITECTURES, build_for_tests
from tool_stand_ins import make_program

from trtforge.cli.app import run
from trtforge.errors import BuildError, InputError, UnavailableError
from trtforge.plugins import compile as compiling
from trtforge.plugins import sources
from trtforge.plugins.compile import BuiltLibrary, LibraryRequest, architectures_from_option, build_library
from trtforge.plugins.record import LibraryRecord, read_record, record_path
from trtforge.plugins.resources import resources_from_ptxas

PTXAS_LOG = """
[1/2] Building CUDA object a.o
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN8trtforge4copyI6__halfLi64ELb1EEEvNS_6ParamsE' for 'sm_90a'
ptxas info    : Function properties for _ZN8trtforge4copyI6__halfLi64ELb1EEEvNS_6ParamsE
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 96 registers, used 1 barriers, 512 bytes smem, 480 bytes cmem[0]
ptxas info    : Compiling entry function 'plain' for 'sm_75'
ptxas info    : Function properties for helper
    99 bytes stack frame, 99 bytes spill stores, 99 bytes spill loads
ptxas info    : Function properties for plain
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, 360 bytes cmem[0]
"""


@pytest.fixture(scope="module")
def kernels() -> BuiltLibrary:
    """The kernels alone: needs the CUDA toolkit and nothing of TensorRT."""
    return build_for_tests(None)


def test_kernels_build_with_the_cuda_toolkit_alone(kernels: BuiltLibrary) -> None:
    record = kernels.record
    assert kernels.path.name == "libtrtforge_kernels.so"
    assert (record.kind, record.tensorrt, record.architectures) == ("kernels", None, ARCHITECTURES)
    assert {kernel.architecture for kernel in record.kernels} == set(ARCHITECTURES)
    names = {kernel.name.split("<")[0] for kernel in record.kernels}
    assert {"attention_kernel", "gemm_kernel", "gemm_s8_kernel", "layernorm_kernel"} <= names
    assert all(0 < kernel.registers <= 255 for kernel in record.kernels)
    assert not [kernel for kernel in record.kernels if kernel.spill_store_bytes or kernel.spill_load_bytes]


def test_kernels_load_without_a_driver_and_answer(kernels: BuiltLibrary) -> None:
    library = ctypes.CDLL(str(kernels.path.absolute()))
    library.trtforge_block_status_text.restype = ctypes.c_char_p
    library.trtforge_block_params_bytes.restype = ctypes.c_size_t
    library.trtforge_block_workspace_bytes.restype = ctypes.c_size_t
    nothing = ctypes.create_string_buffer(library.trtforge_block_params_bytes())
    status = library.trtforge_launch_block(nothing, None)
    assert b"H or F is not a positive multiple of 8" in library.trtforge_block_status_text(status)
    assert library.trtforge_block_workspace_bytes(nothing) == 0


def test_second_build_from_the_same_inputs_compiles_nothing(
    kernels: BuiltLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiling, "_run", refuse)
    request = LibraryRequest(kernels.path.parent, ARCHITECTURES, kernels_only=True)
    again = build_library(request)
    assert again.is_reused
    assert again.record == kernels.record
    with pytest.raises(AssertionError, match="compiled again"):
        build_library(LibraryRequest(request.folder, (80,), kernels_only=True))


def test_changed_source_changes_the_fingerprint(tmp_path: Path) -> None:
    tree = sources.find_sources()
    copy = tmp_path / "copy"
    for name in ("cmake", "plugins/csrc"):
        shutil.copytree(tree.root / name, copy / name)
    shutil.copy(tree.root / "CMakeLists.txt", copy)
    assert sources._hash_sources(copy) == tree.sha256
    (copy / "plugins/csrc/emulation/new.h").parent.mkdir(exist_ok=True)
    (copy / "plugins/csrc/emulation/new.h").write_text("// not part of a library\n")
    assert sources._hash_sources(copy) == tree.sha256
    with (copy / "plugins/csrc/launch/block.cu").open("a") as file:
        file.write("\n")
    assert sources._hash_sources(copy) != tree.sha256


def test_info_shows_registers_spills_and_types_of_each_kernel(
    kernels: BuiltLibrary, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plugin", "info", str(kernels.path)]) == 0
    printed = capsys.readouterr().out
    assert "sm_86         fp16 bf16 int8" in printed
    assert "registers (+ spilled bytes)" in printed
    kernel = kernels.record.kernels[0]
    (line,) = [line for line in printed.splitlines() if line.strip().startswith(f"{kernel.name} ")]
    assert line.split()[-2:] == [str(kernel.registers), str(kernel.shared_bytes)]
    assert kernel.shared_bytes > 16 * 1024
    assert all(kernel.shared_bytes <= 48 * 1024 for kernel in kernels.record.kernels)


def test_info_as_json_is_the_record(kernels: BuiltLibrary, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plugin", "info", str(kernels.path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown.pop("library") == str(kernels.path)
    assert shown.pop("dtypes") == {"sm_86": ["fp16", "bf16", "int8"]}
    assert [kernel.pop("shared_bytes") for kernel in shown["kernels"]] == [
        k.shared_bytes for k in kernels.record.kernels
    ]
    assert LibraryRecord.model_validate(shown) == kernels.record


def test_turing_is_said_to_have_no_bf16(kernels: BuiltLibrary) -> None:
    assert kernels.record.dtypes(75) == ("fp16", "int8")


def test_library_that_was_replaced_is_not_described_by_the_old_record(kernels: BuiltLibrary, tmp_path: Path) -> None:
    library = tmp_path / kernels.path.name
    shutil.copy(record_path(kernels.path), record_path(library))
    library.write_bytes(kernels.path.read_bytes() + b"\0")
    with pytest.raises(InputError, match="is of another library"):
        read_record(library)
    record_path(library).unlink()
    with pytest.raises(InputError, match="has no record"):
        read_record(library)
    library.unlink()
    with pytest.raises(InputError, match="does not exist"):
        read_record(library)
    library.mkdir()
    with pytest.raises(InputError, match="it is a folder"):
        read_record(library)


@pytest.mark.parametrize(
    ("text", "why"), [("{", "not valid JSON"), ("[]", "mapping"), ('{"schema_version": 1}', "missing key 'kind'")]
)
def test_damaged_record_is_made_by_building_again(text: str, why: str, tmp_path: Path) -> None:
    library = tmp_path / "libtrtforge_plugin.so"
    library.touch()
    record_path(library).write_text(text)
    with pytest.raises(InputError, match="is damaged") as caught:
        read_record(library)
    assert why in caught.value.why
    assert caught.value.fix == "build it with `trtforge plugin build`"


def test_resources_are_read_from_ptxas() -> None:
    copy, plain = resources_from_ptxas(PTXAS_LOG)
    assert (copy.architecture, copy.registers, copy.static_shared_bytes) == (90, 96, 512)
    assert (copy.stack_bytes, copy.spill_store_bytes, copy.spill_load_bytes) == (16, 8, 12)
    if shutil.which("c++filt"):
        assert copy.name == "copy<__half, 64, true>"
    assert (plain.name, plain.architecture, plain.registers, plain.static_shared_bytes) == ("plain", 75, 8, 0)
    assert (plain.stack_bytes, plain.spill_store_bytes) == (0, 0)  # those of another function are not its own


def test_architectures_are_read_with_and_without_prefix() -> None:
    assert architectures_from_option("sm_90, 75,90") == (75, 90)
    assert architectures_from_option(None) == compiling.ARCHITECTURES


@pytest.mark.parametrize("text", ["87", "sm_86,,", "", "8.6", "sm_sm_86"])
def test_unknown_architecture_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is not known") as caught:
        architectures_from_option(text)
    assert "sm_75, sm_80, sm_86, sm_89, sm_90, sm_100, sm_120" in caught.value.why


def test_default_architectures_are_those_of_cmake() -> None:
    text = (sources.find_sources().root / "CMakeLists.txt").read_text()
    assert f"set(CMAKE_CUDA_ARCHITECTURES {' '.join(map(str, compiling.ARCHITECTURES))} CACHE" in text


def test_failed_compilation_shows_the_compilers_words(
    tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = "echo 'ptxas info : fine'; echo 'block.cu(7): error: identifier \"x\" is undefined'; exit 1"
    make_program(tools, "cmake", f"[ \"$1\" = --version ] && echo 'cmake version 3.25.1' && exit 0\n{refusal}")
    with pytest.raises(BuildError, match="the plugin was not built") as caught:
        build_library(LibraryRequest(tmp_path / "out", kernels_only=True))
    assert 'block.cu(7): error: identifier "x" is undefined' in caught.value.why
    assert "ptxas info" not in caught.value.why
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("log", "why", "fix"),
    [
        (
            "ptxas a.ptx, line 9; fatal   : Unsupported .version 9.5; current version is '9.0'",
            "releases",
            "nvidia-nvvm",
        ),
        ("/tmp/a.s: fatal error: No space left on device", "no space left", "free some"),
    ],
)
def test_known_causes_of_a_failed_compilation_have_a_remedy(
    tools: Path, tmp_path: Path, log: str, why: str, fix: str
) -> None:
    (tmp_path / "log").write_text(log + "\n")
    answer = "[ \"$1\" = --version ] && echo 'cmake version 3.25.1' && exit 0"
    make_program(tools, "cmake", f'{answer}\nwhile read -r line; do echo "$line"; done < {tmp_path}/log\nexit 1')
    with pytest.raises(UnavailableError, match="the plugin was not built") as caught:
        build_library(LibraryRequest(tmp_path / "out", kernels_only=True))
    assert why in caught.value.why
    assert fix in caught.value.fix


def has_ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_interrupted_build_ends_its_compilers_and_leaves_nothing(tools: Path, tmp_path: Path) -> None:
    started, scratch = tmp_path / "started", tmp_path / "scratch"
    scratch.mkdir()
    answer = "[ \"$1\" = --version ] && echo 'cmake version 3.25.1' && exit 0"
    compiler = f"/bin/sleep 60 & echo $! > {started}.new && /bin/mv {started}.new {started} && wait"
    make_program(tools, "cmake", f"{answer}\n{compiler}")
    command = [sys.executable, "-m", "trtforge.cli.app", "plugin", "build", "--kernels", "-o", tmp_path / "out"]
    process = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(scratch)}, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    child = psutil.Process(int(started.read_text()))
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=30)
    assert process.returncode == 130, message
    deadline = time.monotonic() + 20  # it would sleep for 60 s; what kills it does not wait for its end
    while not has_ended(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert has_ended(child)
    assert not list(scratch.iterdir())
    assert not (tmp_path / "out").exists()


def test_what_a_killed_build_left_is_gone_after_the_next(tools: Path, tmp_path: Path) -> None:
    left = tmp_path / ".libtrtforge_kernels.so.partial-x" / "work"
    left.mkdir(parents=True)
    make_program(tools, "cmake", "[ \"$1\" = --version ] && echo 'cmake version 3.25.1' && exit 0\nexit 1")
    with pytest.raises(BuildError):
        build_library(LibraryRequest(tmp_path, kernels_only=True))
    assert [path.name for path in tmp_path.iterdir()] == ["tools"]


def test_place_that_cannot_be_written_is_refused_before_anything_is_compiled(tools: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    make_program(tools, "cmake", f"[ \"$1\" = --version ] && echo 'cmake version 3.25.1' && exit 0\n: > {tmp_path}/ran")
    with pytest.raises(UnavailableError, match=r"file/libtrtforge_kernels\.so cannot be written"):
        build_library(LibraryRequest(tmp_path / "file", kernels_only=True))
    assert not (tmp_path / "ran").exists()


def test_file_that_is_no_library_of_ours_is_not_replaced(tools: Path, tmp_path: Path) -> None:
    library = tmp_path / "libtrtforge_kernels.so"
    library.write_text("mine")
    with pytest.raises(InputError, match="exists"):
        build_library(LibraryRequest(tmp_path, kernels_only=True))
    assert library.read_text() == "mine"
