"""The C interface through ctypes: the layout of its parameters, arrays that it takes, and what it refuses."""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtforge.benchmark import block_params, compilers
from trtforge.benchmark.arrays import HostArrays
from trtforge.benchmark.case import BlockCase
from trtforge.benchmark.host import check_on_host
from trtforge.benchmark.host_worker import EMULATED, _aligned
from trtforge.benchmark.implementations import bits_dtype, kernel_arrays
from trtforge.benchmark.kernels import STRATEGIES, BlockKernels, DeviceSize
from trtforge.benchmark.operands import make_operands
from trtforge.benchmark.reference import Reference, calibrated
from trtforge.errors import BuildError, ChildDiedError, InputError, TrtForgeError, UnavailableError
from trtforge.plugins import toolkit
from trtforge.plugins.sources import SourceTree
from trtforge.plugins.toolkit import Toolkit
from trtforge.progress import Stopwatch, ignore

ROOT = Path(__file__).resolve().parents[2]
CASE = BlockCase(2, 19, 64, 2, 80)
STRUCTS = ("BlockLinear", "BlockNorm", "DeviceTraits", "BlockParams")


def test_the_layout_of_parameters_is_that_of_the_header(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not here")
    printed = [f'std::printf("{name} %zu\\n", sizeof({name}));' for name in STRUCTS]
    expected = {name: ctypes.sizeof(getattr(block_params, name)) for name in STRUCTS}
    for name in STRUCTS:
        struct = getattr(block_params, name)
        for field, _ in struct._fields_:
            printed.append(f'std::printf("{name}.{field} %zu\\n", offsetof({name}, {field}));')
            expected[f"{name}.{field}"] = getattr(struct, field).offset
    for enum, values in (("ElementType", block_params.TYPES), ("Activation", block_params.ACTIVATIONS)):
        for key, value in values.items():
            member = {"fp16": "Half", "bf16": "Bfloat16"}.get(key, "".join(map(str.capitalize, key.split("_"))))
            printed.append(f'std::printf("{enum}.{key} %zu\\n", static_cast<size_t>({enum}::k{member}));')
            expected[f"{enum}.{key}"] = value
    for key, value in block_params.ORDERS.items():
        printed.append(f'std::printf("{key} %zu\\n", static_cast<size_t>(NormOrder::k{key.capitalize()}));')
        expected[key] = value
    source = tmp_path / "layout.cpp"
    source.write_text(
        '#include <cstdio>\n#include "kernels/block_params.h"\nusing namespace trtforge;\nint main() {\n'
        + "\n".join(printed)
        + "\n}\n"
    )
    program = tmp_path / "layout"
    subprocess.run([compiler, "-std=c++17", "-w", f"-I{ROOT / 'plugins' / 'csrc'}", source, "-o", program], check=True)
    lines = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    assert {name: int(value) for name, value in (line.rsplit(" ", 1) for line in lines)} == expected


@pytest.fixture
def bound(emulated: Path) -> tuple[BlockKernels, dict[str, Any], Any]:
    """Kernels, operands and an output of CASE."""
    arrays = {name: _aligned(array) for name, array in kernel_arrays(CASE, make_operands(CASE)).items()}
    y = _aligned(np.full((CASE.batch, CASE.sequence, CASE.width), np.nan, np.float16))
    return BlockKernels(emulated, EMULATED), arrays, y


def launch(kernels: BlockKernels, params: Any) -> None:
    workspace = _aligned(np.zeros(kernels.workspace_bytes(params), np.uint8))
    kernels.give_workspace(params, workspace)
    kernels.launch(params)


def test_a_block_on_arrays_is_right(bound: Any) -> None:
    kernels, arrays, y = bound
    launch(kernels, kernels.bind(CASE, arrays, y))
    reference = Reference(CASE, make_operands(CASE), HostArrays())
    assert reference.judge(y).is_right


class CudaArray:
    """What cupy, torch and pycuda offer: an address with a shape and a type, here of host memory."""

    def __init__(self, array: Any, strides: tuple[int, ...] | None = None) -> None:
        self.array = array
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (array.ctypes.data, False),
            "strides": strides,
            "version": 3,
        }


def test_arrays_are_taken_by_their_cuda_array_interface(bound: Any) -> None:
    kernels, arrays, y = bound
    wrapped = {name: CudaArray(array) for name, array in arrays.items()}
    # numpy's own interface of a row of torch's kind: strides that say what None says.
    wrapped["x"] = CudaArray(arrays["x"], arrays["x"].strides)
    launch(kernels, kernels.bind(CASE, wrapped, CudaArray(y)))
    assert Reference(CASE, make_operands(CASE), HostArrays()).judge(y).is_right


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("w_up", lambda array: None, "w_up is no array"),
        ("x", lambda array: array[:, :5], "x is not contiguous"),
        ("w_up", lambda array: array.T, "w_up is not contiguous"),
        ("x", lambda array: array.astype(np.float32), "elements of 4 bytes"),
        ("b_qkv", lambda array: array[:64], "b_qkv has 64 elements of 2 bytes"),
    ],
)
def test_an_array_that_does_not_fit_is_refused_by_name(bound: Any, name: str, change: Any, text: str) -> None:
    kernels, arrays, y = bound
    with pytest.raises(InputError) as caught:
        kernels.bind(CASE, {**arrays, name: change(arrays[name])}, y)
    assert text in str(caught.value)


def test_a_missing_operand_is_named(bound: Any) -> None:
    kernels, arrays, y = bound
    del arrays["ln2_beta"]
    with pytest.raises(InputError, match="the block has no ln2_beta"):
        kernels.bind(CASE, arrays, y)
    with pytest.raises(InputError, match="the block has no lengths"):
        kernels.bind(dataclasses.replace(CASE, mask="lengths"), arrays | {"ln2_beta": arrays["ln2_gamma"]}, y)


def test_what_the_launcher_says_reaches_the_user(bound: Any) -> None:
    kernels, arrays, y = bound
    with pytest.raises(UnavailableError) as caught:
        kernels.launch(kernels.bind(CASE, arrays, y))
    assert "the workspace is null or smaller" in caught.value.why


def test_every_strategy_that_the_launchers_have_is_right(bound: Any) -> None:
    kernels, arrays, y = bound
    reference = Reference(CASE, make_operands(CASE), HostArrays())
    right = set()
    for name in STRATEGIES:
        y[...] = np.nan
        try:
            launch(kernels, kernels.bind(CASE, arrays, y, strategy=name))
        except UnavailableError as err:
            assert "strategy" in err.why
            continue
        assert reference.judge(y).is_right, name
        right.add(name)
    assert {"auto", "launches"} <= right


def test_a_library_of_other_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be used as a kernel library"):
        BlockKernels(tmp_path / "nothing.so", DeviceSize(86, 4))
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not here")
    source = tmp_path / "other.cpp"
    names = ("block_params_bytes", "block_workspace_bytes", "launch_block", "block_status_text")
    source.write_text("".join(f'extern "C" long trtforge_{name}() {{ return 8; }}\n' for name in names))
    library = tmp_path / "other.so"
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library], check=True)
    with pytest.raises(InputError, match="was built from other sources") as caught:
        BlockKernels(library, DeviceSize(86, 4))
    assert "its BlockParams has 8 bytes" in caught.value.why


def test_the_emulator_is_compiled_once(emulated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> str:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compilers, "_run", refuse)
    monkeypatch.setattr(compilers, "_fingerprint", lambda *_: emulated.stem.rpartition("-")[2])
    assert compilers.build_for_host(emulated.parent) == emulated


def test_a_package_without_the_emulator_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "find_sources", lambda: SourceTree(tmp_path, ""))
    with pytest.raises(UnavailableError) as caught:
        compilers.build_for_host(tmp_path / "build")
    assert "the emulator's sources are not here" in caught.value.what
    assert "run this in a checkout" in caught.value.fix


def test_a_compiler_that_refuses_is_quoted_and_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "bad.cpp"
    source.write_text("int main( {\n")
    folder = tmp_path / "out"
    folder.mkdir()
    with pytest.raises(BuildError) as caught:
        compilers._compile(["g++"], ["-O0"], [source], ["-shared"], folder / "lib.so")
    assert "bad.cpp:1" in caught.value.why
    assert list(folder.iterdir()) == []


def test_a_toolkit_of_mixed_releases_is_named_here_too(tmp_path: Path) -> None:
    compiler = tmp_path / "nvcc"
    compiler.write_text("#!/bin/sh\necho 'ptxas fatal : Unsupported .version 9.5' >&2\nexit 1\n")
    compiler.chmod(0o755)
    with pytest.raises(UnavailableError, match="the kernels were not built") as caught:
        compilers._run([str(compiler)])
    assert "different releases" in caught.value.why


def test_headers_are_found_though_nvcc_is_a_script_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc, cuda = tmp_path / "bin" / "nvcc", tmp_path / "cuda"
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(compilers, "find_toolkit", lambda: Toolkit(nvcc, "13.0.88", None))
    monkeypatch.setattr(toolkit, "_SYSTEM_CUDA", cuda)
    with pytest.raises(UnavailableError, match="CUDA's headers were not found"):
        compilers.cuda_include()
    for root in (cuda, tmp_path):  # the later one is beside nvcc, and comes first
        (root / "include").mkdir(parents=True)
        (root / "include" / "cuda_fp16.h").touch()
        assert compilers.cuda_include() == root / "include"


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize("mask", ["none", "causal", "lengths", "bias"])
def test_cases_on_the_emulator_are_right(emulated: Path, dtype: Any, mask: Any) -> None:
    case = BlockCase(2, 33, 96, 3, 112, dtype, mask, "pre", "silu")
    (check,) = check_on_host([case], "auto", emulated.parent, Stopwatch(ignore))
    assert check.case == case
    assert check.verdict.is_right, check.verdict.describe()


def test_a_wrong_kernel_is_found_on_the_host(emulated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The same block with another activation is what a wrong epilogue would give.
    case = BlockCase(1, 33, 64, 2, 112)
    kernels = BlockKernels(emulated, EMULATED)
    operands = calibrated(case, make_operands(case), HostArrays())
    arrays = {name: _aligned(array) for name, array in kernel_arrays(case, operands).items()}
    y = _aligned(np.zeros((1, 33, 64), bits_dtype(case)))
    launch(kernels, kernels.bind(dataclasses.replace(case, activation="silu"), arrays, y))
    verdict = Reference(case, operands, HostArrays()).judge(y)
    assert not verdict.is_right
    assert verdict.rms_ratio is not None and verdict.rms_ratio > 2


def test_an_emulator_that_ends_its_process_is_an_error_with_its_words(emulated: Path, tmp_path: Path) -> None:
    # A library whose launch prints and exits, as the emulator does when it finds a race.
    source = tmp_path / "fails.cpp"
    size = ctypes.sizeof(block_params.BlockParams)
    source.write_text(
        "#include <cstdio>\n#include <cstdlib>\n"
        f'extern "C" size_t trtforge_block_params_bytes() {{ return {size}; }}\n'
        'extern "C" size_t trtforge_block_workspace_bytes(void*) { return 16; }\n'
        'extern "C" int trtforge_launch_block(void*, void*) {\n'
        '  std::fprintf(stderr, "gemm.cuh:7: emulation error: planted\\n"); std::exit(70); }\n'
        'extern "C" const char* trtforge_block_status_text(int) { return ""; }\n'
    )
    library = tmp_path / "fails.so"
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", library], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trtforge.benchmark.host.build_for_host", lambda folder: library)
        with pytest.raises(ChildDiedError) as caught:
            check_on_host([CASE], "auto", tmp_path, Stopwatch(ignore))
    assert "exited with 70" in caught.value.what
    assert "gemm.cuh:7: emulation error: planted" in caught.value.why


def test_a_strategy_that_is_not_compiled_in_is_refused_with_the_reason(bound: Any) -> None:
    kernels, arrays, y = bound
    params = kernels.bind(CASE, arrays, y)
    params.strategy = 99
    workspace = _aligned(np.zeros(1 << 20, np.uint8))
    kernels.give_workspace(params, workspace)
    with pytest.raises(TrtForgeError, match="the block was not launched"):
        kernels.launch(params)
